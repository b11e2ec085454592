# SPDX-License-Identifier: Apache-2.0
"""Rarer steps of a durable session's sender: what was lost on the way, ended subscriptions, replays."""

from __future__ import annotations

import pytest

from mqtt_nats.codec import ProtocolError, ack_bytes
from mqtt_nats.protocol.durable_sender import (
    ID_SPACE,
    RETAINED_BASE,
    RETAINED_SPACE,
    DurableSender,
    packet_id,
    retained_id,
)
from mqtt_nats.protocol.inflight import STORING, SubscriptionState
from tests.protocol.recorder import PUBACK, PUBCOMP, PUBREC, PUBREL, Recorder, session, source


def test_what_was_given_up_is_sent_when_it_comes_again() -> None:
    """Without DUP where it has never left the gateway; before all that is new."""
    one, past = source(), source(0, 0)
    machine, ports = session(one, past, started=False, limit=3)
    machine.arrived(past, 4, 2, b"r4", None, 1)
    machine.start()
    for sequence in (5, 6, 7):
        machine.arrived(one, sequence, 1, b"r%d" % sequence, None, 1)
    machine.acknowledged(PUBACK, [packet_id(7)])
    assert all(map(machine.recall, (packet_id(4), packet_id(6))))
    machine.stop_sending()
    assert (machine.crowd, machine.unsent()) == (0, {6, 7})
    ports.take()
    for sequence in (4, 6, 7):
        machine.arrived(past, sequence, 2, b"s%d" % sequence, None, 1)
    assert ports.take() == []
    machine.go_on()
    assert ports.take() == [("publish", 4, 1, True), ("publish", 6, 1, False)]
    machine.arrived(one, 8, 1, b"r8", None, 1)
    machine.acknowledged(PUBACK, [packet_id(5), packet_id(6)])
    assert ports.take()[2:] == [("publish", 7, 1, False), ("publish", 8, 1, False)]


@pytest.mark.parametrize("lowered", [False, True])
def test_what_an_ended_subscription_has_in_flight_is_taken_back(lowered: bool) -> None:
    """The position has it. Not so of one that was lowered to QoS 0: messages of QoS 0 wait for what was before."""
    one, past = source(), source(0, 0)
    machine, ports = session(one, limit=1)
    for sequence in (5, 6):
        machine.arrived(one, sequence, 1, b"r%d" % sequence, None, 1)
    ports.take()
    if lowered:
        machine.lower(one, 6, retained=False)
    else:
        machine.drain(one, lambda delivery: True)
        machine.forget(one)
    assert machine.recallable(packet_id(5)) is machine.recall(packet_id(5)) is not lowered
    machine.stop_sending()
    assert (machine.crowd, machine.waits(one)) == (int(lowered), lowered)
    for sequence in () if lowered else (5, 6):
        machine.arrived(past, sequence, 2, b"s%d" % sequence, None, 1)
    machine.go_on()
    machine.acknowledged(PUBACK, [packet_id(5)])
    assert [call[1:] for call in ports.take() if call[0] == "publish"] == [(5, 1, False), (6, 1, False)][lowered:]


@pytest.mark.parametrize("kind", [PUBACK, PUBREC])
def test_an_acknowledgement_of_the_other_qos(kind: int) -> None:
    one = source()
    machine, _ = session(one)
    machine.arrived(one, 5, 1, b"r", None, 2 if kind == PUBACK else 1)
    with pytest.raises(ProtocolError):
        machine.acknowledged(kind, [6])
    assert 6 in machine.inflight


def test_a_negative_pubrec_completes_the_message() -> None:
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 5, 1, b"r", None, 2)
    ports.take()
    machine.acknowledged(PUBREC, [6], failed=True)
    assert ports.take() == [("confirm", b"r", 6)]
    machine.acknowledged(PUBREC, [6], failed=True)
    assert ports.take() == []
    machine.arrived(one, 7, 1, b"s", None, 2)
    machine.acknowledged(PUBREC, [8])
    machine.acknowledged(PUBREC, [8], failed=True)
    assert machine.inflight[8].state == STORING, "its record is on the way"


