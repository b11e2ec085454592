# SPDX-License-Identifier: Apache-2.0
"""Shared subscriptions when gateways and nats-server die."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import nats
import pytest

from mqtt_nats.codec import Publish
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.nats import NatsServer
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

TEXT = "$share/group/work"
ACK_WAIT = 30.0  # seconds after which JetStream gives a message to somebody else


Connect = Callable[..., Awaitable[RawClient5]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connect 5.0 clients."""
    clients: list[RawClient5] = []

    async def connect(port: int, client_id: str, **options: Any) -> RawClient5:
        client = await RawClient5.connect5(port, client_id, **options)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.drop()


async def settled(server: NatsServer) -> None:
    """Wait until JetStream has all acknowledgements: messages come again whose acknowledgement nats-server loses."""
    client = await nats.connect(server.url)

    async def nothing_waits() -> bool:
        return not any(one.num_ack_pending for one in await client.jetstream().consumers_info("$MQTT_msgs"))

    try:
        await aeventually(nothing_waits, 60)
    finally:
        await client.close()


async def test_members_of_a_killed_gateway(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, connect: Connect
) -> None:
    """What they had at QoS 1 goes to the others; what they had at QoS 2 is theirs."""
    server = nats_factory()
    first, second = gateway_factory(server), gateway_factory(server)
    lost = await connect(first.port, "lost", session_expiry_interval=3600, receive_maximum=6)
    await lost.subscribe(TEXT, qos=2)
    publisher = await connect(second.port, "publisher")
    await publisher.deliver_all("work", [b"1-%d" % number for number in range(3)], 1)
    await publisher.deliver_all("work", [b"2-%d" % number for number in range(3)], 2)
    sent = await lost.messages(6)
    first.kill()
    other = await connect(second.port, "other")
    await other.subscribe(TEXT, qos=2)
    got = [await other.message("work", b"1-%d" % number, ACK_WAIT + 15) for number in range(3)]
    assert not any(publish.dup for publish in got)
    await other.quiet()
    again = await connect(second.port, "lost", clean=False, session_expiry_interval=3600)
    for publish in (one for one in sent if one.qos == 2):
        await again.message("work", publish.payload, qos=2, dup=True, packet_id=publish.packet_id)
    await again.quiet()


async def test_nats_server_is_killed_at_qos_2(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, connect: Connect
) -> None:
    """It has forgotten what it has delivered last: nobody gets that a second time."""
    server = nats_factory()
    gateways = gateway_factory(server), gateway_factory(server)
    members = [
        await connect(gateways[0].port, "first", session_expiry_interval=3600),
        await connect(gateways[1].port, "second", session_expiry_interval=3600),
    ]
    for member in members:
        await member.subscribe(TEXT, qos=2)
    publisher = await connect(gateways[0].port, "publisher")
    got: Counter[bytes] = Counter()

    async def take(member: RawClient5) -> None:
        while True:
            publish = await member.expect(Publish, 60)
            await member.complete(publish)
            got[publish.payload] += 1

    taking = [asyncio.create_task(take(member)) for member in members]
    try:
        for turn in range(2):
            payloads = [b"%d-%d" % (turn, number) for number in range(40)]
            await publisher.deliver_all("work", payloads, 2)
            await aeventually(partial(set(payloads).issubset, got), 60)
            server.kill()
            server.start()
        await publisher.deliver_all("work", [b"end %d" % number for number in range(10)], 2)
        await aeventually(lambda: len(got) == 90, 60)
    finally:
        for task in taking:
            task.cancel()
        await asyncio.gather(*taking, return_exceptions=True)
    for member in members:
        await member.quiet()
    assert set(got.values()) == {1}


async def test_nats_server_restarts(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, connect: Connect
) -> None:
    """Members go on, of a regular and of a durable session."""
    server = nats_factory()
    gateway = gateway_factory(server)
    members = [
        await connect(gateway.port, "regular"),
        await connect(gateway.port, "durable", session_expiry_interval=3600),
    ]
    for member in members:
        await member.subscribe(TEXT, qos=1)
    publisher = await connect(gateway.port, "publisher")
    for _ in range(2):
        payloads = [b"%d" % number for number in range(20)]
        await publisher.deliver_all("work", payloads, 1)
        got: Counter[bytes] = Counter()

        async def take(member: RawClient5, got: Counter[bytes] = got) -> None:
            while True:  # who takes how many is a matter of who asks first
                publish = await member.expect(Publish, 60)
                got[publish.payload] += 1
                await member.complete(publish)

        taking = [asyncio.create_task(take(member)) for member in members]
        try:
            await aeventually(partial(set(payloads).issubset, got), 60)
        finally:
            for task in taking:
                task.cancel()
            await asyncio.gather(*taking, return_exceptions=True)
        for member in members:
            await member.quiet()
        assert got == Counter(payloads)
        await settled(server)
        server.restart()
