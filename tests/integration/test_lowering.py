# SPDX-License-Identifier: Apache-2.0
"""QoS 0 takes the place of a durable subscription: nothing that was stored for that is lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from mqtt_nats.codec import Ack, Publish, Subscribe, Subscription
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, RawClient
from tests.integration.conftest import Connector, Connector5, Stored, until


@asynccontextmanager
async def completing(client: RawClient) -> AsyncIterator[list[Publish]]:
    """What a client gets meanwhile, and completes."""
    found: list[Publish] = []

    async def complete() -> None:
        while True:
            packet = await client.packet(60)
            if isinstance(packet, Publish):
                found.append(packet)
                if packet.qos:
                    client.ack(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id)
            elif isinstance(packet, Ack):
                client.ack(PUBCOMP, packet.packet_id)

    task = asyncio.create_task(complete())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def as_many(found: list[Publish], count: int) -> None:
    assert len(found) >= count, [(one.payload, one.qos, one.packet_id) for one in found]


async def come(found: list[Publish], *payloads: bytes) -> None:
    """Wait until a client has these, once each, in order."""
    await until(partial(as_many, found, len(payloads)))
    assert [one.payload for one in found] == list(payloads)


async def lowered(stored: Stored, name: str) -> None:
    """Wait until the consumers of a session have brought what they had to bring."""

    async def gone() -> None:
        assert not await stored.session_consumers(name)
        assert not (await stored.record(name))["v5"].get("draining")

    await until(gone)


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("wanted", ["a", "#"])
async def test_what_waits_is_not_lost(connect: Connector, name: str, stored: Stored, qos: int, wanted: str) -> None:
    """[MQTT-3.8.4-3] (3.1.1): more than a window; the consumer goes then, and what is new comes at QoS 0."""
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/{wanted}", qos=qos)
    client.drop()
    await stored.detached(name)
    publisher = await connect(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(250)]
    await publisher.deliver_all(f"{name}/a", payloads, qos)
    client = await connect(name, clean=False)
    client.send(Subscribe(7, (Subscription(f"{name}/{wanted}", 0),)))
    async with completing(client) as found:
        await come(found, *payloads)
        assert {one.qos for one in found} == {qos}
        await lowered(stored, name)
        await publisher.deliver(f"{name}/a", b"new", qos)
        await come(found, *payloads, b"new")
        assert not found[-1].qos


async def test_what_waits_and_another_subscription_matches(connect: Connector, name: str, stored: Stored) -> None:
    """[MQTT-3.3.5-1] (3.1.1): it comes once, and what is new by the other one."""
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/+", qos=1)
    await client.subscribe(f"{name}/#", qos=2)
    client.drop()
    await stored.detached(name)
    publisher = await connect(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(20)]
    await publisher.deliver_all(f"{name}/a", payloads, 2)
    client = await connect(name, clean=False)
    client.send(Subscribe(7, (Subscription(f"{name}/+", 0),)))
    async with completing(client) as found:
        await come(found, *payloads)

        async def gone() -> None:
            assert len(await stored.session_consumers(name)) == 2

        await until(gone)
        await publisher.deliver(f"{name}/a", b"new", 2)
        await come(found, *payloads, b"new")
        assert {one.qos for one in found} == {2}


async def test_the_next_connection_gets_the_rest(
    connect5: Connector5, name: str, second_gateway: Gateway, stored: Stored
) -> None:
    """[MQTT-3.8.4-4] (5.0): also at another gateway, before what another subscription at QoS 1 brings."""
    client = await connect5(name, session_expiry_interval=60)
    await client.subscribe(name, qos=1)
    client.drop()
    await stored.detached(name)
    publisher = await connect5(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(8)]
    await publisher.deliver_all(name, payloads[:4], 1)
    client = await connect5(name, clean=False, session_expiry_interval=60, receive_maximum=1)
    await client.message(name, payloads[0])
    await client.subscribe(name, qos=0)
    client.drop()
    client = await connect5(name, to=second_gateway, clean=False, session_expiry_interval=60, receive_maximum=1)
    assert client.session_present
    first = await client.message(name, payloads[0], qos=1, dup=True)
    await client.subscribe(name, qos=1)
    await publisher.deliver_all(name, payloads[4:], 1)
    client.ack(PUBACK, first.packet_id)
    async with completing(client) as found:
        await come(found, *payloads[1:])
        assert {one.qos for one in found} == {1}


@pytest.mark.parametrize("qos", [1, 2])
async def test_what_is_lost_meanwhile(
    connect: Connector, name: str, stored: Stored, proxy: NatsProxy, gateway_factory: GatewayFactory, qos: int
) -> None:
    """[MQTT-4.3.2-2] [MQTT-4.3.3-2] (3.1.1): the reader brings it another time, and it has come at QoS 0."""
    gateway = gateway_factory(proxy.url, start=False)
    await asyncio.to_thread(gateway.start)
    client = await connect(name, clean=False, to=gateway)
    await client.subscribe(name, qos=qos)
    await stored.live(name)
    publisher = await connect(f"{name}-publisher")
    async with completing(client) as found:
        await publisher.deliver(name, b"before", qos)
        await come(found, b"before")
        asked = proxy.set("up", "$JS.API.DIRECT.GET.$MQTT_rmsgs", Action.HOLD)
        client.send(Subscribe(7, (Subscription(name, 0),)))
        await asked.sprung.wait()
        lost = proxy.set("down", f"$MQTT.msgs.{name}", Action.DROP)
        await publisher.deliver_all(name, [b"1", b"2"], qos)
        await lost.sprung.wait()
        asked.release()
        await come(found, b"before", b"1", b"2")
        await lowered(stored, name)
        await publisher.deliver(name, b"new", qos)
        await come(found, b"before", b"1", b"2", b"new")
    assert "the shared reader was made again" in gateway.log
    await asyncio.to_thread(gateway.term)


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("where", ["same gateway", "another gateway"])
@pytest.mark.parametrize("qos", [1, 2])
async def test_messages_go_on_meanwhile(
    connect: Connector, name: str, gateway: Gateway, second_gateway: Gateway, qos: int, where: str, overlapping: bool
) -> None:
    """[MQTT-3.8.4-3] (3.1.1): each comes, and none by both subscriptions."""
    publisher = await connect(f"{name}-publisher", to=gateway if where == "same gateway" else second_gateway)
    for topic in (f"{name}-{number}" for number in range(4)):
        client = await connect(topic, clean=False)
        await client.subscribe(f"{topic}/+", qos=qos)
        if overlapping:
            await client.subscribe(f"{topic}/#", qos=qos)
        async with completing(client) as found:
            sent: list[bytes] = []
            while len(sent) < 60 or not (overlapping or any(not one.qos for one in found)):
                sent.append(b"%d" % len(sent))
                await publisher.deliver(f"{topic}/a", sent[-1], qos)
                if len(sent) == 20:
                    client.send(Subscribe(99, (Subscription(f"{topic}/+", 0),)))
            await until(partial(as_many, found, len(sent)))
            higher = [one.payload for one in found if one.qos]
            assert sent == (higher if overlapping else higher + [one.payload for one in found if not one.qos])
        client.drop()


async def test_each_change_waits_for_what_came_before_it(connect5: Connector5, name: str) -> None:
    """[MQTT-4.6.0-6] (5.0): a client that takes one message at a time gets all in the order of its subscriptions."""
    client = await connect5(name, session_expiry_interval=60, receive_maximum=1)
    publisher = await connect5(f"{name}-publisher")
    await client.subscribe(f"{name}/+", qos=1)
    await publisher.deliver(f"{name}/a", b"first", 1)
    first = await client.message(f"{name}/a", b"first", qos=1)
    expected: list[tuple[bytes, int]] = []
    for qos in (1, 0, 1, 0, 2, 0):
        await client.subscribe(f"{name}/+", qos=qos)
        for _ in range(3):
            expected.append((b"%d" % len(expected), min(qos, 1)))
            await publisher.deliver(f"{name}/a", expected[-1][0], 1)
    await client.quiet()
    async with completing(client) as found:
        client.ack(PUBACK, first.packet_id)
        await until(partial(as_many, found, len(expected)))
        assert [(one.payload, one.qos) for one in found] == expected


async def test_what_waits_goes_with_its_subscription(connect5: Connector5, name: str) -> None:
    """[MQTT-3.10.4-2] (5.0): what came at QoS 0 waits for a message that is not complete, and is let go of."""
    client = await connect5(name, session_expiry_interval=60, receive_maximum=1)
    publisher = await connect5(f"{name}-publisher")
    await client.subscribe(f"{name}/+", qos=1)
    await publisher.deliver_all(f"{name}/a", [b"0", b"1"], 1)
    first = await client.message(f"{name}/a", b"0", qos=1)
    await client.subscribe(f"{name}/+", qos=0)
    await publisher.deliver(f"{name}/a", b"2", 1)
    await client.subscribe(f"{name}/+", qos=1)
    await publisher.deliver(f"{name}/a", b"3", 1)
    await client.unsubscribe(f"{name}/+")
    await client.subscribe(f"{name}/b", qos=1)
    await publisher.deliver(f"{name}/b", b"4", 1)
    async with completing(client) as found:
        client.ack(PUBACK, first.packet_id)
        await until(partial(as_many, found, 2))
        assert [one.payload for one in found] == [b"1", b"4"]


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("where", ["same gateway", "another gateway"])
async def test_the_next_connection_gets_what_is_new_behind_the_rest(
    connect5: Connector5, name: str, second_gateway: Gateway, stored: Stored, where: str, taken: bool
) -> None:
    """[MQTT-4.6.0-6] (5.0): at QoS 0, while the consumer, or what was ``taken`` from the shared reader, is older."""
    client = await connect5(name, session_expiry_interval=60, receive_maximum=1)
    publisher = await connect5(f"{name}-publisher")
    await client.subscribe(name, qos=1)
    if taken:
        await stored.live(name)
    await publisher.deliver_all(name, [b"0", b"1", b"2"], 1)
    await client.message(name, b"0", qos=1)
    await client.subscribe(name, qos=0)
    client.drop()
    to = second_gateway if where == "another gateway" else None
    client = await connect5(name, to=to, clean=False, session_expiry_interval=60, receive_maximum=1)
    first = await client.message(name, b"0", qos=1, dup=True)
    await publisher.deliver(name, b"3", 1)
    await client.quiet()
    async with completing(client) as found:
        client.ack(PUBACK, first.packet_id)
        await come(found, b"1", b"2", b"3")
        assert [one.qos for one in found] == [1, 1, 0]
