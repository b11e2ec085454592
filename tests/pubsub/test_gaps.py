# SPDX-License-Identifier: Apache-2.0
"""Regular sessions around a gap of NATS: what was stored since they subscribed comes once, and nothing older."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from mqtt_nats.codec import Suback, Subscribe, Subscription, Will
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.proxy import Proxy
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio

RECOVERY = 30.0
"""Seconds in which everything that waited for NATS has come."""


@pytest.fixture
def proxy(nats_server: NatsServer) -> Iterator[Proxy]:
    with Proxy(nats_server.port) as found:
        yield found


@pytest.fixture
def behind(proxy: Proxy, gateway_factory: GatewayFactory) -> Gateway:
    """A gateway whose connection to NATS can be cut."""
    return gateway_factory(proxy.url)


@pytest.fixture
def beside(nats_server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    """A gateway that is never cut off."""
    return gateway_factory(nats_server)


async def cut(proxy: Proxy, gateway: Gateway) -> None:
    """End the gateway's connections to NATS."""
    known = gateway.log.count("connection to NATS is lost")
    proxy.cut()
    await aeventually(lambda: gateway.log.count("connection to NATS is lost") > known)


async def restored(proxy: Proxy, gateway: Gateway) -> None:
    """Let the gateway connect again."""
    known = gateway.log.count("connected to NATS again")
    proxy.restore()
    await aeventually(lambda: gateway.log.count("connected to NATS again") > known, RECOVERY)


class Begun:
    """Publishes whose live copies leave when they are told to: at QoS 2 that is at PUBREL."""

    def __init__(self, client: RawClient, topic: str, qos: int) -> None:
        self._client, self._topic, self._qos = client, topic, qos
        self._ids: list[int] = []

    async def hold(self, numbers: range) -> None:
        """Have the gateway hold them, at QoS 2."""
        if self._qos == 2:
            self._ids = [self._client.publish(self._topic, b"%d" % number, 2) for number in numbers]
            await self._client.expect_ack(PUBREC, *self._ids)
        else:
            self._numbers = numbers

    def release(self) -> None:
        """Have them published."""
        if self._qos == 2:
            self._client.ack(PUBREL, *self._ids)
        else:
            self._ids = [self._client.publish(self._topic, b"%d" % number, 1) for number in self._numbers]

    async def acknowledged(self) -> None:
        await self._client.expect_ack(PUBACK if self._qos == 1 else PUBCOMP, *self._ids)


async def connected(port: int, client_id: str, version: int, **options: Any) -> RawClient:
    """A client with a session that ends with its connection."""
    if version == 5:
        return await RawClient5.connect5(port, client_id, **options)
    return await RawClient.connect(port, client_id)


async def subscribed(client: RawClient, topic_filter: str, qos: int) -> None:
    if isinstance(client, RawClient5):
        await client.subscribe5(Subscription(topic_filter, qos))
    else:
        await client.subscribe(topic_filter, qos=qos)


@contextlib.asynccontextmanager
async def pair(publisher: Gateway, subscriber: Gateway, version: int = 4) -> AsyncIterator[tuple[RawClient, RawClient]]:
    """A publisher and a subscriber."""
    async with (
        await connected(publisher.port, "publisher", version) as first,
        await connected(subscriber.port, "subscriber", version) as second,
    ):
        yield first, second


