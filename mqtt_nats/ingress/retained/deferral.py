# SPDX-License-Identifier: Apache-2.0
"""Withheld retained messages: their stores were not acknowledged when NATS was lost.

Their client may have gone to another gateway since and have retained a newer message there. So they are stored only
when the client's session is known to be here still; until then all later retained messages wait behind them.
See docs/internals/ingress.md#withheld-messages.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import all_done
from mqtt_nats.backbone.pending_stores import TRANSIENT
from mqtt_nats.ingress.retained.ops import RetainedOp
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.sessions import NewerRecord, PoisonedRecord

if TYPE_CHECKING:
    from mqtt_nats.backbone.pending_stores import PendingStore
    from mqtt_nats.ingress.publish import Publisher
    from mqtt_nats.ingress.retained.store import RetainedStores

log = logging.getLogger("mqtt_nats.broker")

PASSING: Final = TRANSIENT | {STREAM_NOT_FOUND}
"""JetStream errors after which a record is read again: also of a deleted stream, which is created again."""

RECORDS_READ_RETRY_S: Final = 0.5
"""Seconds between two reads of session records where JetStream does not answer."""


RECORDS_READ_AT_ONCE: Final = 64
"""Records that are read at the same time."""


def withhold(stores: RetainedStores) -> None:
    """Withhold all retained messages that are not stored; NATS is connected again and nothing was sent again yet."""
    for operation in stores.storing:
        _withhold(stores, operation, True)


def consider(stores: RetainedStores, operation: PendingStore) -> None:
    """Withhold the store of a retained message if its client's session is in doubt, or if others are withheld."""
    client = _client(operation)
    doubtful = client is not None and client in stores.services.registry.unchecked
    if doubtful or stores.withholding is not None:
        _withhold(stores, operation, doubtful)


def _withhold(stores: RetainedStores, operation: PendingStore, doubtful: bool) -> None:
    stores.services.nats.store.withhold(operation)
    doubted = stores.withholding
    if doubted is None:
        doubted = stores.begin_withholding()
        stores.services.tasks.spawn(_look(stores, doubted), "retained messages in doubt")
    client = _client(operation)
    if doubtful and client is not None:
        doubted.add(client)


def _client(operation: PendingStore) -> Publisher | None:
    return operation.client if isinstance(operation, RetainedOp) else None


async def _look(stores: RetainedStores, doubted: set[Publisher]) -> None:
    """Store the withheld messages in their order, except messages of clients whose session has moved."""
    nats = stores.services.nats
    here: dict[Publisher, bool | None] = {}
    linked = 0.0
    while True:
        await nats.online.wait()
        if linked != nats.linked:
            linked = nats.linked
            here.clear()
        try:
            while doubted - here.keys():
                await _read(doubted - here.keys(), here)
            if linked == nats.linked and nats.link.online:
                break
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("retained messages wait for JetStream: %s", error)
        except Exception:
            log.exception("retained messages could not be stored")
        here.clear()  # a client that was here may have moved before the other records can be read
        await asyncio.sleep(RECORDS_READ_RETRY_S)
    stores.end_withholding()
    dropped: set[PendingStore] = {one for one in stores.storing if not _may(here, one)}
    stores.services.nats.store.let_go(dropped)
    for operation in dropped:
        stores.store_ended(operation)
    for client in [client for client, is_here in here.items() if not is_here]:
        log.info("%s: this gateway does not store its retained message", client)
        if client.alive and here[client] is None:
            client.close()
        elif client.alive:
            log.info("%s: another connection has claimed the session", client)
            client.taken_over()


def _may(here: dict[Publisher, bool | None], operation: PendingStore) -> bool:
    client = _client(operation)
    return client is None or bool(here.get(client, True) and not client.taken)


async def _read(doubted: set[Publisher], here: dict[Publisher, bool | None]) -> None:
    """Read the session records of clients; the results go into ``here``."""
    limit = asyncio.Semaphore(RECORDS_READ_AT_ONCE)

    async def read(client: Publisher) -> None:
        async with limit:
            here[client] = await _is_here(client)

    await all_done(read(client) for client in doubted)


async def _is_here(client: Publisher) -> bool | None:
    """Whether no other connection has had the client's session since; None: its record cannot be read.

    A session that has ended leaves no record, on whichever gateway it ended.
    """
    try:
        found = await client.services.streams.sessions.load(client.hash, client.client_id)
    except NewerRecord:
        return False
    except (ApiError, PoisonedRecord) as error:
        if isinstance(error, ApiError) and error.err_code in PASSING:
            raise
        log.warning("%s: its session cannot be read: %s", client, error)
        return None
    if found is None:
        return not client.alive
    present, own = found[0].v5, client.record.v5 if client.record is not None else None
    # The nonce identifies a write of this connection that is not confirmed yet; the epoch one confirmed since the read.
    return found[1] <= client.epoch or (present is not None and own is not None and present.nonce == own.nonce)
