# SPDX-License-Identifier: Apache-2.0
"""Leaky buckets: what comes in a burst is let through, what comes all the time only at the rate. Budgets of memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
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


KEPT_FREE: Final = 16 * 1024
"""Bytes that a share may keep however much the others keep: `max_connections` bounds what that is together."""


class MemoryBudget:
    """Memory for what clients make a gateway remember. Sizes are estimates, in bytes.

    Most of it is a cache: the share that has begun to fill first is emptied when there is no room.

    Args:
        limit: of all shares together.
        each: of one share, unless it has a limit of its own.
    """

    __slots__ = ("_filled", "each", "kept", "limit", "used")

    def __init__(self, limit: int, each: int) -> None:
        self.limit = limit
        self.each = each
        self.used = 0
        """Bytes in caches."""
        self.kept = 0
        """Bytes that cannot be forgotten."""
        self._filled: dict[Share, None] = {}
        """Shares with something in their caches, the one that has begun to fill first in front."""

    def count(self, share: Share, used: int, kept: int) -> None:
        """A share has changed by so much."""
        self.used += used
        self.kept += kept
        if share.used:
            self._filled[share] = None
        else:
            self._filled.pop(share, None)

    def make_room(self, size: int) -> None:
        """Empty caches until there is room for ``size`` bytes, or nothing is left in them."""
        while self._filled and self.used + self.kept + size > self.limit:
            next(iter(self._filled)).forget()


class Share:
    """What one client, or one part of the gateway, has of a budget.

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
        """Bytes in its caches."""
        self.kept = 0
        """Bytes that it cannot forget."""

    def add(self, size: int) -> None:
        """Something is put into a cache, or has changed its size; caches are emptied first where there is no room."""
        if size > 0:
            if self.used + self.kept + size > self._limit:
                self.forget()
            self._budget.make_room(size)
        size = max(size, -self.used)
        self.used += size
        self._budget.count(self, size, 0)

    def keep(self, size: int) -> bool:
        """Something is kept that cannot be forgotten, or ends (a negative size); false: there is no room for it."""
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
        """Empty the caches."""
        used, self.used = self.used, 0
        self._budget.count(self, -used, 0)
        self._clear()

    def end(self) -> None:
        """Give everything back."""
        self.forget()
        self.keep(-self.kept)
