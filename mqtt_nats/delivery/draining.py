# SPDX-License-Identifier: Apache-2.0
"""Ended subscriptions of a durable session, until everything that their consumers had begun is complete.

What was sent is completed. What waited and is matched by another subscription, which had left it to the ended one,
still comes from the consumer of that one; the other's own messages stand behind it, so that each topic keeps its
order. See docs/internals/rules.md#ended-subscriptions.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.codec import matches
from mqtt_nats.ingress.retained_replay import close_gate
from mqtt_nats.protocol.inflight import Delivery, SubscriptionState
from mqtt_nats.protocol.overlap import patterns_meet
from mqtt_nats.protocol.requeue import EVER
from mqtt_nats.sessions.record import save_record
from mqtt_nats.sessions.stream_head import beyond
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import consumer_info
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import V5, Conflict, Draining
from mqtt_streams.subjects import subject_to_topic

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.pubsub.backlog import Gate
    from mqtt_nats.pubsub.routing_table import Filter, Member
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding

log = logging.getLogger("mqtt_nats.broker")

LOOK_AGAIN: Final = 1.0
"""Seconds until JetStream is asked again whether a consumer has anything left: its messages may be removed."""


def _strike(side: DurableDelivery, key: str) -> tuple[V5, ConsumerBinding]:
    """Take a subscription out of the session record; returns the gateways' part of that, and its attachment."""
    record = side.client.record
    assert record is not None
    assert record.v5 is not None
    consumer = record.cons.pop(key)
    record.v5.start.pop(key, None)
    record.v5.replay.pop(key, None)
    record.v5.was.pop(key, None)
    return record.v5, side.attachments[consumer.durable_name]


def drain(side: DurableDelivery, key: str) -> Draining | None:
    """End a subscription's source; returns what the record has to say while messages are in flight."""
    record, attachment = _strike(side, key)
    consumer = attachment.consumer
    side.settle()
    others = side.overlap.after(attachment)
    unmatch(side, attachment)
    source = attachment.source
    attachment.handover_limits = {other: other.last for other in others}
    if others:
        side.machine.ended = max(side.machine.ended, source.last, *attachment.handover_limits.values())
    for former in side.attachments.values():  # what one of them had left to this one others had left to this one too
        limit = former.handover_limits.get(source, 0) if former.source.end and not former.drained else 0
        for heir in former.handover_limits.keys() & attachment.handover_limits.keys() if limit else ():
            former.handover_limits[heir] = max(former.handover_limits[heir], min(heir.last, limit))

    def keep(delivery: Delivery) -> bool:
        message: Stored = delivery.body
        qos = inherited(side, attachment, message, delivery.sequence)
        if qos:
            delivery.qos = min(message.qos, qos)
        return bool(qos)

    inflight = side.machine.drain(source, keep)
    attachment.key = ""
    if source.live:  # what is in flight is in the session's position
        record.draining.append(Draining(consumer.durable_name, consumer.filter_subject, 0, source.end, source.start))
        return None
    qos = [delivery.qos for delivery in inflight]
    if any(other.last > source.last for other in others):
        # They have acknowledged what was this one's to deliver, and perhaps it has not been given that yet.
        source.end = max(source.end, *attachment.handover_limits.values())
        qos += [other.qos for other in others]
        stand_before(attachment, attachment.handover_limits)
        watch(side, attachment)
    if attachment.missed or attachment.redelivering:  # what an earlier connection has sent may have yet to come again
        source.end = max(source.end, attachment.gone[1])
        qos.append(max(source.qos, source.was_qos))
    most = max(qos, default=0)
    draining = Draining(consumer.durable_name, consumer.filter_subject, most, source.end, source.start)
    record.draining.append(draining)
    return draining if qos or side.machine.holds(source) else None


def lower(side: DurableDelivery, key: str, end: int, gates: list[Gate], retained: bool) -> ConsumerBinding:
    """QoS 0 takes the place of a subscription, whose consumer goes on up to ``end`` [MQTT-3.8.4-4] (5.0).

    Args:
        gates: what keeps what has come by that, until all that the consumer brings is sent.
        retained: a replay of retained messages that had begun goes on, at QoS 0.
    """
    record, attachment = _strike(side, key)
    consumer = attachment.consumer
    source = attachment.source
    side.machine.lower(source, end, retained)
    attachment.lowered(list(gates))
    stand_before(attachment, side.overlap.after(attachment))
    qos = max(source.qos, source.was_qos)
    record.draining.append(
        Draining(consumer.durable_name, consumer.filter_subject, qos, source.end, source.start, True)
    )
    return attachment


