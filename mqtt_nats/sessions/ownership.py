# SPDX-License-Identifier: Apache-2.0
"""Check that a session still belongs to a connection: its record has the connection's epoch."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.base.logs import once
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.sessions import PoisonedRecord

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client

log = logging.getLogger("mqtt_nats.broker")

PATIENCE: Final = 30.0
"""Seconds to wait for JetStream after core NATS is back: a stream's leader may have to be elected."""

RETRY: Final = 0.25
"""Seconds between two attempts to read the record."""


async def still_owner(client: Client) -> bool:
    """Whether the session is this connection's; if not, or if its record cannot be read, the connection is ended.

    While NATS is lost the result is False, and the connection goes on.
    """
    broker = client.broker
    patience = asyncio.get_running_loop().time() + PATIENCE
    while True:
        try:
            found = await broker.sessions.load(client.hash, client.client_id)
            break
        except (ApiError, NoResponders, RequestTimeout) as error:
            if not broker.link.online or not client.alive:
                return False  # after the reconnect to NATS the record is read again
            if asyncio.get_running_loop().time() > patience:
                log.warning("%s: its session cannot be read: %s", client, error)
                client.close()
                return False
            await asyncio.sleep(RETRY)
        except PoisonedRecord as error:
            log.warning("%s: its session cannot be read: %s", client, error)
            client.close()
            return False
    if found is None or found[1] != client.epoch:
        if found is None:
            log.warning(
                "%s: its session is gone: it has ended elsewhere, or was lost", client, extra=once("session gone")
            )
        else:
            log.info("%s: another connection has claimed the session", client)
        client.taken_over()
        return False
    return True
