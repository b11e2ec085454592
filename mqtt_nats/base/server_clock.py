# SPDX-License-Identifier: Apache-2.0
"""What time it is for nats-server, which stores messages and keeps deadlines by its own clock.

A gateway whose clock differs would end sessions too early or too late, and drop messages that have not expired. So it
finds out by how much, with every look at a stream, and counts by the clock of nats-server.
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


class NatsTime:
    """The difference of two clocks.

    Attributes:
        offset: seconds by which nats-server is ahead.
    """

    def __init__(self) -> None:
        self.offset = 0.0
        self._exact = float("inf")
        """It may be wrong by half of this (seconds)."""
        self._found = 0.0
        self._told = 0.0

    def now(self) -> float:
        """Unix time, as nats-server has it."""
        return time.time() + self.offset

    def learn(self, there: float, asked: float, answered: float) -> None:
        """nats-server has said that it was ``there``; here it was ``asked`` before, and ``answered`` after that."""
        exact = answered - asked
        offset = there - (asked + answered) / 2
        stepped = abs(offset - self.offset) > exact + self._exact
        if exact > self._exact * 2 and not stepped and time.monotonic() - self._found < TRUSTED:
            return
        self.offset, self._exact, self._found = offset, max(exact, 0.001), time.monotonic()
        if abs(offset - self._told) > REMARKABLE:
            self._told = offset
            how = "behind" if offset > 0 else "ahead of"
            log.warning("the clock here is %.0f s %s nats-server's: deadlines are kept by that one", abs(offset), how)


_TIME: Final = NatsTime()

now = _TIME.now
learn = _TIME.learn


def converted(here: float) -> float:
    """What a Unix time of this machine's clock is by nats-server's."""
    return here + _TIME.offset
