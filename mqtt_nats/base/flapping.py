# SPDX-License-Identifier: Apache-2.0
"""Clients that connect again and again: first they wait, then they are banned.

A count runs out evenly over the window, so nothing happens at the end of one. From half of the limit on each CONNECT
waits, longer and longer; at the limit there is a ban.
"""

from __future__ import annotations

from typing import Final

from mqtt_nats.base.bucket import Buckets

SLOWEST: Final = 5.0
"""Seconds that a CONNECT waits at most."""


class Flapping:
    """Counts connections by a name.

    Args:
        limit: connections that lead to a ban.
        window: seconds in which they do.
    """

    __slots__ = ("_buckets", "_limit")

    def __init__(self, limit: int, window: float) -> None:
        self._limit = limit
        self._buckets = Buckets(limit / window, limit)

    def connects(self, name: str, now: float) -> float | None:
        """Count a connection at ``now``: the seconds that it has to wait, or None when there is to be a ban."""
        bucket = self._buckets.of(name, now)
        bucket.pour(1.0, now)
        share = bucket.level(now) / self._limit
        if share >= 1.0:
            self._buckets.forget(name)
            return None
        return max(0.0, share - 0.5) * 2 * SLOWEST
