# SPDX-License-Identifier: Apache-2.0
"""Messages that wait until older ones, which were missed, have been read from the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqtt_nats.pubsub.routing_table import Route


class Backlog:
    """QoS 1 and 2 messages that came through NATS while those missed before them were still being read.

    They are stored too: where there are too many they are dropped here, and read from the stream.
    """

    __slots__ = ("_bytes", "_limit", "full", "waiting")

    def __init__(self, limit: int) -> None:
        """``limit`` in bytes."""
        self._limit = limit
        self.reset()

    def reset(self) -> None:
        """Start over."""
        self._bytes = 0
        self.full = False
        """Something was dropped."""
        self.waiting: list[tuple[Route, bytes, bytes, bytes]] = []

    def keep(self, route: Route, headers: bytes, payload: bytes, reply: bytes) -> None:
        """Keep a message, or drop it when there is no room."""
        self._bytes += len(headers) + len(payload) + 256
        if self.full or self._bytes > self._limit:
            self.full = True
            self.waiting.clear()
        else:
            self.waiting.append((route, headers, payload, reply))
