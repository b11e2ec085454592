# SPDX-License-Identifier: Apache-2.0
"""Leaky buckets, which allow a burst and then a rate; and budgets of memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

KEYS_MOST: Final = 50_000
"""Most buckets of one `Buckets`; beyond it the least recently used bucket is removed."""


class Bucket:
    """Leaky bucket: empties at ``rate`` per second and takes ``depth``. Times are seconds of any monotonic clock."""

    __slots__ = ("_level", "_since", "depth", "rate")

    def __init__(self, rate: float, depth: float, now: float) -> None:
        self.rate = rate
        self.depth = depth
        self._level = 0.0
        self._since = now

    def level(self, now: float) -> float:
        """Return the present level."""
        return max(0.0, self._level - (now - self._since) * self.rate)

    def pour(self, amount: float, now: float) -> float:
        """Add any amount; return the seconds until the level is not above ``depth``."""
        self._level, self._since = self.level(now) + amount, now
        return max(0.0, (self._level - self.depth) / self.rate)

    def has_room(self, now: float) -> bool:
        """Whether there is room for one more."""
        return self.level(now) + 1 <= self.depth

    def add_if_room(self, now: float) -> bool:
        """Add one if there is room for it; return whether there was."""
        level = self.level(now)
        if level + 1 > self.depth:
            return False
        self._level, self._since = level + 1, now
        return True


def depth(rate: float, seconds: float) -> float:
    """Return the depth of a bucket of a rate: the amount of ``seconds`` seconds, at least one."""
    return max(1.0, rate * seconds)


class Buckets:
    """Buckets by key, of bounded number."""

    __slots__ = ("_buckets", "_most", "depth", "rate")

    def __init__(self, rate: float, depth: float, most: int = KEYS_MOST) -> None:
        self.rate = rate
        self.depth = depth
        self._most = most
        self._buckets: dict[Hashable, Bucket] = {}

    def of(self, key: Hashable, now: float) -> Bucket:
        """Return the bucket of a key and mark it as the most recently used one."""
        found = self._buckets.pop(key, None)
        if found is None:
            if len(self._buckets) >= self._most:
                del self._buckets[next(iter(self._buckets))]
            found = Bucket(self.rate, self.depth, now)
        self._buckets[key] = found
        return found

    def forget(self, key: Hashable) -> None:
        """Remove the bucket of a key, so that the key starts empty."""
        self._buckets.pop(key, None)

    def __len__(self) -> int:
        return len(self._buckets)


KEPT_FREE: Final = 16 * 1024
"""Bytes that every share may keep whatever the other shares keep; `max_connections` bounds their sum."""


class MemoryBudget:
    """Memory budget for data that clients cause a gateway to store. Sizes are estimates in bytes.

    Most of the data is cached: without room, the share that has begun to fill first is emptied.

    Args:
        limit: bytes of all shares together.
        each: bytes of one share without a limit of its own.
    """

    __slots__ = ("_filled", "each", "kept", "limit", "used")

    def __init__(self, limit: int, each: int) -> None:
        self.limit = limit
        self.each = each
        self.used = 0
        """Bytes in caches."""
        self.kept = 0
        """Bytes that cannot be dropped."""
        self._filled: dict[Share, None] = {}
        """Shares with cached data, in the order in which they have begun to fill."""

    def count(self, share: Share, used: int, kept: int) -> None:
        """Count a share's change of cached (``used``) and kept bytes."""
        self.used += used
        self.kept += kept
        if share.used:
            self._filled[share] = None
        else:
            self._filled.pop(share, None)

    def make_room(self, size: int) -> None:
        """Empty caches until there is room for ``size`` bytes, or all caches are empty."""
        while self._filled and self.used + self.kept + size > self.limit:
            next(iter(self._filled)).forget()


class Share:
    """Share of a memory budget that belongs to one client or one part of the gateway.

    Args:
        clear: empties the caches of the share.
        limit: bytes of the share.
    """

    __slots__ = ("_budget", "_clear", "_limit", "kept", "used")

    def __init__(self, budget: MemoryBudget, clear: Callable[[], None], limit: int | None = None) -> None:
        self._budget = budget
        self._clear = clear
        self._limit = budget.each if limit is None else limit
        self.used = 0
        """Bytes in the caches of the share."""
        self.kept = 0
        """Bytes of the share that cannot be dropped."""

    def add(self, size: int) -> None:
        """Count bytes added to (negative: removed from) a cache; without room caches are emptied first."""
        if size > 0:
            if self.used + self.kept + size > self._limit:
                self.forget()
            self._budget.make_room(size)
        size = max(size, -self.used)
        self.used += size
        self._budget.count(self, size, 0)

    def count_kept(self, size: int) -> bool:
        """Count bytes that cannot be dropped; return False, and count nothing, where there is no room for them.

        Args:
            size: bytes; negative for bytes that are removed.
        """
        if size > 0 and self.kept + size > KEPT_FREE:
            if self.kept + size > self._limit:
                return False
            self._budget.make_room(size)
            if self._budget.kept + size > self._budget.limit:
                return False
        self.kept += size
        self._budget.count(self, 0, size)
        return True

    def forget(self) -> None:
        """Empty the caches of the share."""
        used, self.used = self.used, 0
        self._budget.count(self, -used, 0)
        self._clear()

    def return_all(self) -> None:
        """Return all bytes of the share to the budget."""
        self.forget()
        self.count_kept(-self.kept)
