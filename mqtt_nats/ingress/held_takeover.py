# SPDX-License-Identifier: Apache-2.0
"""Takeover of held QoS 2 publishes by the next connection of their session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_streams.hashing import registered_as

if TYPE_CHECKING:
    from mqtt_nats.ingress.publish import Publisher
    from mqtt_nats.ingress.qos2 import Inbound
    from mqtt_nats.sessions.services import Registry
    from mqtt_streams.sessions import SessionRecord

log = logging.getLogger("mqtt_nats.broker")

FORMER_HOLDS_S: Final = 5.0
"""Seconds after a claim in which the former gateway may still hold publishes of the session."""


async def take_over_held(client: Publisher, former: int, session: SessionRecord) -> None:
    """Take over the publishes that earlier connections of the session held while they were its owners.

    A record that an earlier owner held too late, after the previous connection had looked for such records, is
    removed; so is a record of an earlier session of the client.

    Args:
        former: sequence of the session record that the claim of the previous connection had replaced.
        session: the last session record of the previous connection.
    """
    store = client.services.streams.held
    records = []
    first = session.v5.first if session.v5 is not None else 0
    for record in await store.held(client.token):
        if record.late(former, session.time_ns) or 0 < record.epoch < first:
            log.info("%s: a held publish that was stored too late is removed (sequence %d)", client, record.seq)
            await store.delete(record.seq)
        else:
            records.append(record)
    client.inbound.restore(client.client_id, records)
    known = {record.seq for record in records}
    arguments = client.ingress.registry, registered_as(client.client_id, client.hash), client.inbound, known
    asyncio.get_running_loop().call_later(FORMER_HOLDS_S, _expect_late, *arguments, client.epoch)


def _expect_late(registry: Registry[Publisher], name: str, inbound: Inbound, known: Set[int], epoch: int) -> None:
    client = registry.clients.get(name)
    if client is not None and client.qos2 is inbound and client.alive:
        client.do(_remove_late(client, known, epoch))


async def _remove_late(client: Publisher, known: Set[int], epoch: int) -> None:
    """Remove records that the former gateway has held after the session was claimed here.

    That gateway may read and hold a publish before it hears of the claim. The client has sent the publish again
    here, so the next connection would take the record for another message with this packet identifier.

    Args:
        known: sequences of the records that were held when the session was taken over.
        epoch: epoch of the claim; records of this connection have this epoch or a later one.
    """
    store = client.services.streams.held
    for record in await retry_until_answered(client, lambda: store.held(client.token)):
        if record.epoch < epoch and record.seq not in known:
            log.info("%s: a held publish that was stored too late is removed (sequence %d)", client, record.seq)
            await retry_until_answered(client, partial(store.delete, record.seq))
