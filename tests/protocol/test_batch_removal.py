# SPDX-License-Identifier: Apache-2.0
"""What one request may remove of what is held: never a publish that waits for its PUBREL, however stores went."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mqtt_nats.protocol.batch_removal import Clearance


def held(*sequences: int, attempt: int = 0) -> Clearance:
    """Publishes 1, 2, ... that were sent in this order, and are held under these sequences; 0 = not yet."""
    one = Clearance()
    for number, _ in enumerate(sequences, 1):
        one.send(number, attempt)
    for number, sequence in enumerate(sequences, 1):
        if sequence:
            one.held(number, sequence)
    return one


def test_up_to_the_first_that_is_not_done() -> None:
    one = held(10, 13, 14, 20)
    assert one.bound(0) == 0
    one.done(2)
    one.done(3)
    assert one.bound(0) == 0, "the first would go too"
    one.done(1)
    assert one.bound(0) == 14
    one.gone(1)
    one.gone(2)
    one.gone(3)
    assert one.bound(0) == 0
    one.done(4)
    assert one.bound(0) == 20


def test_what_is_not_held_yet_is_not_in_the_way() -> None:
    one = held(10, 11, 0)
    one.done(1)
    one.done(2)
    assert one.bound(0) == 11


def test_what_an_earlier_connection_has_held_comes_first() -> None:
    one = Clearance()
    one.restore(9, 3)
    one.restore(4, 5)
    one.send(1, 0)
    one.held(1, 8)
    one.done(1)
    assert one.bound(0) == 0
    one.done(9)
    assert one.bound(0) == 3
    one.done(4)
    assert one.bound(0) == 8


def test_a_store_that_was_sent_again() -> None:
    one = held(10, 0)
    one.done(1)
    assert one.bound(0) == 10
    assert one.bound(1) == 0, "the second may be below"
    one.held(2, 12)
    assert one.bound(1) == 10, "it is not"
    one.send(3, 1)
    assert one.bound(1) == 10
    assert one.bound(2) == 0


def test_a_client_that_always_has_one_on_its_way() -> None:
    """What was sent since the stores were sent again is in order again."""
    one = held(10, 0)
    one.send(3, 1)
    one.done(1)
    assert one.bound(1) == 0
    one.held(2, 11)
    assert one.bound(1) == 10
    assert one.bound(2) == 0


def test_sequences_that_do_not_ascend() -> None:
    one = held(10, 9)
    for number in (1, 2):
        one.done(number)
    assert one.bound(0) == 0
    one.gone(1)
    assert one.bound(0) == 0, "not before nothing is left"
    one.gone(2)
    one.send(1, 0)
    one.held(1, 4)  # also in a stream that was replaced
    one.done(1)
    assert one.bound(0) == 4


def test_answers_that_do_not_come_in_order() -> None:
    one = Clearance()
    one.send(1, 0)
    one.send(2, 0)
    one.held(2, 6)
    one.held(1, 7)
    one.done(1)
    assert one.bound(0) == 0


def test_one_that_is_sent_behind_others() -> None:
    one = Clearance()
    one.send(1, 0)
    one.astray()
    one.send(2, 0)
    one.held(1, 11)
    one.done(1)
    assert one.bound(0) == 0


def test_an_identifier_that_nothing_is_held_under() -> None:
    one = Clearance()
    one.held(1, 5)
    one.gone(1)
    assert one.bound(0) == 0
    one.send(2, 0)
    one.gone(2)  # refused
    one.send(3, 1)
    one.held(3, 6)
    one.done(3)
    assert one.bound(1) == 6


class Stores(RuleBasedStateMachine):
    """A client's publishes, on a connection that loses stores and answers, to a stream that may have no leader."""

    def __init__(self) -> None:
        super().__init__()
        self.clearance = Clearance()
        self.attempt = 0
        self.last = 0
        self.identity = 0
        """Of the last publish."""
        self.records: dict[int, tuple[int, int]] = {}
        """What is really held: identity and sequence by packet identifier."""
        self.pending: dict[int, int] = {}
        """Stores without an answer, in the order of their first attempt: identities by packet identifier."""
        self.known: dict[int, int] = {}
        """What is known to be held."""
        self.done: set[int] = set()
        self.way: deque[tuple[int, int]] = deque()
        """On its way to the server."""
        self.back: deque[tuple[int, int, int]] = deque()
        """Answers on their way, with a sequence; 0 = nobody is there; -1 = there is one already."""

    @rule(number=st.integers(1, 3))
    def publish(self, number: int) -> None:
        """The client sends one, under an identifier that is free."""
        if number not in self.pending and number not in self.known:
            self.identity += 1
            self.clearance.send(number, self.attempt)
            self.pending[number] = self.identity
            self.way.append((number, self.identity))

    @precondition(lambda self: self.way)
    @rule(leader=st.booleans())
    def arrive(self, leader: bool) -> None:
        """A store reaches the server."""
        number, identity = self.way.popleft()
        if not leader:
            self.back.append((number, identity, 0))
        elif number in self.records:
            self.back.append((number, identity, -1))
        else:
            self.last += 1
            self.records[number] = identity, self.last
            self.back.append((number, identity, self.last))

    @precondition(lambda self: self.back)
    @rule()
    def answer(self) -> None:
        """An answer reaches the gateway."""
        number, identity, sequence = self.back.popleft()
        if self.pending.get(number) != identity:
            return
        if sequence == 0:
            self._again()
            return
        if sequence < 0:
            self.clearance.astray()
            found, sequence = self.records.get(number, (0, 0))
            if found != identity:  # what is there is nobody's
                self.records.pop(number, None)
                self.way.append((number, identity))
                return
        del self.pending[number]
        self.known[number] = sequence
        self.clearance.held(number, sequence)

    @rule()
    def disconnect(self) -> None:
        """The connection to NATS is lost, with what is on its way."""
        self.way.clear()
        self.back.clear()
        self._again()

    def _again(self) -> None:
        self.attempt += 1
        self.way.extend(self.pending.items())

    @precondition(lambda self: self.known.keys() - self.done)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """PUBREL, and its store: in any order."""
        number = data.draw(st.sampled_from(sorted(self.known.keys() - self.done)))
        self.done.add(number)
        self.clearance.done(number)

    @invariant()
    def nothing_else_may_go(self) -> None:
        """What waits for its PUBREL is above the bound."""
        bound = self.clearance.bound(self.attempt)
        for number in self.known.keys() - self.done:
            assert self.known[number] > bound
        for number, identity in self.pending.items():
            found, sequence = self.records.get(number, (0, 0))
            assert found != identity or sequence > bound

    @precondition(lambda self: self.done)
    @rule()
    def remove(self) -> None:
        """What may go goes."""
        bound = self.clearance.bound(self.attempt)
        self.records = {number: record for number, record in self.records.items() if record[1] > bound}
        for number in [one for one in self.done if self.known[one] <= bound]:
            self._gone(number)

    @precondition(lambda self: self.done)
    @rule(data=st.data())
    def remove_one(self, data: st.DataObject) -> None:
        """One goes by itself."""
        number = data.draw(st.sampled_from(sorted(self.done)))
        del self.records[number]
        self._gone(number)

    def _gone(self, number: int) -> None:
        del self.known[number]
        self.done.discard(number)
        self.clearance.gone(number)


Stores.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestStores = Stores.TestCase
