# SPDX-License-Identifier: Apache-2.0
"""Single steps of a durable session's sender: each test is a way to lose a message or to send one twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mqtt_nats.codec import ProtocolError, ack_bytes
from mqtt_nats.session.delivery import STORING, Delivery, Source
from mqtt_nats.session.durable import ID_SPACE, DurableOutbound, packet_id
from mqtt_nats.session.unsequenced import RETAINED_BASE, retained_id

PUBACK, PUBREC, PUBREL, PUBCOMP = 4, 5, 6, 7


class Recorder:
    """Ports that write down what is asked of them, oldest first."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.sought = 0

    def send(self, data: bytes) -> None:
        self.calls.append(("send", data))

    def publish(self, delivery: Delivery, dup: bool) -> bool:
        self.calls.append(("publish", delivery.sequence, delivery.qos, dup))
        return True

    def ack(self, reply: bytes) -> None:
        self.calls.append(("ack", reply))

    def ack_confirmed(self, reply: bytes, identifier: int) -> None:
        self.calls.append(("confirm", reply, identifier))

    def store_pubrel(self, identifier: int, sequence: int) -> None:
        self.calls.append(("store", identifier, sequence))

    def look(self, source: Source, sequence: int) -> None:
        self.calls.append(("look", sequence))

    def seek(self) -> None:
        self.sought += 1

    def take(self) -> list[tuple[object, ...]]:
        """What was asked since the last look."""
        calls, self.calls = self.calls, []
        return calls


def session(*sources: Source, limit: int = 10, started: bool = True) -> tuple[DurableOutbound, Recorder]:
    ports = Recorder()
    machine = DurableOutbound(limit, ports)
    machine.sources.extend(sources)
    if started:
        machine.start()
    return machine, ports


def source(qos: int = 2, start: int = 1, window: int = 100) -> Source:
    return Source(qos, start, window)


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
    machine.arrived(one, 5, 2, b"r5b", None, 1)
    assert ports.take() == [("ack", b"r5b")], "its acknowledgement was lost; the client has it"


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
    machine.arrived(one, 5 + ID_SPACE, 1, b"next", None, 1)
    assert ports.take() == [("send", ack_bytes(PUBREL, 6)), ("send", ack_bytes(PUBREL, 7))]
    assert ports.sought == 0
    machine.acknowledged(PUBCOMP, [6, 7])
    assert ports.sought == 2
    assert machine.unrecorded() == {6: 5, 7: 6}
    machine.vanished(6, 4)  # another one of that identifier
    assert not ports.take()
    machine.vanished(6, 5)
    assert ports.take() == [("publish", 5 + ID_SPACE, 1, False)]
    machine.pubrel_delivered(6, 5, b"late")
    machine.pubrel_delivered(7, 6, b"record")
    assert ports.take() == [("ack", b"late"), ("ack", b"record")]
    assert not machine.releases


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
    """nats-server was killed, and has forgotten that it delivered the message."""
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


def test_a_message_waits_while_its_identifier_is_in_use() -> None:
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 5, 1, b"a", None, 2)
    machine.arrived(one, 5 + ID_SPACE, 1, b"b", None, 1)
    machine.arrived(one, 6 + ID_SPACE, 1, b"c", None, 1)
    assert ports.take() == [("publish", 5, 2, False)], "what comes later waits too: order"
    machine.acknowledged(PUBREC, [6])
    machine.pubrel_stored(6)
    machine.pubrel_delivered(6, 5, b"record")
    machine.confirmed(6)
    ports.take()
    machine.acknowledged(PUBCOMP, [6])
    assert ports.take() == [
        ("ack", b"record"),
        ("publish", 5 + ID_SPACE, 1, False),
        ("publish", 6 + ID_SPACE, 1, False),
    ]


def test_a_quiet_consumer_is_asked_before_an_identifier_could_be_shared() -> None:
    busy, quiet = source(), source()
    machine, ports = session(busy, quiet)
    machine.arrived(busy, ID_SPACE, 1, b"a", None, 1)
    assert ports.take() == [("publish", ID_SPACE, 1, False)]
    machine.arrived(busy, ID_SPACE + 5, 1, b"b", None, 1)
    assert ports.take() == [("look", ID_SPACE + 5)]
    machine.looked(quiet, ID_SPACE + 5, 4, 1)
    assert ports.take() == [], "it has a message that is older"
    machine.arrived(quiet, 4, 1, b"c", None, 1)
    assert ports.take() == [("publish", 4, 1, False), ("look", ID_SPACE + 5)]
    machine.looked(quiet, ID_SPACE + 5, 4, 0)
    assert ports.take() == [("publish", ID_SPACE + 5, 1, False)]


