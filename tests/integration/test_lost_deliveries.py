# SPDX-License-Identifier: Apache-2.0
"""Messages that are lost between JetStream and a gateway's reader, and the order of what comes after them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from mqtt_nats.codec import Subscribe, Subscription
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.rawclient import RawClient
from tests.integration.conftest import Stored

pytestmark = pytest.mark.anyio

LOST = "the shared reader was made again"


@pytest.fixture
async def local(proxy: NatsProxy, gateway_factory: GatewayFactory) -> AsyncIterator[Gateway]:
    gateway = gateway_factory(proxy.url, start=False)
    await asyncio.to_thread(gateway.start)
    yield gateway
    await asyncio.to_thread(gateway.term)


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("name", ["plain", "wild"])
async def test_what_was_lost_comes_before_what_followed(
    local: Gateway, proxy: NatsProxy, stored: Stored, qos: int, name: str
) -> None:
    """And what the client has does not come again."""
    client_id = f"{name}-{qos}"
    topic = f"{client_id}/x"
    async with (
        await RawClient.connect(local.port, client_id, clean=False) as subscriber,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        await subscriber.subscribe(topic if name == "plain" else f"{client_id}/#", qos=qos)
        await stored.live(client_id, 1 if name == "plain" else 2)
        for number in range(3):
            await publisher.deliver(topic, b"%d" % number, qos)
        pending = await subscriber.messages(3)
        trap = proxy.set("down", f"$MQTT.msgs.{client_id}.x", Action.DROP)
        await publisher.deliver(topic, b"3", qos)
        await trap.sprung.wait()
        await publisher.deliver_all(topic, [b"%d" % number for number in range(4, 20)], qos)
        for number in range(3, 20):
            (received,) = await subscriber.messages(1)
            assert (received.payload, received.dup) == (b"%d" % number, False)
            await subscriber.complete(received)
        for one in pending:
            await subscriber.complete(one)
        await publisher.deliver(topic, b"end", qos)
        assert (await subscriber.messages(1))[0].payload == b"end"
        await subscriber.quiet()
    assert LOST in local.log


@pytest.mark.parametrize("qos", [1, 2])
async def test_the_first_message_of_a_subscription(
    local: Gateway, proxy: NatsProxy, stored: Stored, name: str, qos: int
) -> None:
    """[MQTT-4.6.0-6] (3.1.1): it is lost, and what follows does not overtake it."""
    async with (
        await RawClient.connect(local.port, name, clean=False) as subscriber,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        await subscriber.subscribe(name, qos=qos)
        await stored.live(name)
        trap = proxy.set("down", f"$MQTT.msgs.{name}", Action.DROP)
        await publisher.deliver_all(name, [b"1", b"2"], qos)
        for payload in (b"1", b"2"):
            await subscriber.receive(name, payload, qos=qos, dup=False)
        await subscriber.quiet()
        assert trap.sprung.is_set()


@pytest.mark.long
async def test_consecutive_deliveries_lack_nothing(local: Gateway, stored: Stored) -> None:
    """Also when a new connection gets them again."""
    async with (
        await RawClient.connect(local.port, "steady", clean=False) as subscriber,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        await subscriber.subscribe("steady", qos=1)
        await publisher.deliver_all("steady", [b"%d" % number for number in range(5)], 1)
        await subscriber.messages(5)
        subscriber.drop()
        async with await RawClient.connect(local.port, "steady", clean=False) as again:
            for received in await again.messages(5):
                await again.complete(received)
            await stored.live("steady")
            for number in range(50):
                await publisher.deliver("steady", b"more %d" % number, 1)
                (received,) = await again.messages(1)
                assert received.payload == b"more %d" % number
                await again.complete(received)
    assert LOST not in local.log


@pytest.mark.long
@pytest.mark.parametrize("step", ["position", "record", "consumer"])
@pytest.mark.parametrize("published", [False, True])
async def test_a_gateway_is_killed_in_a_subscribe(
    proxy: NatsProxy, gateway_factory: GatewayFactory, stored: Stored, name: str, published: bool, step: str
) -> None:
    """Before it has stored the position, the record, or the consumer: what was acknowledged is served from the start.

    The client has no SUBACK. Where the record has the subscription, nothing is lost.
    """
    gateway = gateway_factory(proxy.url, "--session-positions", "consumers", start=False)
    await asyncio.to_thread(gateway.start)
    words = {
        "position": "$MQTT.pos.",
        "record": "$MQTT.sess.",
        "consumer": "$JS.API.CONSUMER.DURABLE.CREATE.$MQTT_msgs.",
    }
    async with await RawClient.connect(gateway.port, name, clean=False) as subscriber:
        trap = proxy.set("up", words[step], Action.DROP)
        subscriber.send(Subscribe(subscriber.next_id(), (Subscription(name, 1),)))
        await trap.sprung.wait()
        await asyncio.to_thread(gateway.kill)
    await asyncio.to_thread(gateway.start)
    async with await RawClient.connect(gateway.port, "publisher") as publisher:
        if published:
            await publisher.deliver(name, b"before", 1)
        await publisher.deliver("elsewhere", b"", 1)
        async with await RawClient.connect(gateway.port, name, clean=False) as subscriber:
            if step != "consumer":  # the session has no such subscription
                await subscriber.quiet()
                await subscriber.subscribe(name, qos=1)
            elif published:
                await subscriber.receive(name, b"before", qos=1)
            await stored.live(name)
            await publisher.deliver(name, b"after", 1)
            await subscriber.receive(name, b"after", qos=1)
            await subscriber.quiet()
            assert len(await stored.session_consumers(name)) == 1
    await asyncio.to_thread(gateway.term)
