# SPDX-License-Identifier: Apache-2.0
"""A durable session through crashes, stalls, changes of subscriptions and every order of events."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mqtt_nats.protocol import durable_sender as durable
from mqtt_nats.protocol.inflight import SENT, STORING
from tests.protocol.world import PUBCOMP, PUBREC, SHARED, Gateway, Subscription, World

# So few identifiers that they are used again all the time.
IDS = 5
GROUP_IDS = 8
LIMIT = 4
# The subscriptions overlap on the topic "b.b"; the one with the lower start delivers it.
PATTERNS = {"one": "a.>", "two": "b.>", "three": "b.b"}
TOPICS = ("a.a", "b.a", "b.b", "b.b", "c")
STEPS = ("read", "write", "store", "written", "serve", "answer", "record", "seek", "client", "acknowledge")


class DurableSession(RuleBasedStateMachine):
    """One client, one session, one gateway after the other."""

    world: World
    gateway: Gateway

    def __init__(self) -> None:
        super().__init__()
        # A crash may lose an acknowledgement after which all identifiers were used: each one is late.
        self.patches = [
            patch.object(durable, "ID_SPACE", IDS),
            patch.object(durable, "LATE_AFTER_MESSAGES", -1),
            patch.object(durable, "RETAINED_SPACE", GROUP_IDS),
        ]
        for each in self.patches:
            each.start()

    def teardown(self) -> None:
        try:
            if hasattr(self, "gateway"):
                self.finish()
        finally:
            for each in self.patches:
                each.stop()

    @initialize(late=st.booleans(), qos=st.lists(st.integers(1, 2), min_size=3, max_size=3), later=st.integers(1, 9))
    def begin(self, late: bool, qos: list[int], later: int) -> None:
        """The last subscription may begin so late that all identifiers were used before."""
        self.world = World(late=late, limit=LIMIT)
        for (name, pattern), granted in zip(PATTERNS.items(), qos, strict=True):
            start = later if name == "three" else 1
            self.world.subscriptions[name] = Subscription(pattern, granted, start)
        self.resume()

    def resume(self, former: Gateway | None = None) -> None:
        gateway = self.world.resume(former)
        assert gateway is not None
        self.gateway = gateway

    # -- what happens -----------------------------------------------------------------------------

    @rule(
        topics=st.lists(st.sampled_from(TOPICS), min_size=1, max_size=6),
        qos=st.sampled_from((1, 2, 2)),
        read=st.booleans(),
    )
    def publish(self, topics: list[str], qos: int, read: bool) -> None:
        """Messages are stored, and are perhaps read at once."""
        for topic in topics:
            self.world.publish(topic, qos)
        self.read(len(topics) * read)

    def read(self, count: int = 2) -> None:
        """The reader brings messages."""
        for _ in range(count):
            message = None if self.gateway.stalled else self.world.following(self.gateway.position)
            if message is None:
                break
            self.gateway.take(message)
        self.gateway.end_lowered()

    @precondition(lambda self: len(self.world.assignments) + len(self.gateway.machine.releases) < GROUP_IDS // 2)
    @rule()
    def assign(self) -> None:
        """A shared subscription brings a message."""
        if self.gateway.machine.room:
            self.world.assign(self.gateway)

    @rule(steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=10))
    def move(self, steps: list[str]) -> None:
        """What is under way comes one step further."""
        for step in steps:
            getattr(self, step)()

    def write(self) -> None:
        if self.gateway.write is None and self.gateway.ledger.dirty:
            self.gateway.begin_write()

    def store(self) -> None:
        self.world.store(self.gateway)

    def written(self) -> None:
        if self.gateway.stored_now and self.gateway.write is not None:
            self.gateway.answered()

    def serve(self, count: int = 2) -> None:
        for _ in range(min(count, len(self.gateway.to_nats))):
            self.world.serve(self.gateway)

    def answer(self) -> None:
        if self.gateway.answers:
            self.world.answer(self.gateway)

    def record(self) -> None:
        if self.world.record_wire:
            self.world.record_arrives(self.gateway)

    def seek(self) -> None:
        if self.gateway.seeking:
            self.gateway.look_for_records()

    def client(self, count: int = 3) -> None:
        for _ in range(min(count, len(self.world.to_client))):
            self.world.client_reads()

    def acknowledge(self, count: int = 3) -> None:
        for _ in range(min(count, len(self.world.to_gateway))):
            self.world.gateway_reads(self.gateway)

    @rule(later=st.integers(-1, 3), kind=st.sampled_from((PUBREC, PUBCOMP)))
    def keep(self, later: int, kind: int) -> None:
        """The client does not acknowledge one message, or it has enough of that. The window has room for others."""
        if self.world.client.kept and later < 0:
            self.world.let_go()
        else:
            self.world.keep(max(self.world.last + later, 1), kind)

    @rule(times=st.integers(1, 8))
    def flow(self, times: int) -> None:
        """Messages go through, one by one."""
        for _ in range(times):
            self.read(1)
            self.client(4)
            self.acknowledge(4)
            self.serve(3)
            self.gateway.write_all()

    # -- the ends of connections ------------------------------------------------------------------

    @rule(
        stored=st.booleans(),
        served=st.integers(0, 3),
        read=st.integers(0, 3),
        late=st.booleans(),
        dies=st.lists(st.integers(1, 2), max_size=2),
    )
    def crash(self, stored: bool, served: int, read: int, late: bool, dies: list[int]) -> None:
        """The gateway dies, and another one takes over: of what was under way, only so much arrives.

        Where some is late, the session was taken over, and the former owner still stores and acknowledges records.
        """
        world = self.world
        if stored:
            world.store(self.gateway)
        for _ in range(min(served, len(self.gateway.to_nats))):
            world.serve(self.gateway)
        self.client(read)
        world.disconnected()
        for step in dies:
            world.resume(dies=step)
        self.resume(self.gateway if late else None)

    @rule(read=st.integers(0, 3), dies=st.lists(st.integers(1, 2), max_size=1))
    def leave(self, read: int, dies: list[int]) -> None:
        """The connection ends and its gateway lives: what it has not sent needs no DUP."""
        gateway, world = self.gateway, self.world
        while gateway.to_nats:
            world.serve(gateway)
        gateway.write_all()
        gateway.leaving = True
        gateway.flush()
        self.client(read)
        world.disconnected()
        for step in dies:
            world.resume(dies=step)
        self.resume()

    @precondition(lambda self: self.gateway.to_nats)
    @rule(served=st.integers(0, 3))
    def gap(self, served: int) -> None:
        """The gateway loses NATS: what was under way is lost, then stores and removals are sent again."""
        gateway, answers = self.gateway, len(self.gateway.answers)
        unanswered = [entry for entry in gateway.to_nats if entry[0] != "ack"]
        for _ in range(min(served, len(gateway.to_nats))):
            self.world.serve(gateway)
        while len(gateway.answers) > answers:  # the answers to what the server did take are lost
            gateway.answers.pop()
        gateway.to_nats.clear()
        gateway.to_nats.extend(unanswered)
        self.world.attach_records()

    # -- the client and its subscriptions ---------------------------------------------------------

    @precondition(lambda self: self.gateway.may_change)
    @rule(name=st.sampled_from(sorted(PATTERNS)), qos=st.integers(0, 2))
    def subscribe(self, name: str, qos: int) -> None:
        """SUBSCRIBE for new messages, or for another QoS of them."""
        world, gateway = self.world, self.gateway
        one = world.subscriptions.get(name)
        if one is None:
            world.subscriptions[name] = Subscription(PATTERNS[name], qos or 1, world.last + 1)
            gateway.add(name)
        elif one.end is None and not qos:
            gateway.lower(name)
            world.lowered.append(one)
            gateway.end_lowered()
        elif one.end is None:
            gateway.settle()
            source = gateway.sources[name]
            source.regrant(qos, gateway.position)
            one.qos, one.was = qos, (source.was_qos, source.until)

    @precondition(lambda self: self.gateway.may_change)
    @rule(name=st.sampled_from(sorted(PATTERNS)))
    def unsubscribe(self, name: str) -> None:
        """All that was taken is in the position before."""
        one = self.world.subscriptions.get(name)
        if one is not None and one.end is None:
            self.gateway.flush()
            self.gateway.unsubscribe(name)

    @rule(unread=st.integers(0, 3))
    def stall(self, unread: int) -> None:
        """The client does not read: what has not left the gateway is given up."""
        if not self.gateway.stalled:
            self.gateway.ledger.reach(self.gateway.position)
            self.gateway.ledger.change()
        self.gateway.stalled = True
        self.world.recall(self.gateway, unread)
        self.gateway.machine.stop_sending()

    @precondition(lambda self: self.gateway.stalled)
    @rule()
    def go_on(self) -> None:
        """It reads again: everything that is pending comes again."""
        self.gateway.flush()
        self.gateway.fetch_in_flight()
        self.gateway.stalled = False
        self.gateway.machine.go_on()

    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        """Retention removes old messages. What the client may know is the subject of test_suspect_identifiers.py."""
        known = self.world.client.in_use.values()
        old = [one for one, message in self.world.stream.items() if message.topic != SHARED and one not in known]
        for sequence in old[: data.draw(st.integers(0, 3))]:
            del self.world.stream[sequence]

    # -- what is always true --------------------------------------------------------------------------

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "gateway"):
            machine = self.gateway.machine
            assert len(machine.inflight) <= LIMIT
            for identifier, delivery in machine.inflight.items():
                assert delivery.id == identifier
                assert delivery.state in (SENT, STORING)
                assert identifier not in machine.releases or delivery.state == STORING

    def flow_out(self) -> None:
        """Everything that is under way arrives."""
        world, gateway = self.world, self.gateway
        for _ in range(1_000):
            left = (
                *(world.to_client, world.to_gateway, gateway.to_nats, gateway.answers, world.record_wire),
                *(gateway.ledger.dirty, gateway.write, gateway.seeking, world.following(gateway.position)),
            )
            if not any(left):
                break
            self.flow(1)
            self.answer()
            self.record()
            self.seek()
        else:
            raise AssertionError("it never ends")

    def finish(self) -> None:
        """Nothing waits for a message that the client keeps. Then nothing may be left over, and nothing missing."""
        world, machine = self.world, self.gateway.machine
        if self.gateway.stalled:
            self.go_on()
        self.flow_out()
        # Else the client may keep its answer to the question about an identifier, or all identifiers are in use.
        if not (machine._suspects.ranges or self.gateway.lacking):
            assert not machine._waiting
            assert not machine._queued
        world.let_go()
        self.flow_out()
        machine.forget_absent()
        self.flow_out()
        identifiers = machine.identifiers
        for left in (
            *(machine.inflight, machine.releases, machine._waiting, machine._queued, machine.others),
            *(identifiers.allocated, identifiers.used, identifiers.stored, identifiers.unconfirmed),
            *(world.records, world.assignments),
        ):
            assert not left
        self.gateway.flush()
        assert world.position.content[1:] == ({}, {}, {})
        for sequence, message in world.stream.items():
            if world.expected(message):
                assert world.client.got.get(sequence, 0) >= 1, f"{sequence} is lost"
        assert not [one for one in world.client.holds.values() if one in world.stream]


DurableSession.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestDurableSession = DurableSession.TestCase
TestDurableSession.pytestmark = [pytest.mark.timeout(300)]  # type: ignore[attr-defined]
