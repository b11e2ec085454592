# SPDX-License-Identifier: Apache-2.0
"""Clients of both versions on two gateways, and NATS clients, that subscribe and publish at random.

In turns: some connect, leave, subscribe and unsubscribe; then all publish. So what each is to get is known, down to the
properties, from what all have asked for: a model of a page. A message comes once to a client, however many of its
subscriptions match.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, cast

import pytest
from nats.js.errors import NotFoundError

from mqtt_nats.codec import (
    PINGREQ,
    Ack,
    Disconnect,
    Packet,
    PingResp,
    Properties,
    Publish,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    matches,
)
from mqtt_streams.retained import retained_subject
from mqtt_streams.subjects import topic_to_subject
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient, key_of, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.integration.conftest import Connector, Connector5, Stored

MEMBERS = 6
TURNS = 12
TOPICS = ("a", "a/b", "a/b/c", "a//c", "/", "b", "b/c", "a/b.c", "a/ü", "b/c/d/e", "b//", "a b")
PLAIN = ("a", "a/b", "a/b/c", "b", "b/c", "b/c/d/e")
"""Those whose subjects have dots where they have slashes."""
FILTERS = (
    *("#", "+", "+/+", "a/#", "a/+", "a/b/#", "a/b", "a/b/c", "+/b/+", "a//+", "+/", "b/#", "b", "b/+/d/#"),
    *("a/b.c", "/#", "//#", "a/ü", "+/+/#", "a b"),
)
NAMES = ("a", "A", "b c", "ü", "Nats-Msg-Id", "nmqtt-x", "")
VALUES = ("", "1", "\n", " x ", "ü")
LARGE = 1000
"""Bytes that are too many for some."""


@dataclass(frozen=True)
class Told:
    """A message as somebody gets it."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: Properties

    def key(self) -> tuple[object, ...]:
        """What can be counted. A message is on its way for less than ten minutes, and expires after as many or more."""
        found: dict[str, Any] = dict(self.properties)
        found["subscription_identifier"] = sorted(found.get("subscription_identifier", ()))
        found["message_expiry_interval"] = (found.get("message_expiry_interval", 0) + 3599) // 3600
        return (self.topic, self.payload, self.qos, self.retain, repr(sorted(found.items())))


@dataclass
class World:
    """What all share."""

    name: str
    chance: Random
    retained: dict[str, Told] = field(default_factory=dict)
    retaining: dict[str, tuple[Member, int]] = field(default_factory=dict)
    """Who may publish retained messages on a topic in this turn, and at which QoS: else nobody knows which is last."""
    members: list[Member] = field(default_factory=list)
    published: int = 0

    def here(self) -> list[Member]:
        """Who is connected."""
        return [member for member in self.members if member.client is not None]

    def publish(self, publisher: Member | None, told: Told) -> None:
        """A message is about to be published: all that are to get it expect it."""
        for member in self.members:
            found = [
                (subscription, identifier)
                for subscription, identifier in member.subscriptions.values()
                if matches(subscription.topic_filter, told.topic)
                and not (subscription.no_local and member is publisher)  # [MQTT-3.8.3-3] (5.0)
            ]
            if found:
                qos = min(told.qos, max(subscription.qos for subscription, _ in found))
                retain = told.retain and any(subscription.retain_as_published for subscription, _ in found)
                member.expect(told, qos, retain, [identifier for _, identifier in found if identifier])
        if told.retain:
            self.retained.pop(told.topic, None)
            if told.payload:
                self.retained[told.topic] = told


