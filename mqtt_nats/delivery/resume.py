# SPDX-License-Identifier: Apache-2.0
"""Resume of a durable session, with a new connection of its client or a new connection of the gateway to NATS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Set
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.codec import QuotaExceeded
from mqtt_nats.delivery.backlog_limit import limit_backlog
from mqtt_nats.delivery.draining import meeting, still_draining, watch
from mqtt_nats.delivery.position_recovery import (
    continue_in_stream,
    end_suspicion,
    fetch_in_flight,
    limit_in_flight,
    lowered_consumer,
    restore_position,
)
from mqtt_nats.delivery.pubrels import gone
from mqtt_nats.ingress.held_takeover import take_over_held
from mqtt_nats.ingress.retained.replay import Replay, close_gate, open_gate, start_replays
from mqtt_nats.protocol.durable_sender import RETAINED_BASE
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.pubsub.routing_table import PLAIN, Options
from mqtt_nats.pubsub.shared_filters import PREFIX as SHARED
from mqtt_nats.sessions.groups.ended_shares import resend_unacknowledged
from mqtt_nats.sessions.groups.subscribe import acknowledged as ask_again
from mqtt_nats.sessions.groups.subscribe import begin_shared, rejoin_shared, resend
from mqtt_nats.sessions.guard import denied_subscriptions
from mqtt_nats.sessions.pubrel_consumer import attach_pubrels, try_to_attach_pubrels
from mqtt_nats.sessions.record import claimed
from mqtt_nats.sessions.unrecorded import save_when_room
from mqtt_nats.transport.turns import ITEMS_PER_STEP
from mqtt_streams.api import RequestTimeout
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.positions import STREAM as POSITIONS
from mqtt_streams.sessions import SECOND_SID, Conflict, SubscriptionOptions, first_subject
from mqtt_streams.subjects import subject_to_filter

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.position_writer import PositionWriter
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.pubsub.backlog import Gate
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding
    from mqtt_nats.sessions.groups.member import Membership
    from mqtt_streams.sessions import V5, Draining, SessionRecord

log = logging.getLogger("mqtt_nats.broker")

ROOM_LOOK_S: Final = 0.25
"""Seconds between two looks whether a position that is being stored waits for room."""


def set_options(source: SubscriptionState, options: SubscriptionOptions) -> None:
    """Set the options of a subscription on its source."""
    source.take_options(no_local=options.nl, kept=options.rap, identifier=options.id)


class Resubscribed(NamedTuple):
    """A session's subscriptions in core NATS.

    `denied`: filters that the rules deny, shared ones included. `members`: those of shared subscriptions that take
    part. `gates`: for messages at QoS 0 of lowered subscriptions, of which readers may still bring older messages.
    """

    denied: set[str]
    members: list[Membership]
    gates: list[Gate]


async def resubscribe(client: Receiver) -> Resubscribed:
    """Subscribe a session's filters in core NATS again, shared ones included, except those that the rules deny.

    Raises:
        TimeoutError: NATS does not answer.
    """
    record, v5 = claimed(client.record)
    denied = denied_subscriptions(client)
    await client.path.round.turns.run(_joining(client, record, v5, denied))
    lowered = [entry.filter_subject.removeprefix(STORED_PREFIX) for entry in v5.draining if entry.whole]
    gates = [open_gate(client, found) for found in meeting(client, lowered)]
    members = begin_shared(client, denied)
    services = client.services
    await services.nodes.fence_filters(client.filters)
    if members:
        await services.nodes.fence(services.nats.shared)
    return Resubscribed(denied, members, gates)


def _joining(client: Receiver, record: SessionRecord, v5: V5, denied: Set[str]) -> Iterator[None]:
    for at, (subject, qos) in enumerate(list(record.subs.items())):
        if at and not at % ITEMS_PER_STEP:
            yield
        one = v5.options.get(subject)
        options = PLAIN if one is None else Options(one.nl, one.rap, one.id)
        try:
            topic_filter = subject_to_filter(subject)
            if topic_filter not in denied:
                client.join(topic_filter, qos, options)
        except ValueError as error:  # nats-server's listener allows filters that this gateway refuses
            log.warning("%s: its subscription %r is not resumed: %s", client, subject, error)


async def write_changed_record(client: Receiver, side: DurableDelivery) -> None:
    """Write the session record if it has changed; nats-server's listener needs the deliver subjects of consumers."""
    if side.take_record_change():
        try:
            await save_when_room(client)
        except Conflict:
            client.taken_over()


