# SPDX-License-Identifier: Apache-2.0
"""Tombstones: empty messages in the stream that replace removed retained messages, and are deleted a little later.

nats-server's MQTT listeners read tombstones by consumers of their own. A listener that does not get a tombstone before
its deletion keeps the old message. So each tombstone stays a second. Why: docs/internals/ingress.md#tombstones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import IgnoredStore, PendingStore

if TYPE_CHECKING:
    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_streams.api import ApiError

HEARD: Final = 1.0
"""Seconds after which every listener has read a tombstone."""


class Removal(PendingStore):
    """The deletion of a tombstone, for which ``parent`` waits."""

    __slots__ = ("_ack", "_parent")

    def __init__(self, parent: PendingStore, ack: bytes) -> None:
        self._parent, self._ack = parent, ack

    def stored(self, ack: bytes) -> None:
        """Finish the parent: the place of the tombstone is free."""
        self._parent.stored(self._ack)

    def failed(self, error: ApiError) -> None:
        """Finish the parent: the retained message is removed, and the tombstone is gone or ends by its TTL."""
        self._parent.stored(self._ack)


class Tombstones:
    """Tombstones that this gateway has stored; no other gateway deletes them."""

    __slots__ = ("_at_once", "_ended", "_nats", "_request", "_waiting")

    def __init__(self, nats: NatsLinks, request: bytes, *, at_once: bool) -> None:
        """``request``: subject of requests that delete one; ``at_once``: the number of messages is limited."""
        self._nats, self._request, self._at_once = nats, request, at_once
        self._ended = False
        self._waiting: deque[tuple[float, int]] = deque()

    def add(self, sequence: int, parent: PendingStore | None, ack: bytes) -> None:
        """Delete a tombstone soon, or at once where the number of retained messages is limited: it takes a place.

        Args:
            parent: operation to which the removal of the retained message belongs; it is done when the place is free.
            ack: PubAck of the tombstone.
        """
        if self._at_once:
            self._remove(sequence, IgnoredStore() if parent is None else Removal(parent, ack))
            self._nats.link.kick()
            return
        if parent is not None:
            parent.stored(ack)
        if self._ended:
            self._remove(sequence, IgnoredStore())
            self._nats.link.kick()
            return
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(HEARD, self._flush)
        self._waiting.append((loop.time() + HEARD, sequence))

    def end(self) -> None:
        """Delete all tombstones, and later ones at once: the gateway ends."""
        self._ended = True
        while self._waiting:
            self._remove(self._waiting.popleft()[1], IgnoredStore())
        self._nats.link.kick()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._waiting and self._waiting[0][0] <= now:
            self._remove(self._waiting.popleft()[1], IgnoredStore())
        self._nats.link.kick()
        if self._waiting:
            loop.call_at(self._waiting[0][0], self._flush)

    def _remove(self, sequence: int, operation: PendingStore) -> None:
        self._nats.store.call(self._request, b'{"seq":%d,"no_erase":true}' % sequence, operation)
