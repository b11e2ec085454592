# SPDX-License-Identifier: Apache-2.0
"""The empty messages that tell of retained messages which were removed.

nats-server's MQTT listeners hear of them by consumers of their own: a tombstone that goes before they had it leaves
them with the old message. So each stays a little. Why: docs/internals/rules.md#tombstones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending import IgnoredStore, PendingStore

if TYPE_CHECKING:
    from mqtt_nats.gateway.broker import Broker
    from mqtt_streams.api import ApiError

HEARD: Final = 1.0
"""Seconds after which every listener has heard of it."""


class Removal(PendingStore):
    """The removal of a tombstone, which ``parent`` waits for."""

    __slots__ = ("_ack", "_parent")

    def __init__(self, parent: PendingStore, ack: bytes) -> None:
        self._parent, self._ack = parent, ack

    def stored(self, ack: bytes) -> None:
        """Its place is free."""
        self._parent.stored(self._ack)

    def failed(self, error: ApiError) -> None:
        """It is gone already, or goes by its TTL: the message that it removes is."""
        self._parent.stored(self._ack)


class Tombstones:
    """Those that this gateway has stored, and nobody else removes."""

    __slots__ = ("_broker", "_ended", "_waiting")

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._ended = False
        self._waiting: deque[tuple[float, int]] = deque()

    def add(self, sequence: int, parent: PendingStore | None, ack: bytes) -> None:
        """Remove one soon, or at once where it takes a place that a message on another topic may need.

        Args:
            parent: what the removal of the retained message is part of: it is done when the next message has its place.
            ack: PubAck of the tombstone.
        """
        if self._broker.settings.max_retained is not None:
            self._remove(sequence, IgnoredStore() if parent is None else Removal(parent, ack))
            self._broker.link.kick()
            return
        if parent is not None:
            parent.stored(ack)
        if self._ended:
            self._remove(sequence, IgnoredStore())
            self._broker.link.kick()
            return
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(HEARD, self._flush)
        self._waiting.append((loop.time() + HEARD, sequence))

    def end(self) -> None:
        """The gateway ends: remove all of them, and what is stored after this at once."""
        self._ended = True
        while self._waiting:
            self._remove(self._waiting.popleft()[1], IgnoredStore())
        self._broker.link.kick()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._waiting and self._waiting[0][0] <= now:
            self._remove(self._waiting.popleft()[1], IgnoredStore())
        self._broker.link.kick()
        if self._waiting:
            loop.call_at(self._waiting[0][0], self._flush)

    def _remove(self, sequence: int, operation: PendingStore) -> None:
        broker = self._broker
        broker.store.call(broker.delete_retained, b'{"seq":%d,"no_erase":true}' % sequence, operation)
