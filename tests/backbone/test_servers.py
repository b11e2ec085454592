# SPDX-License-Identifier: Apache-2.0
"""Servers of a list, behind a name, and announced: none that is configured is ever lost."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import pytest
from nats.aio.client import Srv

from mqtt_nats.backbone import link as link_module
from mqtt_nats.backbone import servers
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.backbone.servers import FORMER_MOST, Servers
from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.nats_connect import connect_link
from mqtt_nats.config.settings import Settings
from tests.backbone.certificates import Authority
from tests.conftest import NatsFactory
from tests.harness.proxy import Proxy
from tests.harness.waiting import aeventually, free_port

pytestmark = pytest.mark.anyio


class Names:
    """What a name server knows, in place of the machine's resolver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: dict[str, list[str]] = {}
        self.asked: list[str] = []
        monkeypatch.setattr(servers, "resolve", self.resolve)

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.known[host]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


def where(found: list[Srv]) -> list[str]:
    return [server.uri.netloc for server in found]


# -- what there is to try -------------------------------------------------------------------------


async def test_a_list(names: Names) -> None:
    known = Servers(["nats://127.0.0.1:4222", "nats://127.0.0.2", "nats://127.0.0.3:", "nats://[::1]:4224"])
    assert set(where(await known.round())) == {"127.0.0.1:4222", "127.0.0.2:4222", "127.0.0.3:4222", "[::1]:4224"}
    assert not names.asked


async def test_every_address_of_a_name_and_again_in_each_round(names: Names) -> None:
    names.known["nats.example"] = ["127.0.0.1", "127.0.0.2", "::1"]
    known = Servers(["nats://nats.example:4222"])
    first = await known.round()
    assert set(where(first)) == {"127.0.0.1:4222", "127.0.0.2:4222", "[::1]:4222"}
    assert {server.tls_name for server in first} == {"nats.example"}
    assert known.size == 3
    names.known["nats.example"] = ["127.0.0.3"]
    assert where(await known.round()) == ["127.0.0.3:4222"]
    assert known.known == ["nats.example:4222"]


async def test_a_name_that_cannot_be_looked_up(names: Names) -> None:
    known = Servers(["nats://nats.example:4222", "nats://127.0.0.1:4222"])
    assert where(await known.round()) == ["127.0.0.1:4222"]
    assert "nats.example cannot be looked up: Name or service not known" in str(known.unresolved)
    names.known["nats.example"] = ["127.0.0.2"]
    await known.round()
    assert known.unresolved is None
    del names.known["nats.example"]
    assert set(where(await known.round())) == {"127.0.0.1:4222", "127.0.0.2:4222"}, "what was known before is forgotten"


async def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(servers, "resolve", silent)
    monkeypatch.setattr(servers, "LOOKUP", 0.05)
    known = Servers(["nats://nats.example:4222", "nats://127.0.0.1:4222"])
    assert where(await known.round()) == ["127.0.0.1:4222"]
    assert "no answer" in str(known.unresolved)


async def test_announced_servers_have_the_login_and_the_name_of_the_configured_ones(names: Names) -> None:
    names.known["nats.example"] = ["127.0.0.1"]
    known = Servers(["tls://me:secret@nats.example:4222"])
    known.announced(["127.0.0.1:4222", "127.0.0.2:4222", "[::1]:4222"])
    found = {server.uri.netloc: server for server in await known.round()}
    assert set(found) == {f"me:secret@{one}" for one in ("127.0.0.1:4222", "127.0.0.2:4222", "[::1]:4222")}
    for server in found.values():
        assert (server.uri.scheme, server.uri.username, server.tls_name) == ("tls", "me", "nats.example")
    assert known.known == ["127.0.0.1:4222", "127.0.0.2:4222", "[::1]:4222", "nats.example:4222"]


async def test_what_is_announced_no_more_is_tried_last_and_one_in_a_round() -> None:
    known = Servers(["nats://127.0.0.1:4222"])
    known.announced(["127.0.0.1:4222", "127.0.0.2:4222", "127.0.0.3:4222"])
    known.announced(["127.0.0.1:4222"])
    rounds = [where(await known.round()) for _ in range(4)]
    assert [one[0] for one in rounds] == ["127.0.0.1:4222"] * 4
    assert {one[1] for one in rounds} == {"127.0.0.2:4222", "127.0.0.3:4222"}
    assert all(len(one) == 2 for one in rounds)
    known.announced(["127.0.0.1:4222", "127.0.0.2:4222"])
    assert set(where(await known.round())[:2]) == {"127.0.0.1:4222", "127.0.0.2:4222"}


async def test_former_addresses_are_bounded() -> None:
    known = Servers(["nats://127.0.0.1:4222"])
    for number in range(1000):
        known.announced([f"10.0.{number // 256}.{number % 256}:4222"])
    tried = {address for _ in range(1000) for address in where(await known.round())}
    assert len(tried) == FORMER_MOST + 2
    assert "127.0.0.1:4222" in tried


