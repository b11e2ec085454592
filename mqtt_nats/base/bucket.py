# SPDX-License-Identifier: Apache-2.0
"""Leaky buckets: what comes in a burst is let through, what comes all the time only at the rate."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

KEYS_MOST: Final = 50_000
"""Buckets of one kind that are kept; the one that was used least recently makes room."""


class Bucket:
    """Runs out at ``rate`` per second, and holds ``depth``. Times are seconds of any clock that does not go back."""

    __slots__ = ("_level", "_since", "depth", "rate")

    def __init__(self, rate: float, depth: float, now: float) -> None:
        self.rate = rate
        self.depth = depth
        self._level = 0.0
        self._since = now

    def level(self, now: float) -> float:
        """How much is in it."""
        return max(0.0, self._level - (now - self._since) * self.rate)

    def pour(self, amount: float, now: float) -> float:
        """Put something in, however much it is; returns the seconds until it holds no more than it should."""
        self._level, self._since = self.level(now) + amount, now
        return max(0.0, (self._level - self.depth) / self.rate)

    def take(self, now: float) -> bool:
        """Put one in where there is room for it; false: there is none."""
        level = self.level(now)
        if level + 1 > self.depth:
            return False
        self._level, self._since = level + 1, now
        return True


def depth(rate: float, seconds: float) -> float:
    """What a bucket of a rate holds: what comes in so many seconds, and at least one."""
    return max(1.0, rate * seconds)


class Buckets:
    """One bucket for each key; however many keys there are, the memory is bounded."""

    __slots__ = ("_buckets", "_most", "depth", "rate")

    def __init__(self, rate: float, depth: float, most: int = KEYS_MOST) -> None:
        self.rate = rate
        self.depth = depth
        self._most = most
        self._buckets: dict[Hashable, Bucket] = {}

    def of(self, key: Hashable, now: float) -> Bucket:
        """The bucket of a key, which is now the one that was used last."""
        found = self._buckets.pop(key, None)
        if found is None:
            if len(self._buckets) >= self._most:
                del self._buckets[next(iter(self._buckets))]
            found = Bucket(self.rate, self.depth, now)
        self._buckets[key] = found
        return found

    def forget(self, key: Hashable) -> None:
        """Begin anew with a key."""
        self._buckets.pop(key, None)

    def __len__(self) -> int:
        return len(self._buckets)
