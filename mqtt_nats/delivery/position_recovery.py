# SPDX-License-Identifier: Apache-2.0
"""Set the consumers of a session by its position, when it leaves the shared reader or is resumed.

A dormant consumer is set to begin after the last message that was taken; then a position is stored that no longer
replaces the consumer; then the consumer is attached. See docs/internals/delivery.md#positions.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.backbone.batch import all_done, in_turn, parts
from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.delivery.draining import stand_before_others
from mqtt_nats.delivery.position_import import import_position
from mqtt_nats.delivery.position_writer import NO_POSITION, PositionWriter
from mqtt_nats.delivery.states import DeliveryEvent, DeliveryState
from mqtt_nats.protocol.ack_tokens import OWED, TAKEN
from mqtt_nats.protocol.durable_sender import ID_SPACE, SEQUENCE_EVER
from mqtt_nats.sessions.consumer_attach import create_again
from mqtt_nats.sessions.record import claimed
from mqtt_nats.sessions.takeover import still_owner
from mqtt_streams import stored
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.consumers import (
    ConsumerExists,
    ConsumerNotFound,
    ConsumerRef,
    backstop,
    consumer_info,
    create_consumer,
    delete_consumer,
    existing_consumer,
    update_consumer,
)
from mqtt_streams.hashing import registered_as
from mqtt_streams.messages import DELIVER_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.positions import decode
from mqtt_streams.sessions import Conflict

if TYPE_CHECKING:
    from mqtt_nats.backbone.inbox import RequestInbox
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.protocol.inflight import SubscriptionState
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding
    from mqtt_streams.positions import Position
    from mqtt_streams.sessions import V5, Draining, SessionRecord

log = logging.getLogger("mqtt_nats.broker")

CONSUMERS_SETTING_S: Final = 30.0
"""Seconds after the write of a clean position in which the gateway that wrote it may set the consumers.

