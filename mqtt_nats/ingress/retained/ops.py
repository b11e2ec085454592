# SPDX-License-Identifier: Apache-2.0
"""The store of a retained message: its success, its refusal, and its tombstone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mqtt_nats.backbone.pending_stores import ANYBODY, OVERTAKEN, PendingStore, sequence
from mqtt_nats.base.logs import log_failure
from mqtt_streams.error_codes import MAXIMUM_MESSAGES_TEXT

if TYPE_CHECKING:
    from mqtt_nats.ingress.publish import Publisher
    from mqtt_nats.ingress.retained.store import RetainedStores
    from mqtt_streams.api import ApiError

log = logging.getLogger("mqtt_nats.broker")


class RetainedOp(PendingStore):
    """The store of a retained message, a part of the operation ``parent``; None = the result is only logged."""

    __slots__ = ("client", "parent", "stores", "tombstone")

    def __init__(
        self, stores: RetainedStores, parent: PendingStore | None, tombstone: str, client: Publisher | None = None
    ) -> None:
        """``tombstone``: subject of the tombstone in the stream; empty = a message is stored."""
        self.stores = stores
        self.client = client
        """Client that has published the message; None = no client whose session may have moved."""
        self.parent = parent
        self.tombstone = tombstone

    def stored(self, ack: bytes) -> None:
        """Finish the store; a tombstone is removed by the gateway that has stored it."""
        stores = self.stores
        stores.store_ended(self)
        if self.tombstone:
            stores.tombstones.add(self.tombstone, sequence(ack), self.parent, ack)
        elif self.parent is not None:
            self.parent.stored(ack)

    def waits(self) -> bool:
        """Return whether the publish waits for room."""
        return self.parent is not None and self.parent.waits()

    def publisher(self) -> object:
        """Return `ANYBODY`: an older message, such as a will, must not replace a newer one of any publisher."""
        return ANYBODY

    def failed(self, error: ApiError) -> None:
        """Fail the whole publish; a full stream fails it only if its acknowledgement can have a reason code.

        A message that a newer one has overtaken is as good as stored and replaced.
        """
        self.stores.store_ended(self)
        parent = self.parent
        if error is OVERTAKEN:
            if parent is not None:
                parent.stored(b"")
            return
        if error.description == MAXIMUM_MESSAGES_TEXT and not (parent is not None and parent.explains()):
            self.stores.services.counters.not_retain()
            log.debug("a message is not retained: max_retained is reached")
            if parent is not None:
                parent.stored(b"")
        elif parent is not None:
            parent.failed(error)
        else:
            log_failure(log, logging.WARNING, "store", "a retained message was not stored: %s", error)