def unmatch(side: DurableDelivery, attachment: ConsumerBinding) -> None:
    """A subscription has ended, and delivers nothing that others match too."""
    record = side.client.record
    for other in side.overlap.remove(attachment):
        if record is not None and record.v5 is not None:
            record.v5.was[other.key] = (other.source.was_qos, other.source.until)


def still_draining(side: DurableDelivery, attachment: ConsumerBinding, gates: list[Gate]) -> None:
    """A subscription had ended before the session was resumed; what comes at QoS 0 in its place waits in ``gates``."""
    subject = attachment.consumer.filter_subject.removeprefix(STORED_PREFIX)
    source = attachment.source
    if source.whole:
        attachment.lowered(gates)
        stand_before(attachment, side.overlap.after(attachment))
        return
    attachment.handover_limits = dict.fromkeys(side.overlap.after_ended(source.start, subject), source.end)
    side.machine.ended = max(side.machine.ended, source.end)
    stand_before(attachment, attachment.handover_limits)


def stand_before(attachment: ConsumerBinding, others: Iterable[SubscriptionState]) -> None:
    """An ended subscription may still bring what is older than the next messages of those that have left it some."""
    attachment.drained = attachment.through = False
    attachment.behind = list(others)
    for other in attachment.behind:
        other.held += SubscriptionState.BEHIND


def brought(
    side: DurableDelivery, attachment: ConsumerBinding, message: Stored, sequence: int, pending: int, *, unwanted: bool
) -> None:
    """The consumer of an ended subscription has brought a message, with so many more to come."""
    source = attachment.source
    if attachment.gates and sequence <= source.end:
        attachment.brings(message)
    if source.whole and not pending:
        attachment.emptied()
    if not attachment.drained and (sequence >= source.end or (not pending and not source.whole)):
        spend(side, attachment)
    elif unwanted and source.collected:
        finish(side, attachment)


def spend(side: DurableDelivery, attachment: ConsumerBinding) -> None:
    """Nothing more comes from an ended subscription that another one wants, but what was pending."""
    attachment.through = True
    if not (attachment.redelivering or attachment.missed):
        _pass_on(side, attachment)
        finish(side, attachment)


def returned(side: DurableDelivery, attachment: ConsumerBinding) -> None:
    """All that a consumer had pending when it was attached has come again, or is gone."""
    attachment.redelivering = False
    if attachment.through:
        _pass_on(side, attachment)


def _pass_on(side: DurableDelivery, attachment: ConsumerBinding) -> None:
    """Let those go on that stand behind an ended subscription."""
    attachment.drained = True
    written(side, attachment)


def written(side: DurableDelivery, attachment: ConsumerBinding) -> None:
    """Let them go on unless something is yet to come, or to be sent where QoS 0 has taken the place."""
    if not is_passed(side, attachment):
        return
    for gate in attachment.release():
        close_gate(side.client, gate)
    behind, attachment.behind = attachment.behind, []
    for other in behind:
        side.machine.release_held(other, SubscriptionState.BEHIND)
    if attachment.source.whole:
        finish(side, attachment)


def written_of(side: DurableDelivery, source: SubscriptionState) -> None:
    """The same of whatever depends on a source."""
    for attachment in list(side.attachments.values()):
        if attachment.source.whole and source in (attachment.source, side.past):
            written(side, attachment)


def is_passed(side: DurableDelivery, attachment: ConsumerBinding) -> bool:
    """Whether nothing of an ended subscription is left that others wait for.

    An earlier connection may have taken some of it from the shared reader: that is known when the session has begun.
    """
    if not attachment.drained or not attachment.source.whole:
        return attachment.drained
    machine, past = side.machine, side.past
    return machine.begun and not machine.waits(attachment.source) and (past is None or not machine.waits(past))


def meeting(member: Member, subjects: Collection[str]) -> list[Filter]:
    """The filters by which core NATS may bring a client messages of some subjects."""
    return [
        found
        for found in member.filters
        if any(patterns_meet(one.decode(), other) for one in found.subjects for other in subjects)
    ]


def still_bringing(side: DurableDelivery) -> list[ConsumerBinding]:
    """Subscriptions of which QoS 0 has taken the place, and which have yet to bring what is older."""
    return [one for one in side.attachments.values() if one.source.whole and not is_passed(side, one)]


def stand_behind(side: DurableDelivery, older: list[ConsumerBinding], source: SubscriptionState, subject: str) -> None:
    """A subscription begins: what the ``older`` ones have yet to bring goes first.

    So does what has come at QoS 0 and waits.
    """
    before = 0
    for attachment in older:
        if patterns_meet(attachment.consumer.filter_subject.removeprefix(STORED_PREFIX), subject):
            attachment.behind.append(source)
            before += 1
    gates = side.client.gates
    for gate in [gates[found] for found in meeting(side.client, [subject]) if found in gates] if gates else ():
        if gate.waiting:
            gate.after.append(partial(side.machine.release_held, source, SubscriptionState.BEHIND))
            before += 1
    source.held += before * SubscriptionState.BEHIND


