# SPDX-License-Identifier: Apache-2.0
"""New and changed subscriptions of a durable session: the session record, then the consumers; their limits."""

from __future__ import annotations

import logging
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import in_turn
from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.base.logs import log_failure
from mqtt_nats.client.subscription_change import Wish, is_lowered
from mqtt_nats.delivery.draining import stand_behind, still_bringing
from mqtt_nats.delivery.position_recovery import limit_in_flight
from mqtt_nats.delivery.position_writer import NO_POSITION, PositionWriter
from mqtt_nats.delivery.resume import leave_shared_reader, set_options
from mqtt_nats.ingress.retained.replay import Replay
from mqtt_nats.protocol.durable_sender import SEQUENCE_EVER
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.overlap import patterns_meet
from mqtt_nats.pubsub.filter_index import OverlapLimit
from mqtt_nats.pubsub.shared_filters import PREFIX as SHARED
from mqtt_nats.pubsub.shared_filters import is_open, plain_filter
from mqtt_nats.sessions.consumer_attach import attach_pubrels
from mqtt_nats.sessions.consumer_binding import Came, ConsumerBinding
from mqtt_nats.sessions.message_stream import Mark
from mqtt_nats.sessions.quotas import holder
from mqtt_nats.sessions.record import claimed, save_record
from mqtt_streams.api import ApiError
from mqtt_streams.consumers import ConsumerRef, backstop, create_consumer
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.record_size import subscription_bytes
from mqtt_streams.sessions import second_sid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mqtt_nats.client.client import Client
    from mqtt_nats.codec import Subscribe, Subscription
    from mqtt_nats.delivery.durable import DurableDelivery

log = logging.getLogger("mqtt_nats.broker")

LEVELS_EACH: Final = 8
"""Levels that the filters of a session may have on the average: each level takes memory of the gateway."""

RECORD_SPARE: Final = 2048
"""Bytes of max_payload that subscriptions leave to the rest of the session record: headers, later changes."""

OVERLAPS: Final = "overlapping_filters"
"""Name of the limit :class:`OverlapLimit` in the log and in metrics."""


async def grant(
    client: Client,
    wanted: dict[str, Wish],
    replays: dict[str, Replay],
    place: Mark,
    came: Came | None = None,
) -> set[str]:
    """Write the session record with the subscriptions, then create their consumers.

    Args:
        replays: replays of retained messages, which come first, by key in the session record.
        place: mark in the stream, after which messages are for new subscriptions.
        came: whether core NATS has already brought such a message.

    Returns:
        The filters for which JetStream does not create a consumer.

    Raises:
        Conflict: the session belongs to another connection.
        ApiError: JetStream does not store the record.
    """
    side = client.durable_side
    assert side is not None
    lowered = {topic_filter for topic_filter, wish in wanted.items() if is_lowered(client, wish)}
    if lowered:
        await leave_shared_reader(client)
    position = await retry_until_answered(client, partial(place.position, client.services.nats.inbox))
    others = {topic_filter: wish for topic_filter, wish in wanted.items() if topic_filter not in lowered}
    await client.services.quotas.pace(client.hash)
    in_records = client.delivery.feed.without_consumers(client)
    joins = came is None and _may_join(client, side, others)
    if not (joins and in_records):
        client.services.stream.count_consumers(sum(1 for _ in _new_keys(client, others)))
        if any(wish.qos == 2 for wish in wanted.values()) and not side.has_pubrels:
            await retry_until_answered(client, partial(attach_pubrels, side))
    if joins:
        put = partial(_put_served, side, others, replays, _Starts(side, position), in_records=in_records)
        added = await client.delivery.feed.subscribe(client, position, put)
        if not in_records:
            await retry_until_answered(client, partial(_create_dormant, client, added))
        return set()
    created = _put(side, others, replays, _Starts(side, position), partial(side.add, came=came))
    await save_record(client, client.epoch)
    if created:
        limit_in_flight(side)  # each new consumer adds its window
    results = await retry_until_answered(client, partial(_create, client, created))
    failed = {created[at][0]: error for at, error in enumerate(results) if error is not None}
    if failed:
        client.refuse_filters({"jetstream": len(failed)}, f": {next(iter(failed.values()))}")
    return set(failed)


def _may_join(client: Client, side: DurableDelivery, wanted: dict[str, Wish]) -> bool:
    """Whether the shared reader serves the new ones of these subscriptions."""
    feed = client.delivery.feed
    if not feed.takes(client, side) or not any(_new_keys(client, wanted)):
        return False
    if side.position_writer is None:
        side.store_position_with(PositionWriter(client, NO_POSITION))
    return True


def _new_keys(client: Client, wanted: dict[str, Wish]) -> Iterator[str]:
    """Yield the keys in the session record of the consumers that new subscriptions need."""
    record, _ = claimed(client.record)
    keys = (key for wish in wanted.values() if wish.qos for key in _keys(wish.subjects))
    return (key for key in keys if key not in record.cons)