async def numbers(client: RawClient, count: int) -> list[int]:
    """The payloads of the next messages."""
    return [int(one.payload) for one in await client.messages(count, RECOVERY)]


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("topic_filter", ["gap/old", "gap/+", "+/old"])
async def test_what_was_published_before_the_subscription_does_not_come(
    proxy: Proxy, behind: Gateway, beside: Gateway, qos: int, version: int, topic_filter: str
) -> None:
    async with pair(beside, behind, version) as (publisher, subscriber):
        for number in range(1, 6):
            await publisher.deliver("gap/old", b"%d" % number, qos)
        await subscribed(subscriber, topic_filter, qos)
        await publisher.deliver("gap/old", b"6", qos)
        assert await numbers(subscriber, 1) == [6]
        await cut(proxy, behind)
        await publisher.deliver("gap/old", b"7", qos)
        await restored(proxy, behind)
        await publisher.deliver("gap/old", b"8", qos)
        assert await numbers(subscriber, 2) == [7, 8]
        await subscriber.quiet()


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_client_that_is_back_does_not_get_what_its_former_connection_had(
    proxy: Proxy, behind: Gateway, beside: Gateway, qos: int
) -> None:
    async with pair(beside, behind) as (publisher, former):
        await former.subscribe("gap/back", qos=qos)
        await publisher.deliver("gap/back", b"1", qos)
        assert await numbers(former, 1) == [1]
        former.drop()
        async with await RawClient.connect(behind.port, "subscriber") as subscriber:
            await subscriber.subscribe("gap/back", qos=qos)
            await cut(proxy, behind)
            await restored(proxy, behind)
            await publisher.deliver("gap/back", b"2", qos)
            assert await numbers(subscriber, 1) == [2]
            await subscriber.quiet()


@pytest.mark.parametrize("qos", [1, 2])
async def test_an_overlapping_subscription_that_takes_over_does_not_bring_what_the_other_one_had(
    proxy: Proxy, behind: Gateway, beside: Gateway, qos: int
) -> None:
    async with pair(beside, behind) as (publisher, subscriber):
        await subscriber.subscribe("gap/+", qos=qos)
        await subscriber.subscribe("gap/over", qos=qos)
        await publisher.deliver("gap/over", b"1", qos)
        assert await numbers(subscriber, 1) == [1]
        await subscriber.unsubscribe("gap/+")
        await cut(proxy, behind)
        await publisher.deliver("gap/over", b"2", qos)
        await restored(proxy, behind)
        await publisher.deliver("gap/over", b"3", qos)
        assert await numbers(subscriber, 2) == [2, 3]
        await subscriber.quiet()


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("topic_filter", ["lost/a", "+/a"])
async def test_what_is_published_at_a_gateway_without_nats_reaches_the_others(
    proxy: Proxy, behind: Gateway, beside: Gateway, qos: int, topic_filter: str
) -> None:
    """Their own connections have no gap; the live copies of these messages are gone."""
    async with pair(behind, beside) as (publisher, subscriber):
        await subscriber.subscribe(topic_filter, qos=qos)
        await publisher.deliver("lost/a", b"0", qos)
        assert await numbers(subscriber, 1) == [0]
        begun = Begun(publisher, "lost/a", qos)
        await begun.hold(range(1, 6))
        await cut(proxy, behind)
        begun.release()
        await restored(proxy, behind)
        await begun.acknowledged()
        await publisher.deliver("lost/a", b"6", qos)
        assert await numbers(subscriber, 6) == [1, 2, 3, 4, 5, 6]
        await subscriber.quiet()


@pytest.mark.parametrize("qos", [1, 2])
async def test_what_is_published_at_a_gateway_without_nats_comes_once_at_the_gateway_itself(
    proxy: Proxy, behind: Gateway, qos: int
) -> None:
    """Its filters are served directly, except those that begin with a wildcard."""
    async with (
        pair(behind, behind) as (publisher, subscriber),
        await RawClient.connect(behind.port, "wild") as wild,
    ):
        await subscriber.subscribe("own/a", qos=qos)
        await wild.subscribe("+/a", qos=qos)
        begun = Begun(publisher, "own/a", qos)
        await begun.hold(range(1, 6))
        await cut(proxy, behind)
        begun.release()
        await restored(proxy, behind)
        await begun.acknowledged()
        await publisher.deliver("own/a", b"6", qos)
        for client in (subscriber, wild):
            assert await numbers(client, 6) == [1, 2, 3, 4, 5, 6]
            await client.quiet()


