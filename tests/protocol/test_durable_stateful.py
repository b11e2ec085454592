# SPDX-License-Identifier: Apache-2.0
"""A durable session through crashes, gaps, redeliveries and every order of events."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mqtt_nats.protocol import durable_sender as durable
from mqtt_nats.protocol.inflight import SENT, STORING
from tests.protocol.world import PUBCOMP, PUBREC, Consumer, Gateway, World

# So few identifiers that they are used again all the time.
IDS = 5
LIMIT = 4
# The consumers overlap on the topic "b.b"; the one with the lower start delivers it.
PATTERNS = {"one": ("a.>", 1), "two": ("b.>", 1), "three": ("b.b", 2)}
TOPICS = ("a.a", "b.a", "b.b")


SENT_AGAIN = ("confirm", "pubrel", "delete", "allocate", "end allocation")
"""What is sent again when NATS is back; acknowledgements are not."""


class DurableSession(RuleBasedStateMachine):
    """One client, one session, one gateway after the other."""

    world: World
    gateway: Gateway
    stalled = False
    """What the client does not read has been given up; its consumers have nowhere to deliver to."""
    left: tuple[set[int], int] | None = None
    """What a connection that was left in order has never sent, and after which sequence nothing was sent at all."""

    def __init__(self) -> None:
        super().__init__()
        # A crash may lose an acknowledgement after which all identifiers were used: each one is late.
        self.patches = [patch.object(durable, "ID_SPACE", IDS), patch.object(durable, "LATE_AFTER_MESSAGES", -1)]
        for each in self.patches:
            each.start()

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.finish()
        finally:
            for each in self.patches:
                each.stop()

    @initialize(
        late=st.booleans(),
        window=st.integers(1, 3),
        qos=st.lists(st.integers(1, 2), min_size=3, max_size=3),
        later=st.sampled_from((0, 2 * IDS)),
    )
    def begin(self, late: bool, window: int, qos: list[int], later: int) -> None:
        """The last subscription may have begun so late that all identifiers were used before."""
        self.world = World(late=late)
        for (name, (pattern, start)), granted in zip(PATTERNS.items(), qos, strict=True):
            self.world.consumers[name] = Consumer(name, pattern, granted, start + later * (start > 1), window)
        self.resume()

    # -- what happens -----------------------------------------------------------------------------

    @rule(topic=st.sampled_from(TOPICS), qos=st.integers(1, 2), count=st.integers(1, 6))
    def publish(self, topic: str, qos: int, count: int) -> None:
        for _ in range(count):
            self.world.store(topic, qos)

    def listening(self, name: str) -> Consumer | None:
        """A consumer that has somewhere to deliver to."""
        consumer = self.world.consumers.get(name)
        return consumer if consumer is not None and (consumer.end is not None or not self.stalled) else None

    @rule(name=st.sampled_from(sorted(PATTERNS)), count=st.integers(1, 4))
    def deliver(self, name: str, count: int) -> None:
        consumer = self.listening(name)
        for _ in range(count):
            if consumer is None or not self.world.deliver(consumer):
                break

    @rule(name=st.sampled_from(sorted(PATTERNS)), count=st.integers(1, 4))
    def arrive(self, name: str, count: int) -> None:
        consumer = self.world.consumers.get(name)
        for _ in range(count):
            if consumer is None or not consumer.wire:
                break
            self.gateway.arrived(consumer, *consumer.wire.popleft())

    @rule(name=st.sampled_from(sorted(PATTERNS)), data=st.data())
    def ack_wait(self, name: str, data: st.DataObject) -> None:
        consumer = self.listening(name)
        if consumer is not None and consumer.pending:
            self.world.redeliver(consumer, data.draw(st.sampled_from(sorted(consumer.pending))))

    @rule(count=st.integers(1, 3))
    def serve(self, count: int) -> None:
        for _ in range(min(count, len(self.gateway.to_nats))):
            self.world.serve(self.gateway)

    @rule()
    def answer(self) -> None:
        if self.gateway.answers:
            self.world.answer(self.gateway)

    @rule()
    def record(self) -> None:
        if self.world.record_wire:
            self.world.record_arrives(self.gateway)

    @rule()
    def seek(self) -> None:
        if self.gateway.seeking:
            self.gateway.look_for_records()

    @rule(count=st.integers(1, 4))
    def client(self, count: int) -> None:
        for _ in range(min(count, len(self.world.to_client))):
            self.world.client_reads()

    @rule(count=st.integers(1, 4))
    def acknowledge(self, count: int) -> None:
        for _ in range(min(count, len(self.world.to_gateway))):
            self.world.gateway_reads(self.gateway)

    @rule(later=st.integers(0, 3), kind=st.sampled_from((PUBREC, PUBCOMP)))
    def keep(self, later: int, kind: int) -> None:
        """The client does not acknowledge one message. The window has room for others."""
        if all(consumer.window == 1 for consumer in self.world.consumers.values()):
            return
        self.world.keep(max(self.world.last + later, 1), kind)

    @rule()
    def let_go(self) -> None:
        self.world.let_go()

    @rule(served=st.integers(0, 3), read=st.integers(0, 3), late=st.booleans())
    def crash(self, served: int, read: int, late: bool = False) -> None:
        """The gateway dies, and another one takes over: of what was under way, only so much arrives.

        Where some is late, the session was taken over, and the former owner still stores and acknowledges records.
        """
        for _ in range(min(served, len(self.gateway.to_nats))):
            self.world.serve(self.gateway)
        for _ in range(min(read, len(self.world.to_client))):
            self.world.client_reads()
        self.world.disconnected()
        for consumer in self.world.consumers.values():
            consumer.states.clear()
        self.resume(self.gateway if late else None)

    @rule(read=st.integers(0, 3))
    def reconnect(self, read: int) -> None:
        """The client's connection breaks and it comes back; what the gateway has told NATS arrives."""
        while self.gateway.to_nats:
            self.world.serve(self.gateway)
        self.left = self.gateway.machine.unsent(), self.gateway.machine.most
        self.crash(0, read)

    @rule(served=st.integers(0, 3))
    def gap(self, served: int) -> None:
        """The gateway loses NATS: what was under way is lost, then stores and confirmed acks are sent again."""
        gateway = self.gateway
        answers = len(gateway.answers)
        unanswered = [entry for entry in gateway.to_nats if entry[0] in SENT_AGAIN]
        for _ in range(min(served, len(gateway.to_nats))):
            self.world.serve(gateway)
        while len(gateway.answers) > answers:  # the answers to what the server did take are lost
            gateway.answers.pop()
        gateway.to_nats.clear()
        gateway.to_nats.extend(
            (kind, name) for kind, name in unanswered if kind != "delete" or name in self.world.consumers
        )
        self.world.attach_records()
        for name, source in gateway.sources.items():
            source.asked = False
            if self.stalled and not source.ended:
                self.world.consumers[name].wire.clear()
                continue
            self.world.attach(self.world.consumers[name], source, opened=True)
        gateway.machine.pump()

    @rule(name=st.sampled_from(sorted(PATTERNS)), times=st.integers(1, 8))
    def flow(self, name: str, times: int) -> None:
        """Messages go through, one by one."""
        for _ in range(times):
            self.deliver(name, 1)
            self.arrive(name, 1)
            self.client(4)
            self.acknowledge(4)
            self.serve(3)

    @rule(name=st.sampled_from(sorted(PATTERNS)), back=st.integers(1, 12))
    def elect(self, name: str, back: int) -> None:
        """A consumer's leader dies: the next one does not know of the last deliveries and acknowledgements.

        It gets that far again before anything else fails: after that only the client could know what it had.
        """
        consumer = self.listening(name)
        if consumer is None or not consumer.states or consumer.end is not None:
            return
        position = consumer.position
        self.world.elect(consumer, self.gateway.sources[name], min(back, len(consumer.states)))
        for _ in range(20):  # what has expired meanwhile does not come
            if not consumer.wire and consumer.position >= position:
                break
            self.flow(name, 1)
            while self.gateway.to_nats:
                self.world.serve(self.gateway)

    @rule(name=st.sampled_from(sorted(PATTERNS)))
    def unsubscribe(self, name: str) -> None:
        """The subscription that owns nothing together with others, or the one that is not the owner."""
        if name == "two" or name in self.world.ended or self.stalled:
            return
        consumer = self.world.consumers[name]
        source = self.gateway.sources[name]
        for other in self.gateway.overlap.remove(name):
            raised = self.gateway.sources[other]
            self.world.consumers[other].was = raised.was_qos, raised.until
        inflight = self.gateway.machine.drain(source)
        consumer.end = source.end
        consumer.qos = max((delivery.qos for delivery in inflight), default=0)
        self.world.ended[name] = source.end
        if not inflight:
            self.gateway.delete(name)

    @rule(unread=st.integers(0, 3))
    def stall(self, unread: int) -> None:
        """The client does not read: what has not left the gateway is given up."""
        self.world.recall(self.gateway, unread)
        self.gateway.machine.stop_sending()
        self.stalled = True
        for name, source in self.gateway.sources.items():
            if not source.ended:
                self.world.consumers[name].wire.clear()

    @rule()
    def go_on(self) -> None:
        """It reads again: everything that is pending comes again."""
        if not self.stalled:
            return
        self.stalled = False
        for name, source in self.gateway.sources.items():
            if not source.ended:
                consumer = self.world.consumers[name]
                self.world.attach(consumer, source, opened=False)
                while consumer.wire:
                    self.gateway.arrived(consumer, *consumer.wire.popleft())
        self.gateway.machine.go_on()

    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        """Retention removes old messages. Those in flight are the subject of test_durable.py: suspect identifiers."""
        inflight = {sequence for consumer in self.world.consumers.values() for sequence in consumer.pending}
        old = [sequence for sequence in sorted(self.world.stream) if sequence not in inflight]
        for sequence in old[: data.draw(st.integers(0, 3))]:
            self.world.expire(sequence)

    # -- what a gateway does at CONNECT -------------------------------------------------------------

    def resume(self, former: Gateway | None = None) -> None:
        self.stalled = False
        gateway = self.gateway = Gateway(self.world, LIMIT)
        world = self.world
        machine = gateway.machine
        left, self.left = self.left, None
        if left is not None:
            machine.not_sent(left[0])
            machine.sent_at_most(left[1])
        machine.restore_identifiers(world.identifiers)
        for record in world.records:
            machine.owe(record.id, record.sequence)
        if former is not None:
            world.serve_late(former)
        world.attach_records()
        if former is not None:
            while world.record_wire:  # before the messages, of which some are in records that were stored late
                world.record_arrives(gateway)
        for name, consumer in list(world.consumers.items()):
            if consumer.end is not None and not consumer.qos:
                del world.consumers[name]
                continue
            gateway.add(consumer)
        for name, source in gateway.sources.items():
            consumer = world.consumers[name]
            world.attach(consumer, source, opened=False)
            while consumer.wire:
                gateway.arrived(consumer, *consumer.wire.popleft())
        assert machine.collected
        for name, source in list(gateway.sources.items()):
            if source.ended and not machine.holds(source):
                gateway.delete(name)
        machine.start()

    # -- what is always true --------------------------------------------------------------------------

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "gateway"):
            assert len(self.gateway.machine.inflight) <= LIMIT
            for identifier, delivery in self.gateway.machine.inflight.items():
                assert delivery.id == identifier
                assert delivery.state in (SENT, STORING)
                assert identifier not in self.gateway.machine.releases or delivery.state == STORING

    def flow_out(self) -> None:
        """Everything that is under way arrives."""
        world, gateway = self.world, self.gateway
        for _ in range(1_000):
            moved = False
            for consumer in list(world.consumers.values()):
                moved |= world.deliver(consumer)
                while consumer.wire:
                    gateway.arrived(consumer, *consumer.wire.popleft())
                    moved = True
            while world.to_client:
                world.client_reads()
                moved = True
            while world.to_gateway:
                world.gateway_reads(gateway)
                moved = True
            while gateway.to_nats:
                world.serve(gateway)
                moved = True
            while gateway.answers:
                world.answer(gateway)
                moved = True
            while world.record_wire:
                world.record_arrives(gateway)
                moved = True
            if gateway.seeking:
                gateway.look_for_records()
                moved = True
            if not moved:
                break
        else:
            raise AssertionError("it never ends")

    def finish(self) -> None:
        """Nothing waits for a message that the client keeps. Then nothing may be left over, and nothing missing."""
        world, gateway = self.world, self.gateway
        self.go_on()
        self.flow_out()
        assert not gateway.machine._waiting
        assert not gateway.machine._queued
        world.let_go()
        self.flow_out()
        machine = gateway.machine
        machine.forget_absent()
        self.flow_out()
        for sequence in list(machine.identifiers.allocated):
            assert not machine._beyond(sequence), "a consumer may bring it"
            del machine.identifiers.used[machine.identifiers.allocated.pop(sequence)], world.identifiers[sequence]
            machine.identifiers.stored.remove(sequence)
        assert not machine.inflight
        assert not machine.releases
        assert not machine._waiting
        assert not machine._queued
        assert not machine.identifiers.allocated
        assert not machine.identifiers.used
        assert not machine.identifiers.stored
        assert not machine.identifiers.unconfirmed
        assert not world.identifiers
        assert not world.records
        for consumer in world.consumers.values():
            left = [sequence for sequence in consumer.pending if sequence in world.stream]
            assert not left, f"{consumer.name} is not acknowledged: {left}"
        for sequence, message in world.stream.items():
            if world.expected(message):
                assert world.got.get(sequence, 0) >= 1, f"{sequence} is lost"
        assert not world.client_holds


