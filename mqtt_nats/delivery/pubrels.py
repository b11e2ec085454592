# SPDX-License-Identifier: Apache-2.0
"""Records of QoS 2 messages of a client: PUBRELs that are owed, and what was in flight when its connection ended.

Why: docs/internals/delivery.md#owed-pubrels and docs/internals/protocol.md#suspect-identifiers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import IgnoredStore, PendingStore
from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.sessions.pubrel_consumer import attach_pubrels
from mqtt_streams import stored
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.headers import REPLACING
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import pubrel_block, pubrel_subject
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.shared import HalfWay, halfway_subject

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.protocol.durable_sender import DurableSender
    from mqtt_streams.pubrel import Owed

log = logging.getLogger("mqtt_nats.broker")

RECORDS_LOOK_FIRST_S: Final = 1.0
RECORDS_LOOK_MOST_S: Final = 30.0
"""Seconds before a look at the stored records: before the first look (`RECORDS_LOOK_FIRST_S`), and at most."""


class PubrelOp(PendingStore):
    """The store of an owed PUBREL."""

    __slots__ = ("client", "id")

    def __init__(self, client: Receiver, identifier: int) -> None:
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


def store_record(client: Receiver, identifier: int, sequence: int) -> None:
    """Store an owed PUBREL; the consumer of PUBREL records exists, or JetStream would not keep the record."""
    target = b"HPUB %b " % pubrel_subject(client.hash).encode()
    client.path.store.put(target, pubrel_block(identifier, sequence, client.epoch), b"", PubrelOp(client, identifier))


async def store_first(client: Receiver, side: DurableDelivery, identifier: int, sequence: int) -> None:
    """Create the consumer of PUBREL records, unless it has been created meanwhile, and store an owed PUBREL."""
    try:
        if not side.has_pubrels:
            await retry_until_answered(client, partial(attach_pubrels, side))
    except ApiError as error:
        client.refused(error)
    else:
        store_record(client, identifier, sequence)
        client.path.link.kick()


class ConfirmOp(PendingStore):
    """An acknowledgement of a message whose PUBREL is owed; JetStream confirms it."""

    __slots__ = ("client", "id")

    optional = True

    def __init__(self, client: Receiver, identifier: int) -> None:
        self.client = client
        self.id = identifier

    def stored(self, ack: bytes) -> None:
        """Report to the sender that JetStream has the acknowledgement."""
        if self.client.durable_side is not None:
            self.client.durable_side.machine.confirmed(self.id)

    def failed(self, error: ApiError) -> None:
        """Treat the message as acknowledged: the consumer is gone, and the message with it."""
        self.stored(b"")


async def seek(
    machine: DurableSender,
    owed: Callable[[], Awaitable[list[Owed]]],
    is_alive: Callable[[], bool],
    first_wait_s: float = RECORDS_LOOK_FIRST_S,
) -> None:
    """Look for records of answered PUBRELs that JetStream does not deliver, for as long as the sender has any.

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
        patience = min(patience * 2, RECORDS_LOOK_MOST_S)
        try:
            kept = {(one.packet_id, one.message_seq) for one in await owed()}
        except (ApiError, NoResponders, RequestTimeout):
            continue
        for identifier, sequence in waiting.items() - kept:
            machine.vanished(identifier, sequence)


def note(client: Receiver, side: DurableDelivery) -> None:
    """Store the sequences of QoS 2 messages that the client may know and has not completed, at the connection's end."""
    machine = side.machine
    known = [delivery for delivery in machine.queued if delivery.dup]
    known += machine.inflight.values()
    # A message of a shared subscription has its assignment as a note. A retained message has no `reply`.
    sequences = sorted({one.sequence for one in known if one.qos == 2 and (one.sequence > 0 or not one.reply)})
    services = client.services
    if sequences:
        target = b"HPUB %b " % halfway_subject(client.hash).encode()
        services.nats.store.put(target, REPLACING, b",".join(b"%d" % one for one in sequences), IgnoredStore())
    elif side.noted:
        request = stored.up_to(halfway_subject(client.hash), side.noted)
        services.nats.store.call(services.streams.purge_shared, request, IgnoredStore())
    else:
        return
    services.nats.link.kick()


async def gone(client: Receiver, side: DurableDelivery, found: HalfWay | None) -> list[int]:
    """Return the packet identifiers of noted messages that do not come again: the client has to give them up first.

    Called when all pending messages have come again.
    """
    if found is None:
        return []
    side.find_note(found.seq)
    if side.replaced is not None:  # every identifier is suspect
        return []
    inbox = client.services.nats.inbox
    # A message that is in the stream and not pending is complete: the note is an old one.
    lost = [
        one
        for one in missing(side.machine, [one for one in found.sequences if one > 0])
        if await stored.get_sequence(inbox, MESSAGES, one) is None
    ]
    if lost:
        log.warning("%s: %d messages in flight were removed from the stream", client, len(lost))
    for sequence in lost:
        side.machine.suspect(sequence, sequence)
    replaced = [-one for one in found.sequences if one < 0 and not await _comes(client, -one)]
    others = {side.machine.retained_identifier(sequence) for sequence in replaced} - _owned(side.machine)
    return [side.machine.identifier_of(sequence) for sequence in lost] + sorted(others)


async def _comes(client: Receiver, sequence: int) -> bool:
    """Whether a retained message is sent again: it is still retained, and its replay goes on."""
    record = client.record
    if record is None or record.v5 is None or not any(cursor <= sequence for cursor in record.v5.replay.values()):
        return False
    return await stored.get_sequence(client.services.nats.inbox, RETAINED, sequence) is not None


def missing(machine: DurableSender, sequences: list[int]) -> list[int]:
    """Return the sequences that have not come again and whose packet identifier no other message has.

    A message that was sent later under the identifier owns it: the client had given the identifier up before.
    """
    come = {delivery.sequence for delivery in machine.queued}
    taken = _owned(machine)
    return [one for one in sequences if one not in come and machine.identifier_of(one) not in taken]


def _owned(machine: DurableSender) -> set[int]:
    """Return the packet identifiers that belong to messages with DUP or to owed PUBRELs."""
    return {delivery.id for delivery in machine.queued if delivery.dup} | machine.releases.keys()
