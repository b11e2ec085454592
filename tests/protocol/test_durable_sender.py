# SPDX-License-Identifier: Apache-2.0
"""Single steps of a durable session's sender: each test is a way to lose a message or to send one twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mqtt_nats.codec import ack_bytes
from mqtt_nats.protocol.durable_sender import ID_SPACE, RETAINED_BASE, DurableSender, packet_id, retained_id
from mqtt_nats.protocol.inflight import Delivery, SubscriptionState
from tests.protocol.recorder import PUBACK, PUBCOMP, PUBREC, PUBREL, session, source


def test_identifiers() -> None:
    assert packet_id(ID_SPACE - 1) == ID_SPACE
    assert packet_id(ID_SPACE) == 1
    assert packet_id(1) == 2
    assert {retained_id(sequence) for sequence in range(16384)} == set(range(RETAINED_BASE, 65536))


def test_qos_1() -> None:
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 5, 1, b"r5", None, 1)
    assert ports.take() == [("publish", 5, 1, False)]
    machine.acknowledged(PUBACK, [6, 6, 99])
    assert ports.take() == [("ack", b"r5")]


def test_qos_2() -> None:
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 5, 1, b"r5", None, 2)
    assert ports.take() == [("publish", 5, 2, False)]
    machine.acknowledged(PUBREC, [6])
    assert ports.take() == [("store", 6, 5)]
    machine.acknowledged(PUBREC, [6])
    assert ports.take() == [], "the record is being stored"
    machine.pubrel_stored(6)
    assert ports.take() == [("send", ack_bytes(PUBREL, 6)), ("confirm", b"r5", 6)]
    machine.acknowledged(PUBREC, [6])
    assert ports.take() == [("send", ack_bytes(PUBREL, 6))]
    machine.acknowledged(PUBCOMP, [6])
    machine.pubrel_delivered(6, 5, b"record")
    assert ports.take() == [], "the record stays until the message is known to be acknowledged"
    machine.confirmed(6)
    assert ports.take() == [("ack", b"record")]
    assert not machine.releases


@pytest.mark.parametrize("order", ["pcr", "prc", "cpr", "crp", "rpc", "rcp"])
def test_a_release_ends_with_the_last_of_three(order: str) -> None:
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 5, 1, b"r5", None, 2)
    machine.acknowledged(PUBREC, [6])
    machine.pubrel_stored(6)
    ports.take()
    steps = {
        "p": lambda: machine.acknowledged(PUBCOMP, [6]),
        "c": lambda: machine.confirmed(6),
        "r": lambda: machine.pubrel_delivered(6, 5, b"record"),
    }
    for step in order:
        assert 6 in machine.releases
        steps[step]()
    assert not machine.releases
    assert ports.take() == [("ack", b"record")]


def test_a_record_may_overtake_its_own_pub_ack() -> None:
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 5, 1, b"r5", None, 2)
    machine.acknowledged(PUBREC, [6])
    machine.pubrel_delivered(6, 5, b"record")
    ports.take()
    machine.pubrel_stored(6)
    machine.acknowledged(PUBCOMP, [6])
    machine.confirmed(6)
    assert ports.take()[-1] == ("ack", b"record")


def test_an_old_record_is_not_taken_for_the_one_being_stored() -> None:
    """Else the new record would be acknowledged on arrival, and nobody would know of the PUBREL after a crash."""
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 5 + ID_SPACE, 1, b"r", None, 2)
    machine.acknowledged(PUBREC, [6])
    machine.pubrel_delivered(6, 5, b"old record")
    machine.pubrel_stored(6)
    machine.pubrel_delivered(6, 5 + ID_SPACE, b"new record")
    assert ("ack", b"old record") in ports.take()
    machine.acknowledged(PUBCOMP, [6])
    machine.confirmed(6)
    assert ports.take() == [("ack", b"new record")]


def test_a_record_that_was_stored_twice_is_removed_twice() -> None:
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 5, 1, b"r5", None, 2)
    machine.acknowledged(PUBREC, [6])
    machine.pubrel_stored(6)
    machine.pubrel_delivered(6, 5, b"first")
    machine.pubrel_delivered(6, 5, b"second")
    machine.confirmed(6)
    ports.take()
    machine.acknowledged(PUBCOMP, [6])
    assert ports.take() == [("ack", b"first"), ("ack", b"second")]


def test_pubrels_come_first_on_resume_and_their_messages_are_never_sent() -> None:
    one = source()
    machine, ports = session(one, started=False)
    machine.owe(6, 5)
    machine.arrived(one, 5, 2, b"r5", None, 2)
    machine.arrived(one, 7, 2, b"r7", None, 2)
    machine.arrived(one, 9, 1, b"r9", None, 2)
    assert ports.take() == [("confirm", b"r5", 6)]
    machine.start()
    assert ports.take() == [("send", ack_bytes(PUBREL, 6)), ("publish", 7, 2, True), ("publish", 9, 2, False)]


def test_a_record_that_went_away_after_it_was_read() -> None:
    """The connection before had acknowledged it. Its identifier is free when the client has answered."""
    one = source()
    machine, ports = session(one, started=False)
    machine.owe(6, 5)
    machine.owe(7, 6)
    machine.start()
    machine.vanished(6, 5)  # but the client may not have let it go
    assert ports.take() == [("send", ack_bytes(PUBREL, 6)), ("send", ack_bytes(PUBREL, 7))]
    assert ports.sought == 0
    machine.acknowledged(PUBCOMP, [6, 7])
    assert ports.sought == 2
    assert machine.unrecorded() == {6: 5, 7: 6}
    machine.vanished(6, 4)  # another one of that identifier
    assert not ports.take()
    machine.vanished(6, 5)
    machine.arrived(one, 5 + ID_SPACE, 1, b"next", None, 1)
    assert ports.take() == [("publish", 5 + ID_SPACE, 1, False)]
    machine.pubrel_delivered(6, 5, b"late")
    machine.pubrel_delivered(7, 6, b"record")
    assert ports.take() == [("ack", b"late"), ("ack", b"record")]
    assert not machine.releases


@pytest.mark.parametrize("when", ["before the start", "in flight"])
def test_a_record_that_an_earlier_connection_has_stored_late_is_kept(when: str) -> None:
    """It came after the records were read. Its removal would follow late, too, when the next connection has read it."""
    one = source()
    machine, ports = session(one, started=False)
    if when == "before the start":
        machine.pubrel_delivered(6, 5, b"late")
    machine.arrived(one, 5, 2, b"r5", None, 2)
    machine.start()
    if when == "in flight":
        machine.pubrel_delivered(6, 5, b"late")
    assert ports.take() == [("publish", 5, 2, True)]
    machine.acknowledged(PUBREC, [6])
    machine.pubrel_stored(6)
    machine.confirmed(6)
    ports.take()
    machine.acknowledged(PUBCOMP, [6])
    assert ports.take() == [("ack", b"late")]
    machine.pubrel_delivered(6, 5, b"record")
    assert ports.take() == [("ack", b"record")]


def test_a_late_record_of_a_message_that_waits_for_the_window_is_kept() -> None:
    one = source()
    machine, ports = session(one, started=False)
    machine.limit_window(1)
    machine.start()
    machine.arrived(one, 4, 1, b"r4", None, 2)
    machine.arrived(one, 5, 1, b"r5", None, 2)
    machine.pubrel_delivered(6, 5, b"late")
    assert ports.take() == [("publish", 4, 2, False)]


def test_a_late_record_whose_message_does_not_come_is_owed() -> None:
    """The connection before has stored it and acknowledged the message after the records were read."""
    one = source()
    machine, ports = session(one, started=False)
    machine.pubrel_delivered(6, 5, b"late")
    machine.start()
    assert ports.take() == [("send", ack_bytes(PUBREL, 6))]
    machine.acknowledged(PUBCOMP, [6])
    assert ports.take() == [("ack", b"late")]
    machine.arrived(one, 5, 2, b"r5", None, 2)
    assert ports.take() == [("ack", b"r5")]


def test_a_late_record_is_not_owed_when_another_message_has_its_identifier() -> None:
    """The client has answered it. Once more, it would give up the message that has the identifier now."""
    one = source()
    machine, ports = session(one, started=False)
    machine.arrived(one, 5 + ID_SPACE, 2, b"r", None, 2)
    machine.pubrel_delivered(6, 5, b"late")
    machine.start()
    assert ports.take() == [("ack", b"late"), ("publish", 5 + ID_SPACE, 2, True)]


def test_a_late_record_is_owed_when_a_message_with_its_identifier_was_never_sent() -> None:
    one = source()
    machine, ports = session(one, started=False)
    machine.arrived(one, 5 + ID_SPACE, 1, b"r", None, 2)
    machine.pubrel_delivered(6, 5, b"late")
    machine.start()
    assert ports.take()[0] == ("send", ack_bytes(PUBREL, 6))


def test_a_late_record_of_a_replaced_stream_is_not_taken_for_the_present_message() -> None:
    one = source()
    machine, ports = session(one, started=False)
    machine.replaced(4)
    machine.pubrel_delivered(6, 5, b"late")
    machine.start()
    machine.acknowledged(PUBCOMP, [6])
    assert ports.take() == [("send", ack_bytes(PUBREL, 6)), ("ack", b"late")]
    machine.arrived(one, 5, 1, b"r5", None, 2)
    assert ports.take() == [("publish", 5, 2, False)]


def test_a_late_record_of_a_retained_message_that_may_be_replayed_is_kept() -> None:
    one = source()
    machine, ports = session(one, started=False)
    machine.replayed(one, 3)
    machine.start()
    machine.pubrel_delivered(retained_id(5), 5, b"late")
    assert ports.take() == []
    machine.pubrel_delivered(retained_id(2), 2, b"of a message that is complete")
    assert ports.take() == [("ack", b"of a message that is complete")]


def test_a_late_record_of_a_retained_message_is_owed_although_a_replay_goes_on() -> None:
    """A newer message may have taken its place; if the replay brings it again, it is not sent."""
    one = source()
    machine, ports = session(one, started=False)
    machine.replayed(one, 3)
    machine.pubrel_delivered(retained_id(5), 5, b"late")
    machine.start()
    assert ports.take() == [("send", ack_bytes(PUBREL, retained_id(5)))]


def test_a_redelivery_that_comes_after_its_pubcomp_is_not_sent() -> None:
    one = source()
    machine, ports = session(one, started=False)
    machine.owe(6, 5)
    machine.start()
    machine.pubrel_delivered(6, 5, b"record")
    machine.acknowledged(PUBCOMP, [6])
    ports.take()
    machine.arrived(one, 5, 2, b"r5", None, 2)
    assert ports.take() == [("ack", b"r5")]


def test_a_first_delivery_that_comes_after_its_pubcomp_is_not_sent() -> None:
    """Consumers that nats-server's listener has moved on say less than the records of PUBREL."""
    one = source()
    machine, ports = session(one, started=False)
    machine.owe(6, 5)
    machine.start()
    machine.pubrel_delivered(6, 5, b"record")
    machine.acknowledged(PUBCOMP, [6])
    ports.take()
    assert not machine.sent_at_once(one, 5, 2, b"r5")
    machine.arrived(one, 5, 1, b"r5", None, 2)
    assert ports.take() == [("ack", b"r5")]
    assert machine.sent_at_once(one, 6, 2, b"r6")


