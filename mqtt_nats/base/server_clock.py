# SPDX-License-Identifier: Apache-2.0
"""Time of nats-server's clock, which determines store times and deadlines.

A gateway with a different clock would end sessions too early or too late, and drop messages that have not expired. So
a gateway reads nats-server's time with every request for a stream's state, and counts on by a clock that is never set.
"""

from __future__ import annotations

import logging
import time
from typing import Final

log = logging.getLogger("mqtt_nats")

DRIFT: Final = 1e-4
"""Seconds by which clocks of two machines may part in a second."""

DIFFERENCE_LOGGED_S: Final = 5.0
"""Seconds of difference that are logged."""

_BOOTTIME: Final = int(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def elapsed() -> float:
    """Return seconds of a clock that is never set and that counts while the machine sleeps (`CLOCK_BOOTTIME`).

    Where the system has no such clock, as on macOS, the monotonic clock is used.
    """
    return time.clock_gettime(_BOOTTIME)


class NatsTime:
    """Time of nats-server's clock.

    Attributes:
        start: nats-server's Unix time in seconds when :func:`elapsed` was 0.
    """

    def __init__(self) -> None:
        self.start = time.time() - elapsed()
        self._exact = float("inf")
        """Round-trip time of the reading in seconds; half of it bounds the error."""
        self._found = 0.0
        self._told = 0.0

    def now(self) -> float:
        """Return nats-server's Unix time in seconds."""
        return elapsed() + self.start

    def learn(self, there: float, asked: float, answered: float) -> None:
        """Use a reading: nats-server's Unix time ``there``; `elapsed` was ``asked`` before, ``answered`` after it."""
        exact = answered - asked
        start = there - (asked + answered) / 2
        known = self._exact + 2 * DRIFT * (elapsed() - self._found)
        stepped = abs(start - self.start) > exact + known
        if exact > known * 2 and not stepped:
            return
        moved = start - self.start if self._found else 0.0
        self.start, self._exact, self._found = start, max(exact, 0.001), elapsed()
        if abs(moved) > DIFFERENCE_LOGGED_S:
            log.warning("the clock of nats-server was set %.0f s %s", abs(moved), "ahead" if moved > 0 else "back")
        offset = self.now() - time.time()
        if abs(offset - self._told) > DIFFERENCE_LOGGED_S:
            self._told = offset
            how = "behind" if offset > 0 else "ahead of"
            log.warning(
                "the clock of this machine is %.0f s %s the clock of nats-server, which decides deadlines",
                abs(offset),
                how,
            )


_TIME: Final = NatsTime()

now = _TIME.now
learn = _TIME.learn


def converted(here: float) -> float:
    """Return nats-server's Unix time at a value of :func:`elapsed`."""
    return here + _TIME.start
