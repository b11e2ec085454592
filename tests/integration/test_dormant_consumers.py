# SPDX-License-Identifier: Apache-2.0
"""Somebody deletes, edits, resets, pauses or replaces dormant consumers: the session gets its messages all the same."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson
import pytest
from nats.js.api import ConsumerInfo
from nats.js.errors import APIError

from mqtt_nats.codec import Ack, Connect, Disconnect, Publish, Subscription
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import _gateway_factory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Stored, until
from tests.integration.resuming import left

STREAM: Final = "$MQTT_msgs"
KEPT: Final = {"session_expiry_interval": 300}
PATIENCE: Final = 30.0


class Refused(Exception):
    """JetStream does not do it."""


MADE: Final = 10148, 10105, 10013, 10012
"""Error codes: somebody else has created the consumer, or creates it at this moment."""

Hand = Callable[[Stored, ConsumerInfo], Awaitable[None]]


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose sessions have consumers."""
    with _gateway_factory(tmp_path_factory.mktemp("gateway")) as start:
        yield start(nats_server, "--session-positions", "consumers")


# -- what somebody does to a consumer ------------------------------------------------------------


async def delete(stored: Stored, consumer: ConsumerInfo) -> None:
    await stored.js.delete_consumer(STREAM, consumer.name)


async def edit(stored: Stored, consumer: ConsumerInfo) -> None:
    """It delivers elsewhere, where somebody listens, and sends again soon; few messages may be under way."""
    config = consumer.config
    config.deliver_subject = f"elsewhere.{consumer.name}"
    config.ack_wait, config.max_ack_pending, config.description = 0.2, 2, "mine"
    await stored.nats.subscribe(config.deliver_subject)
    await stored.js.add_consumer(STREAM, config)


async def edit_filter(stored: Stored, consumer: ConsumerInfo) -> None:
    consumer.config.filter_subject = "$MQTT.msgs.another"
    await stored.js.add_consumer(STREAM, consumer.config)


async def reset(stored: Stored, consumer: ConsumerInfo) -> None:
    """It is set behind all messages."""
    await _reset(stored, consumer, await stored.last_sequence() + 1)


async def reset_to_start(stored: Stored, consumer: ConsumerInfo) -> None:
    await _reset(stored, consumer, consumer.config.opt_start_seq or 1)


async def _reset(stored: Stored, consumer: ConsumerInfo, sequence: int) -> None:
    subject = f"$JS.API.CONSUMER.RESET.{STREAM}.{consumer.name}"
    answer = orjson.loads((await stored.nats.request(subject, orjson.dumps({"seq": sequence}))).data)
    if "error" in answer:
        raise Refused(answer["error"])


async def pause(stored: Stored, consumer: ConsumerInfo) -> None:
    subject = f"$JS.API.CONSUMER.PAUSE.{STREAM}.{consumer.name}"
    await stored.nats.request(subject, b'{"pause_until":"2099-01-01T00:00:00Z"}')


async def replace_by_later(stored: Stored, consumer: ConsumerInfo) -> None:
    """One takes its place that begins behind all messages."""
    await delete(stored, consumer)
    consumer.config.opt_start_seq = await stored.last_sequence() + 1
    await _add(stored, consumer)


async def replace_by_new(stored: Stored, consumer: ConsumerInfo) -> None:
    """One takes its place as nats-server's listener makes them."""
    await delete(stored, consumer)
    consumer.config.opt_start_seq, consumer.config.deliver_policy = None, "new"  # type: ignore[assignment]
    await _add(stored, consumer)


async def replace_by_pull(stored: Stored, consumer: ConsumerInfo) -> None:
    await delete(stored, consumer)
    consumer.config.deliver_subject = None
    await _add(stored, consumer)


async def _add(stored: Stored, consumer: ConsumerInfo) -> None:
    """Create it, unless the gateway of the connected client is faster."""
    body = {"stream_name": STREAM, "config": consumer.config.as_dict(), "action": "create"}
    subject = f"$JS.API.CONSUMER.DURABLE.CREATE.{STREAM}.{consumer.name}"
    answer = orjson.loads((await stored.nats.request(subject, orjson.dumps(body))).data)
    assert answer.get("error", {}).get("err_code") in (None, *MADE), answer


HANDS: Final[tuple[Hand, ...]] = (
    delete,
    edit,
    edit_filter,
    reset,
    reset_to_start,
    pause,
    replace_by_later,
    replace_by_new,
    replace_by_pull,
)
BY_NAME: Final = [pytest.param(one, id=one.__name__) for one in HANDS]


async def on_all(stored: Stored, name: str, hand: Hand) -> None:
    """Do it to each consumer of a session."""
    for consumer in await stored.session_consumers(name):
        await hand(stored, consumer)


async def touch(stored: Stored, name: str, hand: Hand, which: float) -> None:
    """Do it to one of the consumers, which may be gone by then, or be none that can be set."""
    consumers = await stored.session_consumers(name)
    if consumers:
        with contextlib.suppress(APIError, Refused):
            await hand(stored, consumers[int(which * len(consumers))])


# -- the client ----------------------------------------------------------------------------------


@dataclass
class Device:
    """A durable client, and what its application has got over all connections."""

    name: str
    port: int
    version: int
    qos: int
    client: RawClient | None = None

    def __post_init__(self) -> None:
        self.got: list[int] = []
        self.held: set[int] = set()
        """Packet identifiers of QoS 2 messages that are not released."""

    @property
    def connection(self) -> RawClient:
        assert self.client is not None
        return self.client

    async def connect(self, *, port: int = 0) -> None:
        """Begin a connection; its packets are not read yet."""
        self.drop()
        kind = RawClient5 if self.version == 5 else RawClient
        client = self.client = await kind.open(port or self.port)
        more: Any = (KEPT,) if self.version == 5 else ()
        client.send(Connect(self.version, self.name, False, 0, None, None, None, *more))
        await client.packet(PATIENCE)

    async def subscribe(self) -> None:
        if isinstance(self.client, RawClient5):
            assert await self.client.subscribe5(Subscription(f"{self.name}/#", self.qos)) == (self.qos,)
        else:
            assert await self.connection.subscribe(f"{self.name}/#", qos=self.qos) == (self.qos,)

    def drop(self) -> None:
        if self.client is not None:
            self.client.drop()

    async def disconnect(self) -> None:
        self.connection.send(Disconnect())
        self.drop()

    async def take(self, count: int) -> None:
        """Receive until the application has so many messages, and complete all of them."""
        while len(set(self.got)) < count or self.held:
            self.handle(await self.connection.packet(PATIENCE))

    def handle(self, packet: object) -> None:
        if isinstance(packet, Publish) and packet.qos == 2:
            if packet.packet_id not in self.held:
                self.got.append(int(packet.payload))
            self.held.add(packet.packet_id)
            self.connection.ack(PUBREC, packet.packet_id)
        elif isinstance(packet, Publish):
            self.got.append(int(packet.payload))
            self.connection.ack(PUBACK, packet.packet_id)
        else:
            assert isinstance(packet, Ack)
            assert packet.kind == PUBREL
            self.held.discard(packet.packet_id)
            self.connection.ack(PUBCOMP, packet.packet_id)

    def check(self, count: int) -> None:
        """Each message came once at QoS 2, in order; at QoS 1 at least once."""
        expected = [*range(count)]
        assert (self.got if self.qos == 2 else list(dict.fromkeys(self.got))) == expected


class Publisher:
    """Publishes numbers to a device."""

    def __init__(self, client: RawClient, device: Device) -> None:
        self._client, self._device, self.count = client, device, 0

    async def publish(self, count: int) -> None:
        numbers = [b"%d" % number for number in range(self.count, self.count + count)]
        await self._client.deliver_all(f"{self._device.name}/a", numbers, self._device.qos)
        self.count += count


@pytest.fixture
async def device(gateway: Gateway, name: str, version: int, qos: int) -> Any:
    """A durable client, which has subscribed."""
    found = Device(name, gateway.port, version, qos)
    await found.connect()
    await found.subscribe()
    yield found
    found.drop()


@pytest.fixture
async def publisher(gateway: Gateway, device: Device) -> Any:
    async with await RawClient.connect(gateway.port, f"{device.name}-publisher") as client:
        yield Publisher(client, device)


async def backlog(stored: Stored, name: str, count: int, consumers: int = 2) -> None:
    """Wait until the consumers show so many messages. ``name/#`` has two: one for ``name``, one for what is below."""

    async def shown() -> None:
        found = await stored.session_consumers(name)
        assert len(found) == consumers
        assert sorted(one.num_pending or 0 for one in found) == [0, count]
        assert not any(one.num_ack_pending for one in found)

    await until(shown)


# -- the tests -----------------------------------------------------------------------------------

both = pytest.mark.parametrize(("version", "qos"), [(4, 1), (4, 2), (5, 1), (5, 2)])


@both
@pytest.mark.parametrize("hand", BY_NAME)
async def test_while_the_client_is_connected(
    stored: Stored, name: str, device: Device, publisher: Publisher, hand: Hand
) -> None:
    """Two messages are in flight; the next connection gets them again."""
    await publisher.publish(5)
    await device.take(5)
    await publisher.publish(2)
    await device.connection.messages(2)
    await on_all(stored, name, hand)
    await publisher.publish(5)
    await device.connection.messages(5)
    await device.connection.quiet()
    device.drop()
    await left(stored, name)
    await publisher.publish(3)
    await device.connect()
    await device.take(15)
    await device.connection.quiet()
    device.check(15)


@both
@pytest.mark.parametrize("hand", BY_NAME)
async def test_while_the_client_is_away(
    stored: Stored, name: str, device: Device, publisher: Publisher, hand: Hand
) -> None:
    """Messages wait before and after it; after the next orderly end the consumers show what waits then."""
    await publisher.publish(5)
    await device.take(5)
    await device.disconnect()
    await left(stored, name)
    await publisher.publish(3)
    await backlog(stored, name, 3)
    await on_all(stored, name, hand)
    await publisher.publish(3)
    await device.connect()
    await device.take(11)
    await device.connection.quiet()
    device.check(11)
    await stored.settled(name)
    await publisher.publish(2)
    await device.connection.messages(2)
    await device.disconnect()
    await left(stored, name)
    await publisher.publish(4)
    await backlog(stored, name, 6)
    await device.connect()
    await device.take(17)
    await device.connection.quiet()
    device.check(17)


