# SPDX-License-Identifier: Apache-2.0
"""Subscriptions and their dormant consumers: gates of a lowered one, where readers serve them from, and repairs."""

from __future__ import annotations

import pytest

from mqtt_nats.messages.message import Stored
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.pubsub.backlog import Gate
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.consumers import ConsumerRef
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeClient, FakeServices, FakeSide


@stands_for(Gate)
class FakeGate:
    """Stands for `Gate`: counts how many wait for it to open, and notes what is discarded."""

    def __init__(self) -> None:
        self.fake_held = 0
        self.fake_discarded: list[bytes | None] = []

    def hold(self) -> None:
        self.fake_held += 1

    def discard(self, known: bytes | None) -> None:
        self.fake_discarded.append(known)


def binding() -> ConsumerBinding:
    return ConsumerBinding("key", ConsumerRef("name", "deliver", "filter", 10), SubscriptionState(1, 0))


def lowered(*gates: FakeGate) -> ConsumerBinding:
    found = binding()
    found.lowered(list(gates))  # type: ignore[arg-type]
    return found


def test_a_new_binding_has_nothing_to_wait_for() -> None:
    found = binding()
    assert (found.drained, found.removed, found.since, found.resent, found.gates) == (True, False, 0, 0, [])


@pytest.mark.sources
def test_a_lowered_subscription_has_no_key_in_the_record_and_holds_its_gates() -> None:
    one, other = FakeGate(), FakeGate()
    found = lowered(one, other)
    assert (found.key, one.fake_held, other.fake_held) == ("", 1, 1)


@pytest.mark.sources
def test_what_the_consumer_brings_is_taken_out_of_the_gates() -> None:
    """By the id of the message, which core NATS may have brought before."""
    gate = FakeGate()
    found = lowered(gate)
    found.brings(Stored("a", b"", b"", 1, 1, False, b"", b"NATS/1.0\r\nNmqtt-Id:abc\r\n\r\n"))
    assert gate.fake_discarded == [b"abc"]


@pytest.mark.sources
def test_released_gates_are_not_held_again() -> None:
    gate = FakeGate()
    found = lowered(gate)
    assert len(found.release()) == 1
    assert found.release() == []


# -- what readers bring -------------------------------------------------------------------------------


@pytest.mark.parametrize("removed", [True, False])
def test_readers_serve_a_subscription_from_a_place_on(removed: bool) -> None:
    """New messages wait until the session is known to be this gateway's."""
    found = binding()
    found.pass_over(3, 5)
    found.begin_after(7, removed=removed)
    assert (found.since, found.resent, found.source.last) == (7, 0, 7)
    assert found.source.is_served
    assert (found.source.held, found.removed) == (SubscriptionState.RETURNING, removed)


def test_a_place_is_never_set_back() -> None:
    found = binding()
    found.begin_after(7, removed=True)
    found.catch_up_to(5)
    assert found.since == 7
    found.catch_up_to(9)
    assert found.since == 9
    found.pass_over(3, 8)
    assert (found.resent, found.since) == (3, 9)
    found.pass_over(4, 12)
    assert (found.resent, found.since) == (4, 12)


def test_messages_that_may_have_been_sent_are_given_until_readers_have_passed_them() -> None:
    """The shared reader then brings only messages that nobody has sent."""
    found = binding()
    found.pass_over(5, 8)
    found.catch_up_to(4)
    assert (found.resent, found.since) == (5, 8)
    found.catch_up_to(5)
    assert (found.resent, found.since) == (0, 8)


def test_a_consumer_is_removed_and_created_again() -> None:
    found = binding()
    found.remove()
    assert found.removed
    found.lie_dormant()
    assert not found.removed


@pytest.mark.sources
def test_an_ended_subscription_lets_those_go_that_wait_for_it_once() -> None:
    found, behind = binding(), SubscriptionState(1, 0)
    found.behind.append(behind)
    found.end_subscription()
    assert found.key == ""
    assert (found.take_behind(), found.take_behind()) == ([behind], [])
    lower = lowered()
    before = lower.drained
    lower.exhaust()
    assert (before, lower.drained) == (False, True)


# -- the session --------------------------------------------------------------------------------------


def test_a_consumer_that_is_configured_otherwise_is_in_the_record() -> None:
    """If the record names it: that of a lowered subscription it does not."""
    client = FakeClient(FakeServices())
    side = FakeSide(client)
    found, other = binding(), ConsumerRef("name", "other", "filter", 10)
    assert client.record is not None
    side.reconfigure(found, other)
    assert (found.consumer, client.record.cons, side.take_record_change()) == (other, {}, False)
    client.record.cons["key"] = other
    side.reconfigure(found, ConsumerRef("name", "third", "filter", 10))
    assert client.record.cons["key"].deliver_subject == "third"
    assert (side.take_record_change(), side.take_record_change()) == (True, False)


def test_one_repair_covers_all_consumers_that_were_deleted_meanwhile() -> None:
    side = FakeSide(FakeClient(FakeServices()))
    assert [side.begin_repair(), side.begin_repair()] == [True, False]
    side.end_repair()
    assert side.begin_repair()


def test_the_source_of_what_an_earlier_connection_has_taken() -> None:
    side = FakeSide(FakeClient(FakeServices()))
    side.resume_from(30)
    side.add_past()
    assert (side.resumed_from, side.machine.sources) == (30, [side.past])
    assert side.machine.reached == 30


def test_assignments_and_notes_of_this_connection() -> None:
    side = FakeSide(FakeClient(FakeServices()))
    known = []
    for sequences in ([], [1, 2], [2, 3]):
        side.know_assignments(sequences)
        known.append(side.assigned)
    assert known == [None, {1, 2}, {1, 2, 3}]
    side.find_note(9)
    side.replace_stream(20)
    assert (side.noted, side.replaced) == (9, 20)
