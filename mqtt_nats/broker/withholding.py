# SPDX-License-Identifier: Apache-2.0
"""Retained messages that were not stored when NATS was lost.

Their client may have gone to another gateway since, and have retained something else there. So they are stored when
its session is known to be here still. See docs/internals/rules.md#withheld-messages.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.broker.operations import RetainedOp
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.sessions import NewerRecord, PoisonedRecord

if TYPE_CHECKING:
    from mqtt_nats.broker.client import Client
    from mqtt_nats.broker.context import Broker

log = logging.getLogger("mqtt_nats.broker")

RETRY: Final = 0.5
"""Seconds between two looks for the owner of a session, where JetStream does not answer."""


def withhold(broker: Broker) -> None:
    """NATS is there again, and nothing was sent again yet."""
    doubted = broker.doubted
    for operation in broker.retaining:
        if isinstance(operation, RetainedOp) and operation.client is not None:
            broker.store.withhold(operation)
            if operation.client not in doubted:
                doubted[operation.client] = set()
                broker.spawn(_look(operation.client), f"retained messages of {operation.client.client_id}")
            doubted[operation.client].add(operation)


async def _look(client: Client) -> None:
    """Store what was withheld, or drop it."""
    broker = client.broker
    while True:
        await broker.online.wait()
        linked = broker.linked
        try:
            here = await _is_here(client)
            if broker.linked == linked and broker.link.online:
                break
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("%s: its session cannot be read: %s", client, error)
        await asyncio.sleep(RETRY)
    found = broker.doubted.pop(client)
    if here:
        broker.store.let_go(found)
        return
    log.info("%s: the session has moved, and what it was to retain is not stored from here", client)
    broker.store.drop(found)
    for operation in found:
        broker.retained_now(operation)
    if client.alive:
        client.taken_over()


async def _is_here(client: Client) -> bool:
    """Whether nobody else has had the session since.

    A session that has ended with its connection leaves no record, wherever that was.
    """
    try:
        found = await client.broker.sessions.load(client.hash, client.client_id)
    except (NewerRecord, PoisonedRecord):
        return False
    if found is None:
        return not client.alive and not client.durable
    present, own = found[0].v5, client.record.v5 if client.record is not None else None
    # A write that is under way is known by its nonce.
    return found[1] == client.epoch or (present is not None and own is not None and present.nonce == own.nonce)