Other gateways allow for twice as long, since clocks may differ by as much."""

RENEWED_NS: Final = 1_000_000_000
"""Nanoseconds by which a renewal changes the inactive threshold of a dormant consumer."""

UNHEARD: Final = ".new"
"""Appended to the deliver subject of a consumer that is not attached yet."""

POSITION_WRITE_ATTEMPTS: Final = 10
"""Attempts to write the position of a session while an earlier owner writes it at the same time."""

# Most messages in flight to one client. JetStream bounds each consumer by max_ack_pending, but not the sum of all.
CLIENT_INFLIGHT_MOST: Final = 32768


def end_shared_delivery(side: DurableDelivery) -> None:
    """Take no more messages of a session from the shared reader; its subscriptions note up to where they have come."""
    position_writer = side.position_writer
    if position_writer is None or not side.live:
        return
    feed = side.client.delivery.feed
    position_writer.ledger.reach(feed.reached(side))
    feed.end_catching(side)
    feed.remove(side.client)
    position_writer.ledger.change()
    side.change(DeliveryEvent.LEFT_READER)


def limit_in_flight(side: DurableDelivery) -> None:
    """Bound the messages in flight that come from the shared reader, which no consumer bounds."""
    machine = side.machine
    limit = min(CLIENT_INFLIGHT_MOST, side.client.terms.receive_maximum)
    taken = not side.live and side.position_writer is not None and bool(side.position_writer.ledger.pending)
    if side.live or taken:
        windows = sum(one.consumer.max_ack_pending for one in side.bindings.values())
        # Messages that may have been sent before do not wait for acknowledgements of this connection [MQTT-4.4.0-1].
        limit = min(limit, max(windows, machine.places if taken else 0, 1))
    machine.limit_window(limit)
    if side.state is not DeliveryState.CATCHING_UP:
        machine.call_on_room(partial(_widen, side) if taken else None)


def _widen(side: DurableDelivery) -> None:
    """Let the consumers alone bound the messages in flight, once none from the shared reader is pending."""
    if side.position_writer is not None and not side.position_writer.ledger.pending:
        limit_in_flight(side)
        side.machine.pump()


async def _exists(inbox: RequestInbox, consumer: ConsumerRef) -> bool:
    """Whether a consumer exists; True also when JetStream does not answer."""
    try:
        return await consumer_info(inbox, MESSAGES, consumer.durable_name) is not None
    except (ApiError, NoResponders, RequestTimeout):
        return True


async def set_position(inbox: RequestInbox, consumer: ConsumerRef, start: int, *, resets: bool) -> ConsumerRef:
    """Set a detached consumer to begin at stream sequence ``start``; return the consumer as it is then.

    Args:
        resets: whether nats-server can set the position of a consumer; else the consumer is made again.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not do it.
    """
    if resets:
        try:
            await call(inbox, f"CONSUMER.RESET.{MESSAGES}.{consumer.durable_name}", {"seq": start})
            return consumer
        except ApiError as error:
            log.debug("consumer %s is made again: %s", consumer.durable_name, error)
        except (NoResponders, RequestTimeout):
            # A request for a consumer that does not exist is not answered.
            if await _exists(inbox, consumer):
                raise
    await delete_consumer(inbox, MESSAGES, consumer.durable_name)
    return await _create(inbox, consumer, start)


async def _create(inbox: RequestInbox, consumer: ConsumerRef, start: int) -> ConsumerRef:
    """Create a consumer to begin at stream sequence ``start``; return the consumer that is to be attached.

    Nobody listens to the deliver subject of the new consumer: it delivers nothing before it is attached.
    """
    consumer = replace(consumer, start_seq=start)
    await create_again(inbox, MESSAGES, replace(consumer, deliver_subject=consumer.deliver_subject + UNHEARD))
    return consumer


async def _set(
    client: Receiver, position_writer: PositionWriter, consumer: ConsumerRef, start: int, *, removed: bool
) -> ConsumerRef:
    """Set a detached consumer, or create it; as :func:`set_position`.

    Args:
        removed: the consumer may have been removed (`remove_dormant`); else it is expected to exist.

    Raises:
        Conflict: the session has another owner.
    """
    inbox = client.services.nats.inbox
    if removed:
        try:
            return await _create(inbox, consumer, start)
        except ConsumerExists:  # it was not removed, or the session's next owner has created it
            if not await position_writer.sure():
                raise Conflict(client.client_id) from None
    return await set_position(inbox, consumer, start, resets=client.delivery.resets)


async def remove_dormant(client: Receiver, side: DurableDelivery) -> None:
    """Delete the dormant consumers of a session; the stored position replaces them.

    Nobody takes their deletion for a loss, since the registry of attached consumers does not have them any more.
    """
    position_writer = side.position_writer
    services = client.services
    for some in parts([one for one in side.dormant if not one.removed]):
        # A late deletion would be one of a consumer that the next owner of the session has made.
        if position_writer is None or not client.alive or not await position_writer.sure():
            return
        found = [one for one in some if one.source.live]
        for one in found:
            one.remove()
            services.registry.attached.pop(one.consumer.durable_name, None)
        names = [one.consumer.durable_name for one in found]
        try:
            await all_done(delete_consumer(services.nats.inbox, MESSAGES, name) for name in names)
            position_writer.miss_consumers(names)
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("%s: dormant consumers may stay: %s", client, error)


async def renew_dormant(client: Receiver, side: DurableDelivery) -> None:
    """Change dormant consumers a little: nats-server removes consumers that are not used for long."""
    _, v5 = claimed(client.record)
    threshold = backstop(v5.expiry)
    for one in list(side.bindings.values()):
        if threshold and one.source.live and one.sid == b"" and not one.removed:
            other = threshold if one.consumer.inactive_threshold != threshold else threshold + RENEWED_NS
            one.reconfigure(replace(one.consumer, inactive_threshold=other))
            try:
                await update_consumer(client.services.nats.inbox, MESSAGES, one.consumer)
            except (ApiError, ConsumerNotFound, NoResponders, RequestTimeout) as error:
                log.debug("consumer %s: %s", one.consumer.durable_name, error)  # created again when it is needed


async def check_dormant(client: Receiver, side: DurableDelivery) -> None:
    """Give the dormant consumers of a resumed session its present expiry; create those again that are gone."""
    _, v5 = claimed(client.record)
    threshold = backstop(v5.expiry)
    kept = [one for one in side.dormant if not one.removed]
    await in_turn([partial(_check, client, side, one, threshold) for one in kept])


async def create_dormant(client: Receiver, side: DurableDelivery) -> bool:
    """Create the consumers of a session that has none, to lie dormant; False: the session has moved.

    The position names them before: this gateway may die before the record says that they exist.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not do it.
    """
    position_writer, services = side.position_writer, client.services
    _, v5 = claimed(client.record)
    missing = [one for one in side.dormant if one.removed]
    assert position_writer is not None
    position_writer.expect_consumers(one.consumer.durable_name for one in missing)
    if not await position_writer.flush():
        position_writer.end_if_moved()
        return False
    await in_turn([partial(_check, client, side, one, backstop(v5.expiry)) for one in missing])
    if not client.alive:  # the position names those that were created
        return False
    for one in missing:
        one.lie_dormant()
        services.registry.attached[one.consumer.durable_name] = client
    v5.move_to_consumers()
    side.change_record()
    return True


async def _check(client: Receiver, side: DurableDelivery, one: ConsumerBinding, threshold: int) -> None:
    inbox, name = client.services.nats.inbox, one.consumer.durable_name
    if not (client.alive and one.source.live and side.bindings.get(name) is one):
        return  # the subscription has ended meanwhile, or its consumer is to deliver
    found = await existing_consumer(inbox, MESSAGES, name, client.client_id)
    if found is None:
        wanted = replace(one.consumer, start_seq=_oldest_pending(side, one), inactive_threshold=threshold)
        with suppress(ConsumerExists):
            await create_consumer(inbox, MESSAGES, wanted)
    elif found.start_seq is None:
        made = await _make_settable(client, side, replace(found, inactive_threshold=threshold))
        if made is None:
            return
        wanted = made
    elif found.inactive_threshold not in (threshold, threshold + RENEWED_NS):
        wanted = replace(found, inactive_threshold=threshold)
        with suppress(ConsumerNotFound):
            await update_consumer(inbox, MESSAGES, wanted)
    elif found.deliver_subject != one.consumer.deliver_subject:
        wanted = replace(one.consumer, deliver_subject=found.deliver_subject)
    else:
        return
    side.reconfigure(one, wanted)


def _oldest_pending(side: DurableDelivery, binding: ConsumerBinding) -> int:
    """Return the first stream sequence that a dormant consumer has to bring, should it have to deliver."""
    side.settle()
    pending = side.position_writer.ledger.pending if side.position_writer is not None else {}
    first: int = min([*pending, binding.source.last + 1])
    return max(first, binding.source.start, 1)


async def _make_settable(client: Receiver, side: DurableDelivery, consumer: ConsumerRef) -> ConsumerRef | None:
    """Make a dormant consumer of nats-server's listener again: such a one begins with new messages, and cannot be set.

    Returns:
        The consumer; None: the session has moved.
    """
    position_writer, attached = side.position_writer, client.services.registry.attached
    if position_writer is None or not await position_writer.sure():
        return None
    made = replace(consumer, start_seq=_oldest_pending(side, side.bindings[consumer.durable_name]))
    attached.pop(consumer.durable_name, None)  # its deletion is no loss
    try:
        await delete_consumer(client.services.nats.inbox, MESSAGES, consumer.durable_name)
        await create_again(client.services.nats.inbox, MESSAGES, made)
    finally:
        attached[consumer.durable_name] = client
    return made


async def store_positions_in_consumers(client: Receiver, side: DurableDelivery) -> bool:
    """Make live subscriptions plain: set their consumers, for the caller to attach. False: the session has moved."""
    position_writer = side.position_writer
    assert position_writer is not None
    record = client.record
    assert record is not None
    bindings = side.dormant
    reached = position_writer.ledger.reached
    if claimed(record)[1].consumerless:
        position_writer.expect_consumers(one.consumer.durable_name for one in bindings)
    # A consumer that is set forgets its pending messages: the position has to be stored before.
    if not await position_writer.flush():
        position_writer.end_if_moved()
        return False

    async def set_back(one: ConsumerBinding) -> ConsumerRef:
        if (
            not await position_writer.sure()
        ):  # NATS was away, or this gateway stood still: the session may have another owner
            raise Conflict(client.client_id)
        start = max(reached + 1, one.source.start)  # the session may have subscribed while it was behind
        return await _set(client, position_writer, one.consumer, start, removed=one.removed)

    for one in bindings:
        try:
            one.reconfigure(await retry_until_answered(client, partial(set_back, one)))
        except Conflict:
            position_writer.end_if_moved()
            return False
        if one.key in record.cons:
            record.cons[one.key] = replace(record.cons[one.key], start_seq=one.consumer.start_seq)
    position_writer.live.clear()
    position_writer.present.clear()
    if not await position_writer.flush():
        position_writer.end_if_moved()
        return False
    for one in bindings:
        one.become_plain(reached)
    for one in bindings:
        if one.source.whole and not one.drained:
            stand_before_others(side, one)
    limit_in_flight(side)
    return True


async def _handed_over(client: Receiver, position: Position, written: float, asked: set[str]) -> bool:
    """Ask the gateway that wrote the position, if it may still serve the session, or be setting its consumers.

    Args:
        written: time of the write, in seconds since 1970.
        asked: the gateways that were asked; this one is added.

    Returns:
        Whether it has handed the session over meanwhile, so that the position has to be read again.
    """
    setting = position.live and natstime.now() - written < CONSUMERS_SETTING_S * 2
    if position.clean and not setting:
        return False
    asked.add(position.gateway)
    return await client.delivery.handover.elsewhere(registered_as(client.client_id, client.hash), position.gateway)


def _valid_up_to(client: Receiver, side: DurableDelivery, position: Position) -> int:
    """Return the stream sequence up to which a stream that was replaced has the messages of the position."""
    _, v5 = claimed(client.record)
    generations = {position.generation, v5.generation} - {""}
    return SEQUENCE_EVER if side.replaced is None and len(generations) < 2 else client.services.stream.floor


class _Replaced(NamedTuple):
    """A consumer that the stored position replaces."""

    key: str
    """Key in the session record; empty for a subscription that was lowered to QoS 0."""
    consumer: ConsumerRef
    start: int
    """Stream sequence at which the subscription begins."""


def _replaced(client: Receiver, side: DurableDelivery, position: Position) -> list[_Replaced]:
    record, v5 = claimed(client.record)
    found = [_Replaced(key, one, v5.start.get(key, 0)) for key, one in record.cons.items()]
    found += [_Replaced("", lowered_consumer(side, entry), entry.start) for entry in v5.draining if entry.qos]
    return [one for one in found if one.consumer.durable_name in position.live]


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


def _stays(record: SessionRecord, position: Position) -> bool:
    """Whether readers can bring every missed message: the position replaces the consumers of all subscriptions."""
    assert record.v5 is not None
    names = {one.durable_name for one in record.cons.values()}
    names |= {entry.name for entry in record.v5.draining if entry.qos}
    return bool(names) and names.issubset(position.live)


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


async def restore_position(client: Receiver, side: DurableDelivery, *, may_stay: bool = False) -> set[str]:
    """Read the session's position and set its consumers to it; return the names of the consumers.

    Args:
        may_stay: the session may go on without consumers. If it does, the writer's `live` names them all the same.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    services = client.services
    record, v5 = claimed(client.record)
    if not v5.pos:
        return await _begin_without_position(client, side, NO_POSITION, may_stay=may_stay)
    await client.delivery.handover.over(client.hash)
    asked: set[str] = set()
    for _ in range(POSITION_WRITE_ATTEMPTS):
        data, sequence, written = await services.streams.positions.load(client.hash)
        position = decode(data) if data else None
        if position is None or position.id != v5.pos:
            return await _begin_without_position(client, side, sequence, may_stay=may_stay)
        if position.gateway not in asked and await _handed_over(client, position, written, asked):
            continue
        valid = _valid_up_to(client, side, position)
        reached = min(position.reached, valid)
        sent = position.perhaps
        unclear = bool(position.live) and not position.clean
        if unclear:
            sent = max(sent, int((await services.head.state())["last_seq"]))
        replaced = _replaced(client, side, position)
        writer = PositionWriter(client, sequence)
        writer.restore(position, valid, sent)
        side.store_position_with(writer)  # from here on it is handed over even when the connection ends meanwhile
        side.machine.not_sent(one for one in position.unsent if one <= valid)
        if position.clean and position.most >= 0:
            side.machine.sent_at_most(min(position.most, valid))
        stays = may_stay and _stays(record, position)
        if await _set_consumers(client, side, writer, None if stays else replaced) and await writer.flush():
            break
        if not await still_owner(client):
            raise RequestTimeout("the session belongs to another connection, or its owner cannot be read")
    else:
        raise RequestTimeout("another connection writes the position of the session")
    writer.end_restore()
    _take_identifiers(side, position, valid)
    went = {one.consumer.durable_name for one in replaced}
    if went:
        side.resume_from(reached)
    if writer.perhaps > reached:
        await _mark_perhaps_sent(client, side, reached, valid if unclear and went else None)
    return went


