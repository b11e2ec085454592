# SPDX-License-Identifier: Apache-2.0
"""Who is next: those who wait are taken from one source after the other, so that none keeps the others waiting."""

from __future__ import annotations

from collections import deque
from ipaddress import IPv6Address, ip_address
from typing import Generic, TypeVar

T = TypeVar("T")


class AuthenticationQueue(Generic[T]):
    """What waits, by source.

    Args:
        most: how many may wait. When there are more, the source that has the most loses its last.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sources: dict[str, deque[T]] = {}  # in the order of their turns
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, source: str, item: T) -> T | None:
        """Let it wait; returns who has to go for that, maybe itself."""
        self._sources.setdefault(source, deque()).append(item)
        self._count += 1
        if self._count <= self._most:
            return None
        # The last of those that have as many: who has come just now has to go before who waits.
        crowded = max(reversed(self._sources), key=lambda one: len(self._sources[one]))
        dropped = self._sources[crowded].pop()
        self._taken(crowded)
        return dropped

    def next(self) -> T | None:
        """Take who is next; None when nobody waits."""
        for source, waiting in self._sources.items():
            item = waiting.popleft()
            self._taken(source)
            if waiting:  # to the end of the row
                self._sources[source] = self._sources.pop(source)
            return item
        return None

    def remove(self, source: str, item: T) -> None:
        """Who has given up does not wait any more."""
        waiting = self._sources.get(source)
        if waiting is not None and item in waiting:
            waiting.remove(item)
            self._taken(source)

    def _taken(self, source: str) -> None:
        self._count -= 1
        if not self._sources[source]:
            del self._sources[source]


def source_of(host: str) -> str:
    """What counts as one source: an IPv4 address, or the 64 bits of an IPv6 address that a customer is given."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Address(int(address) >> 64 << 64))