class Member:
    """A client, its subscriptions, and what it is to get."""

    def __init__(self, world: World, gateways: list[Gateway], connect: Connector, connect5: Connector5) -> None:
        self.world, self.gateways, self._connect, self._connect5 = world, gateways, connect, connect5
        self.chance = Random(world.chance.random())
        self.name = f"{world.name}-{len(world.members)}"
        self.modern, self.durable = self.chance.random() < 0.7, self.chance.random() < 0.6
        self.client: RawClient | None = None
        self.subscriptions: dict[str, tuple[Subscription, int | None]] = {}
        self.expected: Counter[tuple[object, ...]] = Counter()
        self.queued: list[Told] = []
        self.got: list[Told] = []
        self.sent: dict[tuple[str, int], list[bytes]] = {}
        """What it has published in this turn, by topic and QoS."""
        self._reading: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[Packet]] = {}
        self._window = self._most = self._aliases = 0
        self._unacknowledged: set[int] = set()
        self._by_alias: dict[int, str] = {}
        self._own_aliases: dict[str, int] = {}

    # -- what it expects --------------------------------------------------------------------------

    def expect(self, told: Told, qos: int, retain: bool, identifiers: list[int]) -> None:
        """It is to get a message, now or when it comes back."""
        properties = Properties()
        if self.modern:
            properties = told.properties.copy()
            if identifiers:
                properties["subscription_identifier"] = identifiers  # [MQTT-3.3.4-3], [MQTT-3.3.4-4] (5.0)
        own = Told(told.topic, told.payload, qos, retain, properties)
        if self.client is not None:
            self._await(own)
        elif self.durable and qos:
            self.queued.append(own)

    def _await(self, told: Told) -> None:
        if not self._most or len(told.payload) < LARGE:  # [MQTT-3.1.2-25] (5.0)
            self.expected[told.key()] += 1

    async def served(self) -> None:
        """All has come, and nothing else."""
        with contextlib.suppress(AssertionError):  # what is missing says more
            await aeventually(lambda: len(self.got) >= self.expected.total(), 60)
        await self.ping()
        come = Counter(told.key() for told in self.got)
        missing, unexpected = self.expected - come, come - self.expected
        assert not missing + unexpected, f"{self.name}: {missing=!s}, {unexpected=!s}"

    # -- connections ------------------------------------------------------------------------------

    async def arrive(self) -> None:
        """Connect somewhere; another connection of its own ends with that."""
        before = self._reading
        where = self.chance.choice(self.gateways)
        self._unacknowledged, self._by_alias, self._own_aliases = set(), {}, {}
        self._window, self._most, self._aliases = 65535, 0, 0
        if not self.durable:
            self.subscriptions.clear()
        if self.modern:
            properties: dict[str, int] = {"session_expiry_interval": 600} if self.durable else {}
            if self.chance.random() < 0.7:
                self._window = properties["receive_maximum"] = self.chance.choice((1, 2, 5))
            if self.chance.random() < 0.3:
                self._most = properties["maximum_packet_size"] = LARGE // 2
            if self.chance.random() < 0.5:
                self._aliases = properties["topic_alias_maximum"] = self.chance.choice((1, 3, 100))
            self.client = await self._connect5(self.name, clean=not self.durable, to=where, **properties)
        else:
            self.client = await self._connect(self.name, clean=not self.durable, to=where)
        if before is not None:
            await before
        self._reading = asyncio.create_task(self._read(self.client))
        for told in self.queued:
            self._await(told)
        self.queued.clear()
        await self.served()

    async def leave(self) -> None:
        """End the connection, in order or not."""
        assert self.client is not None
        assert self._reading is not None
        if self.chance.random() < 0.5:
            self.client.send(Disconnect())
        else:
            self.client.half_close()
        await self._reading
        self._reading = self.client = None
        if not self.durable:
            self.subscriptions.clear()

    async def ping(self) -> None:
        """What was sent to it before has come."""
        assert self.client is not None
        self._answers[0] = answer = asyncio.get_running_loop().create_future()
        self.client.write(PINGREQ)
        await self._answer(answer)

    async def _answer(self, answer: asyncio.Future[Packet]) -> Packet:
        assert self._reading is not None
        await asyncio.wait((answer, self._reading), timeout=30, return_when=asyncio.FIRST_COMPLETED)
        if self._reading.done():
            await self._reading
        return answer.result()

    async def _read(self, client: RawClient) -> None:
        while True:
            try:
                packet = await client.packet(3600)
            except AssertionError:
                return  # closed
            match packet:
                case Publish():
                    self._take(client, packet)
                case Ack(kind=kind, packet_id=identifier) if kind == PUBREL:
                    client.ack(PUBCOMP, identifier)
                    self._unacknowledged.discard(identifier)
                case Ack(kind=kind, packet_id=identifier, reason=reason) if kind == PUBREC:
                    assert reason in (0x00, 0x10), packet
                    client.ack(PUBREL, identifier)
                case Ack(packet_id=identifier, reason=reason):
                    assert reason in (0x00, 0x10), packet
                    self._answers.pop(identifier).set_result(packet)
                case Suback(packet_id=identifier) | Unsuback(packet_id=identifier):
                    self._answers.pop(identifier).set_result(packet)
                case PingResp():
                    self._answers.pop(0).set_result(packet)
                case _:
                    assert isinstance(packet, Disconnect), packet  # of a takeover; else nothing more comes

    def _take(self, client: RawClient, packet: Publish) -> None:
        properties = (packet.properties or Properties()).copy()
        topic = topic_of(packet)
        alias = properties.pop("topic_alias", 0)
        assert 0 <= alias <= self._aliases  # [MQTT-3.3.2-9] (5.0)
        if alias and topic:
            self._by_alias[alias] = topic
        elif alias:
            topic = self._by_alias[alias]
        assert topic
        assert not packet.dup
        if packet.qos:
            assert packet.packet_id not in self._unacknowledged
            self._unacknowledged.add(packet.packet_id)
            assert len(self._unacknowledged) <= self._window  # [MQTT-3.3.4-9] (5.0)
        if packet.qos == 1:
            client.ack(PUBACK, packet.packet_id)
            self._unacknowledged.discard(packet.packet_id)
        elif packet.qos == 2:
            client.ack(PUBREC, packet.packet_id)
        self.got.append(Told(topic, packet.payload, packet.qos, packet.retain, properties))

    # -- what it does -----------------------------------------------------------------------------

    async def stir(self) -> None:
        """Come, go, subscribe and unsubscribe."""
        what = self.chance.random()
        if self.client is None:
            if what < 0.4:
                return
            await self.arrive()
        elif what < 0.15:
            await self.leave()
            return
        elif what < 0.3:
            await self.arrive()  # a takeover
        for _ in range(self.chance.choice((0, 1, 1, 2, 3))):
            if self.subscriptions and self.chance.random() < 0.4:
                await self.unsubscribe(self.chance.sample(sorted(self.subscriptions), 1))
            else:
                await self.subscribe(self.chance.sample(FILTERS, self.chance.choice((1, 1, 2, 4))))

    async def subscribe(self, filters: list[str]) -> None:
        """And take what is retained."""
        assert self.client is not None
        chance = self.chance
        identifier = chance.choice((None, 1, 2, 300, 70_000)) if self.modern else None
        wanted = []
        for text in filters:
            qos = chance.randrange(3)
            options: tuple[Any, ...] = ()
            if self.modern:
                options = (chance.random() < 0.3, chance.random() < 0.5, chance.choice((0, 0, 1, 2)))
            one = Subscription(f"{self.world.name}/{text}", qos, *options)
            wanted.append(one)
            if one.retain_handling == 0 or (one.retain_handling == 1 and text not in self.subscriptions):
                for told in self.world.retained.values():  # [MQTT-3.3.1-9], [MQTT-3.3.1-10] (5.0)
                    if matches(one.topic_filter, told.topic):
                        self.expect(told, min(qos, told.qos), True, [identifier] if identifier else [])
        packet_id = self.client.next_id()
        answer = self._ask(packet_id)
        properties = Properties(subscription_identifier=[identifier]) if identifier else None
        self.client.send(Subscribe(packet_id, tuple(wanted), properties))
        suback = await self._answer(answer)
        assert isinstance(suback, Suback)
        assert suback.codes == tuple(one.qos for one in wanted)
        self.subscriptions |= {text: (one, identifier) for text, one in zip(filters, wanted, strict=True)}
        await self.served()

    async def unsubscribe(self, filters: list[str]) -> None:
        """From what it has subscribed to."""
        assert self.client is not None
        packet_id = self.client.next_id()
        answer = self._ask(packet_id)
        self.client.send(Unsubscribe(packet_id, tuple(f"{self.world.name}/{text}" for text in filters)))
        await self._answer(answer)
        for text in filters:
            del self.subscriptions[text]

    async def publish(self) -> None:
        """Some messages, with several under way now and then."""
        if self.client is None:
            return
        chance, waiting = self.chance, []
        for _ in range(chance.choice((0, 1, 3, 8))):
            told = self._message()
            if told is None:
                continue
            self.world.publish(self, told)
            self.sent.setdefault((told.topic, told.qos), []).append(told.payload)
            answer = self._send(told)
            if answer is not None:
                waiting.append(answer)
            if told.retain or chance.random() < 0.5:
                while waiting:
                    await self._answer(waiting.pop())
        for one in waiting:
            await self._answer(one)
        await self.ping()

    def _message(self) -> Told | None:
        chance, world = self.chance, self.world
        topic, qos, retain = chance.choice(TOPICS), chance.randrange(3), chance.random() < 0.4
        if retain:
            who, qos = world.retaining.setdefault(topic, (self, qos))
            if who is not self:
                return None
        world.published += 1
        payload = b"%d" % world.published
        if retain and chance.random() < 0.3:
            payload = b""
        elif chance.random() < 0.15:
            payload = payload.ljust(LARGE, b".")
        return Told(f"{world.name}/{topic}", payload, qos, retain, self._properties())

    def _properties(self) -> Properties:
        chance, found = self.chance, Properties()
        if not self.modern or chance.random() < 0.5:
            return found
        if chance.random() < 0.4:
            found["content_type"] = chance.choice(("text/plain", "ü", "x:y"))
        if chance.random() < 0.4:
            found["payload_format_indicator"] = chance.randrange(2)
        if chance.random() < 0.3:
            found["response_topic"] = f"{self.world.name}/answers/%41"
        if chance.random() < 0.3:
            found["correlation_data"] = chance.choice((b"", b"\0\xff", b"abc"))
        if chance.random() < 0.3:
            found["message_expiry_interval"] = chance.choice((600, 60_000))
        if chance.random() < 0.5:
            some = range(chance.choice((1, 2, 3)))
            found["user_property"] = [(chance.choice(NAMES), chance.choice(VALUES)) for _ in some]
        return found

    def _send(self, told: Told) -> asyncio.Future[Packet] | None:
        assert self.client is not None
        key, properties = key_of(told.topic), told.properties.copy()
        if self.modern and self.chance.random() < 0.4:
            most = (cast(RawClient5, self.client).connack.properties or {}).get("topic_alias_maximum", 0)
            if told.topic in self._own_aliases:
                key = key_of("")
                properties["topic_alias"] = self._own_aliases[told.topic]
            elif len(self._own_aliases) < most:
                properties["topic_alias"] = self._own_aliases[told.topic] = len(self._own_aliases) + 1
        identifier = self.client.next_id() if told.qos else 0
        answer = self._ask(identifier) if told.qos else None
        self.client.send(Publish(told.qos, told.retain, False, key, identifier, told.payload, properties or None))
        return answer

    def _ask(self, identifier: int) -> asyncio.Future[Packet]:
        self._answers[identifier] = answer = asyncio.get_running_loop().create_future()
        return answer