@pytest.fixture
async def held_up(proxy: NatsProxy, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A gateway whose words to nats-server may be held up."""
    with _gateway_factory(tmp_path_factory.mktemp("held")) as start:
        found = start(proxy.url, "--session-positions", "consumers", start=False)
        await asyncio.to_thread(found.start)
        yield found
        await asyncio.to_thread(found.term)


@both
@pytest.mark.parametrize("way", ["up", "answer"])
@pytest.mark.parametrize("hand", BY_NAME)
async def test_during_a_resume(
    stored: Stored,
    name: str,
    device: Device,
    publisher: Publisher,
    proxy: NatsProxy,
    held_up: Gateway,
    hand: Hand,
    way: str,
) -> None:
    """Before the gateway looks at the consumers, or between its look and what it does then."""
    await publisher.publish(5)
    await device.take(5)
    await device.disconnect()
    await left(stored, name)
    await publisher.publish(3)
    trap = proxy.set(way, f"$JS.API.CONSUMER.INFO.{STREAM}.", Action.HOLD)
    await device.connect(port=held_up.port)
    await asyncio.wait_for(trap.sprung.wait(), PATIENCE)
    await on_all(stored, name, hand)
    trap.release()
    await publisher.publish(3)
    await device.take(11)
    await device.connection.quiet()
    device.check(11)
    await device.disconnect()
    await left(stored, name)
    await publisher.publish(2)
    await device.connect()
    await device.take(13)
    await device.connection.quiet()
    device.check(13)


@both
async def test_deleted_ones_of_a_connected_client_are_created_again(
    stored: Stored, name: str, device: Device, publisher: Publisher
) -> None:
    """They show the backlog after the end of the connection."""
    before = {one.name for one in await stored.session_consumers(name)}
    await publisher.publish(3)
    await device.take(3)
    await on_all(stored, name, delete)

    async def there() -> None:
        assert {one.name for one in await stored.session_consumers(name)} == before

    await until(there)
    await publisher.publish(4)
    await device.connection.messages(4)
    await device.disconnect()
    await left(stored, name)
    await backlog(stored, name, 4)
    await publisher.publish(5)
    await backlog(stored, name, 9)
    await device.connect()
    await device.take(12)
    device.check(12)


async def test_one_that_is_missing_does_not_keep_others_from_being_set(
    stored: Stored, name: str, proxy: NatsProxy, held_up: Gateway
) -> None:
    """The gateway has not heard of its deletion when the connection of the client ends."""
    topics = [f"{name}/{number}" for number in range(40)]  # more than are set at a time
    async with (
        await RawClient.connect(held_up.port, name, clean=False) as client,
        await RawClient.connect(held_up.port, f"{name}-publisher") as publisher,
    ):
        await client.subscribe(*topics, qos=1)
        await publisher.deliver(topics[-1], b"1", 1)
        await client.receive(topics[-1], b"1", qos=1)
        await client.quiet()
        await stored.settled(name)
        by_filter = {one.config.filter_subject: one for one in await stored.session_consumers(name)}
        lost = proxy.set("down", "$JS.EVENT.ADVISORY.CONSUMER.DELETED.", Action.DROP)
        await delete(stored, by_filter[f"$MQTT.msgs.{topics[0].replace('/', '.')}"])
        await asyncio.wait_for(lost.sprung.wait(), PATIENCE)
        await client.disconnect()
        await left(stored, name)
        await publisher.deliver(topics[-1], b"2", 1)

        async def shown() -> None:
            found = await stored.js.consumer_info(STREAM, by_filter[f"$MQTT.msgs.{topics[-1].replace('/', '.')}"].name)
            assert found.num_pending == 1

        await until(shown)


@pytest.mark.parametrize("seed", range(3))
@both
async def test_anything_at_any_time(stored: Stored, name: str, device: Device, publisher: Publisher, seed: int) -> None:
    """Messages, ends of connections, and hands on a consumer, in any order."""
    chance = random.Random(f"{seed}{device.version}{device.qos}")
    done = 0
    for _ in range(25):
        match chance.choice(("publish", "publish", "hand", "hand", "take", "reconnect", "leave")):
            case "publish":
                await publisher.publish(chance.randint(1, 5))
            case "hand":
                await touch(stored, name, chance.choice(HANDS), chance.random())
            case "take":
                await device.take(chance.randint(done, publisher.count))
            case "reconnect":
                await device.connect()
            case _:
                await device.disconnect()
                await left(stored, name)
                await publisher.publish(chance.randint(1, 5))
                await device.connect()
        done = len(set(device.got))
    await publisher.publish(1)
    await device.take(publisher.count)
    await device.connection.quiet()
    device.check(publisher.count)
