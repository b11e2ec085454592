# SPDX-License-Identifier: Apache-2.0
"""Fair queue of waiting CONNECTs: the sources are served one after another, so that no source delays the others."""

from __future__ import annotations

from collections import deque
from ipaddress import IPv6Address, ip_address
from typing import Generic, TypeVar

T = TypeVar("T")


class AuthenticationQueue(Generic[T]):
    """Waiting items by source.

    Args:
        most: most waiting items. One item more drops the last item of the source with the most items.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sources: dict[str, deque[T]] = {}  # the first source is served next
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, source: str, item: T) -> T | None:
        """Add an item; return the item that is dropped for it (perhaps itself), None = no item."""
        self._sources.setdefault(source, deque()).append(item)
        self._count += 1
        if self._count <= self._most:
            return None
        # Of several sources with the most items the last one in the row: a new item is dropped before older ones.
        crowded = max(reversed(self._sources), key=lambda one: len(self._sources[one]))
        dropped = self._sources[crowded].pop()
        self._taken(crowded)
        return dropped

    def next(self) -> T | None:
        """Take the next item; None for an empty queue."""
        for source, waiting in self._sources.items():
            item = waiting.popleft()
            self._taken(source)
            if waiting:  # the source goes to the end of the row
                self._sources[source] = self._sources.pop(source)
            return item
        return None

    def remove(self, source: str, item: T) -> None:
        """Remove an item that does not wait any more."""
        waiting = self._sources.get(source)
        if waiting is not None and item in waiting:
            waiting.remove(item)
            self._taken(source)

    def _taken(self, source: str) -> None:
        self._count -= 1
        if not self._sources[source]:
            del self._sources[source]


def source_of(host: str) -> str:
    """Return the source of an address: an IPv4 address, or the first 64 bits of an IPv6 address (one customer)."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Address(int(address) >> 64 << 64))