# -- suspect identifiers --------------------------------------------------------------------------


def test_a_suspect_identifier_is_cleared_before_qos_2_uses_it() -> None:
    one = source()
    machine, ports = session(one, started=False)
    machine.suspect(3, 10)
    machine.start()
    machine.arrived(one, 5 + ID_SPACE, 1, b"a", None, 2)
    machine.pump()
    assert ports.take() == [("send", ack_bytes(PUBREL, 6))]
    machine.acknowledged(PUBCOMP, [6])
    assert ports.take() == [("publish", 5 + ID_SPACE, 2, False)], "it has waited, and was not sent"
    machine.arrived(one, 2 + 2 * ID_SPACE, 1, b"c", None, 2)
    machine.arrived(one, 11 + 2 * ID_SPACE, 1, b"d", None, 2)
    machine.arrived(one, 10 + 3 * ID_SPACE, 1, b"e", None, 1)
    assert [call[:2] for call in ports.take()] == [
        ("publish", 2 + 2 * ID_SPACE),
        ("publish", 11 + 2 * ID_SPACE),
        ("publish", 10 + 3 * ID_SPACE),
    ], "not suspect, not suspect, QoS 1"


def test_a_message_sent_again_is_not_suspect_because_of_itself() -> None:
    """A PUBREL would make the client give the identifier up, and then take the message for a new one."""
    one = source()
    machine, ports = session(one, started=False)
    machine.arrived(one, 7, 2, b"a", None, 2)
    machine.suspect(5, 10)
    machine.start()
    assert ports.take() == [("publish", 7, 2, True)]


# -- retained messages ----------------------------------------------------------------------------


def test_retained_messages_are_sent_before_what_waits() -> None:
    one = source()
    machine, ports = session(one)
    one.hold(SubscriptionState.REPLAYING)
    machine.arrived(one, 5, 1, b"r", None, 1)
    machine.replay(one, 3, 2, None, False)
    assert ports.take() == [("publish", -3, 2, False)]
    assert machine.oldest_replayed(one) == 3
    machine.drop_hold(one)
    assert ports.take() == [("publish", 5, 1, False)]
    identifier = retained_id(3)
    machine.acknowledged(PUBREC, [identifier])
    assert ports.take() == [("store", identifier, 3)]
    machine.pubrel_stored(identifier)
    assert not any(delivery.sequence < 0 for delivery in machine.inflight.values())
    machine.pubrel_delivered(identifier, 3, b"record")
    machine.acknowledged(PUBCOMP, [identifier])
    assert ports.take() == [("send", ack_bytes(PUBREL, identifier)), ("ack", b"record")]


def test_new_messages_wait_for_every_replay() -> None:
    """The client has subscribed again while the first was under way, and NATS was lost: that counts once."""
    one = source()
    machine, ports = session(one)
    one.held += 2 * SubscriptionState.REPLAYING
    one.held |= SubscriptionState.RETURNING
    one.held |= SubscriptionState.RETURNING
    machine.arrived(one, 5, 1, b"r", None, 1)
    machine.drop_hold(one)
    machine.drop_hold(one, SubscriptionState.RETURNING)
    machine.drop_hold(one, SubscriptionState.RETURNING)
    assert ports.take() == []
    machine.drop_hold(one)
    assert ports.take() == [("publish", 5, 1, False)]


def test_a_retained_message_whose_pubrel_is_owed_is_not_sent_again() -> None:
    one = source()
    machine, ports = session(one, started=False)
    machine.owe(retained_id(3), 3)
    machine.replay(one, 3, 2, None, True)
    machine.replay(one, 4, 2, None, True)
    machine.start()
    assert ports.take() == [("send", ack_bytes(PUBREL, retained_id(3))), ("publish", -4, 2, True)]


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_message_is_sent_for_all_that_a_pubrel_of_its_sequence_is_owed(attempt: int) -> None:
    """The sequence is of a retained message, or the same message came by a shared subscription [MQTT-4.5.0-1]."""
    one = source()
    machine, ports = session(one, started=False)
    machine.owe(retained_id(3), 3)
    machine.start()
    machine.arrived(one, 2, 1, b"before", None, 1)
    ports.take()
    if attempt == 1:
        assert machine.sent_at_once(one, 3, 2, b"reply")
    else:
        machine.arrived(one, 3, attempt, b"reply", None, 2)
        assert ports.take() == [("publish", 3, 2, True)]
    machine.acknowledged(PUBREC, [packet_id(3)])
    assert ports.take() == [("store", packet_id(3), 3)]