async def resume(
    client: Receiver,
    side: DurableDelivery,
    resubscribed: Resubscribed,
    withdraw: Callable[[Set[str]], Awaitable[None]],
) -> None:
    """Continue a durable session: owed PUBRELs, then messages that were in flight, then new messages.

    Denied subscriptions end before a new message of them is sent.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer, or the session has another owner.
    """
    record, v5 = claimed(client.record)
    denied, members, gates = resubscribed
    continue_in_stream(client, side)
    if v5.q2:
        await take_over_held(client, side.former, record)
    owed = await _owe_pubrels(client, side)
    await restore_position(client, side)
    await write_changed_record(client, side)
    if client.taken:
        raise RequestTimeout("the session belongs to another connection")
    assignments, halfway = await client.services.streams.groups.assigned(client.hash)
    await rejoin_shared(client, members)
    if v5.ended:
        await resend_unacknowledged(client, {one.packet_id for one in assignments})
    shares = {text for text in denied if text.startswith(SHARED)}
    if shares:
        await withdraw(shares)
    if owed:
        await attach_pubrels(side)
    elif assignments or v5.replay:
        await try_to_attach_pubrels(side)
    unfinished = await _add_subscriptions(client, side)
    lowered, done = _add_lowered(client, side, gates)
    for gate in gates:
        close_gate(client, gate)
    end_suspicion(v5, max((one.source.last for one in side.bindings.values()), default=0))
    await fetch_in_flight(client, side)
    if done:
        await side.remove(done)
        side.change_record()
        await write_changed_record(client, side)
    await resend(client, assignments)
    given_up = await gone(client, side, halfway)
    if denied - shares:
        await withdraw(denied - shares)
    await _start(client, side, lowered, unfinished, given_up)


async def _owe_pubrels(client: Receiver, side: DurableDelivery) -> bool:
    """Owe the PUBRELs of the stored records: also of ended subscriptions, and of retained messages; False: none is."""
    records = await client.services.streams.pubrels.owed(client.hash)
    for owed in records:
        own = owed.packet_id < RETAINED_BASE
        former = own and side.replaced is not None and owed.message_seq > side.replaced
        side.machine.owe(owed.packet_id, owed.message_seq, former, owed.epoch)
    return bool(records)


async def _start(
    client: Receiver,
    side: DurableDelivery,
    lowered: list[ConsumerBinding],
    unfinished: list[Replay],
    given_up: list[int],
) -> None:
    """Send messages that were in flight, then new ones; go on with replays of retained messages.

    ``given_up`` are packet identifiers of messages that do not come again: PUBREL asks the client to give them up.
    """
    machine = side.machine
    await limit_backlog(client, side)
    if not client.alive:  # no message is noted as sent to a client that has left
        return
    limit_in_flight(side)
    side.start()
    client.delivery.feed.go_on(client, side)
    client.delivery.feed.settle_consumers(client, side)
    if machine.resent:
        log.debug("%s: %d messages sent again", client, machine.resent)
    for identifier in given_up:
        machine.ask(identifier)
    for binding in lowered:
        watch(side, binding)
    ask_again(client)
    for replay in unfinished:
        if replay.source is None:  # denied
            replay.finish()
    unfinished = [replay for replay in unfinished if replay.source is not None]
    held = {replay.filter: open_gate(client, client.path.table.filters[replay.filter]) for replay in unfinished}
    for replay in unfinished:
        await replay.first_page()
    start_replays(client, unfinished, held)


