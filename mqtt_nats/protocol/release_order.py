# SPDX-License-Identifier: Apache-2.0
"""The order in which PUBRELs are sent: that of their PUBRECs, whatever is stored first."""

from __future__ import annotations

from collections import deque


class ReleaseOrder:
    """The order of PUBRELs: each waits until those of earlier PUBRECs are stored, too.

    Records and positions are in different streams, which are stored in no common order. [MQTT-4.6.0-4] (3.1.1)
    """

    __slots__ = ("_storable", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()
        """Packet identifiers in the order of their PUBRECs."""
        self._storable: dict[int, bytes] = {}
        """Marks of the identifiers that are stored, behind an identifier that is not."""

    def received(self, identifier: int) -> None:
        """Note that a PUBREC has come."""
        self._waiting.append(identifier)

    def stored(self, identifier: int, mark: bytes) -> list[tuple[int, bytes]]:
        """Note that a PUBREL is stored as ``mark``; return the identifiers that may be sent now, with their marks."""
        waiting, storable = self._waiting, self._storable
        if not storable and waiting and waiting[0] == identifier:
            waiting.popleft()
            return [(identifier, mark)]
        storable[identifier] = mark
        found = []
        while waiting and waiting[0] in storable:
            first = waiting.popleft()
            found.append((first, storable.pop(first)))
        return found
