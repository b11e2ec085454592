# SPDX-License-Identifier: Apache-2.0
"""Resume of a durable session, with a new connection of its client or a new connection of the gateway to NATS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.backbone.batch import BATCH_REQUESTS_MOST, in_turn
from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.codec import QuotaExceeded
from mqtt_nats.delivery.backlog_limit import limit_backlog
from mqtt_nats.delivery.draining import (
    finish,
    finished,
    meeting,
    note_redelivered,
    release_waiting,
    still_draining,
    watch,
)
from mqtt_nats.delivery.position_recovery import (
    continue_in_stream,
    end_shared_delivery,
    end_suspicion,
    fetch_in_flight,
    limit_in_flight,
    lowered_consumer,
    remove_dormant,
    restore_position,
    store_positions_in_consumers,
)
from mqtt_nats.delivery.pubrels import gone
from mqtt_nats.delivery.states import DeliveryEvent, DeliveryState
from mqtt_nats.ingress.held_takeover import take_over_held
from mqtt_nats.ingress.retained.replay import Replay, close_gate, open_gate, start_replays
from mqtt_nats.protocol.durable_sender import RETAINED_BASE
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.pubsub.routing_table import PLAIN, Options
from mqtt_nats.pubsub.shared_filters import PREFIX as SHARED
from mqtt_nats.sessions.consumer_attach import PENDING_RETURN_S, attach_pubrels, bring_back
from mqtt_nats.sessions.groups.ended_shares import resend_unacknowledged
from mqtt_nats.sessions.groups.subscribe import acknowledged as ask_again
from mqtt_nats.sessions.groups.subscribe import begin_shared, rejoin_shared, resend
from mqtt_nats.sessions.guard import denied_subscriptions
from mqtt_nats.sessions.record import claimed
from mqtt_nats.sessions.unrecorded import save_when_room
from mqtt_nats.transport.turns import ITEMS_PER_STEP
from mqtt_streams.api import RequestTimeout
from mqtt_streams.consumers import consumer_info, existing_consumer
from mqtt_streams.messages import DELIVER_PREFIX
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
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
    from mqtt_streams.consumers import ConsumerRef
    from mqtt_streams.sessions import V5, Draining, SessionRecord

log = logging.getLogger("mqtt_nats.broker")

ROOM_LOOK_S: Final = 0.25
"""Seconds between two looks whether a position that is being stored waits for room."""

ATTEMPTS: Final = 3
"""Times that a consumer is made to send its pending messages again before it is attached once more."""


MANY: Final = BATCH_REQUESTS_MOST
"""Consumers of a session; with more, the client is served before all of them are attached."""


def is_large(client: Receiver) -> bool:
    """Whether a session has so many consumers that attaching all of them takes long."""
    return client.record is not None and len(client.record.cons) > MANY


def set_options(source: SubscriptionState, options: SubscriptionOptions) -> None:
    """Set the options of a subscription on its source."""
    source.take_options(no_local=options.nl, kept=options.rap, identifier=options.id)


class Resubscribed(NamedTuple):
    """A session's subscriptions in core NATS.

    `denied`: filters that the rules deny, shared ones included. `members`: those of shared subscriptions that take
    part. `gates`: for messages at QoS 0 of lowered subscriptions, whose consumers may still bring older messages.
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
) -> list[ConsumerBinding]:
    """Continue a durable session: owed PUBRELs, then messages that were in flight, then new messages.

    Denied subscriptions end before a new message of them is sent.

    Returns:
        Consumers without messages for the client, which :func:`attach_idle` attaches.
    """
    record, v5 = claimed(client.record)
    denied, members, gates = resubscribed
    continue_in_stream(client, side)
    if v5.q2:
        await take_over_held(client, side.former, record)
    owed = await _owe_pubrels(client, side)
    went = await restore_position(client, side, may_stay=client.delivery.feed.admit())
    stays = await _write_deliver_subjects(client, side)
    assignments, halfway = await client.services.streams.groups.assigned(client.hash)
    await rejoin_shared(client, members)
    if v5.ended:
        await resend_unacknowledged(client, {one.packet_id for one in assignments})
    shares = {text for text in denied if text.startswith(SHARED)}
    if shares:
        await withdraw(shares)
    if owed or assignments or _may_owe(side, record, v5):
        await attach_pubrels(side)
    bindings, unfinished = await _add_sources(client, side, went)
    ended, lowered, done = await _add_ended(client, side, gates, went)
    for gate in gates:
        close_gate(client, gate)
    # None is left for later: a denied subscription ends now, an ended one delivers first, or the stream is another.
    idle = [] if denied or ended or side.replaced is not None else await _find_idle(client, bindings)
    unused = set(idle)
    bindings = [one for one in bindings if one not in unused] + ended
    await _attach(client, side, bindings, with_consumers=not (stays or _stays_in_records(client)))
    done += [one.consumer.durable_name for one in bindings if finished(side, one)]
    if done:
        await side.remove(done)
    await resend(client, assignments)
    given_up = await gone(client, side, halfway)
    if denied - shares:
        await withdraw(denied - shares)
    await _start(client, side, bindings + lowered, unfinished, given_up)
    return idle