DurableSession.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestDurableSession = DurableSession.TestCase
TestDurableSession.pytestmark = [pytest.mark.timeout(300)]  # type: ignore[attr-defined]


def test_a_leader_that_lags_behind_a_window_of_one() -> None:
    """It brings what has been complete for longer than the window is wide."""
    session = DurableSession()
    session.begin(late=False, window=1, qos=[1, 1, 1], later=0)
    session.publish(count=2, qos=1, topic="a.a")
    session.deliver(count=1, name="one")
    session.crash(read=0, served=0)
    session.flow(name="one", times=2)
    session.elect(back=3, name="one")
    session.teardown()


def test_a_takeover_while_a_record_is_acknowledged() -> None:
    """The new owner has read it, and nothing delivers it any more."""
    session = DurableSession()
    session.begin(late=False, window=1, qos=[2, 2, 2], later=0)
    session.publish(count=2, qos=2, topic="a.a")
    session.deliver(count=1, name="one")
    session.arrive(count=1, name="one")
    session.client(count=1)
    session.acknowledge(count=1)  # PUBREC
    session.serve(count=1)
    session.answer()
    session.record()
    session.serve(count=1)
    session.answer()
    session.client(count=1)
    session.acknowledge(count=1)  # PUBCOMP
    assert session.gateway.to_nats[-1] == ("ack", b"record 1 1")
    session.crash(read=0, served=0, late=True)
    assert session.gateway.machine.releases
    session.teardown()
