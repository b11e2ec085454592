# SPDX-License-Identifier: Apache-2.0
"""PUBRELs leave in the order of their PUBRECs, in whatever order they may be sent."""

from __future__ import annotations

from collections import deque


class ReleaseOrder:
    """What has to be stored before a PUBREL may be sent is stored in streams of their own, which keep no order.

    [MQTT-4.6.0-4] (3.1.1)
    """

    __slots__ = ("_storable", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[int] = deque()
        """Packet identifiers in the order of their PUBRECs."""
        self._storable: dict[int, bytes] = {}
        """Those of them that are stored, behind one that is not."""

    def received(self, identifier: int) -> None:
        """A PUBREC has come."""
        self._waiting.append(identifier)

    def stored(self, identifier: int, mark: bytes) -> list[tuple[int, bytes]]:
        """It is stored, which ``mark`` stands for; returns the PUBRELs that may be sent now, with theirs."""
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