async def _write_deliver_subjects(client: Receiver, side: DurableDelivery) -> bool:
    """Write the record before consumers are attached; return whether readers bring the messages instead."""
    stays = side.position_writer is not None and bool(side.position_writer.live)
    if claimed(client.record)[0].cons and not stays:
        side.point_anew()
        side.change_record()
    await write_changed_record(client, side)
    if client.taken:
        raise RequestTimeout("the session belongs to another connection")
    return stays


def _stays_in_records(client: Receiver) -> bool:
    """Whether a session stays in records; consumers that it gets otherwise are counted."""
    record, v5 = claimed(client.record)
    wanted = v5.consumerless and client.delivery.feed.wants_records(client)
    if v5.consumerless and not wanted:
        client.services.stream.count_consumers(len(record.cons))
    return wanted


def _may_owe(side: DurableDelivery, record: SessionRecord, v5: V5) -> bool:
    """Whether the session needs the consumer of PUBREL records; one without consumers owes PUBREL by its position."""
    earlier = [entry.qos for entry in v5.draining] + [qos for qos, _ in v5.was.values()]
    stays = v5.consumerless and side.position_writer is not None and bool(side.position_writer.live)
    return not stays and (bool(side.machine.releases) or 2 in record.subs.values() or 2 in earlier)


async def _owe_pubrels(client: Receiver, side: DurableDelivery) -> bool:
    """Owe the PUBRELs of the stored records: also of ended subscriptions, and of retained messages; False: none is."""
    records = await client.services.streams.pubrels.owed(client.hash)
    for owed in records:
        own = owed.packet_id < RETAINED_BASE
        former = own and side.replaced is not None and owed.message_seq > side.replaced
        side.machine.owe(owed.packet_id, owed.message_seq, former, owed.epoch)
    return bool(records)


async def _attach(
    client: Receiver, side: DurableDelivery, bindings: list[ConsumerBinding], *, with_consumers: bool
) -> None:
    """Attach consumers, and wait for their pending messages; read those that an earlier connection took otherwise.

    Args:
        with_consumers: the session is to keep its consumers from now on.
    """
    await in_turn([partial(side.attach, binding) for binding in bindings])
    _, v5 = claimed(client.record)
    if with_consumers:
        _move_to_consumers(side, v5)
    await write_changed_record(client, side)
    end_suspicion(v5, max((one.source.last for one in side.bindings.values()), default=0))
    await side.collect()
    await asyncio.gather(*(bring_back(side, one, 0.0) for one in bindings if one.source.missing))
    for binding in bindings:
        if binding.missed:
            continue  # its pending messages have yet to come again
        if binding.source.missing:
            side.machine.suspect(*binding.not_come)
        note_redelivered(side, binding)
    await fetch_in_flight(client, side)


def _move_to_consumers(side: DurableDelivery, v5: V5) -> None:
    """Move a session from records to consumers: these exist by now, and the record has to say so."""
    if v5.consumerless:
        v5.move_to_consumers()
        side.change_record()