def test_a_message_gets_another_identifier_while_its_own_is_in_use() -> None:
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 5, 1, b"a", None, 2)
    machine.arrived(one, 5 + ID_SPACE, 1, b"b", None, 1)
    machine.arrived(one, 6 + ID_SPACE, 1, b"c", None, 1)
    other = (5 + ID_SPACE + ID_SPACE // 2) % ID_SPACE + 1
    assert ports.take() == [("publish", 5, 2, False), ("allocate", 5 + ID_SPACE, other)], "what follows waits: order"
    machine.allocation_stored(other)
    assert ports.take() == [("publish", 5 + ID_SPACE, 1, False), ("publish", 6 + ID_SPACE, 1, False)]
    assert {delivery.id for delivery in machine.inflight.values()} == {6, other, 7}


def test_window() -> None:
    one = source()
    machine, ports = session(one, limit=2)
    for sequence in (1, 2, 3):
        machine.arrived(one, sequence, 1, b"r%d" % sequence, None, 1)
    assert [call[1] for call in ports.take()] == [1, 2]
    assert not machine.sent_at_once(one, 4, 1, b"r4")
    machine.acknowledged(PUBACK, [packet_id(1)])
    assert ports.take() == [("ack", b"r1"), ("publish", 3, 1, False)]


def keep_back(machine: DurableSender) -> None:
    """Let an older message wait for the retained messages of its subscription."""
    held = source()
    held.hold(SubscriptionState.REPLAYING)
    machine.arrived(held, 6, 1, b"held", None, 1)


# What the shortcut must leave to `arrived`, by preparation.
REFUSED: dict[str, Callable[[DurableSender, SubscriptionState], object]] = {
    "not started": lambda machine, one: machine.close(),
    "held back": lambda machine, one: one.hold(SubscriptionState.REPLAYING),
    "ended": lambda machine, one: one.end_at(9),
    "older": lambda machine, one: machine.read_to(7),
    "others wait": lambda machine, one: keep_back(machine),
    "perhaps sent": lambda machine, one: machine.sent_perhaps(7),
    "suspect": lambda machine, one: machine.suspect(1, 3),
    "replaced": lambda machine, one: machine.replaced(3),
    "identifier in use": lambda machine, one: machine.inflight.update(
        {8: Delivery(one, 7 + ID_SPACE, 8, 1, None, b"", False)}
    ),
    "identifier owed": lambda machine, one: machine.owe(8, 7 + ID_SPACE),
    "identifier in use by a complete message": lambda machine, one: machine.identifiers.await_confirmation(8, 1),
    "owed": lambda machine, one: machine.owe(9, 7),
    "window": lambda machine, one: machine.limit_window(0),
}


@pytest.mark.parametrize("reason", [*REFUSED, ""])
def test_the_shortcut(reason: str) -> None:
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 6, 1, b"r", None, 1)
    machine.acknowledged(PUBACK, [7])
    ports.take()
    if not reason:
        assert machine.sent_at_once(one, 7, 1, b"r")
        assert machine.inflight[8].sequence == one.last == machine.reached == 7
        assert not machine.sent_at_once(one, 7, 1, b"r")
        machine.acknowledged(PUBACK, [8])
        assert ports.take() == [("ack", b"r")]
        return
    REFUSED[reason](machine, one)
    before = dict(machine.inflight)
    assert not machine.sent_at_once(one, 7, 1, b"r")
    assert machine.inflight == before


