# SPDX-License-Identifier: Apache-2.0
"""Durable sessions that readers of a gateway serve go to nats-server's listener, and come back, while absent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.interop.support import Message, Pahos, Raws, Sides, unique


@pytest.fixture(scope="module")
def sides(nats: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    """The MQTT ports of a gateway that has seen no client of nats-server's listener, and of nats-server."""
    directory: Path = tmp_path_factory.mktemp("gateway")
    gateway = Gateway(directory / "gateway.log", nats.url)
    gateway.start()
    yield {"gateway": gateway.port, "nats-server": nats.mqtt_port}
    gateway.process.discard()
    assert "Traceback" not in gateway.log, gateway.log


@pytest.mark.parametrize("way", ["gn", "ggn", "gngn", "ngngg", "nngng"])
@pytest.mark.parametrize("qos", [1, 2])
def test_what_waits_comes_once(
    paho: Pahos, let_go: Callable[[str], None], settle: Callable[[str], None], qos: int, way: str
) -> None:
    """Wherever the session goes; ``way``: g for the gateway, n for nats-server's listener."""
    topic, client_id = unique("moves/"), unique("sub")
    publisher = paho("gateway", unique("pub"))
    for at, side in enumerate(way):
        subscriber = paho("gateway" if side == "g" else "nats-server", client_id, clean=False)
        if at:
            assert subscriber.session_present
            subscriber.expect(*(Message(topic, b"%d" % number, qos, False) for number in range(10)))
        else:
            subscriber.subscribe(topic, qos)
            subscriber.subscribe(f"{topic}/deep/#", qos)
        publisher.publish(topic, b"live", qos)
        publisher.publish(f"{topic}/deep", b"live", qos)
        subscriber.expect(Message(topic, b"live", qos, False), Message(f"{topic}/deep", b"live", qos, False))
        subscriber.fence()
        assert subscriber.messages == []
        settle(client_id)
        subscriber.close()
        let_go(client_id)
        for number in range(10):
            publisher.publish(topic, b"%d" % number, qos)


@pytest.mark.parametrize("acknowledged", [(), (0,), (1,), (0, 1, 2)])
@pytest.mark.parametrize("qos", [1, 2])
async def test_what_nats_server_has_sent_and_nobody_has_acknowledged(
    raw: Raws, let_go: Callable[[str], None], qos: int, acknowledged: tuple[int, ...]
) -> None:
    """[MQTT-4.4.0-1] (3.1.1): it comes again with DUP, also where a later message was acknowledged first."""
    topic, client_id = unique("moves/"), unique("sub")
    publisher = await raw("gateway", unique("pub"))
    client = await raw("nats-server", client_id, clean=False)
    await client.subscribe(topic, qos=qos)
    await publisher.deliver_all(topic, [b"0", b"1", b"2"], qos)
    first = await client.messages(3)
    for at in acknowledged:
        await client.complete(first[at])
    await client.quiet()
    client.drop()
    await asyncio.to_thread(let_go, client_id)
    await publisher.deliver(topic, b"3", qos)
    client = await raw("gateway", client_id, clean=False)
    left = [(b"%d" % at, True) for at in range(3) if at not in acknowledged]
    got = await client.messages(len(left) + 1)
    assert [(one.payload, one.dup) for one in got] == [*left, (b"3", False)]
    for one in got:
        await client.complete(one)
    await client.quiet()


@pytest.mark.parametrize("qos", [1, 2])
async def test_what_nobody_has_acknowledged_goes_back(raw: Raws, let_go: Callable[[str], None], qos: int) -> None:
    """[MQTT-4.4.0-1] (3.1.1): nats-server sends it again, after a gateway has sent it in vain, too."""
    topic, client_id = unique("moves/"), unique("sub")
    publisher = await raw("gateway", unique("pub"))
    client = await raw("nats-server", client_id, clean=False)
    await client.subscribe(topic, qos=qos)
    await publisher.deliver_all(topic, [b"0", b"1"], qos)
    for side in ("nats-server", "gateway", "nats-server"):
        got = await client.messages(2)
        assert [one.payload for one in got] == [b"0", b"1"]
        await client.quiet()
        client.drop()
        await asyncio.to_thread(let_go, client_id)
        client = await raw("gateway" if side == "nats-server" else "nats-server", client_id, clean=False)
    for one in await client.messages(2):
        await client.complete(one)
    await client.quiet()
