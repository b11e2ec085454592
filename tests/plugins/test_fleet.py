# SPDX-License-Identifier: Apache-2.0
"""What all gateways are asked to do reaches those that are there, those that are away, and those that come later."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl.nats_connection import connected
from mqtt_nats.ctl.verbs import VERBS
from mqtt_nats.plugins.manager import Plugins
from mqtt_streams.fleet import FleetStore, Wish, read_wish
from tests.conftest import Logged
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer
from tests.harness.proxy import Proxy
from tests.harness.raw import Raw
from tests.harness.waiting import eventually
from tests.plugins.conftest import Install, Start, run_ctl

HERE = "tests.plugins.samples:"
PATIENCE = 30.0
ALL = {"suffix": {"load": False, "suffix": "!"}}


def ask(server: NatsServer, called: str, /, **arguments: Any) -> Any:
    """Run a verb, as the command line does."""
    (verb,) = (one for one in VERBS if one.name == called)

    async def run() -> Any:
        async with connected(Settings(nats=(server.url,))) as inbox:
            return await verb.run(inbox, verb.arguments(**arguments))

    return asyncio.run(run())


def wishes(server: NatsServer) -> list[Wish]:
    async def read(inbox: RequestInbox) -> list[Wish]:
        return await FleetStore(inbox).all()

    async def run() -> list[Wish]:
        async with connected(Settings(nats=(server.url,))) as inbox:
            return await read(inbox)

    return asyncio.run(run())


def plugins_of(inside: InProcess) -> Plugins:
    plugins = inside.broker.plugins
    assert plugins is not None
    return plugins


def has(inside: InProcess, name: str) -> bool:
    plugins = plugins_of(inside)
    return inside.call(lambda: plugins.has(name))


@pytest.fixture(autouse=True)
def _nothing_is_wished(nats_server: NatsServer) -> Iterator[None]:
    yield

    async def clear() -> None:
        async with connected(Settings(nats=(nats_server.url,))) as inbox:
            reply = await inbox.request("$JS.API.STREAM.PURGE.KV_MQTT_fleet", b"")
            assert b'"success":true' in reply.payload

    asyncio.run(clear())


def test_a_plugin_that_is_loaded_once_is_everywhere(start: Start, install: Install, nats_server: NatsServer) -> None:
    install("suffix", HERE + "Suffix")
    first, second = start(ALL), start(ALL)
    assert [one["loaded"] for one in ask(nats_server, "plugins.load", name="suffix")] == [True, True]
    late = start(ALL)
    assert has(first, "suffix")
    assert has(second, "suffix")
    assert has(late, "suffix")  # from its first moment, though its file says otherwise
    ask(nats_server, "plugins.unload", name="suffix")
    assert not has(late, "suffix")
    assert not has(start({"suffix": {"suffix": "!"}}), "suffix")  # its file would load it
    for inside in (first, second):
        assert not has(inside, "suffix")


def test_what_one_gateway_is_asked_to_do_is_its_own(start: Start, install: Install, nats_server: NatsServer) -> None:
    install("suffix", HERE + "Suffix")
    first = start(ALL)
    ask(nats_server, "plugins.load", name="suffix", gateway=first.account.services.identity.id)
    assert has(first, "suffix")
    assert wishes(nats_server) == []
    assert not has(start(ALL), "suffix")


def test_what_not_all_have_done_is_not_asked_of_others(start: Start, install: Install, nats_server: NatsServer) -> None:
    install("suffix", HERE + "Suffix")
    able, unable = start(ALL), start({})  # its option is needed
    with pytest.raises(
        StartupError, match=f"gateway {unable.account.services.identity.id}: plugin 'suffix': suffix: field req"
    ):
        ask(nats_server, "plugins.load", name="suffix")
    assert has(able, "suffix")
    assert wishes(nats_server) == []


@pytest.mark.long
def test_a_gateway_that_cannot_load_what_all_have_starts_without_it_and_says_so(
    start: Start, install: Install, nats_server: NatsServer, logged: Logged
) -> None:
    """And it can be taken back, also when none runs."""
    install("suffix", HERE + "Suffix")
    inside = start(ALL)
    ask(nats_server, "plugins.load", name="suffix")
    unable = start({})
    assert "plugin 'suffix': suffix: field required; `mqtt-nats ctl plugins unload` withdraws" in "\n".join(
        logged.messages
    )
    (failed,) = (one["error"] for one in plugins_of(unable).state() if one["name"] == "suffix")
    assert failed == "plugin 'suffix': suffix: field required"
    status, text = run_ctl(nats_server.url, "plugins", "list")
    assert (status, failed in text) == (0, True)
    unable.stop()
    inside.stop()
    status, text = run_ctl(nats_server.url, "plugins", "unload", "suffix")
    assert (status, text) == (0, "no gateway runs; those that start do not load it\n")
    assert not has(start({}), "suffix")
    status, text = run_ctl(nats_server.url, "plugins", "unload", "nobody")
    assert status == 1
    assert "plugin 'nobody' is not loaded" in text
    assert [wish.name for wish in wishes(nats_server)] == ["suffix"]


def test_a_wish_for_a_plugin_that_nobody_has_keeps_no_gateway_from_starting(
    start: Start, nats_server: NatsServer, logged: Logged
) -> None:
    """An operator's program, or a stranger who may write to the bucket, can name anything."""

    async def wish() -> None:
        async with connected(Settings(nats=(nats_server.url,))) as inbox:
            await FleetStore(inbox).put(Wish("plugin", "1", "no\nsuch\x1b[2J", True))

    start({}).stop()  # the bucket exists
    asyncio.run(wish())
    inside = start({})
    assert not has(inside, "no\nsuch\x1b[2J")
    assert "no plugin 'no\\nsuch\\x1b[2J' is installed" in "\n".join(logged.messages)
    answers = ask(nats_server, "plugins.unload", name="no\nsuch\x1b[2J")
    assert [one["loaded"] for one in answers] == [False]
    assert not wishes(nats_server)[0].loaded