def test_a_message_on_its_way_comes_once() -> None:
    """Whether it waits, is in flight, or its PUBREL is being stored."""
    one = source()
    machine, ports = session(one, limit=1)
    for sequence in (5, 6):
        machine.arrived(one, sequence, 1, b"r%d" % sequence, None, 2)
    machine.acknowledged(PUBREC, [6])
    assert ports.take() == [("publish", 5, 2, False), ("store", 6, 5)]
    for sequence in (5, 6):
        machine.arrived(one, sequence, 2, b"again", None, 2)
    assert (machine.crowd, ports.take()) == (1, [])
    machine.pubrel_stored(6)
    assert ports.take()[1:] == [("confirm", b"r5", 6), ("publish", 6, 2, False)]


def test_how_far_everything_has_come() -> None:
    """A message of a new subscription may be older; what no subscription matches counts, too."""
    one = source()
    machine, _ = session(one)
    machine.arrived(one, 5, 1, b"r5", None, 1)
    assert machine.sent_at_once(one, 6, 1, b"r6")
    machine.arrived(one, 4, 1, b"r4", None, 1)
    assert (machine.past_all(6), machine.past_all(7)) == (True, False)
    machine.read_to(9)
    machine.read_to(8)
    assert (machine.past_all(9), machine.past_all(10)) == (True, False)
    machine.close()
    assert not machine.past_all(9)