async def _add_subscriptions(client: Receiver, side: DurableDelivery) -> list[Replay]:
    """Add the subscriptions of a session's record; return the interrupted replays of retained messages."""
    record, v5 = claimed(client.record)
    unfinished: list[Replay] = []

    def adding() -> Iterator[None]:
        for at, (key, consumer) in enumerate(list(record.cons.items())):
            if at and not at % ITEMS_PER_STEP:
                yield
            subject, first = key.removesuffix(SECOND_SID), first_subject(key)
            qos = record.subs.get(first, 0) or 1
            was = v5.was.get(key, (0, 0))
            source = SubscriptionState(qos, v5.start.get(key, 0), was=was)
            described = v5.options.get(first)
            if described is not None:
                set_options(source, described)
            if (cursor := v5.replay.get(key)) is not None:
                unfinished.append(Replay(client, subject_to_filter(first), key, subject, qos, cursor))
                unfinished[-1].hold(source)
                side.machine.replayed(source, cursor)
            side.add(key, consumer, source, removed=not side.may_exist(consumer.durable_name))

    await client.path.round.turns.run(adding())
    return unfinished


def _add_lowered(client: Receiver, side: DurableDelivery, gates: list[Gate]) -> tuple[list[ConsumerBinding], list[str]]:
    """Add the subscriptions that were lowered to QoS 0 and have messages left.

    Returns:
        These subscriptions, and the names of the consumers of ended ones, which can go.
    """
    _, v5 = claimed(client.record)
    lowered = [_lowered(client, side, entry, gates) for entry in v5.draining if entry.qos and entry.whole]
    return lowered, [entry.name for entry in v5.draining if not (entry.qos and entry.whole)]


def _lowered(client: Receiver, side: DurableDelivery, entry: Draining, gates: list[Gate]) -> ConsumerBinding:
    _, v5 = claimed(client.record)
    consumer = lowered_consumer(side, entry)
    source = SubscriptionState(entry.qos, entry.start, end=entry.end, whole=True)
    subject = entry.filter_subject.removeprefix(STORED_PREFIX)
    described = v5.options.get(subject) or v5.options.get(f"{subject}.>")
    if described is not None:
        set_options(source, described)
    binding = side.add("", consumer, source, removed=not side.may_exist(entry.name))
    still_draining(binding, [gate for gate in gates if gate.found in meeting(client, [subject])])
    return binding


async def recover(client: Receiver, side: DurableDelivery) -> None:
    """Go on after the connection to NATS was lost, if this connection can still write the session's position."""
    if side.has_pubrels:
        await retry_until_answered(client, partial(attach_pubrels, side))
    held = [one.source for one in side.bindings.values() if one.source.held & SubscriptionState.RETURNING]
    if side.live and held:
        position_writer = side.position_writer
        if position_writer is not None and not await position_writer.flush():
            position_writer.end_if_moved()
            return
        for source in held:
            side.machine.drop_hold(source, SubscriptionState.RETURNING)
    await write_changed_record(client, side)
    side.machine.pump()


async def _flush_at_once(client: Receiver, position_writer: PositionWriter) -> bool:
    """Write the position as `flush`, but do not wait for room. Raises ApiError: there is no room."""
    done = position_writer.begin_flush()
    while not done.done():
        await asyncio.wait([done], timeout=ROOM_LOOK_S)
        refusal = client.path.store.lacking_room(POSITIONS.encode())
        if refusal is not None and not done.done():
            raise refusal
    return done.result()


async def keep_taken(client: Receiver) -> None:
    """Store the session's position, with all messages taken, before consumers of its subscriptions are deleted.

    Raises:
        Conflict: the session has another owner.
        ApiError: JetStream has no room for the position, which waits.
        QuotaExceeded: the position cannot be stored.
    """
    side = client.durable_side
    position_writer = side.position_writer if side is not None else None
    if position_writer is not None and position_writer.live and not await _flush_at_once(client, position_writer):
        if position_writer.moved:
            raise Conflict(client.client_id)
        raise QuotaExceeded("the position of the session cannot be stored")
