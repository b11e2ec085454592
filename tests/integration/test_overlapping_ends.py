# SPDX-License-Identifier: Apache-2.0
"""A regular session ends one of two filters that bring it the same messages, and one connection to NATS is slow."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.codec import Unsuback, Unsubscribe
from tests.chaos.points.proxy import Action, NatsProxy
from tests.harness.gateway import Gateway
from tests.harness.rawclient import RawClient
from tests.integration.conftest import Connector

pytestmark = pytest.mark.anyio


async def _first_to_get(clients: list[RawClient], topic: str) -> int:
    """Which client gets a message first."""
    waiting = [asyncio.create_task(client.receive(topic, b"probe")) for client in clients]
    done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    return waiting.index(done.pop())


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("nth", [1, 2], ids=["one is slow", "the other is slow"])
@pytest.mark.parametrize("wild_first", [True, False], ids=["wild ends", "exact ends"])
async def test_nothing_is_lost_or_doubled(
    connect: Connector,
    name: str,
    gateway: Gateway,
    late: Gateway,
    proxy: NatsProxy,
    wild_first: bool,
    nth: int,
    qos: int,
) -> None:
    """Filters that begin with a wildcard have a connection of their own."""
    topic = f"{name}/t"
    filters = ["+/t", topic] if wild_first else [topic, "+/t"]
    client = await connect(name, to=late)
    for one in filters:
        assert await client.subscribe(one, qos=qos) == (qos,)
    probes = [await connect(f"{name}-{number}", to=late) for number in range(2)]
    for probe, one in zip(probes, ("+/probe", f"{name}/probe"), strict=True):
        await probe.subscribe(one, qos=1)
    publisher = await connect(f"{name}-publisher")
    trap = proxy.set("down", f"{name}.t", Action.HOLD, nth)
    await publisher.deliver(topic, b"1", qos)
    await asyncio.wait_for(trap.sprung.wait(), 10)
    await publisher.deliver(f"{name}/probe", b"probe", 1)
    came = (await _first_to_get(probes, f"{name}/probe") == 0) == wild_first
    if came:
        await client.receive(topic, b"1", qos=qos)
    packet_id = client.next_id()
    client.send(Unsubscribe(packet_id, (filters[0],)))
    await client.quiet()  # UNSUBACK waits for the slow connection
    await publisher.deliver(topic, b"2", qos)
    trap.release()
    for payload in (b"2",) if came else (b"1", b"2"):
        await client.receive(topic, payload, qos=qos)
    await client.expect(Unsuback, packet_id=packet_id)
    await publisher.deliver(topic, b"3", qos)
    await client.receive(topic, b"3", qos=qos)
    await client.quiet()


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("wild_first", [True, False], ids=["wild ends", "exact ends"])
async def test_what_comes_past_nats(
    connect: Connector, name: str, late: Gateway, proxy: NatsProxy, wild_first: bool, qos: int
) -> None:
    """What a gateway's own client publishes comes through NATS only to filters that begin with a wildcard."""
    topic = f"{name}/t"
    filters = ["+/t", topic] if wild_first else [topic, "+/t"]
    client = await connect(name, to=late)
    for one in filters:
        assert await client.subscribe(one, qos=qos) == (qos,)
    publisher = await connect(f"{name}-publisher", to=late)
    trap = proxy.set("down", f"{name}.t", Action.HOLD)
    await publisher.deliver(topic, b"1", qos)
    await asyncio.wait_for(trap.sprung.wait(), 10)
    if not wild_first:
        await client.receive(topic, b"1", qos=qos)
    packet_id = client.next_id()
    client.send(Unsubscribe(packet_id, (filters[0],)))
    await client.quiet()
    await publisher.deliver(topic, b"2", qos)
    trap.release()
    for payload in (b"1", b"2") if wild_first else (b"2",):
        await client.receive(topic, payload, qos=qos)
    await client.expect(Unsuback, packet_id=packet_id)
    await publisher.deliver(topic, b"3", qos)
    await client.receive(topic, b"3", qos=qos)
    await client.quiet()
