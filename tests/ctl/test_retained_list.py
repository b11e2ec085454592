# SPDX-License-Identifier: Apache-2.0
"""A list of retained messages holds no more than it shows, and a little."""

from __future__ import annotations

import pytest

from mqtt_nats.ctl.commands import retained
from mqtt_nats.ctl.commands.retained import All, Brief
from mqtt_streams.retained import RetainedMessage


def message(number: int) -> RetainedMessage:
    return RetainedMessage(f"a.{number:03}", 1, b"x" * number, b"", number + 1, number * 10**9)


@pytest.mark.parametrize("most", [0, 3])
def test_the_first_by_topic(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "HELD", 10)
    found = All(most)
    full = 0
    for start in range(95, -1, -5):
        if found.add([message(number) for number in range(start, start + 5)]):
            full += 1
            assert len(found.first()) == most
    assert found.total == 100
    assert found.first()[:3] == [(f"a/{number:03}", Brief(1, number, float(number))) for number in range(3)]
    assert len(found.first()) == (most or 100)
    assert bool(full) is bool(most)