async def _start(
    client: Receiver,
    side: DurableDelivery,
    bindings: list[ConsumerBinding],
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
    if claimed(client.record)[1].consumerless and any(not one.removed for one in side.dormant):
        await remove_dormant(client, side)
    if machine.resent:
        log.debug("%s: %d messages sent again", client, machine.resent)
    for identifier in given_up:
        machine.ask(identifier)
    for binding in bindings:
        if not binding.drained:
            watch(side, binding)
        elif binding.source.whole:
            release_waiting(side, binding)
    ask_again(client)
    for replay in unfinished:
        if replay.source is None:  # denied
            replay.finish()
    unfinished = [replay for replay in unfinished if replay.source is not None]
    held = {replay.filter: open_gate(client, client.path.table.filters[replay.filter]) for replay in unfinished}
    for replay in unfinished:
        await replay.first_page()
    start_replays(client, unfinished, held)


async def _add_sources(
    client: Receiver, side: DurableDelivery, went: Set[str]
) -> tuple[list[ConsumerBinding], list[Replay]]:
    """Subscribe the deliver subjects of a session's consumers; also return the interrupted replays."""
    record, v5 = claimed(client.record)
    bindings: list[ConsumerBinding] = []
    unfinished: list[Replay] = []

    def adding() -> Iterator[None]:
        for at, (key, consumer) in enumerate(list(record.cons.items())):
            if at and not at % ITEMS_PER_STEP:
                yield
            subject, first = key.removesuffix(SECOND_SID), first_subject(key)
            qos = record.subs.get(first, 0) or 1
            was = v5.was.get(key, (0, 0))
            source = SubscriptionState(qos, v5.start.get(key, 0), consumer.max_ack_pending, was=was)
            if consumer.durable_name in went:
                source.deliver_to(side.resumed_from)
            described = v5.options.get(first)
            if described is not None:
                set_options(source, described)
            if (cursor := v5.replay.get(key)) is not None:
                unfinished.append(Replay(client, subject_to_filter(first), key, subject, qos, cursor))
                unfinished[-1].hold(source)
                side.machine.replayed(source, cursor)
            if side.position_writer is not None and consumer.durable_name in side.position_writer.live:
                _add(side, key, consumer, source)
            else:
                bindings.append(side.add(key, consumer, source))

    await client.path.round.turns.run(adding())
    return bindings, unfinished


def _add(side: DurableDelivery, key: str, consumer: ConsumerRef, source: SubscriptionState) -> ConsumerBinding:
    """Add a subscription that readers serve; the position may still name its consumer as present."""
    assert side.position_writer is not None
    removed = claimed(side.client.record)[1].consumerless and consumer.durable_name not in side.position_writer.present
    return side.add_removed(key, consumer, source, removed=removed)


async def _add_ended(
    client: Receiver, side: DurableDelivery, gates: list[Gate], went: Set[str]
) -> tuple[list[ConsumerBinding], list[ConsumerBinding], list[str]]:
    """Add the ended subscriptions.

    Returns:
        Those that consumers serve; those that readers serve; the names of consumers that can go.
    """
    _, v5 = claimed(client.record)
    bindings: list[ConsumerBinding] = []
    lowered: list[ConsumerBinding] = []
    done: list[str] = []
    for entry in v5.draining:
        ended = await _ended(client, side, entry, gates, went)
        if ended is None:
            done.append(entry.name)
        else:
            (lowered if ended.source.live else bindings).append(ended)
    return bindings, lowered, done


async def _find_idle(client: Receiver, bindings: list[ConsumerBinding]) -> list[ConsumerBinding]:
    """Return the idle ones of many consumers: without messages for the client, and detached. They are attached later.

    A request for its state costs nats-server a tenth of a change of the deliver subject, which goes to its disk.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    if not is_large(client):
        return []
    inbox = client.services.nats.inbox
    last = int((await client.services.head.state())["last_seq"])
    names = [binding.consumer.durable_name for binding in bindings]
    found = await in_turn([partial(consumer_info, inbox, MESSAGES, name) for name in names])
    idle: list[ConsumerBinding] = []
    for binding, info in zip(bindings, found, strict=True):
        if info is not None and not (info.num_pending or info.num_ack_pending or info.push_bound):
            binding.source.idle(info.delivered_seq, last)
            idle.append(binding)
    return idle


async def attach_idle(client: Receiver, side: DurableDelivery, idle: list[ConsumerBinding]) -> None:
    """Attach the idle consumers that :func:`resume` has left, while the client is served.

    This goes on when the client leaves, since the session record names the new deliver subjects.

    Raises:
        ApiError, NoResponders, RequestTimeout, MqttError: JetStream does not do it.
    """
    services = client.services

    async def attach(binding: ConsumerBinding) -> None:
        known = side.bindings.get(binding.consumer.durable_name) is binding
        if not known or client.taken or side.stalled or binding.wire is not services.nats.link.wire:
            return  # a later job attaches all consumers, here or at the next owner
        await retry_until_answered(client, partial(side.attach, binding))
        if await retry_until_answered(client, partial(bring_back, side, binding, attempts=ATTEMPTS)):
            note_redelivered(side, binding)
            finish(side, binding)
        else:
            client.delivery.reconciling.due(client, binding.consumer.durable_name)

    await in_turn([partial(attach, binding) for binding in idle])
    await write_changed_record(client, side)
    side.machine.pump()


async def _ended(
    client: Receiver, side: DurableDelivery, entry: Draining, gates: list[Gate], went: Set[str]
) -> ConsumerBinding | None:
    """Add an ended subscription; None = it has no message left, or its consumer is gone."""
    if not entry.qos:
        return None
    draining = lowered_consumer(side, entry)
    live = side.position_writer is not None and entry.name in side.position_writer.live
    if not live:
        found = await existing_consumer(client.services.nats.inbox, MESSAGES, entry.name, client.client_id)
        if found is None:
            return None
        draining = replace(found, deliver_subject=draining.deliver_subject)
    source = SubscriptionState(entry.qos, entry.start, draining.max_ack_pending, entry.end, whole=entry.whole)
    if entry.name in went:
        source.deliver_to(side.resumed_from)
    subject = entry.filter_subject.removeprefix(STORED_PREFIX)
    _, v5 = claimed(client.record)
    described = v5.options.get(subject) or v5.options.get(f"{subject}.>")
    if entry.whole and described is not None:
        set_options(source, described)
    binding = _add(side, "", draining, source) if live else side.add("", draining, source)
    still_draining(side, binding, [gate for gate in gates if gate.found in meeting(client, [subject])])
    return binding


async def rebind_consumers(client: Receiver, side: DurableDelivery) -> None:
    """Attach all consumers anew: deliveries and acknowledgements may be lost, with the connection to NATS or without.

    New messages wait until the pending ones have come again; where some do not come, `Reconciling` tries again later.
    """
    loop = asyncio.get_running_loop()
    record = client.record
    assert record is not None
    if not side.bindings or any(not one.source.live for one in side.bindings.values()):
        side.point_anew()
        try:
            await save_when_room(client)
        except Conflict:
            client.taken_over()
            return
    if side.has_pubrels:
        await retry_until_answered(client, partial(attach_pubrels, side))
    for binding in list(side.bindings.values()):
        if side.stalled and not binding.source.ended:
            binding.source.drop_reason(SubscriptionState.RETURNING)
            continue  # it is attached when the client reads
        if binding.source.live:
            if binding.source.held & SubscriptionState.RETURNING and side.live:
                # NATS was away: the session goes on only if this connection can still write its position.
                if side.position_writer is not None and not await side.position_writer.flush():
                    side.position_writer.end_if_moved()
                    return
                side.machine.drop_hold(binding.source, SubscriptionState.RETURNING)
            continue
        consumer = record.cons.get(binding.key)
        if consumer is None:
            consumer = replace(binding.consumer, deliver_subject=DELIVER_PREFIX + client.services.identity.new_nuid())
        binding.source.hold(SubscriptionState.RETURNING)  # new messages must not overtake lost ones
        side.add(binding.key, consumer, binding.source)
        asked = loop.time()
        await retry_until_answered(client, partial(side.attach, binding))
        # A consumer that had no leader sends nothing again by itself.
        patience = 0.0 if loop.time() - asked > PENDING_RETURN_S else PENDING_RETURN_S
        if await retry_until_answered(client, partial(bring_back, side, binding, patience, ATTEMPTS)):
            side.machine.drop_hold(binding.source, SubscriptionState.RETURNING)
            note_redelivered(side, binding)
            finish(side, binding)
        else:
            client.delivery.reconciling.due(client, consumer.durable_name)
    await write_changed_record(client, side)
    side.machine.pump()


async def deliver_by_consumers(client: Receiver, side: DurableDelivery) -> None:
    """Have its own consumers bring the messages of a session that has left the shared reader."""
    if side.state is not DeliveryState.LEAVING:
        return
    client.delivery.feed.promote_later(client)
    in_records = _stays_in_records(client)
    if await store_positions_in_consumers(client, side):
        if not in_records:
            _move_to_consumers(side, claimed(client.record)[1])
        side.change(DeliveryEvent.CONSUMERS_SET)
        try:
            await rebind_consumers(client, side)
        finally:
            side.change(DeliveryEvent.ATTACHED)


async def leave_reader_unless_wholly_live(client: Receiver) -> None:
    """Leave the shared reader before subscriptions end, unless it serves all subscriptions, or will when it is resumed.

    Else messages could be lost that a live subscription has left to a plain one, or the reverse.
    """
    side = client.durable_side
    if side is None:
        return
    served = side.live or side.state is DeliveryState.RESUMING
    if not (served and all(one.source.live for one in side.bindings.values())):
        await leave_shared_reader(client)


async def leave_shared_reader(client: Receiver) -> None:
    """Leave the shared reader, if it serves the session: the session's consumers bring its messages from then on."""
    side = client.durable_side
    if side is None or not (side.live or side.dormant):
        return
    end_shared_delivery(side)
    if not side.stalled:
        await deliver_by_consumers(client, side)
    elif side.dormant:
        await store_positions_in_consumers(client, side)  # the consumers are attached when the client reads again


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
    """Store the session's position, with all messages taken, before consumers of live subscriptions are deleted.

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