async def can_be_read(world: World, stored: Stored, topic: str) -> bool:
    """Whether what is retained last is stored."""
    told = world.retained.get(topic)
    try:
        found = await stored.js.get_last_msg("$MQTT_rmsgs", retained_subject(topic_to_subject(topic)))
    except NotFoundError:
        return told is None
    return (found.data or b"") == (b"" if told is None else told.payload)


async def turn(world: World, stored: Stored, heard: list[bytes]) -> None:
    """Let all stir, then all publish, and see who has got what."""
    async with asyncio.TaskGroup() as group:
        for member in world.members:
            group.create_task(member.stir())
    for member in world.here():
        await member.served()
        member.got.clear()
        member.expected.clear()
    world.retaining.clear()
    from_nats = []
    async with asyncio.TaskGroup() as group:
        for member in world.members:
            group.create_task(member.publish())
        for _ in range(world.chance.choice((0, 1, 5))):
            world.published += 1
            topic, payload = f"{world.name}/{world.chance.choice(PLAIN)}", b"%d" % world.published
            world.publish(None, Told(topic, payload, 0, False, Properties(user_property=[("k", "v")])))
            await stored.nats.publish(topic.replace("/", "."), payload, headers={"k": "v"})
            from_nats.append(payload)
        await fence(stored.nats)
    for topic, (_, qos) in world.retaining.items():
        if not qos:  # nobody has acknowledged it
            await aeventually(partial(can_be_read, world, stored, f"{world.name}/{topic}"), what=topic)
    sent = [member.sent for member in world.members]
    for member in world.here():
        await member.served()
        come = [told.payload for told in member.got]
        for payloads in (payloads for some in sent for payloads in some.values()):
            expected = [payload for payload in payloads if payload in come]
            assert [payload for payload in come if payload and payload in payloads] == [*filter(None, expected)]
        member.got.clear()
        member.expected.clear()
    everything = Counter(payload for some in sent for payloads in some.values() for payload in payloads)
    everything.update(from_nats)
    await aeventually(lambda: len(heard) >= everything.total(), what="what NATS clients hear")
    assert Counter(heard) == everything
    heard.clear()
    for one in sent:
        one.clear()


