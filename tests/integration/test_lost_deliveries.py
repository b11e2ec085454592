# SPDX-License-Identifier: Apache-2.0
"""Deliveries that are lost between a consumer and its gateway, and the order of what comes after them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mqtt_nats.codec import Subscribe, Subscription
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.rawclient import RawClient
from tests.integration.conftest import Stored

pytestmark = pytest.mark.anyio

LOST = "deliveries or acknowledgements were lost"


@pytest.fixture
async def local(proxy: NatsProxy, gateway_factory: GatewayFactory) -> AsyncIterator[Gateway]:
    gateway = gateway_factory(proxy.url, start=False)
    await asyncio.to_thread(gateway.start)
    yield gateway
    await asyncio.to_thread(gateway.term)


@pytest.mark.parametrize("qos", [1, 2])
async def test_what_the_shared_reader_lost(
    proxy: NatsProxy, gateway_factory: GatewayFactory, stored: Stored, qos: int
) -> None:
    """It is read again, before what followed."""
    gateway = gateway_factory(proxy.url, start=False)
    await asyncio.to_thread(gateway.start)
    async with (
        await RawClient.connect(gateway.port, f"lost-{qos}", clean=False) as subscriber,
        await RawClient.connect(gateway.port, "publisher") as publisher,
    ):
        await subscriber.subscribe(f"lost/{qos}", qos=qos)

        await stored.live(f"lost-{qos}")
        await publisher.deliver(f"lost/{qos}", b"first", qos)
        await subscriber.complete(await subscriber.message(f"lost/{qos}", b"first"))
        trap = proxy.set("down", f"$MQTT.msgs.lost.{qos}", Action.DROP)
        await publisher.deliver(f"lost/{qos}", b"0", qos)
        await trap.sprung.wait()
        await publisher.deliver_all(f"lost/{qos}", [b"%d" % number for number in range(1, 20)], qos)
        for number in range(20):
            (received,) = await subscriber.messages(1)
            assert (received.payload, received.dup) == (b"%d" % number, False)
            await subscriber.complete(received)
        await subscriber.quiet()
    assert "the shared reader was made again" in gateway.log
    await asyncio.to_thread(gateway.term)


@pytest.mark.long
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("name", ["plain", "wild"])
async def test_what_was_lost_comes_before_what_followed(local: Gateway, proxy: NatsProxy, qos: int, name: str) -> None:
    """And what the client has does not come again."""
    topic = f"{name}-{qos}/x"
    async with (
        await RawClient.connect(local.port, f"{name}-{qos}", clean=False) as subscriber,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        await subscriber.subscribe(topic if name == "plain" else f"{name}-{qos}/#", qos=qos)
        for number in range(3):
            await publisher.deliver(topic, b"%d" % number, qos)
        pending = await subscriber.messages(3)
        trap = proxy.set("down", f"$MQTT.msgs.{name}-{qos}.", Action.DROP)
        await publisher.deliver(topic, b"3", qos)
        await trap.sprung.wait()
        await publisher.deliver_all(topic, [b"%d" % number for number in range(4, 20)], qos)
        for number in range(3, 20):
            (received,) = await subscriber.messages(1)
            assert received.payload == b"%d" % number
            await subscriber.complete(received)
        for one in pending:
            await subscriber.complete(one)
        await publisher.deliver(topic, b"end", qos)
        assert (await subscriber.messages(1))[0].payload == b"end"
    assert LOST in local.log


@pytest.mark.long
async def test_consecutive_deliveries_lack_nothing(local: Gateway) -> None:
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
            for number in range(50):
                await publisher.deliver("steady", b"more %d" % number, 1)
                (received,) = await again.messages(1)
                assert received.payload == b"more %d" % number
                await again.complete(received)
    assert LOST not in local.log


@pytest.mark.long
async def test_an_answer_that_counts_what_was_delivered_after_the_change(
    local: Gateway, proxy: NatsProxy, stored: Stored
) -> None:
    """A loaded nats-server makes it after it has sent everything again, and what is new: the resume is as any other."""
    async with (
        await RawClient.connect(local.port, "late", clean=False) as subscriber,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        await subscriber.subscribe("late", qos=2)
        await publisher.deliver_all("late", [b"%d" % number for number in range(3)], 2)
        flying = await subscriber.messages(3)
        subscriber.drop()
        await stored.detached("late")
        await publisher.deliver_all("late", [b"%d" % number for number in range(3, 8)], 2)

        def alter(answer: dict[str, Any]) -> None:
            answer["num_ack_pending"], answer["num_pending"] = 8, 0
            if answer["delivered"]["consumer_seq"] == 3:
                answer["delivered"]["consumer_seq"] += 8
                answer["delivered"]["stream_seq"] += 5

        trap = proxy.set("answer", "$JS.API.CONSUMER.DURABLE.CREATE.$MQTT_msgs.", Action.ALTER)
        trap.alter = alter
        async with await RawClient.connect(local.port, "late", clean=False) as again:
            found = await again.messages(8)  # and no PUBREL between them
            assert trap.sprung.is_set()
            assert [(one.payload, one.dup) for one in found] == [(b"%d" % number, number < 3) for number in range(8)]
            assert [one.packet_id for one in found[:3]] == [one.packet_id for one in flying]
            for one in found:
                await again.complete(one)
            await again.quiet()
    assert LOST not in local.log


@pytest.mark.long
async def test_a_consumer_that_delivers_elsewhere_is_brought_back(
    local: Gateway, proxy: NatsProxy, stored: Stored
) -> None:
    """Whatever has moved its deliver subject away: a look at the consumer finds that out."""
    async with (
        await RawClient.connect(local.port, "astray", clean=False) as subscriber,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        await subscriber.subscribe("astray", qos=1)
        ((name, config),) = [(one.name, one.config) for one in await stored.session_consumers("astray")]
        trap = proxy.set("down", "$JS.EVENT.ADVISORY.CONSUMER.DELETED.", Action.DROP)
        await stored.js.delete_consumer("$MQTT_msgs", name)
        await trap.sprung.wait()
        config.deliver_subject = "$MQTT.sub.elsewhere"
        await stored.js.add_consumer("$MQTT_msgs", config)
        await publisher.deliver("astray", b"1", 1)
        await subscriber.quiet()
        await stored.nats.publish(f"$JS.EVENT.ADVISORY.CONSUMER.LEADER_ELECTED.$MQTT_msgs.{name}", b"{}")
        assert (await subscriber.messages(1))[0].payload == b"1"
    assert LOST in local.log


@pytest.mark.long
@pytest.mark.parametrize("shared_reader", ["always", "never"])
@pytest.mark.parametrize("published", [False, True])
async def test_a_gateway_is_killed_before_it_has_created_a_consumer(
    proxy: NatsProxy, gateway_factory: GatewayFactory, published: bool, shared_reader: str
) -> None:
    """The record names the consumer, and the position what it replaces: so nothing is lost.

    Without the shared reader there is no position. Where a message is stored, one may be lost, and the log says so.
    """
    topic = client_id = f"halfway-{published}-{shared_reader}"
    gateway = gateway_factory(proxy.url, "--shared-reader", shared_reader, start=False)
    await asyncio.to_thread(gateway.start)
    trap = proxy.set("up", "$JS.API.CONSUMER.DURABLE.CREATE.$MQTT_msgs.", Action.DROP)
    async with await RawClient.connect(gateway.port, client_id, clean=False) as subscriber:
        subscriber.send(Subscribe(subscriber.next_id(), (Subscription(topic, 1),)))
        await trap.sprung.wait()
        await asyncio.to_thread(gateway.kill)
    await asyncio.to_thread(gateway.start)
    async with await RawClient.connect(gateway.port, "publisher") as publisher:
        if published:
            await publisher.deliver(topic, b"before", 1)
        await publisher.deliver("elsewhere", b"", 1)
        async with await RawClient.connect(gateway.port, client_id, clean=False) as subscriber:
            kept = published and shared_reader == "always"
            if kept:
                await subscriber.receive(topic, b"before", qos=1)
            await subscriber.quiet()  # the consumer is created
            await publisher.deliver(topic, b"after", 1)
            await subscriber.receive(topic, b"after", qos=1)
            await subscriber.quiet()
    assert ("is gone" in gateway.log) is (published and not kept)
    await asyncio.to_thread(gateway.term)
