# SPDX-License-Identifier: Apache-2.0
"""A session between the shared reader and its catch-up reader, through crashes at every step.

The world has queues between gateway and client that a crash cuts off.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mqtt_nats.protocol.durable_sender import ID_SPACE
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

    @rule(count=st.integers(1, 4))
    def catch_up_reader_brings(self, count: int) -> None:
        gateway = self.gateway
        for sequence in self.world.after(gateway.reached)[: count if gateway.behind else 0]:
            gateway.take(sequence)

    @precondition(lambda self: self.gateway.behind and self.gateway.handover is None)
    @rule()
    def shared_reader_begins(self) -> None:
        """It keeps back what comes, until the catch-up reader has brought what was before."""
        self.gateway.handover = max(self.world.last, self.gateway.reached), []

    @rule()
    def shared_reader_brings(self) -> None:
        gateway = self.gateway
        if not gateway.behind:
            for sequence in self.world.after(gateway.reached)[:1]:
                gateway.take(sequence)
        elif gateway.handover is not None:
            since, kept = gateway.handover
            kept += self.world.after(max([since, *kept]))[:1]

    @precondition(lambda self: self.gateway.handover is not None)
    @rule()
    def hand_over(self) -> None:
        """The catch-up reader may have brought what the shared reader has kept back, too."""
        gateway = self.gateway
        assert gateway.handover is not None
        since, kept = gateway.handover
        if any(gateway.reached < one <= since for one in self.world.stream):
            return
        gateway.behind, gateway.handover = False, None
        for sequence in kept:
            if sequence > gateway.reached:
                gateway.take(sequence)

    @precondition(lambda self: not self.gateway.behind)
    @rule()
    def fall_behind(self) -> None:
        self.gateway.behind = True

    @rule()
    def flow(self) -> None:
        """The client reads and answers everything, and what it has answered is written."""
        for _ in range(3):
            while self.world.to_client:
                self.client_reads()
            while self.world.to_gateway:
                self.client_answers()
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
        gateway.write, gateway.stored_now = None, False
        gateway.answered()

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
        gateway.leaving = True
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
        steps: tuple[tuple[Any, Any], ...] = (
            (lambda: self.world.to_client, self.client_reads),
            (lambda: self.world.to_gateway, self.client_answers),
            (lambda: self.gateway.write is not None and self.gateway.stored_now, self.written),
            (lambda: self.gateway.write is not None and not self.gateway.stored_now, self.written_in_the_stream),
            (lambda: self.gateway.write is None and self.gateway.ledger.dirty, self.write),
            (lambda: self.gateway.handover is not None, self.hand_over),
            (lambda: True, lambda: self.catch_up_reader_brings(1)),
            (lambda: True, self.shared_reader_brings),
        )
        for _ in range(40 * (len(self.world.stream) + 5)):
            for condition, step in steps:
                if condition():
                    step()
        assert set(self.world.got) == set(self.world.stream)
        self.once()
        self.in_order()


def test_between_two_readers() -> None:
    """Nothing is lost, QoS 2 comes once and everything in order, and no identifier is used twice at a time."""
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Between,
        settings=settings(max_examples=200, stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )
