# SPDX-License-Identifier: Apache-2.0
"""The store of a retained message, and what its end means."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending import PendingStore, sequence
from mqtt_nats.base.logs import log_failure

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.gateway.broker import Broker
    from mqtt_streams.api import ApiError

log = logging.getLogger("mqtt_nats.broker")

NO_ROOM: Final = "maximum messages exceeded"
"""JetStream's words, of a stream that has as many messages as it may."""


class RetainedOp(PendingStore):
    """The store of a retained message, part of ``parent`` (or of nothing that anybody waits for)."""

    __slots__ = ("broker", "client", "parent", "tombstone")

    def __init__(
        self, broker: Broker, parent: PendingStore | None, tombstone: bool, client: Client | None = None
    ) -> None:
        self.broker = broker
        self.client = client
        """Who has published it; None = nobody who may be elsewhere by now."""
        self.parent = parent
        self.tombstone = tombstone

    def stored(self, ack: bytes) -> None:
        """Remove our own tombstone: nobody else does."""
        broker = self.broker
        broker.retained_now(self)
        if self.tombstone:
            broker.tombstones.add(sequence(ack), self.parent, ack)
        elif self.parent is not None:
            self.parent.stored(ack)

    def failed(self, error: ApiError) -> None:
        """The publish as a whole has failed, unless there are as many retained messages as there may be."""
        self.broker.retained_now(self)
        parent = self.parent
        if error.description == NO_ROOM and not (parent is not None and parent.explains()):
            self.broker.not_retained += 1
            log.debug("a message is not retained: there are as many as there may be")
            if parent is not None:
                parent.stored(b"")
        elif parent is not None:
            parent.failed(error)
        else:
            log_failure(log, logging.WARNING, "store", "a retained message was not stored: %s", error)