async def test_a_subscriber_at_qos_0_gets_nothing_old(proxy: Proxy, behind: Gateway, beside: Gateway) -> None:
    """It shares its filter with one at QoS 1, for which the stream is read."""
    async with (
        pair(beside, behind) as (publisher, subscriber),
        await RawClient.connect(behind.port, "zero") as zero,
    ):
        await publisher.deliver("gap/zero", b"1", 1)
        await subscriber.subscribe("gap/zero", qos=1)
        await zero.subscribe("gap/zero", qos=0)
        await cut(proxy, behind)
        await restored(proxy, behind)
        await publisher.deliver("gap/zero", b"2", 1)
        for client in (subscriber, zero):
            assert await numbers(client, 1) == [2]
            await client.quiet()


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_will_that_is_due_while_its_gateway_has_no_nats_comes_once(
    proxy: Proxy, behind: Gateway, beside: Gateway, qos: int
) -> None:
    async with await RawClient.connect(beside.port, "subscriber") as subscriber:
        await subscriber.subscribe("gap/will", qos=qos)
        dying = await RawClient.connect(behind.port, "dying", will=Will("gap/will", b"1", qos, False))
        await cut(proxy, behind)
        dying.drop()
        await aeventually(lambda: "'dying' from 127.0.0.1" in behind.log and "is disconnected" in behind.log)
        await restored(proxy, behind)
        assert await numbers(subscriber, 1) == [1]
        async with await RawClient.connect(beside.port, "publisher") as publisher:
            await publisher.deliver("gap/will", b"2", qos)
        assert await numbers(subscriber, 1) == [2]
        await subscriber.quiet()


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_retained_message_of_the_gap_comes_once_and_not_as_a_retained_one(
    proxy: Proxy, behind: Gateway, beside: Gateway, qos: int
) -> None:
    async with pair(beside, behind) as (publisher, subscriber):
        await publisher.deliver("gap/kept", b"1", qos, retain=True)
        await subscriber.subscribe("gap/kept", qos=qos)
        assert [(one.payload, one.retain) for one in await subscriber.messages(1)] == [(b"1", True)]
        await cut(proxy, behind)
        await publisher.deliver("gap/kept", b"2", qos, retain=True)
        await restored(proxy, behind)
        assert [(one.payload, one.retain) for one in await subscriber.messages(1, RECOVERY)] == [(b"2", False)]
        await subscriber.quiet()
        await publisher.deliver("gap/kept", b"", 1, retain=True)


async def test_a_member_of_a_group_with_a_clean_session_gets_what_was_missed_once(
    proxy: Proxy, behind: Gateway, beside: Gateway
) -> None:
    """The group has a consumer of the stream."""
    async with pair(beside, behind) as (publisher, subscriber):
        await publisher.deliver("gap/group", b"0", 1)
        await subscriber.subscribe("$share/g/gap/group", qos=1)
        await cut(proxy, behind)
        for number in range(1, 4):
            await publisher.deliver("gap/group", b"%d" % number, 1)
        await restored(proxy, behind)
        await publisher.deliver("gap/group", b"4", 1)
        found = []
        for one in await subscriber.messages(4, RECOVERY):
            found.append(int(one.payload))
            subscriber.ack(PUBACK, one.packet_id)
        assert found == [1, 2, 3, 4]
        await subscriber.quiet()


async def test_a_client_that_subscribes_in_the_gap_gets_nothing_older(
    proxy: Proxy, behind: Gateway, beside: Gateway
) -> None:
    """Its filter is there already, and the stream is read for the client that has it."""
    async with (
        pair(beside, behind) as (publisher, subscriber),
        await RawClient.connect(behind.port, "later") as later,
    ):
        await subscriber.subscribe("gap/later", qos=1)
        await cut(proxy, behind)
        await publisher.deliver("gap/later", b"1", 1)
        packet_id = later.next_id()
        later.send(Subscribe(packet_id, (Subscription("gap/later", 1),)))
        await restored(proxy, behind)
        await later.expect(Suback, RECOVERY, packet_id=packet_id)
        await publisher.deliver("gap/later", b"2", 1)
        assert await numbers(later, 1) == [2]
        assert await numbers(subscriber, 2) == [1, 2]
        for client in (subscriber, later):
            await client.quiet()
