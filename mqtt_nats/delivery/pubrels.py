# SPDX-License-Identifier: Apache-2.0
"""PUBRELs that are owed to a client: storing a record, confirming a message, and finding records that are missing.

A connection that ends acknowledges the records of complete messages. The next connection, at another gateway, may have
read these records already: it sends PUBREL, the client answers, and JetStream never delivers the removed record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import PendingStore
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.protocol.durable_sender import DurableSender
    from mqtt_streams.pubrel import Owed

PATIENCE: Final = 1.0
PATIENCE_MOST: Final = 30.0
"""Seconds before a look at the stored records: before the first look (`PATIENCE`), and at most."""


class PubrelOp(PendingStore):
    """The store of an owed PUBREL."""

    __slots__ = ("client", "id")

    def __init__(self, client: Client, identifier: int) -> None:
        self.client = client
        self.id = identifier

    def stored(self, ack: bytes) -> None:
        """Let PUBREL be sent; after the end of the connection the next owner finds the record."""
        if self.client.durable_side is not None and self.client.alive:
            self.client.durable_side.pubrel_stored(self.id)

    def waits(self) -> bool:
        """Return True: the client waits for PUBREL, as without a leader."""
        return True

    def failed(self, error: ApiError) -> None:
        """End the connection: without the record PUBREL is not sent; the client sends PUBREC again on its next one."""
        self.client.refused(error)


class ConfirmOp(PendingStore):
    """An acknowledgement of a released message, which JetStream confirms."""

    __slots__ = ("client", "id")

    optional = True

    def __init__(self, client: Client, identifier: int) -> None:
        self.client = client
        self.id = identifier

    def stored(self, ack: bytes) -> None:
        """Report to the machine that JetStream has the acknowledgement."""
        if self.client.durable_side is not None:
            self.client.durable_side.machine.confirmed(self.id)

    def failed(self, error: ApiError) -> None:
        """Treat the message as acknowledged: the consumer is gone, and the message with it."""
        self.stored(b"")


async def seek(
    machine: DurableSender,
    owed: Callable[[], Awaitable[list[Owed]]],
    is_alive: Callable[[], bool],
    first_wait_s: float = PATIENCE,
) -> None:
    """Look for records of answered PUBRELs that JetStream does not deliver, for as long as the machine has any.

    Args:
        owed: reads the records that JetStream has for the client.
        is_alive: whether the client is connected.
        first_wait_s: seconds before the first look at each record.
    """
    patience = first_wait_s
    while is_alive() and (waiting := machine.unrecorded()):
        await asyncio.sleep(patience)
        if waiting.items().isdisjoint(machine.unrecorded().items()):
            patience = first_wait_s  # the records were on their way, and have come
            continue
        patience = min(patience * 2, PATIENCE_MOST)
        try:
            stored = {(one.packet_id, one.message_seq) for one in await owed()}
        except (ApiError, NoResponders, RequestTimeout):
            continue
        for identifier, sequence in waiting.items() - stored:
            machine.vanished(identifier, sequence)
