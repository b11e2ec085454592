# SPDX-License-Identifier: Apache-2.0
"""What the shared reader brings while a session is handed over to it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mqtt_nats.shared_reader import reader_session
from mqtt_nats.shared_reader.reader_session import ReaderHandover, ReaderSession


def keep(handover: ReaderHandover, *sequences: int) -> list[int]:
    """Messages of the shared reader; returns the sequences of all that are kept back."""
    for sequence in sequences:
        handover.keep_back(sequence, cast("Any", f"message {sequence}"))
    return [sequence for sequence, _ in handover.kept]


def test_messages_are_kept_back_in_their_order() -> None:
    """Those up to the session's place have come already."""
    handover = ReaderHandover(10)
    assert keep(handover, 9, 10, 11, 12) == [11, 12]
    assert str(handover.kept[0][1]) == "message 11"
    assert not handover.overfull
    assert keep(ReaderHandover(), 1) == [1]


def test_too_many_messages_are_not_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handover has to begin anew: the catch-up reader brings them."""
    monkeypatch.setattr(reader_session, "KEPT_BACK", 3)
    handover = ReaderHandover()
    assert keep(handover, 1, 2, 3) == [1, 2, 3]
    assert not handover.overfull
    assert keep(handover, 4) == []
    assert handover.overfull


def test_a_handover_ends_once() -> None:
    member = ReaderSession(cast("Any", "client"), cast("Any", "side"))
    assert (member.filters, member.handover) == ([], None)
    member.begin_handover(handover := ReaderHandover())
    assert [member.handover, member.end_handover(), member.handover, member.end_handover()] == [
        handover,
        handover,
        None,
        None,
    ]


def test_where_dormant_consumers_are_is_noted_once() -> None:
    """They need not be set to where they are; they may go back, when an older message has to be sent again."""
    member = ReaderSession(cast("Any", "client"), cast("Any", "side"))
    assert [member.show(first) for first in (7, 7, 9, 9, 7)] == [True, False, True, False, True]
    assert member.shown == 7
