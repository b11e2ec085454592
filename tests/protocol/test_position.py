# SPDX-License-Identifier: Apache-2.0
"""Position of a session: its content, and the steps that wait until the content is stored."""

from __future__ import annotations

from mqtt_nats.protocol.ack_tokens import OWED, TAKEN
from mqtt_nats.protocol.position import Content, SessionPosition, Step


def test_pubrel_waits_for_the_write_that_has_it() -> None:
    """A PUBREC that comes during a write waits for the next one: the write under way does not have its PUBREL."""
    position = SessionPosition()
    position.add_pending(7, 2)
    position.add_pending(8, 2)
    position.receive(1, 7)
    assert position.urgent
    assert position.begin() == Content(0, {8: 2}, {1: 7}, {})
    position.receive(2, 8)
    assert position.stored() == [(Step.RELEASE, 1)]
    assert position.urgent
    assert position.begin() == Content(0, {}, {1: 7, 2: 8}, {})
    assert position.stored() == [(Step.RELEASE, 2)]
    assert not position.urgent


def test_a_packet_identifier_is_free_when_a_position_without_its_pubrel_is_stored() -> None:
    position = SessionPosition()
    position.restore(9, {}, {1: 7}, {})
    assert position.complete(OWED + b"1")
    assert position.begin() == Content(9, {}, {}, {})
    assert position.stored() == [(Step.FREE, 1)]
    assert position.complete(OWED + b"1"), "PUBCOMP comes again"
    assert position.stored() == []


def test_a_message_whose_pubrel_a_record_owes_is_confirmed_once() -> None:
    position = SessionPosition()
    position.add_pending(7, 2)
    assert position.complete(TAKEN + b"7", identifier=1)
    assert not position.complete(TAKEN + b"7", identifier=1)
    position.begin()
    assert position.stored() == [(Step.CONFIRM, 1)]


def test_one_report_for_all_changes_before_a_write() -> None:
    reports: list[SessionPosition] = []
    position = SessionPosition(reports.append)
    for sequence in (1, 2, 3):
        position.add_pending(sequence, 1)
    position.complete(TAKEN + b"2")
    assert reports == [position]
    assert position.begin() == Content(0, {1: 1, 3: 1}, {}, {})
    position.done(1)
    assert reports == [position, position]


def test_a_position_does_not_go_back() -> None:
    position = SessionPosition()
    position.reach(5)
    position.reach(3)
    assert position.reached == 5