def watch(side: DurableDelivery, attachment: ConsumerBinding) -> None:
    """Find out when an ended subscription has nothing left for others."""
    side.client.broker.spawn(_look_for_rest(side, attachment), f"rest of {attachment.consumer.durable_name}")


async def _look_for_rest(side: DurableDelivery, attachment: ConsumerBinding) -> None:
    name = attachment.consumer.durable_name
    while side.client.alive and not attachment.drained and side.attachments.get(name) is attachment:
        try:
            nothing = await _has_nothing(side, attachment)
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("%s: consumer %s is not known about yet: %s", side.client, name, error)
        else:
            if nothing:
                spend(side, attachment)
                return
        await attachment.rest(LOOK_AGAIN)


async def _has_nothing(side: DurableDelivery, attachment: ConsumerBinding) -> bool:
    """Whether nothing more comes from the consumer of an ended subscription."""
    broker = side.client.broker
    consumer, source = attachment.consumer, attachment.source
    # What a consumer that has brought nothing says to have delivered is what lies before its start.
    known = max(source.last, source.start - 1)
    info = await consumer_info(broker.inbox, MESSAGES, consumer.durable_name)
    if info is None:
        return True
    if source.whole:  # what has just been stored may not count as pending yet
        return await beyond(broker, consumer.filter_subject, known + 1, source.end)
    return not info.num_pending and info.delivered_seq <= known


def inherited(side: DurableDelivery, attachment: ConsumerBinding, message: Stored, sequence: int) -> int:
    """The QoS at which other subscriptions take a message that they had left to an ended one; 0: they do not."""
    own = message.sender == side.client.client_id
    if own and attachment.source.no_local:
        return 0
    owner, granted = side.overlap.owner(message.subject, sequence, own)
    if own:  # the present owner may have had No Local then, and not have it now
        owners = side.overlap.matching(message.subject, sequence, own)
        owner = next((one for one in owners if one.source in attachment.handover_limits), None)
    return granted if owner is not None and sequence <= attachment.handover_limits.get(owner.source, 0) else 0


def was_sent(side: DurableDelivery, attachment: ConsumerBinding, message: Stored, sequence: int) -> int:
    """The QoS at which an ended subscription may have sent a message; 0: it was never its own."""
    own = message.sender == side.client.client_id
    if own:
        return 0 if attachment.source.no_local else attachment.source.granted(sequence)
    owner, _ = side.overlap.owner(message.subject, sequence)
    if owner is not None and owner.source not in attachment.handover_limits:
        return 0
    return attachment.source.granted(sequence)


def may_have(side: DurableDelivery, delivery: Delivery, message: Stored, dup: bool) -> bool:
    """Whether the rules let the client have a message that its present subscriptions need not have brought.

    That is one of an ended subscription, or one that an earlier connection was sent. Where the client may know one at
    QoS 2 by its identifier and must not have it again, PUBREL has it give that up.
    """
    client, source = side.client, delivery.source
    guard = client.guarded
    if guard is not None and guard.at_delivery:
        if guard.withholds(message.key, source.qos, message.identity):
            if dup and delivery.qos == 2:
                side.machine.ask(delivery.id)
            return False
        return True
    if not (dup or source.end or source is side.past) or side.overlap.matching(message.subject, EVER, False):
        return True
    if any(member.source is source for member in (client.shares or {}).values()):
        return True
    topic = subject_to_topic(message.subject)
    if any(matches(found.text, topic) for found in client.filters):
        return True
    if guard is None or guard.allows(topic, delivery.qos):
        return True
    guard.audit(f"sending {topic!r} again")
    if dup and delivery.qos == 2:
        side.machine.ask(delivery.id)
    return False


def finished(side: DurableDelivery, attachment: ConsumerBinding) -> bool:
    """Whether nothing more comes from the consumer of an ended subscription, and all of it is complete."""
    source = attachment.source
    come = attachment.drained and not (attachment.redelivering or attachment.missed)
    return bool(source.end) and come and is_passed(side, attachment) and not side.machine.holds(source)


def finish(side: DurableDelivery, attachment: ConsumerBinding) -> None:
    """Remove the consumer of an ended subscription when nothing more comes from it."""
    if finished(side, attachment):
        side.client.do(_remove(side, attachment))


async def _remove(side: DurableDelivery, attachment: ConsumerBinding) -> None:
    name = attachment.consumer.durable_name
    if side.attachments.get(name) is attachment and finished(side, attachment):
        await retry_until_answered(side.client, partial(side.remove, [name]))
        try:
            await save_record(side.client, side.client.epoch)
        except Conflict:
            side.client.taken_over()
