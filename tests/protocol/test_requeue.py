# SPDX-License-Identifier: Apache-2.0
"""DUP says that a message was sent before, so not of one that only waited for a place in the window [MQTT-3.3.1-1]."""

from __future__ import annotations

from mqtt_nats.protocol.durable_sender import SEQUENCE_EVER, packet_id
from tests.protocol.recorder import PUBACK, session, source


def test_what_waits_was_not_sent() -> None:
    """Neither what is in flight, nor what an earlier connection may have sent, but what came and found no place."""
    one = source()
    machine, _ = session(one, started=False, limit=1)
    machine.arrived(one, 5, 2, b"sent before", None, 1)
    machine.start()
    machine.arrived(one, 6, 1, b"waits", None, 1)
    machine.arrived(one, 7, 1, b"waits too", None, 1)
    assert machine.unsent() == {6, 7}
    machine.acknowledged(PUBACK, [packet_id(5)])
    assert machine.unsent() == {7}


def test_what_an_earlier_connection_may_have_sent_is_not_unsent() -> None:
    """Neither what was pending, nor what a reader brings again."""
    one = source()
    machine, _ = session(one, started=False, limit=1)
    machine.sent_perhaps(7)
    for sequence, attempt in ((5, 2), (6, 2), (7, 1), (8, 1)):
        machine.arrived(one, sequence, attempt, b"r", None, 1)
    machine.start()
    assert machine.unsent() == {8}


def test_what_was_not_sent_has_no_dup_however_often_it_comes() -> None:
    one = source()
    machine, ports = session(one, started=False, limit=4)
    machine.not_sent([6])
    for sequence in (5, 6):
        machine.arrived(one, sequence, 2, b"", None, 1)
    machine.start()
    assert machine.recall(packet_id(6))
    machine.stop_sending()
    machine.arrived(one, 6, 2, b"", None, 1)
    machine.go_on()
    assert [call[1:] for call in ports.take() if call[0] == "publish"] == [(5, 1, True), (6, 1, False), (6, 1, False)]


def test_what_was_on_its_way_to_a_connection_that_has_ended_was_not_sent() -> None:
    """It was taken when nothing was sent any more; the connection has left word of how far it came."""
    one, other = source(), source()
    machine, _ = session(one, other)
    machine.arrived(one, 5, 1, b"", None, 1)
    machine.arrived(other, 6, 1, b"", None, 1)
    assert machine.most == 6
    machine.close()
    assert machine.most == 6
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
    machine.arrived(again, 10, 1, b"", None, 1)
    found = [call[1:] for call in ports.take() if call[0] == "publish"]
    assert found == [(5, 1, True), (6, 1, True), (9, 1, False), (10, 1, False)]
    assert machine.most == 10


def test_how_far_a_connection_came_is_not_known_where_nobody_has_left_word() -> None:
    """What is pending may have been sent; the end of a subscription does not make this connection forget."""
    one, ended = source(), source()
    machine, ports = session(one, ended, started=False)
    assert machine.most == SEQUENCE_EVER
    machine.arrived(one, 5, 2, b"", None, 1)
    machine.start()
    assert ports.take() == [("publish", 5, 1, True)]
    assert machine.sent_at_once(ended, 9, 1, b"")
    machine.acknowledged(PUBACK, [packet_id(9)])
    machine.drain(ended)
    machine.forget(ended)
    assert (machine.most, machine.sources) == (9, [one])


def test_what_has_not_come_again_was_not_sent_either() -> None:
    """The connection before had left word of it; or this client does not read, and what waited was given up."""
    one = source()
    machine, _ = session(one, limit=1)
    machine.not_sent([3, 4])
    machine.arrived(one, 3, 2, b"comes again", None, 1)
    machine.arrived(one, 5, 1, b"waits", None, 1)
    assert machine.unsent() == {4, 5}
    machine.stop_sending()
    assert machine.unsent() == {4, 5}


def test_the_next_connection_sends_it_for_the_first_time() -> None:
    """Where the one before has left word of it, although it is pending."""
    one = source()
    machine, ports = session(one, started=False)
    machine.not_sent([6])
    machine.sent_perhaps(8)
    for sequence in (5, 6):
        machine.arrived(one, sequence, 2, b"%d" % sequence, None, 1)
    machine.arrived(one, 7, 1, b"7", None, 1)
    machine.start()
    assert ports.take() == [("publish", 5, 1, True), ("publish", 6, 1, False), ("publish", 7, 1, True)]
