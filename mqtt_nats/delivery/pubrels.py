# SPDX-License-Identifier: Apache-2.0
"""PUBRELs that are owed to a client: the store of a record, its confirmation, and records that are missing.

A connection that ends acknowledges the records of what is complete. The next one, at another gateway, may have read
them by then: it sends PUBREL, the client answers, and nothing delivers what JetStream has removed meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending import Op
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.durable import DurableSide

PATIENCE: Final = 1.0
PATIENCE_MOST: Final = 30.0
"""Seconds before a look at what there is: at first, and at most."""


class PubrelOp(Op):
    """The store of an owed PUBREL."""

    __slots__ = ("client", "id")

    def __init__(self, client: Client, identifier: int) -> None:
        self.client = client
        self.id = identifier

    def stored(self, ack: bytes) -> None:
        """PUBREL may be sent; when the connection has ended, whoever resumes the session finds the record."""
        if self.client.durable_side is not None and self.client.alive:
            self.client.durable_side.pubrel_stored(self.id)

    def failed(self, error: ApiError) -> None:
        """Without the record no PUBREL: the client sends PUBREC again after it has reconnected."""
        self.client.refused(error)


class ConfirmOp(Op):
    """An acknowledgement that JetStream confirms."""

    __slots__ = ("client", "id")

    optional = True

    def __init__(self, client: Client, identifier: int) -> None:
        self.client = client
        self.id = identifier

    def stored(self, ack: bytes) -> None:
        """JetStream has forgotten the message."""
        if self.client.durable_side is not None:
            self.client.durable_side.machine.confirmed(self.id)

    def failed(self, error: ApiError) -> None:
        """The consumer is gone, and the message with it."""
        self.stored(b"")


async def seek(side: DurableSide) -> None:
    """Look for what the client has completed and JetStream does not deliver, as long as there is any."""
    try:
        await _seek(side)
    finally:
        side.seeking = False


async def _seek(side: DurableSide) -> None:
    client, machine = side.client, side.machine
    patience = PATIENCE
    while client.alive and (waiting := machine.unrecorded()):
        await asyncio.sleep(patience)
        if waiting.items().isdisjoint(machine.unrecorded().items()):
            patience = PATIENCE  # they were on their way
            continue
        patience = min(patience * 2, PATIENCE_MOST)
        try:
            owed = {(one.packet_id, one.message_seq) for one in await client.broker.pubrels.owed(client.hash)}
        except (ApiError, NoResponders, RequestTimeout):
            continue
        for identifier, sequence in waiting.items() - owed:
            machine.vanished(identifier, sequence)
