# SPDX-License-Identifier: Apache-2.0
"""Message ids: 128 bits as 32 hex digits. See docs/observing.md."""

from __future__ import annotations

from time import time_ns
from typing import Final

_TWO: Final = tuple(b"%02x" % number for number in range(0x100))


def precedes(one: bytes, other: bytes) -> bool:
    """Whether ids tell that a message was published before another one, at the same gateway or both at QoS 2.

    The ids are those of :func:`mqtt_nats.messages.headers.identity`. QoS 2 publishes are in the order in which they
    were held; they may be released in another one.
    """
    if one.startswith(b"q2-") and other.startswith(b"q2-"):
        first, second = one[3:], other[3:]
        return first.isdigit() and second.isdigit() and int(first) < int(second)
    return len(one) == len(other) == 32 and one[16:28] == other[16:28] and one < other


class MessageIds:
    """Generator of one gateway's message ids: time in microseconds (64 bits), gateway (48 bits), counter (16 bits)."""

    __slots__ = ("_count", "_high", "_start", "given", "own")

    def __init__(self, gateway: int) -> None:
        self.own = b"%012x" % gateway
        """Digits 17 to 28 of each id: the gateway."""
        self.given = b""
        """Id that the next message gets, since hooks have seen it; empty = a new id."""
        self._count = 0
        self._high = -1
        """Time in microseconds without its last 8 bits: its digits are shared by messages of the same moment."""
        self._start = b""

    def is_own(self, headers: bytes) -> bool:
        """Return whether this gateway made the message with these headers, by its id."""
        start = headers.find(b"\r\nNmqtt-Id:")
        return start >= 0 and headers[start + 27 : start + 39] == self.own

    def give(self, identity: bytes) -> None:
        """Give the next message an id that hooks have seen; empty = a new id."""
        self.given = identity

    def next(self) -> bytes:
        """Return the id of the next message."""
        if self.given:
            given, self.given = self.given, b""
            return given
        self._count = count = (self._count + 1) & 0xFFFF
        now = time_ns() // 1000
        high = now >> 8
        if high != self._high:
            self._high, self._start = high, b"%014x" % high
        # On the path of each message: number formatting and a join of a tuple would take longer.
        return self._start + _TWO[now & 0xFF] + self.own + _TWO[count >> 8] + _TWO[count & 0xFF]
