# SPDX-License-Identifier: Apache-2.0
"""Messages that wait until older ones have been sent: those that were missed, or are retained."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqtt_nats.messages.message import Message
    from mqtt_nats.pubsub.granted_options import Choice
    from mqtt_nats.pubsub.routing_table import Filter, Route


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


class Gate:
    """New messages of a subscription, kept back while its retained messages are being sent.

    Without it an older, retained message could arrive after a newer one.
    """

    __slots__ = ("_bytes", "_limit", "dropped", "found", "users", "waiting")

    def __init__(self, found: Filter, limit: int) -> None:
        """``limit`` in bytes of payload."""
        self._limit = limit
        self._bytes = 0
        self.dropped = 0
        self.found = found
        self.users = 0
        """Replays that have begun and not ended."""
        self.waiting: list[tuple[Choice, Message]] = []

    def keep(self, choice: Choice, message: Message) -> bool:
        """Keep a message; QoS 0 ones are dropped when the gate is full. False: no room."""
        if self._bytes + len(message.payload) > self._limit:
            self.dropped += 1
            return message.qos == 0 or choice.qos == 0
        self._bytes += len(message.payload) + 64
        self.waiting.append((choice, message))
        return True
