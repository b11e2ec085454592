# SPDX-License-Identifier: Apache-2.0
"""What one request may remove of what is held: never a publish that waits for its PUBREL, however stores went."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mqtt_nats.protocol.qos2_receiver import InboundQos2


def held(*sequences: int, attempt: int = 0) -> InboundQos2:
    """Publishes 1, 2, ... that were sent in this order, and are held under these sequences; 0 = not yet."""
    one = InboundQos2()
    for number, _ in enumerate(sequences, 1):
        one.sent(number, attempt)
    for number, sequence in enumerate(sequences, 1):
        if sequence:
            one.stored(number, sequence)
    return one


def test_up_to_the_first_that_is_not_done() -> None:
    one = held(10, 13, 14, 20)
    assert one.bound(0) == 0
    one.removable(2)
    one.removable(3)
    assert one.bound(0) == 0, "the first would go too"
    one.removable(1)
    assert one.bound(0) == 14
    one.released(1)
    one.released(2)
    one.released(3)
    assert one.bound(0) == 0
    one.removable(4)
    assert one.bound(0) == 20


def test_what_is_not_held_yet_is_not_in_the_way() -> None:
    one = held(10, 11, 0)
    one.removable(1)
    one.removable(2)
    assert one.bound(0) == 11


def test_what_an_earlier_connection_has_held_comes_first() -> None:
    one = InboundQos2()
    one.restore(9, 3)
    one.restore(4, 5)
    one.sent(1, 0)
    one.stored(1, 8)
    one.removable(1)
    assert one.bound(0) == 0
    one.removable(9)
    assert one.bound(0) == 3
    one.removable(4)
    assert one.bound(0) == 8


def test_a_store_that_was_sent_again() -> None:
    one = held(10, 0)
    one.removable(1)
    assert one.bound(0) == 10
    assert one.bound(1) == 0, "the second may be below"
    one.stored(2, 12)
    assert one.bound(1) == 10, "it is not"
    one.sent(3, 1)
    assert one.bound(1) == 10
    assert one.bound(2) == 0


def test_a_client_that_always_has_one_on_its_way() -> None:
    """What was sent since the stores were sent again is in order again."""
    one = held(10, 0)
    one.sent(3, 1)
    one.removable(1)
    assert one.bound(1) == 0
    one.stored(2, 11)
    assert one.bound(1) == 10
    assert one.bound(2) == 0


def test_sequences_that_do_not_ascend() -> None:
    one = held(10, 9)
    for number in (1, 2):
        one.removable(number)
    assert one.bound(0) == 0
    one.released(1)
    assert one.bound(0) == 0, "not before nothing is left"
    one.released(2)
    one.sent(1, 0)
    one.stored(1, 4)  # also in a stream that was replaced
    one.removable(1)
    assert one.bound(0) == 4


def test_answers_that_do_not_come_in_order() -> None:
    one = InboundQos2()
    one.sent(1, 0)
    one.sent(2, 0)
    one.stored(2, 6)
    one.stored(1, 7)
    one.removable(1)
    assert one.bound(0) == 0


def test_one_that_is_sent_behind_others() -> None:
    one = InboundQos2()
    one.sent(1, 0)
    one.astray()
    one.sent(2, 0)
    one.stored(1, 11)
    one.removable(1)
    assert one.bound(0) == 0


def test_an_identifier_that_nothing_is_held_under() -> None:
    one = InboundQos2()
    one.stored(1, 5)
    one.released(1)
    assert one.bound(0) == 0
    one.sent(2, 0)
    one.released(2)  # refused
    one.sent(3, 1)
    one.stored(3, 6)
    one.removable(3)
    assert one.bound(1) == 6


class Stores(RuleBasedStateMachine):
    """A client's publishes, on a connection that loses stores and answers, to a stream that may have no leader."""

    def __init__(self) -> None:
        super().__init__()
        self.receiver = InboundQos2()
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
            self.receiver.sent(number, self.attempt)
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
            self.receiver.astray()
            found, sequence = self.records.get(number, (0, 0))
            if found != identity:  # what is there is nobody's
                self.records.pop(number, None)
                self.way.append((number, identity))
                return
        del self.pending[number]
        self.known[number] = sequence
        self.receiver.stored(number, sequence)

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
        self.receiver.removable(number)

    @invariant()
    def nothing_else_may_go(self) -> None:
        """What waits for its PUBREL is above the bound."""
        bound = self.receiver.bound(self.attempt)
        for number in self.known.keys() - self.done:
            assert self.known[number] > bound
        for number, identity in self.pending.items():
            found, sequence = self.records.get(number, (0, 0))
            assert found != identity or sequence > bound

    @precondition(lambda self: self.done)
    @rule()
    def remove(self) -> None:
        """What may go goes."""
        bound = self.receiver.bound(self.attempt)
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
        self.receiver.released(number)


Stores.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestStores = Stores.TestCase
