# SPDX-License-Identifier: Apache-2.0
"""What the consumers of ended subscriptions have yet to bring is lost on its way, and comes again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest

from mqtt_nats.codec import Publish, Unsubscribe
from tests.chaos.points.proxy import Action, Frame, NatsProxy, Trap
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.integration.conftest import Connector, Stored, until
from tests.integration.test_lowering import as_many, come, completing, lowered

pytestmark = pytest.mark.anyio


class Delivery(Trap):
    """Waits for a delivery of one consumer."""

    def __init__(self, consumer: str, attempt: int, nth: int, action: Action = Action.DROP) -> None:
        super().__init__("down", f"$JS.ACK.$MQTT_msgs.{consumer}.{attempt}.", action, nth)

    def matches(self, frame: Frame) -> bool:
        """Known by the subject of its acknowledgement."""
        words = frame.data.partition(b"\r\n")[0].split(b" ")
        return len(words) > 4 and super().matches(frame._replace(subject=words[3].decode()))


@pytest.mark.parametrize("qos", [1, 2])
async def test_the_first_message_of_a_subscription(
    connect: Connector, name: str, stored: Stored, proxy: NatsProxy, plain: Gateway, qos: int
) -> None:
    """[MQTT-4.6.0-6] (3.1.1): it is lost, and what follows does not overtake it."""
    client = await connect(name, clean=False, to=plain)
    await client.subscribe(name, qos=qos)
    (consumer,) = await stored.session_consumers(name)
    lost = Delivery(consumer.name, 1, 1)
    proxy.traps.append(lost)
    publisher = await connect(f"{name}-publisher")
    async with completing(client) as found:
        await publisher.deliver_all(name, [b"1", b"2"], qos)
        await come(found, b"1", b"2")
        assert lost.sprung.is_set()


async def draining(stored: Stored, name: str) -> None:
    assert (await stored.record(name))["v5"].get("draining")


async def left_to_another(stored: Stored, name: str, lost: str) -> None:
    """Check that the session has acknowledged, for another consumer, all that the consumer ``lost`` has delivered."""
    infos = {one.name: one for one in await stored.session_consumers(name)}
    delivered, floors = infos.pop(lost).delivered, [one.ack_floor for one in infos.values()]
    assert delivered is not None
    assert max(floor.stream_seq for floor in floors if floor is not None) == delivered.stream_seq


@pytest.fixture
async def plain(proxy: NatsProxy, gateway_factory: GatewayFactory) -> AsyncIterator[Gateway]:
    """A gateway behind the proxy, whose sessions have their own consumers."""
    gateway = gateway_factory(proxy.url, start=False)
    await asyncio.to_thread(gateway.start)
    yield gateway
    await asyncio.to_thread(gateway.term)


async def left(
    connect: Connector, name: str, stored: Stored, plain: Gateway, qos: int, ended: bool
) -> tuple[list[Publish], str]:
    """A client has got three messages and completed none, has unsubscribed or not, and is gone.

    Returns:
        The messages, and the name of the consumer that has them pending.
    """
    client = await connect(name, clean=False, to=plain)
    await client.subscribe(name, qos=qos)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver_all(name, [b"1", b"2", b"3"], qos)
    found = await client.messages(3)
    if ended:
        await client.unsubscribe(name)
    (consumer,) = await stored.session_consumers(name)
    client.drop()
    await stored.detached(name)
    return found, consumer.name


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_what_was_sent_is_completed(
    connect: Connector, name: str, stored: Stored, proxy: NatsProxy, plain: Gateway, nth: int, qos: int
) -> None:
    """[MQTT-3.10.4-3] (3.1.1): the client may have it as received; the next connection gets it in two parts."""
    before, consumer = await left(connect, name, stored, plain, qos, ended=True)
    lost = Delivery(consumer, 2, nth)
    proxy.traps.append(lost)
    client = await connect(name, clean=False, to=plain)
    async with completing(client) as found:
        await come(found, b"1", b"2", b"3")
        assert lost.sprung.is_set()
        assert [one.packet_id for one in found] == [one.packet_id for one in before]
        await lowered(stored, name)


@pytest.mark.long
@pytest.mark.parametrize("qos", [1, 2])
async def test_what_was_sent_before_is_completed(
    connect: Connector, name: str, stored: Stored, proxy: NatsProxy, plain: Gateway, qos: int
) -> None:
    """[MQTT-3.10.4-3] (3.1.1): the subscription ends before it has come again, and after the rest is complete."""
    before, consumer = await left(connect, name, stored, plain, qos, ended=False)
    lost = Delivery(consumer, 2, 3)
    proxy.traps.append(lost)
    client = await connect(name, clean=False, to=plain)
    async with completing(client) as found:
        await until(partial(as_many, found, 2))
        client.send(Unsubscribe(99, (name,)))
        await come(found, b"1", b"2", b"3")
        assert lost.sprung.is_set()
        assert [one.packet_id for one in found] == [one.packet_id for one in before]
        await lowered(stored, name)


@pytest.mark.parametrize("qos", [1, 2])
async def test_what_is_new_does_not_overtake(
    connect: Connector, name: str, stored: Stored, proxy: NatsProxy, plain: Gateway, qos: int
) -> None:
    """[MQTT-4.6.0-6] (3.1.1): what was left to the ended subscription comes again, but is lost once more."""
    client = await connect(name, clean=False, to=plain)
    await client.subscribe(f"{name}/+", qos=qos)
    (first,) = await stored.session_consumers(name)
    await client.subscribe(f"{name}/#", qos=qos)
    publisher = await connect(f"{name}-publisher")
    async with completing(client) as found:
        await publisher.deliver(f"{name}/a", b"0", qos)
        await come(found, b"0")
        lost = [Delivery(first.name, attempt, 1) for attempt in (1, 2)]
        proxy.traps += lost
        await publisher.deliver(f"{name}/a", b"1", qos)
        await asyncio.wait_for(lost[0].sprung.wait(), 10)
        await until(partial(left_to_another, stored, name, first.name))
        client.send(Unsubscribe(99, (f"{name}/+",)))
        await until(partial(draining, stored, name))
        await publisher.deliver(f"{name}/a", b"2", qos)
        await asyncio.wait_for(lost[1].sprung.wait(), 20)
        await come(found, b"0", b"1", b"2")

        async def gone() -> None:
            assert len(await stored.session_consumers(name)) == 2

        await until(gone)
        await publisher.deliver(f"{name}/a", b"3", qos)
        await come(found, b"0", b"1", b"2", b"3")
