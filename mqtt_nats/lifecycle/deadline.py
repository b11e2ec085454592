# SPDX-License-Identifier: Apache-2.0
"""Deadline of a session: the timer that ends a session after its connection has ended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import PendingStore
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.error_codes import WRONG_LAST_SEQUENCE
from mqtt_streams.headers import EXPECTED_LAST_SUBJECT_SEQUENCE
from mqtt_streams.sessions import PoisonedRecord
from mqtt_streams.timers import EXPIRY, schedule_block, timer_subject

if TYPE_CHECKING:
    from mqtt_nats.sessions.session import Session

log = logging.getLogger("mqtt_nats.broker")

# Header with which a timer is stored only if the session has no timer.
UNSET: Final = ((EXPECTED_LAST_SUBJECT_SEQUENCE, "0"),)


def set_deadline(client: Session, at: float | None, pairs: tuple[tuple[str, str], ...] = UNSET) -> None:
    """Have the session end at Unix time ``at`` (nats-server's clock), unless its record is written before.

    None: the session does not end. Its timer never fires, and tells other gateways that the connection has ended.
    """
    headers = schedule_block(EXPIRY, client.hash, at, client.epoch, pairs)
    target = b"HPUB %b " % timer_subject(EXPIRY, client.hash).encode()
    client.path.store.put(target, headers, client.client_id.encode(), DeadlineOp(client, at))


class DeadlineOp(PendingStore):
    """The store of the timer of a session whose connection has ended.

    The timer is stored only if the session has none: a gateway that was cut off may learn late that the session has
    moved, and must not replace the timer of the later owner.
    """

    __slots__ = ("at", "client")

    def __init__(self, client: Session, at: float | None) -> None:
        self.client = client
        self.at = at

    def stored(self, ack: bytes) -> None:
        """Do nothing: the deadline is stored, and the session will end in time."""

    def failed(self, error: ApiError) -> None:
        """Replace a timer that exists, if the session has not moved; log any other error."""
        client = self.client
        if error.err_code in WRONG_LAST_SEQUENCE:
            client.services.tasks.spawn(self._replace(), f"deadline of {client.client_id}")
        else:
            log.error("the session of %r may not end in time: %s", client.client_id, error)

    async def _replace(self) -> None:
        client = self.client
        services = client.services
        try:
            found = await services.streams.sessions.load(client.hash, client.client_id)
            if found is None or found[1] != client.epoch:
                return
            await services.streams.timers.cancel(EXPIRY, client.hash, client.epoch)
        except PoisonedRecord:
            return
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.error("the session of %r may not end in time: %s", client.client_id, error)
            return
        set_deadline(client, self.at, ())
        services.nats.link.kick()
