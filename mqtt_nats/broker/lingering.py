# SPDX-License-Identifier: Apache-2.0
"""Records of PUBRELs that are not owed any more, kept until nobody can need them.

A nats-server writes what its consumers have delivered, and what was acknowledged, about ten times a second. One that is
killed has forgotten the end of it, also acknowledgements that it has confirmed, and delivers those messages once more.
The record of a PUBREL says that the client has the message; so it stays a little longer than its exchange.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mqtt_nats.backbone.link import Link

LINGER: Final = 0.3
"""Seconds from the end of an exchange to the acknowledgement of its record."""


class Lingering:
    """Acknowledgements of one session that are kept back for `LINGER` seconds."""

    __slots__ = ("_link", "_loop", "_waiting")

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[float, bytes]] = deque()

    def add(self, reply: bytes) -> None:
        """Acknowledge later."""
        if not self._waiting:
            self._loop.call_later(LINGER, self._flush)
        self._waiting.append((self._loop.time() + LINGER, reply))

    def end(self) -> None:
        """Acknowledge now: the next owner must not find a record that goes away under its hands."""
        while self._waiting:
            self._acknowledge()
        self._link.kick()

    def _flush(self) -> None:
        now = self._loop.time()
        while self._waiting and self._waiting[0][0] <= now:
            self._acknowledge()
        self._link.kick()
        if self._waiting:
            self._loop.call_at(self._waiting[0][0], self._flush)

    def _acknowledge(self) -> None:
        self._link.out.append(b"PUB %b 0\r\n\r\n" % self._waiting.popleft()[1])