async def test_the_server_that_was_lost_is_tried_after_the_others() -> None:
    known = Servers([f"nats://127.0.0.{number}:4222" for number in range(1, 5)])
    known.last = (await known.round())[0]
    for _ in range(20):
        order = where(await known.round())
        assert order[-1] == known.last.uri.netloc
        assert len(set(order)) == 4


# -- connections ----------------------------------------------------------------------------------


async def connect(settings: Settings) -> tuple[NatsConnection, asyncio.Event]:
    again = asyncio.Event()

    async def online() -> None:
        link.online = True
        again.set()

    async def offline() -> None:
        pass

    link = await connect_link(settings, name="test", no_echo=False, on_online=online, on_offline=offline)
    return link, again


@pytest.mark.long
async def test_the_first_servers_of_the_list_are_down(
    nats_factory: NatsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One refuses connections, one accepts them and does not say a word."""
    monkeypatch.setattr(link_module, "CONNECT_TIMEOUT", 1.0)
    server = nats_factory()
    with Proxy(server.port) as silent:
        silent.stall()
        urls = (f"nats://127.0.0.1:{free_port()}", silent.url, server.url)
        for _ in range(4):  # the order is left to chance
            link, _ = await connect(Settings(nats=urls))
            assert link.connected_url is not None
            assert link.connected_url.port == server.port
            await link.fence()
            await link.close()


async def test_a_server_that_refuses_the_login_does_not_hide_one_that_accepts_it(nats_factory: NatsFactory) -> None:
    strict = nats_factory(config='authorization { user: "u", password: "right" }')
    other = nats_factory(config='authorization { user: "u", password: "p" }')
    settings = {"nats_user": "u", "nats_password": "p"}
    for _ in range(4):
        link, _ = await connect(Settings(nats=(strict.url, other.url), **settings))  # type: ignore[arg-type]
        assert link.connected_url is not None
        assert link.connected_url.port == other.port
        await link.close()
    with pytest.raises(StartupError, match="refuses the credentials"):
        await connect(Settings(nats=(f"nats://127.0.0.1:{free_port()}", strict.url), **settings))  # type: ignore[arg-type]


async def test_a_name_nobody_knows_is_said(names: Names) -> None:
    with pytest.raises(StartupError, match=r"nats\.example:4222: the name nats\.example cannot be looked up"):
        await connect(Settings(nats=("nats://nats.example:4222",)))


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface has only one address")
async def test_a_name_whose_servers_move(nats_factory: NatsFactory, names: Names) -> None:
    """A new server is behind the name, at an address that nobody has announced."""
    server = nats_factory()
    names.known["nats.example"] = ["127.0.0.2"]
    with Proxy(server.port, host="127.0.0.2") as old, Proxy(server.port, host="127.0.0.3", port=old.port) as new:
        link, again = await connect(Settings(nats=(f"nats://nats.example:{old.port}",)))
        assert (old.accepted, new.accepted) == (1, 0)
        names.known["nats.example"] = ["127.0.0.3"]
        old.cut()
        await asyncio.wait_for(again.wait(), 30.0)
        await link.fence()
        assert (old.accepted, new.accepted) == (1, 1)
        await link.close()


async def test_a_login_in_a_url_is_used_for_announced_servers(nats_factory: NatsFactory) -> None:
    routes = [free_port(), free_port()]
    nodes = [
        nats_factory(
            config=f'server_name: "s{own}"\njetstream: false\nauthorization {{ user: "u", password: "p" }}\n'
            f'cluster {{ name: c, listen: "127.0.0.1:{own}", routes: ["nats://127.0.0.1:{other}"] }}'
        )
        for own, other in (routes, routes[::-1])
    ]
    link, again = await connect(Settings(nats=(nodes[0].url.replace("://", "://u:p@"),)))
    known = link.known
    assert known is not None
    await aeventually(lambda: len(known.known) == 2, 30.0)
    nodes[0].kill()
    await asyncio.wait_for(again.wait(), 30.0)
    assert link.connected_url is not None
    assert link.connected_url.port == nodes[1].port
    await link.fence()
    # Configured servers are not forgotten when nobody announces them any more.
    again.clear()
    nodes[1].kill()
    nodes[0].start()
    await asyncio.wait_for(again.wait(), 30.0)
    await link.fence()
    await link.close()


async def test_the_certificate_is_for_the_name_and_not_for_the_address(
    nats_factory: NatsFactory, names: Names, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("nats.example")
    server = nats_factory(config=f'tls {{ cert_file: "{pair.certificate}", key_file: "{pair.key}" }}')
    names.known |= {"nats.example": ["127.0.0.1"], "other.example": ["127.0.0.1"]}
    link, _ = await connect(Settings(nats=(f"tls://nats.example:{server.port}",), nats_tls_ca=authority.file))
    await link.fence()
    await link.close()
    with pytest.raises(StartupError, match="certificate"):
        await connect(Settings(nats=(f"tls://other.example:{server.port}",), nats_tls_ca=authority.file))