async def _begin_without_position(
    client: Receiver, side: DurableDelivery, expected: int, *, may_stay: bool
) -> set[str]:
    """Begin where the consumers are; return their names if readers go on there.

    Else the position gets another id: the first one of an earlier owner, if it is stored late, is void then.
    """
    if may_stay and (names := await import_position(client, side, expected)):
        return names
    record, v5 = claimed(client.record)
    if record.cons and v5.pos:
        v5.name_position(client.services.identity.new_nuid())
        side.change_record()
    return set()


def _take_identifiers(side: DurableDelivery, position: Position, valid: int) -> None:
    """Take the packet identifiers that the position names: those allocated to messages, and those of owed PUBRELs."""
    side.machine.restore_identifiers({one: to for one, to in position.identifiers.items() if one <= valid})
    for identifier, owed in position.released.items():
        side.machine.owe(identifier, owed, owed > valid)
        side.machine.keep_identifier(identifier, OWED + b"%d" % identifier)


async def _mark_perhaps_sent(client: Receiver, side: DurableDelivery, reached: int, valid: int | None) -> None:
    """Set DUP for messages after ``reached`` that the previous owner may have sent.

    Args:
        valid: where the previous owner may go on: sequence up to which the stream has its messages; None: it does not.
    """
    position_writer = side.position_writer
    assert position_writer is not None
    state = await client.services.head.state()  # again: an earlier owner may have gone on for a moment
    last = position_writer.perhaps if valid is None else min(int(state["last_seq"]), valid)
    side.machine.sent_perhaps(last)
    if int(state["first_seq"]) > reached + 1 or state.get("num_deleted"):
        side.machine.suspect(reached + 1, last)


