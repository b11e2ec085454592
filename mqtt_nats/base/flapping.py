# SPDX-License-Identifier: Apache-2.0
"""Clients that connect too often: their CONNECTs are delayed, then the clients are banned.

A count decreases evenly over the window, so that no time within a window is better than another. From half of the limit
on each CONNECT is delayed, by an increasing time; at the limit the client is banned.
"""

from __future__ import annotations

from typing import Final

from mqtt_nats.base.bucket import Buckets

SLOWEST: Final = 5.0
"""Longest delay of a CONNECT in seconds."""


class Flapping:
    """Counter of connections by name.

    Args:
        limit: connections within the window that cause a ban.
        window: length of the window in seconds.
    """

    __slots__ = ("_buckets", "_limit")

    def __init__(self, limit: int, window: float) -> None:
        self._limit = limit
        self._buckets = Buckets(limit / window, limit)

    def connects(self, name: str, now: float) -> float | None:
        """Count a connection at ``now``; return its delay in seconds, None = ban."""
        bucket = self._buckets.of(name, now)
        bucket.pour(1.0, now)
        share = bucket.level(now) / self._limit
        if share >= 1.0:
            self._buckets.forget(name)
            return None
        return max(0.0, share - 0.5) * 2 * SLOWEST