def test_messages_that_have_expired_do_not_hold_others_up() -> None:
    busy, quiet = source(), source()
    machine, ports = session(busy, quiet)
    machine.arrived(busy, ID_SPACE + 5, 1, b"b", None, 1)
    ports.take()
    machine.looked(quiet, ID_SPACE + 5, 0, 0)
    assert ports.take() == [("publish", ID_SPACE + 5, 1, False)]


def test_a_consumer_that_never_had_anything_does_not_hold_others_up() -> None:
    """It is just before its first sequence, as JetStream says, though nothing has come."""
    busy, quiet = Source(2, 7, 100), Source(2, 7, 100)
    machine, ports = session(busy, quiet)
    for sequence in (ID_SPACE + 7, 2 * ID_SPACE + 8):
        machine.arrived(busy, sequence, 1, b"a", None, 1)
        assert ports.take() == [("look", sequence)]
        machine.looked(quiet, sequence, 6, 0)
        assert ports.take() == [("publish", sequence, 1, False)]


def test_window() -> None:
    one = source()
    machine, ports = session(one, limit=2)
    for sequence in (1, 2, 3):
        machine.arrived(one, sequence, 1, b"r%d" % sequence, None, 1)
    assert [call[1] for call in ports.take()] == [1, 2]
    assert not machine.sent_at_once(one, 4, 1, b"r4")
    machine.acknowledged(PUBACK, [packet_id(1)])
    assert ports.take() == [("ack", b"r1"), ("publish", 3, 1, False)]


def behind() -> Source:
    """A consumer that is more than all identifiers behind."""
    other = source(start=-ID_SPACE)
    other.last = -ID_SPACE
    return other


# What the shortcut must leave to `arrived`, by preparation.
REFUSED: dict[str, Callable[[DurableOutbound, Source], object]] = {
    "not started": lambda machine, one: setattr(machine, "open", False),
    "held back": lambda machine, one: setattr(one, "held", True),
    "ended": lambda machine, one: setattr(one, "end", 9),
    "the first since it was attached": lambda machine, one: one.attaching(),
    "repeated": lambda machine, one: setattr(one, "last", 7),
    "suspect": lambda machine, one: machine.suspect(1, 3),
    "identifier in use": lambda machine, one: machine.inflight.update(
        {8: Delivery(one, 7 + ID_SPACE, 8, 1, None, b"", False)}
    ),
    "identifier owed": lambda machine, one: machine.owe(8, 7 + ID_SPACE),
    "window": lambda machine, one: setattr(machine, "limit", 0),
    "another consumer": lambda machine, one: machine.sources.append(behind()),
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
        assert machine.inflight[8].sequence == one.last == 7
        assert not machine.sent_at_once(one, 7, 1, b"r")
        machine.acknowledged(PUBACK, [8])
        assert ports.take() == [("ack", b"r")]
        return
    REFUSED[reason](machine, one)
    before = dict(machine.inflight)
    assert not machine.sent_at_once(one, 7, 1, b"r")
    assert machine.inflight == before


def test_ack_wait_of_a_message_in_flight_changes_only_its_reply() -> None:
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 5, 1, b"first", None, 1)
    machine.arrived(one, 5, 2, b"second", None, 1)
    assert ports.take() == [("publish", 5, 1, False)]
    machine.acknowledged(PUBACK, [6])
    assert ports.take() == [("ack", b"second")]


def test_what_was_done_before_the_last_window_is_not_sent_again() -> None:
    """The next leader of a consumer may know of neither the last deliveries nor the last acknowledgements."""
    one = source(window=2)
    machine, ports = session(one)
    for sequence in range(5, 12):
        machine.arrived(one, sequence, 1, b"r%d" % sequence, None, 1)
        machine.acknowledged(PUBACK, [packet_id(sequence)])
    ports.take()
    one.attaching()
    machine.arrived(one, 6, 2, b"s6", None, 1)
    machine.arrived(one, 11, 2, b"s11", None, 1)
    assert ports.take() == [("ack", b"s6"), ("ack", b"s11")]
    one.attaching()
    machine.arrived(one, 6, 3, b"t6", None, 1)
    assert ports.take() == [("ack", b"t6")]


