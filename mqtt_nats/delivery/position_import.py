# SPDX-License-Identifier: Apache-2.0
"""Position of a session whose consumers were moved on: by nats-server's MQTT listener, which knows no positions.

A consumer says up to where it has delivered, and how many of these messages are not acknowledged. So the session gets
a position, and readers go on from there. See docs/internals/shared_reader.md#resumed-sessions.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mqtt_nats.backbone.batch import in_turn
from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.protocol.overlap import PAIRS_MOST, patterns_meet
from mqtt_nats.sessions.pubrel_consumer import move
from mqtt_nats.sessions.record import claimed, save_record
from mqtt_streams.api import RequestTimeout
from mqtt_streams.consumers import ConsumerInfo, ConsumerNotFound, ConsumerRef, DeliverSubjectBusy, consumer_info
from mqtt_streams.messages import DELIVER_PREFIX
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import Conflict, first_subject
from mqtt_streams.subjects import starts_with_wildcard, visible_to_wildcard

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_streams.sessions import SessionRecord

log = logging.getLogger("mqtt_nats.broker")


class _Found(NamedTuple):
    """The progress of one subscription, as its consumer tells it."""

    key: str
    """Key in the session record."""
    delivered: int
    """Stream sequence up to which it has delivered, or passed over, every message."""
    pending: dict[int, int]
    """QoS of the delivered messages that are not acknowledged, by stream sequence."""


async def import_position(client: Receiver, side: DurableDelivery, expected: int, base: object = None) -> set[str]:
    """Give a session the position at which its consumers are; they lie dormant from then on.

    Args:
        expected: sequence of the position that is stored, and is not the session's; 0 = none is.

    Returns:
        The names of the consumers; empty: they have to deliver, since their state does not tell the position.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer, or the session has another owner.
    """
    record, v5 = claimed(client.record)
    if not record.cons or side.replaced is not None or any(entry.qos for entry in v5.draining):
        return set()
    answers = await in_turn([partial(_read, client, key, one) for key, one in list(record.cons.items())])
    found = [one for one in answers if one is not None]
    if len(found) < len(answers):
        return set()
    reached = min(one.delivered for one in found)
    ahead = {one.key for one in found if one.delivered > reached}
    # A subscription that is ahead begins behind the position: neither pending messages nor owners may depend on that.
    if any(one.key in ahead and one.pending for one in found) or _overlaps(record, ahead):
        return set()
    for one in found:
        if one.key in ahead:
            v5.start[one.key] = max(v5.start.get(one.key, 0), one.delivered + 1)
    v5.name_position(client.services.identity.new_nuid())
    writer = PositionWriter(client, expected)
    names = {one.durable_name for one in record.cons.values()}
    writer.live.update(names)
    pending: dict[int, int] = {}
    for one in found:
        pending.update({at: max(qos, pending.get(at, 0)) for at, qos in one.pending.items()})
    writer.ledger.restore(reached, pending, {}, {})
    side.store_position_with(writer)
    try:
        await save_record(client, client.epoch)
    except Conflict:
        client.taken_over()
        raise RequestTimeout("the session belongs to another connection") from None
    if not await writer.flush():
        writer.end_if_moved()
        raise RequestTimeout("the position of the session cannot be stored")
    side.resume_from(writer.ledger.reached)
    log.debug("%s: readers go on where its consumers are", client)
    return names


def _overlaps(record: SessionRecord, keys: Set[str]) -> bool:
    """Whether one of these subscriptions overlaps with another one; True where there are too many to compare."""
    subjects = {key: one.filter_subject for key, one in record.cons.items()}
    if len(subjects) * len(keys) > PAIRS_MOST:
        return True
    return any(
        key != other and patterns_meet(subjects[key], subject) for key in keys for other, subject in subjects.items()
    )


async def _read(client: Receiver, key: str, consumer: ConsumerRef) -> _Found | None:
    """Read up to where a consumer is; None: it does not exist, or does not tell which messages are pending."""
    inbox, name = client.services.nats.inbox, consumer.durable_name
    info = await consumer_info(inbox, MESSAGES, name)
    if info is not None and info.push_bound:
        # The former owner may get messages for a moment: the consumer is to deliver to nobody.
        moved = replace(consumer, deliver_subject=DELIVER_PREFIX + client.services.identity.new_nuid())
        try:
            await move(client.services, MESSAGES, moved)
        except ConsumerNotFound:
            return None
        except DeliverSubjectBusy:  # by a client that listens to everything
            pass
        else:
            claimed(client.record)[0].cons[key] = moved
        info = await consumer_info(inbox, MESSAGES, name)
    if info is None or info.paused:
        return None
    pending = await _pending(client, key, consumer, info)
    return None if pending is None else _Found(key, info.delivered_seq, pending)


async def _pending(client: Receiver, key: str, consumer: ConsumerRef, info: ConsumerInfo) -> dict[int, int] | None:
    """Return the messages that a consumer has delivered and that are not acknowledged; None: that is not known.

    They are all behind its acknowledgement floor, unless later messages were acknowledged first.
    """
    if not info.num_ack_pending:
        return {}
    services = client.services
    record, _ = claimed(client.record)
    granted = record.subs.get(first_subject(key), 0) or 1
    wild = starts_with_wildcard(consumer.filter_subject.removeprefix(STORED_PREFIX))
    pending: dict[int, int] = {}
    count, at = 0, info.ack_floor_seq + 1
    while (one := await services.head.following(consumer.filter_subject, at)) is not None:
        if one.seq > info.delivered_seq:
            break
        count, at = count + 1, one.seq + 1
        if count > info.num_ack_pending:
            return None
        subject = one.subject.encode("utf-8", "surrogateescape")
        message = services.path.recent.message(one.seq, b"%d" % one.time_ns, subject, one.headers, one.payload)
        if message.qos and not (wild and not visible_to_wildcard(message.subject)):
            pending[one.seq] = min(message.qos, granted)
    return pending
