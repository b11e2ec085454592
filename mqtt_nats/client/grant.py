# SPDX-License-Identifier: Apache-2.0
"""New and changed subscriptions of a durable session: its position, its record, then the dormant consumers."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from mqtt_nats.backbone.batch import in_turn
from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.base.logs import log_failure
from mqtt_nats.client.subscription_change import Wish, is_lowered
from mqtt_nats.client.subscription_room import consumer_keys
from mqtt_nats.delivery.draining import stand_behind, still_bringing
from mqtt_nats.delivery.position_writer import NO_POSITION, PositionWriter
from mqtt_nats.delivery.resume import set_options
from mqtt_nats.ingress.retained.replay import Replay
from mqtt_nats.protocol.durable_sender import SEQUENCE_EVER
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.overlap import patterns_meet
from mqtt_nats.sessions.consumer_binding import Came, ConsumerBinding
from mqtt_nats.sessions.message_stream import Mark
from mqtt_nats.sessions.pubrel_consumer import try_to_attach_pubrels
from mqtt_nats.sessions.record import claimed, save_record
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import ConsumerRef, backstop, create_consumer
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.sessions import second_sid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.durable import DurableDelivery

log = logging.getLogger("mqtt_nats.broker")


async def grant(
    client: Client,
    wanted: dict[str, Wish],
    replays: dict[str, Replay],
    place: Mark,
    came: Came | None = None,
) -> None:
    """Store the session's position, then its record with the subscriptions; then create their dormant consumers.

    Args:
        replays: replays of retained messages, which come first, by key in the session record.
        place: mark in the stream, after which messages are for new subscriptions.
        came: whether core NATS has already brought such a message.

    Raises:
        Conflict: the session belongs to another connection.
        ApiError: JetStream does not store the record.
    """
    side = client.durable_side
    assert side is not None
    position = await retry_until_answered(client, partial(place.position, client.services.nats.inbox))
    others = {topic_filter: wish for topic_filter, wish in wanted.items() if not is_lowered(client, wish)}
    await client.services.quotas.pace(client.hash)
    in_records = client.delivery.feed.without_consumers(client)
    new = sum(1 for _ in _new_keys(client, others))
    if not in_records:
        client.services.stream.count_consumers(new)
        if any(wish.qos == 2 for wish in others.values()) and not side.has_pubrels:
            await try_to_attach_pubrels(side)
    put = partial(_put, side, others, replays, _Starts(side, position), came, in_records=in_records)
    if not new:
        put()
        await save_record(client, client.epoch)
        return
    if side.position_writer is None:
        side.store_position_with(PositionWriter(client, NO_POSITION))
    added = await client.delivery.feed.subscribe(client, position, put)
    if not in_records:
        await _create_dormant(client, added)


def _new_keys(client: Client, wanted: dict[str, Wish]) -> Iterator[str]:
    """Yield the keys in the session record of the consumers that new subscriptions need."""
    record, _ = claimed(client.record)
    keys = (key for wish in wanted.values() if wish.qos for key in consumer_keys(wish.subjects))
    return (key for key in keys if key not in record.cons)


def _put(
    side: DurableDelivery,
    wanted: dict[str, Wish],
    replays: dict[str, Replay],
    start_of: Callable[[str], int],
    came: Came | None,
    *,
    in_records: bool,
) -> list[ConsumerBinding]:
    """Put subscriptions into the session and its record; return the new ones."""
    record, v5 = claimed(side.client.record)
    if in_records:
        v5.move_to_records()
    created: list[ConsumerBinding] = []
    older = still_bringing(side)
    for topic_filter, wish in wanted.items():
        options = wish.described(topic_filter)
        for key, subject in zip(consumer_keys(wish.subjects), wish.subjects, strict=True) if wish.qos else ():
            known = record.cons.get(key)
            if known is None:
                source = SubscriptionState(wish.qos, start_of(subject))
            else:
                source = side.bindings[known.durable_name].source
            set_options(source, options)
            if key in replays:
                replays[key].hold(source)
            if known is None:
                stand_behind(side, older, source, subject)
                consumer = _put_consumer(side, key, subject, source)
                created.append(side.add(key, consumer, source, removed=in_records, came=came))
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
    return consumer


def _regrant(side: DurableDelivery, key: str, source: SubscriptionState, qos: int) -> None:
    """Grant another QoS to a subscription that has a consumer; the session record notes the former QoS."""
    _, v5 = claimed(side.client.record)
    # What an earlier connection may have sent comes again at the former QoS.
    source.regrant(qos, max(side.machine.reached, side.machine.perhaps_sent))
    v5.was[key] = (source.was_qos, source.until)


class _Starts:
    """First sequences of new subscriptions: after a stream sequence, and after what overlapping subscriptions have had.

    A message that an overlapping subscription has had meanwhile would come twice.
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


async def _create_dormant(client: Client, added: list[ConsumerBinding]) -> None:
    """Create consumers that lie dormant; others when the session is resumed: JetStream refuses them, or has no room."""
    results = await in_turn([partial(_create_one, client, one) for one in added])
    for one, created in zip(added, results, strict=True):
        if not created and not one.removed:
            one.remove()
            client.services.stream.count_consumers(-1)


async def _create_one(client: Client, binding: ConsumerBinding) -> bool:
    """Create a dormant consumer; False: JetStream refuses it, or readers need its place."""
    if client.services.stream.crowded:
        return False
    try:
        await create_consumer(client.services.nats.inbox, MESSAGES, binding.consumer)
    except (ApiError, NoResponders, RequestTimeout) as error:
        subject = binding.consumer.filter_subject
        log_failure(log, logging.DEBUG, "subscribe", "%s: no consumer of %r: %s", client, subject, error)
        return False
    return True


def replays_of(client: Client, wanted: dict[str, Wish]) -> list[Replay]:
    """Return a replay for each subject of which the subscriptions get retained messages."""
    return [
        Replay(client, topic_filter, subject if index == 0 else second_sid(subject), subject, wish.qos)
        for topic_filter, wish in wanted.items()
        if wish.replay
        for index, subject in enumerate(wish.subjects)
    ]
