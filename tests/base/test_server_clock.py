# SPDX-License-Identifier: Apache-2.0
"""Readings of nats-server's clock."""

from __future__ import annotations

import logging
import time

import pytest

from mqtt_nats.base import server_clock
from mqtt_nats.base.server_clock import NatsTime, elapsed

ROUND_TRIP_S = 0.01


def read(clock: NatsTime, ahead: float, round_trip: float = ROUND_TRIP_S) -> None:
    """A reading from a nats-server whose clock is so many seconds ahead of the machine's."""
    asked = elapsed()
    clock.learn(time.time() + ahead + round_trip / 2, asked, asked + round_trip)


def offset(clock: NatsTime) -> float:
    return clock.now() - time.time()


def test_half_of_the_round_trip_has_passed_when_the_server_answers() -> None:
    clock = NatsTime()
    read(clock, 2.0, round_trip=1.0)
    assert offset(clock) == pytest.approx(2.0, abs=0.1)


def test_a_slower_answer_does_not_replace_a_better_one() -> None:
    clock = NatsTime()
    read(clock, 2.0)
    read(clock, 2.4, round_trip=1.0)  # within what half of its round trip may be wrong
    assert offset(clock) == pytest.approx(2.0, abs=0.1)


def test_a_slower_answer_replaces_one_that_is_so_old_that_it_is_less_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks part by a tenth of a millisecond in a second, or less."""
    clock, started, later = NatsTime(), elapsed(), 0.0
    monkeypatch.setattr(server_clock, "elapsed", lambda: started + later)

    def found(ahead: float) -> float:
        clock.learn(1000.0 + later + ahead, started + later, started + later + 1.0)
        return clock.now() - 1000.0 - later

    clock.learn(1000.0, started, started + 0.01)
    later = 300.0
    assert found(0.0) == pytest.approx(0.0, abs=0.1)
    later = 6000.0
    assert found(0.0) == pytest.approx(-0.5, abs=0.01)


def test_a_slow_answer_shows_that_the_clock_was_set(caplog: pytest.LogCaptureFixture) -> None:
    clock = NatsTime()
    read(clock, 0.0)
    with caplog.at_level(logging.WARNING, "mqtt_nats"):
        read(clock, -60.0, round_trip=1.0)
    assert offset(clock) == pytest.approx(-60.0, abs=1.0)
    assert "the clock of nats-server was set 60 s back" in caplog.text
    assert "the clock of this machine is 60 s ahead of the clock of nats-server" in caplog.text