def test_what_was_lost_on_the_way_is_sent_for_all_that_came_after_it() -> None:
    """Also when the consumer is attached between the two, and begins with what is new."""
    one = source(window=2)
    machine, ports = session(one)
    machine.arrived(one, 5, 1, b"r5", None, 1)
    machine.acknowledged(PUBACK, [packet_id(5)])
    one.attaching()
    machine.arrived(one, 7, 1, b"r7", None, 1)
    machine.acknowledged(PUBACK, [packet_id(7)])
    ports.take()
    machine.arrived(one, 6, 2, b"s6", None, 1)
    assert ports.take() == [("publish", 6, 1, True)]


def test_what_was_given_up_is_sent_when_it_comes_again() -> None:
    """It has been here, and is not done; not even when something after it is."""
    one = source(window=2)
    machine, ports = session(one)
    for sequence in (5, 6, 7):
        machine.arrived(one, sequence, 1, b"r%d" % sequence, None, 1)
    machine.acknowledged(PUBACK, [packet_id(7)])
    one.attaching()
    machine.arrived(one, 8, 1, b"r8", None, 1)
    assert machine.recall(packet_id(6))
    machine.stall()
    ports.take()
    one.attaching()
    for sequence in (5, 6, 7):
        machine.arrived(one, sequence, 2, b"s%d" % sequence, None, 1)
    machine.go_on()
    assert ports.take() == [("ack", b"s7"), ("publish", 6, 1, False)]


def test_what_a_killed_server_has_forgotten_is_not_sent_again() -> None:
    """It delivers for the first time once more what is done, what is in flight, and what is new."""
    one = source()
    machine, ports = session(one)
    for sequence in (5, 6):
        machine.arrived(one, sequence, 1, b"r%d" % sequence, None, 1)
    machine.acknowledged(PUBACK, [6])
    ports.take()
    for sequence in (5, 6, 7):
        machine.arrived(one, sequence, 1, b"s%d" % sequence, None, 1)
    assert ports.take() == [("ack", b"s5"), ("publish", 7, 1, False)]
    machine.acknowledged(PUBACK, [7])
    assert ports.take() == [("ack", b"s6")]


def test_a_second_consumer_gets_its_own_acknowledgement() -> None:
    one, two = source(), source()
    machine, ports = session(one, two)
    machine.arrived(one, 5, 1, b"one", None, 2)
    machine.arrived(two, 5, 1, b"two", None, 2)
    machine.arrived(two, 5, 2, b"two again", None, 2)
    machine.acknowledged(PUBREC, [6])
    machine.pubrel_stored(6)
    assert {call for call in ports.take() if call[0] == "confirm"} == {
        ("confirm", b"one", 6),
        ("confirm", b"two", 6),
        ("confirm", b"two again", 6),
    }
    machine.arrived(two, 5, 3, b"two late", None, 2)
    assert ports.take() == [("confirm", b"two late", 6)]


def test_what_an_ended_subscription_sent_keeps_dup_and_qos() -> None:
    """The copy of a second consumer came first after a resume, and says neither."""
    ended, other = source(2), source(1)
    machine, ports = session(ended, other, started=False)
    machine.arrived(other, 5, 1, b"other", None, 1)
    machine.arrived(ended, 5, 2, b"ended", None, 2)
    machine.start()
    assert ports.take() == [("publish", 5, 2, True)]


def test_passed_over() -> None:
    one = source()
    machine, ports = session(one)
    one.expected = 1
    machine.passed_over(one, 5, 2, b"r")
    assert ports.take() == [("ack", b"r")]
    assert one.last == 5
    assert one.collected
    machine.arrived(one, 5, 3, b"r again", None, 1)
    assert ports.take() == [("ack", b"r again")], "the other consumer's subscription has ended since"


def test_what_one_consumer_passes_over_another_one_still_delivers() -> None:
    """Its first delivery was lost in a gap, so it comes as a repetition, after the copy of the other."""
    owner, other = source(), source()
    machine, ports = session(owner, other)
    machine.passed_over(other, 5, 1, b"other")
    machine.arrived(owner, 5, 2, b"owner", None, 1)
    assert ports.take() == [("ack", b"other"), ("publish", 5, 1, True)]


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
    assert ports.take() == [("ack", b"r")]
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
    machine.arrived(one, 5 + ID_SPACE, 2, b"b", None, 2)
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
    one.expected = 2
    machine.arrived(one, 7, 2, b"a", None, 2)
    assert one.missing == 1
    machine.suspect(5, 10)
    machine.start()
    assert ports.take() == [("publish", 7, 2, True)]


# -- retained messages ----------------------------------------------------------------------------


def test_retained_messages_are_sent_before_what_waits() -> None:
    one = source()
    machine, ports = session(one)
    one.held = Source.REPLAYING
    machine.arrived(one, 5, 1, b"r", None, 1)
    machine.replay(one, 3, 2, None, False)
    assert ports.take() == [("publish", -3, 2, False)]
    assert machine.oldest_replayed(one) == 3
    machine.release_held(one)
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
    one.held += 2 * Source.REPLAYING
    one.held |= Source.RETURNING
    one.held |= Source.RETURNING
    machine.arrived(one, 5, 1, b"r", None, 1)
    machine.release_held(one)
    machine.release_held(one, Source.RETURNING)
    machine.release_held(one, Source.RETURNING)
    assert ports.take() == []
    machine.release_held(one)
    assert ports.take() == [("publish", 5, 1, False)]


def test_a_retained_message_whose_pubrel_is_owed_is_not_sent_again() -> None:
    one = source()
    machine, ports = session(one, started=False)
    machine.owe(retained_id(3), 3)
    machine.replay(one, 3, 2, None, True)
    machine.replay(one, 4, 2, None, True)
    machine.start()
    assert ports.take() == [("send", ack_bytes(PUBREL, retained_id(3))), ("publish", -4, 2, True)]


def test_a_retained_message_waits_for_the_identifier_of_another() -> None:
    one = source()
    machine, ports = session(one, started=False)
    machine.owe(retained_id(3), 3)
    machine.replay(one, 3 + 16384, 2, None, True)
    machine.start()
    assert ports.take() == [("send", ack_bytes(PUBREL, retained_id(3)))]
    machine.pubrel_delivered(retained_id(3), 3, b"record")
    machine.acknowledged(PUBCOMP, [retained_id(3)])
    assert ports.take() == [("ack", b"record"), ("publish", -3 - 16384, 2, True)]


# -- ended subscriptions --------------------------------------------------------------------------


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
    machine.on_complete = lambda delivery: ended.append(delivery.sequence)
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
    assert machine.holds(one), "its consumer has to live until it has confirmed"
    machine.confirmed(packet_id(8))
    assert not machine.holds(one)
    assert ended == [5, 6, 8, 5, 6, 8]
    assert machine.holds(other)


def test_drain_of_what_was_held_back() -> None:
    one = source()
    machine, ports = session(one)
    one.held = Source.REPLAYING
    machine.arrived(one, 5, 1, b"held", None, 1)
    machine.replay(one, 3, 1, None, False)
    machine.replay(one, 3 + 16384, 1, None, False)
    ports.take()
    assert [delivery.sequence for delivery in machine.drain(one)] == [-3]
    assert ports.take() == [("ack", b"held")]
    assert not machine.replaying
    machine.release_held(one)
    assert ports.take() == []


def test_what_stands_behind_an_ended_subscription() -> None:
    """It is kept back until that has brought what is older, for as many as stand before it."""
    ended, heir = source(), source()
    machine, ports = session(ended, heir)
    heir.held += 2 * Source.BEHIND + Source.REPLAYING
    machine.drain(ended)
    ended.end = 6
    machine.arrived(heir, 7, 1, b"new", None, 1)
    machine.arrived(ended, 6, 1, b"old", None, 1)
    machine.release_held(heir, Source.BEHIND)
    machine.release_held(heir)
    assert ports.take() == [("publish", 6, 1, False)]
    machine.release_held(heir, Source.BEHIND)
    assert ports.take() == [("publish", 7, 1, False)]
