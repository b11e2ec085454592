# SPDX-License-Identifier: Apache-2.0
"""A session between its consumer and the shared reader, through crashes at every step.

The model has one subscription that matches everything, JetStream with its consumer and the stored position, a client
that keeps its state, and queues between them that a crash cuts off. What the broker does around the machines is done
here in the same order.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mqtt_nats.protocol.durable_sender import ID_SPACE, DurableSender, packet_id
from mqtt_nats.protocol.inflight import Delivery, SubscriptionState
from mqtt_nats.protocol.position import Content, SessionPosition, Step

EVER = 1 << 62


class Consumer:
    """A durable push consumer."""

    def __init__(self) -> None:
        self.position = 0
        self.pending: dict[int, int] = {}
        self.again: list[int] = []
        """What is sent once more, since it is attached anew."""

    def set(self, start: int) -> None:
        self.position, self.pending, self.again = start - 1, {}, []

    def attach(self) -> None:
        self.again = sorted(self.pending)


class Stored:
    """What is stored of a session's position, with the number of the write."""

    def __init__(self) -> None:
        self.number = 0
        self.content = Content(0, {}, {})
        self.live = False
        self.clean = False


class Gateway:
    """The gateway that has the session; a crash leaves nothing of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.machine = DurableSender(world.limit, self)
        self.ledger = SessionPosition()
        self.source = SubscriptionState(2, 1, 100)
        self.source.expected = 0
        self.machine.sources.append(self.source)
        self.taking = False
        self.live = False
        self.joining: int | None = None
        self.kept: list[int] = []
        self.reader = 0
        self.expected = 0
        self.leaving = False
        self.write: tuple[Content, bool, bool] | None = None
        self.stored_now = False
        self.records: deque[tuple[int, int]] = deque()

    def send(self, data: bytes) -> None:
        self.world.to_client.append(("pubrel", data[2] << 8 | data[3], 0, 0, False))

    def publish(self, delivery: Delivery, dup: bool) -> bool:
        self.world.to_client.append(("publish", delivery.id, delivery.sequence, delivery.qos, dup))
        return True

    def ack(self, reply: bytes) -> None:
        kind, number = reply[:1], int(reply[1:])
        if kind == b"@":
            self.ledger.done(number)
        elif kind == b"%":
            self.ledger.free(number)
        elif kind == b"&":
            self.world.records.pop(number, None)
        else:
            self.world.consumer.pending.pop(number, None)

    def ack_confirmed(self, reply: bytes, identifier: int) -> None:
        if reply.startswith(b"@"):
            if not self.ledger.confirm(int(reply[1:]), identifier):
                self.machine.confirmed(identifier)
            return
        self.ack(reply)
        self.records.append((identifier, -1))

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        if self.machine.inflight[identifier].reply.startswith(b"@"):
            self.ledger.receive(identifier, sequence)
        else:
            self.records.append((identifier, sequence))

    def look(self, source: SubscriptionState, sequence: int) -> None:
        raise AssertionError("one source needs no look")

    def written(self, source: SubscriptionState) -> None:
        pass

    def seek(self) -> None:
        """Records stay until they have been delivered."""

    def take(self, sequence: int) -> None:
        qos = self.world.stream[sequence]
        self.machine.reached = sequence
        mark = b"@%d" % sequence
        self.ledger.take(sequence, qos)
        if self.machine.sent_at_once(self.source, sequence, qos, mark):
            self.world.to_client.append(("publish", packet_id(sequence), sequence, qos, False))
        else:
            self.machine.arrived(self.source, sequence, 1, mark, sequence, qos)

    def begin(self) -> None:
        if self.taking:
            self.ledger.reached = max(self.ledger.reached, self.reader)
        self.write = self.ledger.begin(), self.live, self.leaving

    def answered(self) -> None:
        for step, identifier in self.ledger.stored():
            if step is Step.RELEASE:
                self.machine.pubrel_kept(identifier, b"%%%d" % identifier)
            elif step is Step.CONFIRM:
                self.machine.confirmed(identifier)
            else:
                self.machine.freed(identifier)


class World:
    """JetStream, the network and the client."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.stream: dict[int, int] = {}
        self.last = 0
        self.consumer = Consumer()
        self.stored = Stored()
        self.records: dict[int, int] = {}
        """PUBREL records: sequence by packet identifier."""
        self.to_client: deque[tuple[str, int, int, int, bool]] = deque()
        self.to_gateway: deque[tuple[int, int]] = deque()
        self.held: dict[int, int] = {}
        """QoS 2 messages that the client has not been told to forget."""
        self.got: list[int] = []
        self.sent: set[int] = set()
        self.gateway: Gateway | None = None

    def after(self, sequence: int) -> list[int]:
        return [one for one in self.stream if one > sequence]

    # -- the client -----------------------------------------------------------------------------

    def client(self) -> None:
        kind, identifier, sequence, qos, dup = self.to_client.popleft()
        if kind == "pubrel":
            self.held.pop(identifier, None)
            self.to_gateway.append((7, identifier))
            return
        if not dup:
            assert sequence not in self.sent, f"{sequence} is sent again without DUP"
        self.sent.add(sequence)
        if qos == 1:
            self.got.append(sequence)
            self.to_gateway.append((4, identifier))
            return
        if identifier in self.held:
            assert self.held[identifier] == sequence, f"identifier {identifier} of {sequence} is in use"
        else:
            self.held[identifier] = sequence
            self.got.append(sequence)
        self.to_gateway.append((5, identifier))

    # -- a resume -------------------------------------------------------------------------------

    def crash(self, *, stored: bool) -> None:
        gateway = self.gateway
        if gateway is not None and stored and gateway.write is not None and not gateway.stored_now:
            self.store(gateway)
        self.to_client.clear()
        self.to_gateway.clear()
        self.gateway = None

    def store(self, gateway: Gateway) -> None:
        assert gateway.write is not None
        if gateway.expected == self.stored.number:
            self.stored.number += 1
            self.stored.content, self.stored.live, self.stored.clean = gateway.write
            gateway.expected = self.stored.number
        gateway.stored_now = True

    def resume(self, *, dies: int = 0) -> None:
        """With ``dies`` the gateway gets no further than this step."""
        gateway = self.gateway = Gateway(self)
        machine, ledger, source = gateway.machine, gateway.ledger, gateway.source
        for identifier, sequence in self.records.items():
            machine.owe(identifier, sequence)
        position = self.stored
        content = position.content
        was_live, clean = position.live, position.clean
        if was_live:
            self.consumer.set(content.reached + 1)
        if dies == 1:
            return self.crash(stored=False)
        gateway.expected = position.number
        ledger.reached = content.reached
        ledger.pending, ledger.released = dict(content.pending), dict(content.released)
        gateway.begin()
        self.store(gateway)
        gateway.write, gateway.stored_now = None, False
        ledger.stored()
        if dies == 2:
            return self.crash(stored=False)
        for identifier, sequence in ledger.released.items():
            machine.owe(identifier, sequence)
            machine.keep(identifier, b"%%%d" % identifier)
        for identifier, sequence in self.records.items():
            machine.pubrel_delivered(identifier, sequence, b"&%d" % identifier)
        if was_live:
            if not clean:
                machine.sent_perhaps(self.last)
            source.last = source.first = content.reached
        else:
            source.last = source.first = self.consumer.position
        self.consumer.attach()
        source.expected = len(self.consumer.again)
        while self.consumer.again:
            self.bring_again()
        past = SubscriptionState(0, 0, 100)
        past.live, past.clear, past.expected = True, EVER, 0
        machine.sources.append(past)
        for sequence, qos in sorted(ledger.pending.items()):
            machine.arrived(past, sequence, 2, b"@%d" % sequence, sequence, qos)
        machine.start()
        return None

    def bring_again(self) -> None:
        gateway = self.gateway
        assert gateway is not None
        sequence = self.consumer.again.pop(0)
        if sequence in self.consumer.pending:
            self.consumer.pending[sequence] += 1
            attempt = self.consumer.pending[sequence]
            gateway.machine.arrived(
                gateway.source, sequence, attempt, b"$%d" % sequence, sequence, self.stream[sequence]
            )


