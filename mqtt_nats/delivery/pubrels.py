# SPDX-License-Identifier: Apache-2.0
"""PUBRELs that are owed to a client: the store of a record, its confirmation, and records that are missing.

A connection that ends acknowledges the records of what is complete. The next one, at another gateway, may have read
them by then: it sends PUBREL, the client answers, and nothing delivers what JetStream has removed meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending import PendingStore
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.protocol.durable_sender import DurableSender
    from mqtt_streams.pubrel import Owed

PATIENCE: Final = 1.0
PATIENCE_MOST: Final = 30.0
"""Seconds before a look at what there is: at first, and at most."""


class PubrelOp(PendingStore):
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


class ConfirmOp(PendingStore):
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


async def seek(
    machine: DurableSender,
    owed: Callable[[], Awaitable[list[Owed]]],
    is_alive: Callable[[], bool],
    first_wait_s: float = PATIENCE,
) -> None:
    """Look for records that the client has completed and JetStream does not deliver, as long as there are any.

    Args:
        owed: reads the records that JetStream has for the client.
        is_alive: whether the client is connected.
        first_wait_s: before the first look, and before the first one of each further record.
    """
    patience = first_wait_s
    while is_alive() and (waiting := machine.unrecorded()):
        await asyncio.sleep(patience)
        if waiting.items().isdisjoint(machine.unrecorded().items()):
            patience = first_wait_s  # they were on their way
            continue
        patience = min(patience * 2, PATIENCE_MOST)
        try:
            stored = {(one.packet_id, one.message_seq) for one in await owed()}
        except (ApiError, NoResponders, RequestTimeout):
            continue
        for identifier, sequence in waiting.items() - stored:
            machine.vanished(identifier, sequence)
