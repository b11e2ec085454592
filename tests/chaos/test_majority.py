# SPDX-License-Identifier: Apache-2.0
"""What counts as acknowledged without a majority."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checker import Promises, check
from tests.chaos.experiment import Setting
from tests.chaos.experiments.majority import GRACE, GRACE_BEFORE, Scene, excused, first_sent
from tests.chaos.history import Event

SECOND = 1_000_000_000
KILLED, END = 10.0, 20.0


def event(second: float, what: str, **fields: Any) -> Event:
    return Event(int(second * SECOND), "p", what, fields)


@pytest.mark.parametrize(
    ("sent", "answered", "found"),
    [
        (9.0, KILLED + GRACE_BEFORE - 0.1, 0),
        (9.0, KILLED + GRACE_BEFORE + 0.1, 1),
        (10.5, KILLED + GRACE - 0.1, 0),
        (10.5, KILLED + GRACE + 0.1, 1),
        (10.5, END + 0.1, 0),
    ],
)
@pytest.mark.parametrize("what", [("publish", "acked"), ("subscribe", "subscribed"), ("connect", "connected")])
def test_an_answer_that_was_on_its_way(
    what: tuple[str, str], sent: float, answered: float, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent before the kills has a little more time for its answer."""
    about = {"n": 1, "filter": "a", "conn": 3}
    events = [event(sent, what[0], **about), event(answered, what[1], **about)]
    scene = Scene(Setting(tmp_path), "default")
    monkeypatch.setattr(scene, "events", lambda: events)
    scene._judge_outage(int(KILLED * SECOND), int(END * SECOND))
    assert (scene.meanwhile, len(scene.violations)) == (found, found)


@pytest.mark.parametrize(
    ("who", "sent", "seconds", "found"),
    [
        ("default-q1-clean-0", KILLED, 60.0, True),
        ("default-q1-clean-0", KILLED - GRACE_BEFORE + 0.1, 60.0, True),  # its live copy may have been on its way
        ("default-q1-clean-0", KILLED - GRACE_BEFORE - 0.1, 60.0, False),
        ("default-q1-clean-0", KILLED + 60.1, 60.0, False),
        ("default-q1-clean-0", KILLED, 29.0, False),
        ("default-q1-s0", KILLED, 60.0, False),
    ],
)
def test_what_a_clean_session_has_missed_comes_late_after_a_long_outage(
    who: str, sent: float, seconds: float, found: bool
) -> None:
    """In the run of 2026-11-30 ids of clients had the name of the regime in front."""
    end = KILLED + seconds
    about: dict[str, Any] = {"topic": "t", "qos": 1, "id": 1, "dup": False, "conn": 1}
    delivered: dict[str, Any] = {"of": "p", "topic": "t"}
    events = [
        event(sent, "publish", n=1, **about),
        event(end + 1, "acked", n=1, topic="t", conn=1),
        event(end + 2, "publish", n=2, **about),
        *(Event(int((end + 2 + n) * SECOND), who, "delivered", {**delivered, "n": 3 - n}) for n in (1, 2)),
    ]
    (violation,) = check(events, Promises(leaders_change=True)).violations
    outages = [(int(KILLED * SECOND), int(end * SECOND))]
    assert excused(violation, {"default-q1-clean-0"}, first_sent(events), outages) is found