class Between(RuleBasedStateMachine):
    """Everything in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(3)
        self.world.resume()

    @property
    def gateway(self) -> Gateway:
        assert self.world.gateway is not None
        return self.world.gateway

    @rule(qos=st.sampled_from((1, 2, 2)), gap=st.sampled_from((1, 1, 2, ID_SPACE)))
    def publish(self, qos: int, gap: int) -> None:
        self.world.last += gap
        self.world.stream[self.world.last] = qos

    @precondition(lambda self: not self.gateway.live)
    @rule()
    def consumer_brings(self) -> None:
        world, gateway = self.world, self.gateway
        following = world.after(world.consumer.position)
        if not following or len(world.consumer.pending) >= 5:
            return
        sequence = following[0]
        world.consumer.position = sequence
        world.consumer.pending[sequence] = 1
        if gateway.joining is not None and sequence > gateway.joining:
            return
        reply = b"$%d" % sequence
        qos = world.stream[sequence]
        if gateway.machine.sent_at_once(gateway.source, sequence, qos, reply):
            world.to_client.append(("publish", packet_id(sequence), sequence, qos, False))
        else:
            gateway.machine.arrived(gateway.source, sequence, 1, reply, sequence, qos)

    @rule()
    def reader_brings(self) -> None:
        gateway = self.gateway
        following = self.world.after(gateway.reader)
        if not following:
            return
        gateway.reader = following[0]
        if gateway.taking:
            gateway.take(gateway.reader)
        elif gateway.joining is not None and gateway.reader > gateway.joining:
            gateway.kept.append(gateway.reader)

    @rule()
    def reader_is_made(self) -> None:
        if not (self.gateway.taking or self.gateway.joining is not None):
            self.gateway.reader = self.world.last

    @precondition(lambda self: not self.gateway.live and self.gateway.joining is None)
    @rule()
    def join(self) -> None:
        gateway = self.gateway
        gateway.joining = max(self.world.last, gateway.reader, gateway.source.last)
        gateway.kept = []

    @precondition(lambda self: not self.gateway.live)
    @rule()
    def become_live(self) -> None:
        """At once: what is of interest comes after that."""
        if self.gateway.joining is None:
            self.join()
        for _ in range(len(self.world.stream)):
            self.consumer_brings()
        self.switch()

    @rule()
    def flow(self) -> None:
        """The client reads and answers everything, and what it has answered is written."""
        for _ in range(3):
            while self.world.to_client:
                self.client_reads()
            while self.world.to_gateway:
                self.client_answers()
            while self.gateway.records:
                self.record()
            self.write_all()

    @precondition(lambda self: self.gateway.ledger.dirty or self.gateway.write is not None)
    @rule()
    def write_all(self) -> None:
        """Whatever is to be written is."""
        while self.gateway.ledger.dirty or self.gateway.write is not None:
            if self.gateway.write is None:
                self.write()
            if not self.gateway.stored_now:
                self.written_in_the_stream()
            self.written()

    @precondition(lambda self: self.gateway.joining is not None)
    @rule()
    def switch(self) -> None:
        world, gateway = self.world, self.gateway
        since = gateway.joining
        assert since is not None
        if any(one <= since for one in world.after(world.consumer.position)):
            return
        for delivery in gateway.machine.on_their_way():
            if not delivery.reply.startswith(b"@"):
                gateway.ledger.take(delivery.sequence, delivery.qos)
                delivery.reply = b"@%d" % delivery.sequence
        gateway.source.live = gateway.live = gateway.taking = True
        gateway.source.held |= SubscriptionState.RETURNING
        gateway.ledger.dirty = True
        gateway.source.last = gateway.source.first = since
        gateway.ledger.reached = since
        gateway.joining = None
        for sequence in gateway.kept:
            gateway.take(sequence)

    @precondition(lambda self: self.gateway.taking and self.gateway.write is None)
    @rule(dies=st.sampled_from((0, 0, 1, 2, 3)))
    def demote(self, dies: int) -> None:
        """The gateway dies after step ``dies``; 0 = it does not."""
        world, gateway = self.world, self.gateway
        reached = gateway.ledger.reached = max(gateway.ledger.reached, gateway.reader)
        gateway.taking = False
        gateway.begin()
        world.store(gateway)
        if dies == 3:
            world.crash(stored=False)
            world.resume()
            return
        self.written()
        world.consumer.set(reached + 1)
        if dies == 1:
            world.crash(stored=False)
            world.resume()
            return
        gateway.live = gateway.source.live = False
        gateway.begin()
        world.store(gateway)
        if dies == 2:
            world.crash(stored=False)
            world.resume()
            return
        self.written()
        gateway.source.last = gateway.source.first = reached

    @precondition(lambda self: self.gateway.write is None and self.gateway.ledger.dirty)
    @rule()
    def write(self) -> None:
        self.gateway.begin()

    @precondition(lambda self: self.gateway.write is not None and not self.gateway.stored_now)
    @rule()
    def written_in_the_stream(self) -> None:
        self.world.store(self.gateway)

    @precondition(lambda self: self.gateway.write is not None and self.gateway.stored_now)
    @rule()
    def written(self) -> None:
        gateway = self.gateway
        assert gateway.write is not None
        (_, live, _), gateway.write, gateway.stored_now = gateway.write, None, False
        gateway.answered()
        if live:
            gateway.machine.release_held(gateway.source, SubscriptionState.RETURNING)

    @precondition(lambda self: bool(self.gateway.records))
    @rule()
    def record(self) -> None:
        gateway = self.gateway
        identifier, sequence = gateway.records.popleft()
        if sequence < 0:
            gateway.machine.confirmed(identifier)
            return
        self.world.records[identifier] = sequence
        gateway.machine.pubrel_stored(identifier)
        gateway.machine.pubrel_delivered(identifier, sequence, b"&%d" % identifier)

    @precondition(lambda self: bool(self.world.to_client))
    @rule()
    def client_reads(self) -> None:
        self.world.client()

    @precondition(lambda self: bool(self.world.to_gateway))
    @rule()
    def client_answers(self) -> None:
        kind, identifier = self.world.to_gateway.popleft()
        self.gateway.machine.acknowledged(kind, [identifier])

    @rule(stored=st.booleans(), dies=st.lists(st.integers(1, 2), max_size=2))
    def crash(self, stored: bool, dies: list[int]) -> None:
        self.world.crash(stored=stored)
        for step in dies:
            self.world.resume(dies=step)
        self.world.resume()

    @rule(dies=st.lists(st.integers(1, 2), max_size=1))
    def leave(self, dies: list[int]) -> None:
        """The connection ends and its gateway lives: what it has not sent needs no DUP."""
        gateway = self.gateway
        if gateway.write is not None:
            if not gateway.stored_now:
                self.world.store(gateway)
            self.written()
        if gateway.taking:
            gateway.ledger.reached = max(gateway.ledger.reached, gateway.reader)
        gateway.taking, gateway.leaving = False, True
        gateway.begin()
        self.world.store(gateway)
        self.world.crash(stored=False)
        for step in dies:
            self.world.resume(dies=step)
        self.world.resume()

    @invariant()
    def once(self) -> None:
        for sequence, count in Counter(self.world.got).items():
            assert count == 1 or self.world.stream[sequence] == 1, f"{sequence} was handed on {count} times"

    @invariant()
    def in_order(self) -> None:
        first = list(dict.fromkeys(self.world.got))
        assert first == sorted(first)

    def teardown(self) -> None:
        """Let everything come to its end: nothing is lost."""
        steps: tuple[Any, ...] = (
            self.client_reads,
            self.client_answers,
            self.record,
            self.written,
            self.written_in_the_stream,
            self.write,
            self.switch,
            self.consumer_brings,
            self.reader_brings,
        )
        conditions: tuple[Any, ...] = (
            lambda: self.world.to_client,
            lambda: self.world.to_gateway,
            lambda: self.gateway.records,
            lambda: self.gateway.write is not None and self.gateway.stored_now,
            lambda: self.gateway.write is not None and not self.gateway.stored_now,
            lambda: self.gateway.write is None and self.gateway.ledger.dirty,
            lambda: self.gateway.joining is not None,
            lambda: not self.gateway.live,
            lambda: True,
        )
        for _ in range(40 * (len(self.world.stream) + 5)):
            for step, condition in zip(steps, conditions, strict=True):
                if condition():
                    step()
        assert set(self.world.got) == set(self.world.stream)
        self.once()
        self.in_order()


def test_between_consumer_and_reader() -> None:
    """Nothing is lost, QoS 2 comes once and everything in order, and no identifier is used twice at a time."""
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Between,
        settings=settings(
            max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