async def _set_consumers(
    client: Receiver, side: DurableDelivery, position_writer: PositionWriter, replaced: list[_Replaced] | None
) -> bool:
    """Set the consumers of a session to its position; False when another gateway has written the position.

    Before that, the position names this gateway: the next owner waits until this gateway has left the session.

    Args:
        replaced: the consumers that the position replaces; None: the session goes on with readers.
    """
    if replaced is None:
        position_writer.go_on()
        return True
    record, v5 = claimed(client.record)
    removed = v5.consumerless
    if removed:
        position_writer.expect_consumers(one.consumer.durable_name for one in replaced)
    for some in parts(replaced):
        if not await position_writer.sure():
            return False
        # With the present deliver subject: attaching the consumer gives it a new one.
        first = position_writer.ledger.reached + 1
        setting = (_set(client, position_writer, one.consumer, max(first, one.start), removed=removed) for one in some)
        try:
            moved = await all_done(setting)
        except Conflict:
            position_writer.give_up()
            return False
        for one, now in zip(some, moved, strict=True):
            if one.key and now is not one.consumer:
                record.cons[one.key] = now
                side.change_record()
    position_writer.replace_no_consumer()
    return True


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
    known = {delivery.sequence: delivery for delivery in machine.on_their_way()}
    unsent = machine.unsent()
    missing = []
    for sequence, qos in sorted(position_writer.ledger.pending.items()):
        if sequence in known:  # a consumer has brought the message, too
            machine.taken_before(known[sequence], qos, TAKEN + b"%d" % sequence)
        else:
            missing.append((sequence, qos))
    if missing and side.past is None:
        side.add_past(len(missing))
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
                source = side.past
                if sequence in unsent:
                    source = _behind_replay(side, sequence, message) or source
                machine.arrived(source, sequence, 2, TAKEN + b"%d" % sequence, message, qos)


def _behind_replay(side: DurableDelivery, sequence: int, message: Stored) -> SubscriptionState | None:
    """Return a message's subscription if its retained messages are still being sent: they come first."""
    owner, _ = side.overlap.owner(message.subject, sequence)
    return owner.source if owner is not None and owner.source.replaying else None
