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

LINGER: Final = 1.0
"""Seconds from the end of an exchange to the acknowledgement of its record."""


class Lingering:
    """Acknowledgements that are kept back for `LINGER` seconds, whatever becomes of the session meanwhile."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[float, bytes]] = deque()

    def add(self, reply: bytes) -> None:
        """Acknowledge later."""
        if not self._waiting:
            self._loop.call_later(LINGER, self._flush)
        self._waiting.append((self._loop.time() + LINGER, reply))

    def _flush(self) -> None:
        waiting = self._waiting
        now = self._loop.time()
        out = self._link.out
        while waiting and waiting[0][0] <= now:
            out.append(b"PUB %b 0\r\n\r\n" % waiting.popleft()[1])
        self._link.kick()
        if waiting:
            self._loop.call_at(waiting[0][0], self._flush)
