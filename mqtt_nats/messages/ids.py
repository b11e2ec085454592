# SPDX-License-Identifier: Apache-2.0
"""The ids of messages: 128 bits, as 32 hex digits. See docs/observing.md."""

from __future__ import annotations

from time import time_ns
from typing import Final

_TWO: Final = tuple(b"%02x" % number for number in range(0x100))


class MessageIds:
    """Makes the ids of one gateway: time in microseconds (64 bits), gateway (48 bits), counter (16 bits)."""

    __slots__ = ("_count", "_high", "_start", "given", "own")

    def __init__(self, gateway: int) -> None:
        self.own = b"%012x" % gateway
        """What all of them have from the 17th digit on."""
        self.given = b""
        """The id that the next message gets, where it was told before."""
        self._count = 0
        self._high = -1
        """The time but for its last 8 bits: messages that leave at once have it in common."""
        self._start = b""

    def next(self) -> bytes:
        """The id of one more message."""
        if self.given:
            given, self.given = self.given, b""
            return given
        self._count = count = (self._count + 1) & 0xFFFF
        now = time_ns() // 1000
        high = now >> 8
        if high != self._high:
            self._high, self._start = high, b"%014x" % high
        # One for each message: to format numbers takes longer, and so does to join a tuple.
        return self._start + _TWO[now & 0xFF] + self.own + _TWO[count >> 8] + _TWO[count & 0xFF]
