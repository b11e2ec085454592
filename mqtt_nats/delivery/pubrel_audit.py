# SPDX-License-Identifier: Apache-2.0
"""Records of owed PUBRELs that are waited for and do not come, since there are none any more.

A connection that ends acknowledges the records of what is complete. The next one, at another gateway, may have read
them by then: it sends PUBREL, the client answers, and nothing delivers what JetStream has removed meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from mqtt_streams.api import ApiError, NoResponders, RequestTimeout

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableSide

PATIENCE: Final = 1.0
PATIENCE_MOST: Final = 30.0
"""Seconds before a look at what there is: at first, and at most."""


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