def _put_served(
    side: DurableDelivery,
    wanted: dict[str, Wish],
    replays: dict[str, Replay],
    start_of: Callable[[str], int],
    *,
    in_records: bool,
) -> list[ConsumerBinding]:
    """Put subscriptions into the session record; return those that the shared reader is to serve from the start."""
    if in_records:
        claimed(side.client.record)[1].move_to_records()
    add = partial(side.add_removed, removed=in_records)
    return [one for _, one in _put(side, wanted, replays, start_of, add)]


def _keys(subjects: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys in the session record of the consumers of a filter's subjects."""
    return subjects[0], *map(second_sid, subjects[1:])


def _put(
    side: DurableDelivery,
    wanted: dict[str, Wish],
    replays: dict[str, Replay],
    start_of: Callable[[str], int],
    add: Callable[[str, ConsumerRef, SubscriptionState], ConsumerBinding],
) -> list[tuple[str, ConsumerBinding]]:
    """Put subscriptions into the session record, and by ``add`` into the session; return the new ones, with filters."""
    record, v5 = claimed(side.client.record)
    created: list[tuple[str, ConsumerBinding]] = []
    older = still_bringing(side)
    for topic_filter, wish in wanted.items():
        options = wish.described(topic_filter)
        for key, subject in zip(_keys(wish.subjects), wish.subjects, strict=True) if wish.qos else ():
            known = record.cons.get(key)
            if known is None:
                source = SubscriptionState(wish.qos, start_of(subject), side.window())
            else:
                source = side.bindings[known.durable_name].source
            set_options(source, options)
            if key in replays:
                replays[key].hold(source)
            if known is None:
                stand_behind(side, older, source, subject)
                created.append((topic_filter, add(key, _put_consumer(side, key, subject, source), source)))
            elif source.qos != wish.qos:
                _regrant(side, key, source, wish.qos)
        record.subs[wish.subjects[0]] = wish.qos
        v5.options[wish.subjects[0]] = options
    return created


def _put_consumer(side: DurableDelivery, key: str, subject: str, source: SubscriptionState) -> ConsumerRef:
    """Put the consumer of a new subscription into the session record."""
    client = side.client
    record, v5 = claimed(client.record)
    v5.start[key] = source.start
    record.cons[key] = consumer = subscription_consumer(
        client.hash,
        subject,
        name_nuid=client.services.identity.new_nuid(),
        deliver_nuid=client.services.identity.new_nuid(),
        max_ack_pending=side.window(),
        start_seq=source.start,
        inactive_threshold=backstop(v5.expiry),
        client_id=client.client_id,
    )
    source.created()
    return consumer


def _regrant(side: DurableDelivery, key: str, source: SubscriptionState, qos: int) -> None:
    """Grant another QoS to a subscription that has a consumer; the session record notes the former QoS."""
    _, v5 = claimed(side.client.record)
    # The last sequence of all: an overlapping subscription may be ahead of this one's consumer.
    source.regrant(qos, max(each.last for each in side.machine.sources))
    v5.was[key] = (source.was_qos, source.until)


class _Starts:
    """First sequences of new subscriptions: after a stream sequence, and after deliveries of overlapping consumers.

    A message that an overlapping consumer has delivered meanwhile would come twice.
    """

    def __init__(self, side: DurableDelivery, position: int) -> None:
        side.settle()
        self._position = position
        self._later = [
            (one.consumer.filter_subject.removeprefix(STORED_PREFIX), brought)
            for one in side.bindings.values()
            if (brought := min(one.source.last, one.source.end if one.source.ended else SEQUENCE_EVER)) > position
        ]

    def __call__(self, subject: str) -> int:
        """Return the first stream sequence of a new subscription of ``subject``."""
        return max([self._position, *(last for one, last in self._later if patterns_meet(one, subject))]) + 1


async def _create(client: Client, wanted: list[tuple[str, ConsumerBinding]]) -> list[ApiError | None]:
    """Create consumers; returns for each one JetStream's error, or None."""
    return await in_turn([partial(_create_one, client, *one) for one in wanted])


async def _create_dormant(client: Client, added: list[ConsumerBinding]) -> None:
    """Create consumers that lie dormant; one that JetStream refuses is created when it is needed."""
    named = [(one.consumer.filter_subject, one) for one in added]
    for one, error in zip(added, await _create(client, named), strict=True):
        if error is not None and not one.removed:
            one.remove()
            client.services.stream.count_consumers(-1)


async def _create_one(client: Client, topic_filter: str, binding: ConsumerBinding) -> ApiError | None:
    try:
        await create_consumer(client.services.nats.inbox, MESSAGES, binding.consumer)
    except ApiError as error:
        log_failure(log, logging.DEBUG, "subscribe", "%s: no consumer of %r: %s", client, topic_filter, error)
        return error
    return None


async def room_for(client: Client, packet: Subscribe) -> Room:
    """Return the room for the subscriptions of a SUBSCRIBE packet; JetStream is asked for the use of the quota."""
    wanted, quota = _consumers(client, packet)
    if not wanted or not quota:
        return Room(client, wanted)
    who = holder(client.user, client.connection.host)
    work = partial(client.services.quotas.reserve, client.hash, quota, who, wanted)
    return Room(client, await retry_until_answered(client, work))


def known_room(client: Client, packet: Subscribe) -> Room | None:
    """Return the room for the subscriptions of a SUBSCRIBE packet; None: the use of the quota is not known yet."""
    wanted, quota = _consumers(client, packet)
    if not wanted or not quota:
        return Room(client, wanted)
    who = holder(client.user, client.connection.host)
    reserved = client.services.quotas.reserve_known(client.hash, quota, who, wanted)
    return None if reserved is None else Room(client, reserved)


def _consumers(client: Client, packet: Subscribe) -> tuple[int, str | None]:
    """Return the number of consumers that a SUBSCRIBE packet may need, and the quota in which they count."""
    record = client.record
    if client.durable_side is None or record is None or record.v5 is None:
        return 0, None
    having = {found.text for found, qos in client.filters.items() if qos}
    texts = {one.topic_filter for one in packet.filters if one.qos} - having
    return sum(1 + text.endswith("/#") for text in texts if not text.startswith(SHARED)), record.v5.quota


class Room:
    """Room for further subscriptions of a session, and for their consumers."""

    def __init__(self, client: Client, consumers: int) -> None:
        self._client = client
        self._consumers = consumers
        self._refused: dict[str, int] = {}
        self._having = client.record.cons if client.durable_side is not None and client.record is not None else None
        self._present = {found.text for found in client.filters} | set(client.shares or ())
        self._overlaps: OverlapLimit | None = None
        """Overlaps of the session's filters with wildcards or of groups; None = not needed yet."""
        self._count = client.connection.settings.max_subscriptions
        gateway = client.services.settings.max_subscriptions_per_gateway
        self._free = None if gateway is None else gateway - client.path.table.subscriptions
        """Subscriptions, shared ones not counted, that the gateway has room for; None = it has no limit."""
        most = LEVELS_EACH * self._count + client.services.settings.max_topic_levels
        self._levels = most - sum(map(_level_count, self._present))
        """Levels that further filters may have."""
        self._bytes: int | None = None
        """Bytes by which the session record, one message, may grow; None = the session is not durable."""
        if client.durable_side is not None and client.record is not None:
            self._bytes = client.path.store.max_payload - len(client.record.encode()) - RECORD_SPARE

    def reserve(self, entry: Subscription, subjects: tuple[str, ...]) -> bool:
        """Whether there is room for a subscription; the room is then taken."""
        limit = self._exceeded(entry, subjects)
        if limit:
            self._refused[limit] = self._refused.get(limit, 0) + 1
        return not limit

    def tell(self) -> None:
        """Count and log the refused subscriptions."""
        if self._refused:
            self._client.refuse_filters(self._refused)

    def _exceeded(self, entry: Subscription, subjects: tuple[str, ...]) -> str:
        """Return the name in `FILTER_LIMITS` of the limit that a subscription exceeds; empty: the room is taken."""
        topic_filter = entry.topic_filter
        consumers = 0
        shared = topic_filter.startswith(SHARED)
        if self._having is not None and entry.qos and not shared:
            consumers = sum(key not in self._having for key in _keys(subjects))
        if consumers > self._consumers:
            return "consumers"
        if topic_filter in self._present:
            if consumers and not self._may_overlap(topic_filter):
                return OVERLAPS
            self._consumers -= consumers
            return ""
        levels = _level_count(topic_filter)
        if len(self._present) >= self._count:
            return "max_subscriptions"
        if levels > self._levels:
            return "filter_levels"
        if not shared and self._free is not None and self._free <= 0:  # else its consumers would be made for nothing
            return "max_subscriptions_per_gateway"
        if self._bytes is not None:
            size = subscription_bytes(topic_filter, subjects)
            if size > self._bytes:
                return "max_payload"
        if (consumers or shared) and not self._may_overlap(topic_filter):
            return OVERLAPS
        if self._bytes is not None:
            self._bytes -= size
        self._levels -= levels
        self._present.add(topic_filter)
        self._consumers -= consumers
        if self._free is not None:
            self._free -= not shared
        return ""

    def _may_overlap(self, topic_filter: str) -> bool:
        """Whether a new filter with consumers stays within the number of filters that may match one topic."""
        if not is_open(topic_filter):
            return True
        client, overlaps = self._client, self._overlaps
        if overlaps is None:
            overlaps = self._overlaps = OverlapLimit()
            durable = self._having is not None
            having = [found.text for found, qos in client.filters.items() if qos and durable]
            for text in filter(is_open, chain(having, client.shares or ())):
                overlaps.add(plain_filter(text))
        return overlaps.add_if_fits(plain_filter(topic_filter))


def _level_count(topic_filter: str) -> int:
    return topic_filter.count("/") + 1


def replays_of(client: Client, wanted: dict[str, Wish]) -> list[Replay]:
    """Return a replay for each subject of which the subscriptions get retained messages."""
    return [
        Replay(client, topic_filter, subject if index == 0 else second_sid(subject), subject, wish.qos)
        for topic_filter, wish in wanted.items()
        if wish.replay
        for index, subject in enumerate(wish.subjects)
    ]
