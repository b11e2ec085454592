# SPDX-License-Identifier: Apache-2.0
"""Resume of a session at its stored position, and the consumers that show the session in JetStream.

The position decides; where none is valid it is imported from the consumers, once. See
docs/internals/delivery.md#positions.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import parts
from mqtt_nats.delivery.draining import note_read
from mqtt_nats.delivery.position_import import import_position
from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.protocol.ack_tokens import OWED, TAKEN
from mqtt_nats.protocol.durable_sender import ID_SPACE, SEQUENCE_EVER
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.record import claimed
from mqtt_nats.sessions.takeover import still_owner
from mqtt_streams import stored
from mqtt_streams.api import RequestTimeout
from mqtt_streams.consumers import (
    ConsumerRef,
    backstop,
)
from mqtt_streams.hashing import registered_as
from mqtt_streams.messages import DELIVER_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.positions import decode

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.messages.message import Stored
    from mqtt_streams.positions import Position
    from mqtt_streams.sessions import V5, Draining, SessionRecord

log = logging.getLogger("mqtt_nats.broker")

POSITION_WRITE_ATTEMPTS: Final = 10
"""Attempts to write the position of a session while an earlier owner writes it at the same time."""

# Most messages in flight to one client. JetStream bounds each consumer by max_ack_pending, but not the sum of all.
CLIENT_INFLIGHT_MOST: Final = 32768


def end_shared_delivery(side: DurableDelivery) -> None:
    """Take no more messages of a session from readers; its position notes up to where they have come."""
    if not side.live:
        return
    feed, position_writer = side.client.delivery.feed, side.position_writer
    if position_writer is not None:
        position_writer.ledger.reach(feed.reached(side))
        position_writer.ledger.change()
    feed.end_catching(side)
    feed.remove(side.client)


def limit_in_flight(side: DurableDelivery) -> None:
    """Bound the messages in flight: by the windows of the subscriptions, and by receive maximum."""
    machine = side.machine
    most = min(CLIENT_INFLIGHT_MOST, side.client.terms.receive_maximum)
    if side.bindings:
        windows = sum(one.consumer.max_ack_pending for one in side.bindings.values())
        # Messages that may have been sent before do not wait for acknowledgements of this connection [MQTT-4.4.0-1].
        most = min(most, max(windows, machine.places))
    machine.limit_window(most)


async def _handed_over(client: Receiver, position: Position, asked: set[str]) -> bool:
    """Ask the gateway that wrote the position, if it may still serve the session.

    Args:
        asked: the gateways that were asked; this one is added.

    Returns:
        Whether it has handed the session over meanwhile, so that the position has to be read again.
    """
    if position.clean:
        return False
    asked.add(position.gateway)
    return await client.delivery.handover.elsewhere(registered_as(client.client_id, client.hash), position.gateway)


def _valid_up_to(client: Receiver, side: DurableDelivery, position: Position) -> int:
    """Return the stream sequence up to which a stream that was replaced has the messages of the position."""
    _, v5 = claimed(client.record)
    generations = {position.generation, v5.generation} - {""}
    return SEQUENCE_EVER if side.replaced is None and len(generations) < 2 else client.services.stream.floor


def lowered_consumer(side: DurableDelivery, entry: Draining) -> ConsumerRef:
    """Return the consumer of a subscription that was lowered to QoS 0, as it would be made."""
    client = side.client
    return ConsumerRef(
        entry.name,
        DELIVER_PREFIX + client.services.identity.new_nuid(),
        entry.filter_subject,
        side.window(),
        inactive_threshold=backstop(claimed(client.record)[1].expiry),
        client_id=client.client_id,
    )


def _covers(record: SessionRecord, position: Position) -> bool:
    """Whether the position counts for every subscription; else consumers have served some, at an older gateway."""
    assert record.v5 is not None
    names = {one.durable_name for one in record.cons.values()}
    names |= {entry.name for entry in record.v5.draining if entry.qos}
    return names.issubset(position.live)


def continue_in_stream(client: Receiver, side: DurableDelivery) -> None:
    """Continue a session in the present stream: its own, or the one that has replaced it."""
    stream = client.services.stream
    record, v5 = claimed(client.record)
    if v5.generation != stream.id and stream.id:
        if v5.generation:
            log.warning("%s: its session continues with a new stream %s", client, MESSAGES)
            side.replace_stream(stream.floor)
            if 2 in record.subs.values() or v5.draining or v5.was or v5.shared:
                v5.suspect_from(stream.floor + 1)
            v5.count_anew(stream.floor)
        v5.count_in(stream.id)
        side.change_record()
    if v5.fresh:
        side.machine.replaced(v5.fresh - 1)


def end_suspicion(v5: V5, last: int) -> None:
    """End the suspicion of identifiers once sequence ``last`` shows that all were used in the present stream."""
    if v5.fresh and last >= v5.fresh + ID_SPACE:
        v5.suspect_from(0)


async def restore_position(client: Receiver, side: DurableDelivery) -> None:
    """Read the session's position, or import it from the session's consumers; readers go on there.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer, or the session has another owner.
    """
    services = client.services
    _, v5 = claimed(client.record)
    await client.delivery.handover.over(client.hash)
    asked: set[str] = set()
    for _ in range(POSITION_WRITE_ATTEMPTS):
        data, sequence, _ = await services.streams.positions.load(client.hash)
        position = decode(data) if data else None
        if position is None or position.id != v5.pos:
            await import_position(client, side, sequence)
            return
        if position.gateway not in asked and await _handed_over(client, position, asked):
            continue
        valid = _valid_up_to(client, side, position)
        unclear = bool(position.live) and not position.clean
        position = await _limited(client, position, valid, unclear=unclear)
        if await _go_on(client, side, position, sequence):
            _take_identifiers(side, position, valid)
            if position.perhaps > position.reached:
                await _mark_perhaps_sent(client, side, position, valid if unclear else None)
            return
        if not await still_owner(client):
            raise RequestTimeout("the session belongs to another connection, or its owner cannot be read")
    raise RequestTimeout("another connection writes the position of the session")


async def _limited(client: Receiver, position: Position, valid: int, *, unclear: bool) -> Position:
    """Return a position limited to the messages of the present stream.

    Args:
        valid: stream sequence up to which the stream has the messages of the position.
        unclear: the connection that wrote the position has not ended in order: it may have sent later messages.
    """
    sent = position.perhaps
    if unclear:
        sent = max(sent, int((await client.services.head.state())["last_seq"]))
    return replace(
        position,
        reached=min(position.reached, valid),
        pending={one: qos for one, qos in position.pending.items() if one <= valid},
        identifiers={one: to for one, to in position.identifiers.items() if one <= valid},
        unsent=[one for one in position.unsent if one <= valid],
        perhaps=min(sent, valid),
        most=min(position.most, valid) if position.clean else -1,
    )


async def _go_on(client: Receiver, side: DurableDelivery, position: Position, sequence: int) -> bool:
    """Continue a position, as its writer from now on; False: another gateway has written it meanwhile."""
    record, _ = claimed(client.record)
    side.machine.sent_at_most(position.most if position.most >= 0 else SEQUENCE_EVER)
    if not _covers(record, position):
        try:
            await import_position(client, side, sequence, position)
        except RequestTimeout:
            return False
        return True
    writer = PositionWriter(client, sequence)
    writer.restore(position)
    side.store_position_with(writer)  # from here on it is handed over even when the connection ends meanwhile
    side.machine.not_sent(position.unsent)
    writer.go_on()
    if not await writer.flush():
        return False
    writer.end_restore()
    side.resume_from(position.reached)
    return True


def _take_identifiers(side: DurableDelivery, position: Position, valid: int) -> None:
    """Take the packet identifiers that the position names: those allocated to messages, and those of owed PUBRELs."""
    side.machine.restore_identifiers(position.identifiers)
    for identifier, owed in position.released.items():
        side.machine.owe(identifier, owed, owed > valid)
        side.machine.keep_identifier(identifier, OWED + b"%d" % identifier)


async def _mark_perhaps_sent(client: Receiver, side: DurableDelivery, position: Position, valid: int | None) -> None:
    """Set DUP for messages after the position that the previous owner may have sent.

    Args:
        valid: where the previous owner may go on: sequence up to which the stream has its messages; None: it does not.
    """
    state = await client.services.head.state()  # again: an earlier owner may have gone on for a moment
    last = position.perhaps if valid is None else min(int(state["last_seq"]), valid)
    side.machine.sent_perhaps(max(last, side.machine.perhaps_sent))
    if int(state["first_seq"]) > position.reached + 1 or state.get("num_deleted"):
        side.machine.suspect(position.reached + 1, last)


async def fetch_in_flight(client: Receiver, side: DurableDelivery) -> None:
    """Read the pending messages again that an earlier connection took from the shared reader.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    position_writer = side.position_writer
    if position_writer is None:
        return
    services = client.services
    machine = side.machine
    unsent = machine.unsent()
    known = {delivery.sequence for delivery in machine.on_their_way()}
    missing = [one for one in sorted(position_writer.ledger.pending.items()) if one[0] not in known]
    if missing and side.past is None:
        side.add_past()
    for some in parts(missing):
        found = await asyncio.gather(
            *(stored.get_sequence(services.nats.inbox, MESSAGES, sequence) for sequence, _ in some)
        )
        for (sequence, qos), one in zip(some, found, strict=True):
            message = None
            if one is not None:
                subject = one.subject.encode("utf-8", "surrogateescape")
                message = services.path.recent.message(sequence, b"%d" % one.time_ns, subject, one.headers, one.payload)
            if message is None or not message.qos or side.past is None:
                if qos == 2:
                    machine.suspect(sequence, sequence)
                position_writer.ledger.done(sequence)
            else:
                if client.gates:
                    note_read(side, message, sequence)  # core NATS may have brought its copy, which waits in a gate
                source = side.past
                if sequence in unsent:
                    source = _kept_back(side, sequence, message) or source
                machine.arrived(source, sequence, 2, TAKEN + b"%d" % sequence, message, qos)


def _kept_back(side: DurableDelivery, sequence: int, message: Stored) -> SubscriptionState | None:
    """Return a message's subscription if others come first: retained messages, or older ones at QoS 0."""
    owner, _ = side.overlap.owner(message.subject, sequence)
    held = owner is not None and owner.source.held % SubscriptionState.RETURNING  # the caller drops `RETURNING`
    return owner.source if owner is not None and held else None
