# SPDX-License-Identifier: Apache-2.0
"""What time it is for nats-server, which stores messages and keeps deadlines by its own clock.

A gateway whose clock differs would end sessions too early or too late, and drop messages that have not expired. So it
finds out what time it is there, with every look at a stream, and counts from then on by a clock that nobody sets.
"""

from __future__ import annotations

import logging
import time
from typing import Final

log = logging.getLogger("mqtt_nats")

TRUSTED: Final = 60.0
"""Seconds after which what was found out is replaced by something less exact."""

REMARKABLE: Final = 5.0
"""Seconds of difference that are worth a line in the log."""

_BOOTTIME: Final = int(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def elapsed() -> float:
    """Seconds since some moment in the past; it goes on while the machine sleeps, and no step of the time changes it.

    Where there is no such clock, as on macOS, the monotonic one.
    """
    return time.clock_gettime(_BOOTTIME)


class NatsTime:
    """The time of nats-server.

    Attributes:
        start: what it was there, in Unix time, when :func:`elapsed` was 0.
    """

    def __init__(self) -> None:
        self.start = time.time() - elapsed()
        self._exact = float("inf")
        """It may be wrong by half of this (seconds)."""
        self._found = 0.0
        self._told = 0.0

    def now(self) -> float:
        """Unix time, as nats-server has it."""
        return elapsed() + self.start

    def learn(self, there: float, asked: float, answered: float) -> None:
        """nats-server has said that it was ``there``; `elapsed` was ``asked`` before, and ``answered`` after that."""
        exact = answered - asked
        start = there - (asked + answered) / 2
        stepped = abs(start - self.start) > exact + self._exact
        if exact > self._exact * 2 and not stepped and elapsed() - self._found < TRUSTED:
            return
        moved = start - self.start if self._found else 0.0
        self.start, self._exact, self._found = start, max(exact, 0.001), elapsed()
        if abs(moved) > REMARKABLE:
            log.warning("nats-server's clock was set %.0f s %s", abs(moved), "ahead" if moved > 0 else "back")
        offset = self.now() - time.time()
        if abs(offset - self._told) > REMARKABLE:
            self._told = offset
            how = "behind" if offset > 0 else "ahead of"
            log.warning("the clock here is %.0f s %s nats-server's: deadlines are kept by that one", abs(offset), how)


_TIME: Final = NatsTime()

now = _TIME.now
learn = _TIME.learn


def converted(here: float) -> float:
    """What time it was for nats-server when :func:`elapsed` was this."""
    return here + _TIME.start