def test_a_groups_copy_has_another_identifier_than_the_pubrel_of_another_groups_copy() -> None:
    """A record of that PUBREL may outlive its end, and would say that the client has this copy."""
    machine, _ = session(source(), started=False)
    first = RETAINED_BASE + 1
    machine.owe(first, 3)
    machine.start()
    machine.pubrel_delivered(first, 3, b"record")
    machine.acknowledged(PUBCOMP, [first])
    assert first not in machine.releases
    assert machine.allocate_packet_id(3) == first + 1


def test_the_identifier_of_a_pubrel_that_was_owed_is_free_for_another_message() -> None:
    machine, _ = session(source(), started=False)
    first = RETAINED_BASE + 1
    machine.owe(first, 3)
    machine.start()
    machine.pubrel_delivered(first, 3, b"record")
    machine.acknowledged(PUBCOMP, [first])
    assert machine.allocate_packet_id(4) == first


@pytest.mark.parametrize("qos", [1, 2])
def test_a_retained_message_passes_over_the_identifier_of_another(qos: int) -> None:
    """It is sent under one that is stored before, and its followers are not held up; so again after a reconnect."""
    one = source()
    machine, ports = session(one)
    own, other = retained_id(3), retained_id(3 + RETAINED_SPACE // 2)
    machine.replay(one, 3, qos, None, False)
    machine.replay(one, 3 + RETAINED_SPACE, qos, None, False)
    machine.replay(one, 4, qos, None, False)
    assert ports.take() == [("publish", -3, qos, False), ("allocate", -3 - RETAINED_SPACE, other)]
    machine.allocation_stored(other)
    assert ports.take() == [("publish", -3 - RETAINED_SPACE, qos, False), ("publish", -4, qos, False)]
    assert machine.retained_identifier(3 + RETAINED_SPACE) == other
    assert machine.forget_absent() == []

    again, ports_again = session(source(), started=False)
    again.restore_identifiers({-3 - RETAINED_SPACE: other})
    again.replayed(again.sources[0], 3)
    assert again.forget_absent() == [], "its replay may still bring it"
    for sequence in (3, 3 + RETAINED_SPACE):
        again.replay(again.sources[0], sequence, qos, None, True)
    again.start()
    assert ports_again.take() == [("publish", -3, qos, True), ("publish", -3 - RETAINED_SPACE, qos, True)]
    assert set(again.inflight) == {own, other}

    if qos == 1:
        machine.acknowledged(PUBACK, [other])
    else:
        machine.acknowledged(PUBREC, [other])
        machine.pubrel_stored(other)
        machine.pubrel_delivered(other, 3 + RETAINED_SPACE, b"record")
        machine.acknowledged(PUBCOMP, [other])
    assert ("end allocation", -3 - RETAINED_SPACE, other) in ports.take()
    machine.allocation_removed(other)
    assert machine.identifiers.allocated == machine.identifiers.used == {}
    assert machine.identifiers.stored == set()


def test_a_further_copy_of_a_retained_message_waits_for_the_first_one() -> None:
    """An allocation has only its sequence."""
    one, two = source(), source()
    machine, ports = session(one, two)
    for each in (one, two):
        machine.replay(each, 3, 1, None, False)
    assert ports.take() == [("publish", -3, 1, False)]
    machine.acknowledged(PUBACK, [retained_id(3)])
    assert ports.take() == [("publish", -3, 1, False)]


def test_an_allocated_identifier_is_not_given_to_a_group() -> None:
    one = source()
    machine, _ = session(one)
    machine.restore_identifiers({-3: RETAINED_BASE + 1})
    assert machine.allocate_packet_id(7) == RETAINED_BASE + 2


def test_allocations_of_retained_messages_that_do_not_come_again_end() -> None:
    one = source()
    machine, _ = session(one)
    machine.restore_identifiers({-3: RETAINED_BASE + 1})
    assert machine.forget_absent() == [(-3, RETAINED_BASE + 1)]


def released(machine: DurableSender, sequence: int) -> None:
    """A retained message is on its way, and the client completes it."""
    identifier = retained_id(sequence)
    machine.acknowledged(PUBREC, [identifier])
    machine.pubrel_stored(identifier)
    machine.pubrel_delivered(identifier, sequence, b"r%d" % sequence)
    machine.acknowledged(PUBCOMP, [identifier])


def acks(ports: Recorder) -> list[object]:
    """What was acknowledged since the last look."""
    return [call[1] for call in ports.take() if call[0] == "ack"]


def test_records_of_retained_messages_stay_while_they_would_be_sent_again() -> None:
    """[MQTT-4.3.3-6] (5.0): the next connection goes on at the cursor, and knows by them what the client has."""
    one = source()
    machine, ports = session(one)
    machine.replayed(one, 1)
    for sequence in (3, 4, 5):
        machine.replay(one, sequence, 2, None, False)
        released(machine, sequence)
    assert (acks(ports), machine.keeps) == ([], True)
    machine.replayed(one, 4)
    assert acks(ports) == [b"r3"]
    machine.replayed(one, None)
    assert (acks(ports), machine.keeps) == ([b"r4", b"r5"], False)


def test_a_subscription_that_ends_keeps_no_records() -> None:
    one = source()
    machine, ports = session(one)
    machine.replayed(one, 1)
    machine.replay(one, 3, 2, None, False)
    released(machine, 3)
    machine.drain(one)
    assert (acks(ports), machine.cursors) == ([b"r3"], {})


def test_pubcomp_before_the_replay_goes_on() -> None:
    """[MQTT-4.3.3-6] (5.0): PUBREL leaves before the retained messages are read, and the client may be faster."""
    one = source()
    machine, ports = session(one, started=False)
    machine.owe(retained_id(3), 3)
    machine.replayed(one, 1)
    machine.start()
    machine.pubrel_delivered(retained_id(3), 3, b"r3")
    machine.acknowledged(PUBCOMP, [retained_id(3)])
    ports.take()
    for sequence in (3, 4):
        machine.replay(one, sequence, 2, None, True)
    assert ports.take() == [("publish", -4, 2, True)]
    machine.replayed(one, 4)
    assert acks(ports) == [b"r3"]


def test_another_subscription_gets_its_own_copy_of_a_retained_message() -> None:
    """[MQTT-3.3.4-5] (5.0): what one has is not what the other waits for."""
    one, other = source(), source()
    machine, ports = session(one, other, started=False)
    machine.owe(retained_id(3), 3)
    machine.replayed(one, 3)
    machine.replayed(other, 3)
    machine.start()
    machine.replay(one, 3, 2, None, True)
    machine.replay(other, 3, 2, None, True)
    released(machine, 3)
    assert ports.take() == [("send", ack_bytes(PUBREL, retained_id(3)))] * 2
    machine.replayed(one, 4)
    assert ports.take() == [("ack", b"r3"), ("publish", -3, 2, True)]


def test_a_retained_message_that_is_sent_anew_waits_for_no_record() -> None:
    """The client has subscribed again [MQTT-3.3.1-9] (5.0)."""
    one = source()
    machine, ports = session(one)
    machine.replayed(one, 1)
    machine.replay(one, 3, 2, None, False)
    released(machine, 3)
    ports.take()
    machine.replayed(one, 1)
    machine.replay(one, 3, 2, None, False)
    assert ports.take() == [("ack", b"r3"), ("publish", -3, 2, False)]
    released(machine, 3)
    assert (acks(ports), machine.keeps) == ([], True)


# -- ended subscriptions --------------------------------------------------------------------------


def test_qos_0_takes_the_place_of_a_subscription() -> None:
    """[MQTT-3.8.4-4] (5.0): what waits is sent, as far as the reader has come, and who waits for that is told."""
    one, other = source(), source()
    machine, ports = session(one, other)
    one.hold(SubscriptionState.REPLAYING)
    for sequence in (5, 6, 7):
        machine.arrived(one, sequence, 1, b"r%d" % sequence, None, 2)
    machine.arrived(one, 8, 1, b"r8", None, 2)
    machine.read_to(9)
    ports.take()
    machine.lower(one, 7, False)
    assert (one.end, one.whole) == (9, True)
    machine.lower(other, 12, False)
    assert (other.end, other.whole) == (12, True), "the reader has yet to bring what was stored before"
    assert not ports.take()
    assert machine.waits(one)
    machine.drop_hold(one)
    assert [call[1] for call in ports.take()] == [5, 6, 7, 8]
    assert ports.written == [one] * 4
    assert not machine.waits(one)


def test_drain() -> None:
    """What was sent is completed, or may have been sent by an earlier connection; the rest is let go."""
    one, other = source(), source()
    machine, ports = session(one, other, started=False, limit=2)
    machine.arrived(one, 5, 2, b"sent before", None, 2)
    machine.arrived(one, 6, 2, b"perhaps", None, 2)
    machine.arrived(other, 7, 2, b"other", None, 2)
    machine.arrived(one, 8, 2, b"perhaps too", None, 2)
    machine.arrived(one, 9, 1, b"new", None, 2)
    machine.start()
    assert [call[1] for call in ports.take()] == [5, 6]
    ended: list[int] = []
    machine.on_drained_message = lambda delivery: ended.append(delivery.sequence)
    assert [delivery.sequence for delivery in machine.drain(one)] == [5, 6, 8]
    assert one.end == 9
    assert ports.take() == [("ack", b"new")]
    machine.acknowledged(PUBREC, [packet_id(5), packet_id(6)])
    machine.pubrel_stored(packet_id(5))
    machine.pubrel_stored(packet_id(6))
    assert [call[1] for call in ports.take() if call[0] == "publish"] == [7, 8]
    assert ended == [5, 6]
    assert machine.holds(one)
    machine.acknowledged(PUBREC, [packet_id(8)])
    machine.pubrel_stored(packet_id(8))
    for identifier in (packet_id(5), packet_id(6)):
        machine.confirmed(identifier)
    assert machine.holds(one), "its acknowledgement is not confirmed"
    machine.confirmed(packet_id(8))
    assert not machine.holds(one)
    assert ended == [5, 6, 8, 5, 6, 8]
    assert machine.holds(other)


def test_drain_of_what_was_held_back() -> None:
    one = source()
    machine, ports = session(one)
    one.hold(SubscriptionState.REPLAYING)
    machine.arrived(one, 5, 1, b"held", None, 1)
    machine.replay(one, 3, 1, None, False)
    machine.replay(one, 3 + 16384, 1, None, False)
    ports.take()
    assert [delivery.sequence for delivery in machine.drain(one)] == [-3]
    assert ports.take() == [("ack", b"held")]
    assert not machine.others
    machine.drop_hold(one)
    assert ports.take() == []


def test_what_stands_behind_an_ended_subscription() -> None:
    """It is kept back until that has brought what is older, for as many as stand before it."""
    ended, heir = source(), source()
    machine, ports = session(ended, heir)
    heir.held += 2 * SubscriptionState.BEHIND + SubscriptionState.REPLAYING
    machine.drain(ended)
    ended.end_at(6)
    machine.arrived(heir, 7, 1, b"new", None, 1)
    machine.arrived(ended, 6, 1, b"old", None, 1)
    machine.drop_hold(heir, SubscriptionState.BEHIND)
    machine.drop_hold(heir)
    assert ports.take() == [("publish", 6, 1, False)]
    machine.drop_hold(heir, SubscriptionState.BEHIND)
    assert ports.take() == [("publish", 7, 1, False)]
