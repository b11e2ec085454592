# SPDX-License-Identifier: Apache-2.0
"""Pages of long lists: orders, and one page without the whole list in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

SPARE_ENTRIES: Final = 2000
"""Entries in memory beyond twice those that may be on the page, at which the others are dropped."""


class ListPage(Generic[T]):
    """The entries of a list from ``offset`` on, at most ``limit`` of them (0: all), in the order of ``key``.

    Entries are added in any order. At most ``2 * (offset + limit) + SPARE`` of them are in memory.
    """

    def __init__(self, offset: int, limit: int, key: Callable[[T], Any], *, reverse: bool = False) -> None:
        self._offset = offset
        self._most = offset + limit if limit else 0
        self._key = key
        self._reverse = reverse
        self._held: list[T] = []
        self.total = 0
        """Number of entries of the list."""

    def add(self, entry: T) -> None:
        """Add an entry of the list."""
        self.total += 1
        self._held.append(entry)
        if self._most and len(self._held) >= 2 * self._most + SPARE_ENTRIES:
            self._cut()

    def entries(self) -> list[T]:
        """Return the entries of the page, in their order."""
        self._cut()
        return self._held[self._offset :]

    def _cut(self) -> None:
        self._held.sort(key=self._key, reverse=self._reverse)
        if self._most:
            del self._held[self._most :]


def client_order(sort: str) -> Callable[[dict[str, Any]], Any]:
    """Return the key of an entry of `brief` in one of `CLIENT_ORDERS`."""
    if sort == "slowest":
        return lambda one: (-one["unread"], -one["queued"], one["client"])
    return lambda one: (one[sort] or "" if sort == "user" else one[sort], one["client"])


def subscription_order(sort: str) -> Callable[[dict[str, Any]], Any]:
    """Return the key of an entry of a list of subscriptions, by ``filter``, ``client`` or ``qos``."""
    return lambda one: (one[sort], one["filter"], one["client"])