@pytest.mark.long
def test_who_was_away_does_it_when_it_is_back(install: Install, nats_server: NatsServer, tmp_path: Path) -> None:
    install("suffix", HERE + "Suffix")
    acl = tmp_path / "acl.toml"
    acl.write_text('default = "allow"\n', encoding="utf-8")
    with Proxy(nats_server.port) as proxy, ExitStack() as stack:

        def gateway(url: str) -> InProcess:
            settings = Settings(listen="127.0.0.1:0", plugins=ALL, nats=(url,), acl_file=acl)
            return stack.enter_context(running(settings))

        there, away = gateway(nats_server.url), gateway(proxy.url)
        proxy.cut()
        eventually(lambda: not away.call(away.account.services.nats.online.is_set), PATIENCE)
        ask(nats_server, "plugins.load", name="suffix")
        acl.write_text('default = "deny"\n', encoding="utf-8")
        (answer,) = ask(nats_server, "reload")
        assert answer == {"id": there.account.services.identity.id, "problems": []}
        assert not has(away, "suffix")
        proxy.restore()
        eventually(lambda: has(away, "suffix"), PATIENCE)
        for inside in (there, away):
            eventually(partial(refused, inside.port), PATIENCE)


def refused(port: int) -> bool:
    """Whether nobody may subscribe."""
    with Raw.connected(port) as client:
        return client.subscribe(("x", 0)) == [0x80]


def test_reload_says_what_is_wrong(nats_server: NatsServer, tmp_path: Path) -> None:
    acl = tmp_path / "acl.toml"
    acl.write_text('default = "allow"\n', encoding="utf-8")
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), acl_file=acl)
    with running(settings) as one, running(settings.model_copy(update={"acl_file": None})) as two:
        acl.write_text("default = 7\n", encoding="utf-8")
        status, text = run_ctl(nats_server.url, "reload")
        assert status == 1
        (line,) = text.splitlines()
        wrong, right = line.split("; ")
        assert wrong.startswith(
            f"mqtt-nats: gateway {one.account.services.identity.id}: not changed: the ACL file {acl}: default: "
        )
        assert right == f"gateway {two.account.services.identity.id}: files are read again"
        assert run_ctl(nats_server.url, "reload", "--json") == (status, text)
        assert not refused(one.port)
        (answer,) = ask(nats_server, "reload", gateway=two.account.services.identity.id)
        assert answer["id"] == two.account.services.identity.id
    with pytest.raises(StartupError, match="no gateway answers"):
        ask(nats_server, "reload")
    with pytest.raises(StartupError, match="gateway x does not answer"):
        ask(nats_server, "reload", gateway="x")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"7",
        b"{}",
        b'{"kind":"reload"}',
        b'{"kind":"reload","id":7}',
        b'{"kind":"plugin","id":"a","name":7}',
        b'{"kind":"plugin","id":"a","name":"x","loaded":"yes"}',
        b'{"kind":"fly","id":"a"}',
        b"\xff",
    ],
)
def test_what_is_no_wish(payload: bytes) -> None:
    assert read_wish(payload) is None