async def live_through(
    seeds: range,
    name: str,
    stored: Stored,
    gateways: list[Gateway],
    connect: Connector,
    connect5: Connector5,
) -> None:
    """Let clients at the gateways do what each seed says, and compare what they get with the model."""
    heard: list[bytes] = []

    async def hear(message: Any) -> None:
        heard.append(message.data)

    for seed in seeds:
        world = World(f"{name}-{seed}", Random(seed))
        listening = await stored.nats.subscribe(f"{world.name}.>", cb=hear)
        await fence(stored.nats)
        for _ in range(MEMBERS):
            world.members.append(Member(world, gateways, connect, connect5))
        for member in world.members:
            await member.arrive()
        for _ in range(TURNS):
            await turn(world, stored, heard)
        for member in world.here():
            await member.leave()
        await listening.unsubscribe()


@pytest.mark.parametrize(
    "seeds",
    [
        *(range(seed, seed + 1) for seed in range(3)),
        pytest.param(range(3, 103), marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
    ids=["one", "another", "a third", "a hundred"],
)
async def test_everybody_gets_what_it_asks_for(
    connect: Connector,
    connect5: Connector5,
    name: str,
    stored: Stored,
    gateway: Gateway,
    second_gateway: Gateway,
    seeds: range,
) -> None:
    """[MQTT-3.3.5-1], [MQTT-3.3.1-6], [MQTT-3.3.1-9] (3.1.1), [MQTT-3.3.1-12], [MQTT-3.3.4-2], [MQTT-3.8.4-8] (5.0)"""
    await live_through(seeds, name, stored, [gateway, second_gateway], connect, connect5)
