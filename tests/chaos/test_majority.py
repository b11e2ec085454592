# SPDX-License-Identifier: Apache-2.0
"""What counts as acknowledged without a majority."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.experiment import Setting
from tests.chaos.experiments.majority import GRACE, GRACE_BEFORE, Scene
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
