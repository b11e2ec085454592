# SPDX-License-Identifier: Apache-2.0
"""Loading and unloading: what is left, what is said, and `mqtt-nats ctl plugins`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.codec import Publish, ReasonCode
from mqtt_nats.plugins.manager import PluginError
from tests.admin.results import check_result
from tests.harness.inprocess import InProcess
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, RawClient, key_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.plugins import samples
from tests.plugins.conftest import Install, Start, echo, run_ctl

pytestmark = pytest.mark.anyio

HERE = "tests.plugins.samples:"


def plugins_of(inside: InProcess) -> Any:
    found = inside.broker.plugins
    assert found is not None
    return found


def nothing_left(inside: InProcess) -> bool:
    account = inside.account
    return not account.services.hooks.accounts() and not account.ingress.takers


async def test_a_plugin_is_loaded_and_unloaded_under_the_feet_of_clients(start: Start, install: Install) -> None:
    install("suffix", HERE + "Suffix")
    inside = start({"suffix": {"load": False, "suffix": "!"}})
    plugins = plugins_of(inside)
    assert nothing_left(inside)
    unloaded = samples.Suffix.unloaded
    async with await RawClient5.connect5(inside.port, "client") as client:
        await client.subscribe("x", "greetings/#")
        for _ in range(3):
            await echo(client, "x", b"a", b"a")
            inside.run(plugins.load("suffix"))
            await echo(client, "x", b"a", b"a!")
            async with await RawClient.connect(inside.port, "guest"):
                found = await client.message("greetings/guest", b"welcome")
                assert found.properties == {"content_type": "text"}
            inside.run(plugins.unload("suffix"))
            assert nothing_left(inside)
        await echo(client, "x", b"a", b"a")
    assert samples.Suffix.unloaded == unloaded + 3


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "failing": (HERE + "Failing", {}, "plugin 'failing' cannot be loaded: RuntimeError at samples.py:"),
    "hasty": (HERE + "Hasty", {}, "plugin 'hasty' cannot be loaded: CancelledError"),
    "picky": (HERE + "Picky", {}, "plugin 'picky': the moon is full"),
    "none": (HERE + "NoPlugin", {}, "plugin 'none' is no subclass of mqtt_nats.plugins.Plugin"),
    "gone": (HERE + "Gone", {}, "plugin 'gone' cannot be imported: AttributeError"),
    "suffix": (HERE + "Suffix", {"secret": "hush"}, "plugin 'suffix': suffix: field required"),
    "suffix2": (HERE + "Suffix", {"suffix": 7, "secret": "hush"}, "plugin 'suffix2': suffix: input should be a valid"),
    "suffix3": (HERE + "Suffix", {"suffix": "", "sufix": "hush"}, "plugin 'suffix3': sufix: unknown setting: did"),
    "delayed": (HERE + "Suffix", {}, "several packages have a plugin 'delayed'"),
    "unknown": ("", {}, "no plugin 'unknown' is installed"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_plugin_that_cannot_be_loaded_leaves_nothing(name: str, start: Start, install: Install) -> None:
    """At the start the gateway ends with one line; later it goes on without."""
    value, options, line = BAD[name]
    if value:
        install(name, value)
    with pytest.raises(StartupError) as refused:
        start({name: options})
    inside = start({name: {"load": False, **options}})
    samples.Failing.ended = False
    with pytest.raises(PluginError) as caught:
        inside.run(plugins_of(inside).load(name))
    for text in (str(refused.value), str(caught.value)):
        assert text.startswith(line), text
        assert "\n" not in text
        assert "hush" not in text
        assert "secret" not in text
    assert nothing_left(inside)
    if name == "failing":
        await aeventually(lambda: samples.Failing.ended)
    async with await RawClient.connect(inside.port, "client") as client:
        await client.subscribe("x")
        await echo(client, "x", b"a", b"a")


async def test_a_plugin_that_fails_while_it_ends_is_gone_all_the_same(start: Start, install: Install) -> None:
    install("stubborn", HERE + "Stubborn")
    inside = start({"stubborn": {}})
    plugins = plugins_of(inside)
    with pytest.raises(PluginError, match="is unloaded, but failed: RuntimeError"):
        inside.run(plugins.unload("stubborn"))
    assert nothing_left(inside)
    with pytest.raises(PluginError, match="'stubborn' is not loaded"):
        inside.run(plugins.unload("stubborn"))
    inside.run(plugins.load("stubborn"))
    with pytest.raises(PluginError, match="is loaded already"):
        inside.run(plugins.load("stubborn"))


async def test_who_waits_for_a_plugin_that_is_unloaded_is_answered(start: Start, install: Install) -> None:
    """A message that its hook has, and whoever unloads it: its tasks are cancelled, and so is what waits for them."""
    install("waiting", HERE + "Waiting")
    inside = start({"waiting": {}})
    async with await RawClient5.connect5(inside.port, "client") as client:
        client.send(Publish(1, False, False, key_of("x"), 1, b"a"))
        await asyncio.sleep(0.2)
        with pytest.raises(PluginError, match="is unloaded, but failed: CancelledError"):
            inside.run(plugins_of(inside).unload("waiting"))
        await client.expect_refusal(PUBACK, 1, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR)
    assert nothing_left(inside)


def test_what_load_may_be(start: Start) -> None:
    with pytest.raises(StartupError, match=r"plugins\.delayed\.load: expected true or false"):
        start({"delayed": {"load": "no"}})


@pytest.mark.long
def test_ctl_on_one_gateway_and_on_all(start: Start, install: Install, nats_server: NatsServer) -> None:
    install("suffix", HERE + "Suffix")
    first, second = (start({"suffix": {"load": False, "suffix": "!"}}) for _ in range(2))
    one, two = sorted((first.account.services.identity.id, second.account.services.identity.id))

    def loaded() -> dict[str, list[str]]:
        status, text = run_ctl(nats_server.url, "plugins", "list", "--json")
        assert status == 0, text
        found = orjson.loads(text)
        check_result(("plugins", "list"), found)
        return {each["id"]: [plugin["name"] for plugin in each["plugins"] if plugin["loaded"]] for each in found}

    assert loaded() == {one: [], two: []}
    status, text = run_ctl(nats_server.url, "plugins", "load", "suffix", "--gateway", one)
    assert (status, text) == (0, f"gateway {one}: plugin suffix is loaded\n")
    assert loaded() == {one: ["suffix"], two: []}
    status, text = run_ctl(nats_server.url, "plugins", "load", "suffix")  # one has it, the other gets it
    assert status == 1
    assert text == f"mqtt-nats: gateway {one}: plugin 'suffix' is loaded already\n"
    assert loaded() == {one: ["suffix"], two: ["suffix"]}
    status, text = run_ctl(nats_server.url, "plugins", "list")
    assert status == 0
    for identity in (one, two):
        assert f"{identity}  suffix" in text, text
    assert "message.publish, client.connected" in text
    assert run_ctl(nats_server.url, "plugins", "unload", "suffix")[0] == 0
    assert loaded() == {one: [], two: []}
    status, text = run_ctl(nats_server.url, "plugins", "unload", "suffix", "--gateway", "nobody")
    assert status == 1
    assert text.startswith("mqtt-nats: gateway nobody does not answer")


def test_ctl_without_gateways(nats_server: NatsServer, tmp_path: Path) -> None:
    status, text = run_ctl(nats_server.url, "plugins", "list")
    assert status == 1
    assert "no gateway answers" in text


@pytest.mark.parametrize("payload", [b"", b"[]", b"7", b"{}", b'{"do":"load"', b"\xff"])
async def test_questions_that_make_no_sense(payload: bytes, start: Start) -> None:
    inside = start({})
    assert inside.run(plugins_of(inside).asked(payload)) is None
