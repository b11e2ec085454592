# SPDX-License-Identifier: Apache-2.0
"""Messages that wait until older ones have been sent: those that were missed, or are retained."""

from __future__ import annotations

from collections.abc import Callable
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
    """New messages of a subscription, kept back while older ones are being sent.

    Those are its retained messages, or what the consumer of a subscription still brings of which QoS 0 has taken the
    place. Without the gate an older message could arrive after a newer one.
    """

    __slots__ = ("_bytes", "_count", "_limit", "after", "dropped", "ended", "former", "found", "users", "waiting")

    def __init__(self, found: Filter, limit: int, former: Gate | None = None) -> None:
        """``limit`` in bytes of payload; ``former`` is the one before it of the same subscription, yet to be opened."""
        self._limit = limit
        self._bytes = 0
        self._count = 0
        self.dropped = 0
        self.found = found
        self.former = former
        self.users = 0
        """What has to be over before the messages go: replays, and consumers that still bring something."""
        self.ended = False
        """The messages have gone, or the subscription has."""
        self.after: list[Callable[[], None]] = []
        """What is let go after them."""
        self.waiting: dict[bytes | int, tuple[Choice, Message]] = {}
        """In the order in which they came, by their ids, or numbers where they have none."""

    def hold(self) -> None:
        """Something more has to be over before its messages go."""
        self.users += 1

    def unhold(self) -> bool:
        """One such thing is over; whether it was the last."""
        self.users -= 1
        if self.former is not None and self.former.ended:
            self.former = None
        return not self.users

    @property
    def room(self) -> int:
        """How many bytes more it may keep."""
        return max(self._limit - self._bytes, 0)

    def keep(self, choice: Choice, message: Message, known: bytes = b"") -> bool:
        """Keep a message, ``known`` by that id; QoS 0 ones are dropped when the gate is full. False: no room."""
        if self._bytes + len(message.payload) > self._limit:
            self.dropped += 1
            return message.qos == 0 or choice.qos == 0
        self._bytes += len(message.payload) + 64
        self._count += 1
        self.waiting[known or self._count] = choice, message
        return True

    def discard(self, known: bytes) -> None:
        """A message is sent in another way."""
        kept = self.waiting.pop(known, None)
        if kept is not None:
            self._bytes -= len(kept[1].payload) + 64

    def discard_stored(self) -> None:
        """So is every one that has an id."""
        for known in [one for one in self.waiting if isinstance(one, bytes)]:
            self.discard(known)

    def end(self) -> list[tuple[Choice, Message]]:
        """Keep nothing any more; returns what was kept. What is ``after`` it is left to the caller."""
        self.ended = True
        waiting, self.waiting = self.waiting, {}
        return list(waiting.values())

    def let_go(self) -> None:
        """Let go what is to come after its messages."""
        after, self.after = self.after, []
        for release in after:
            release()
