# SPDX-License-Identifier: Apache-2.0
"""A session between its consumer and the shared reader, through crashes at every step.

The world has queues between gateway and client that a crash cuts off.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mqtt_nats.protocol.durable_sender import ID_SPACE, packet_id
from mqtt_nats.protocol.inflight import SubscriptionState
from tests.protocol.position_world import Gateway, World


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
                gateway.ledger.add_pending(delivery.sequence, delivery.qos)
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
    def leave_reader(self, dies: int) -> None:
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
            gateway.machine.drop_hold(gateway.source, SubscriptionState.RETURNING)

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
        settings=settings(max_examples=200, stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )
