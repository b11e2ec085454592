# SPDX-License-Identifier: Apache-2.0
"""DUP says that a message was sent before, so not of one that only waited for a place in the window [MQTT-3.3.1-1]."""

from __future__ import annotations

from mqtt_nats.protocol.durable_sender import SEQUENCE_EVER, packet_id
from tests.protocol.recorder import PUBACK, PUBCOMP, PUBREC, session, source


def test_what_waits_was_not_sent() -> None:
    """Neither what is in flight, nor what an earlier connection may have sent, but what came and found no place."""
    one = source()
    machine, _ = session(one, started=False, limit=1)
    machine.arrived(one, 5, 2, b"sent before", None, 1)
    machine.start()
    machine.arrived(one, 6, 1, b"waits", None, 1)
    machine.arrived(one, 7, 2, b"sent before too", None, 1)
    machine.arrived(one, 8, 1, b"waits too", None, 1)
    assert machine.unsent() == {6, 8}
    machine.acknowledged(PUBACK, [packet_id(5)])
    assert machine.unsent() == {8}


def test_what_was_not_sent_has_no_dup_however_often_it_comes() -> None:
    one = source()
    machine, ports = session(one, started=False, limit=4)
    machine.not_sent([6])
    for attempt in (2, 3):
        for sequence in (5, 6):
            machine.arrived(one, sequence, attempt, b"", None, 1)
    machine.start()
    assert [call[1:] for call in ports.take() if call[0] == "publish"] == [(5, 1, True), (6, 1, False)]


def test_what_was_on_its_way_to_a_connection_that_has_ended_was_not_sent() -> None:
    """A consumer has delivered it before, to nobody; the connection has left word of how far it came."""
    one, other = source(), source()
    machine, _ = session(one, other)
    machine.arrived(one, 5, 1, b"", None, 1)
    machine.arrived(other, 6, 1, b"", None, 1)
    assert machine.most == 6
    machine.close()
    machine.arrived(other, 8, 1, b"", None, 1)
    assert (machine.most, machine.unsent()) == (8, {8})
    most = machine.most
    again = source()
    machine, ports = session(again, started=False)
    machine.sent_at_most(most)
    for sequence in (5, 6, 9):
        machine.arrived(again, sequence, 2, b"", None, 1)
    assert machine.most == most, "it has not sent anything, either"
    machine.start()
    machine.arrived(again, 10, 2, b"", None, 1)
    machine.arrived(again, 11, 1, b"", None, 1)
    found = [call[1:] for call in ports.take() if call[0] == "publish"]
    assert found == [(5, 1, True), (6, 1, True), (9, 1, False), (10, 1, False), (11, 1, False)]
    assert machine.most == 11


def test_what_a_consumer_had_passed_before_the_connection_began_to_send_may_have_been_sent() -> None:
    """However far the connection before it says that it came: it is late, and nothing tells what became of it."""
    one = source()
    machine, ports = session(one, started=False)
    machine.sent_at_most(5)
    one.last = 7
    machine.start()
    machine.arrived(one, 6, 2, b"", None, 1)
    machine.arrived(one, 8, 2, b"", None, 1)
    assert [call[1:] for call in ports.take() if call[0] == "publish"] == [(6, 1, True), (8, 1, False)]


def test_how_far_a_connection_came_is_not_known_where_nobody_has_left_word() -> None:
    """Nor in a stream that begins anew, nor of a subscription that is complete."""
    one, ended = source(), source()
    machine, ports = session(one, ended, started=False)
    assert machine.most == SEQUENCE_EVER
    machine.arrived(one, 5, 2, b"", None, 1)
    machine.start()
    assert ports.take() == [("publish", 5, 1, True)]
    machine.arrived(ended, 9, 1, b"", None, 1)
    machine.acknowledged(PUBACK, [packet_id(9)])
    machine.drain(ended)
    machine.forget(ended)
    assert machine.most == 9
    machine.sent_at_most(3)
    machine.begin_anew()
    one.begin_anew()
    ports.take()
    machine.arrived(one, 4, 2, b"", None, 1)
    assert ports.take() == [("publish", 4, 1, True)]


def test_what_an_ended_subscription_brings_late_was_sent_through_another() -> None:
    """The client has had it, and acknowledged it: its first delivery by a second consumer is not one for the client."""
    one, ended = source(), source()
    machine, ports = session(one, ended)
    machine.arrived(one, 11, 1, b"one", None, 1)
    machine.acknowledged(PUBACK, [packet_id(11)])
    machine.drain(ended)
    ended.end_at(11)
    machine.ended = 11
    ports.take()
    machine.arrived(ended, 11, 1, b"late", None, 1)
    assert ports.take() == [("ack", b"late")]


def test_what_an_ended_subscription_has_brought_is_not_brought_again() -> None:
    """The consumer of one that matches the same is behind, and the ended one's is no more when it brings that."""
    ended, one = source(), source()
    machine, ports = session(ended, one)
    for sequence in (11, 12):
        machine.arrived(ended, sequence, 1, b"", None, 2)
        machine.acknowledged(PUBREC, [packet_id(sequence)])
        machine.pubrel_stored(packet_id(sequence))
        machine.acknowledged(PUBCOMP, [packet_id(sequence)])
        machine.confirmed(packet_id(sequence))
        machine.pubrel_delivered(packet_id(sequence), sequence, b"record")
    machine.drain(ended)
    machine.ended = ended.end
    machine.forget(ended)
    ports.take()
    assert not machine.sent_at_once(one, 11, 2, b"late")
    machine.arrived(one, 11, 1, b"late", None, 2)
    assert ports.take() == [("ack", b"late")]
    machine.passed_over(one, 12, 1, b"left")
    ports.take()
    machine.begin_anew()  # another stream, in which the sequence is another message's
    one.begin_anew()
    machine.arrived(one, 12, 1, b"new", None, 2)
    assert ports.take() == [("publish", 12, 2, False)]


def test_what_has_not_come_again_was_not_sent_either() -> None:
    """The connection before had left word of it; or this client does not read, and what waited was given up."""
    one = source()
    machine, _ = session(one, limit=1)
    machine.not_sent([3, 4])
    machine.arrived(one, 3, 2, b"sent", None, 1)
    machine.arrived(one, 5, 1, b"waits", None, 1)
    assert machine.unsent() == {4, 5}
    machine.stop_sending()
    assert machine.unsent() == {4, 5}


def test_the_next_connection_sends_it_for_the_first_time() -> None:
    """Where the one before has left word of it, although it was delivered before, and once only."""
    one = source()
    machine, ports = session(one, started=False)
    machine.not_sent([6])
    machine.sent_perhaps(8)
    for sequence in (5, 6):
        machine.arrived(one, sequence, 2, b"%d" % sequence, None, 1)
    machine.arrived(one, 7, 1, b"7", None, 1)
    machine.start()
    assert ports.take() == [("publish", 5, 1, True), ("publish", 6, 1, False), ("publish", 7, 1, True)]
    machine.arrived(one, 6, 3, b"again", None, 1)
    machine.acknowledged(PUBACK, [packet_id(6)])
    assert ports.take() == [("ack", b"again")]
