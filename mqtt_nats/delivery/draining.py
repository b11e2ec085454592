# SPDX-License-Identifier: Apache-2.0
"""Ended subscriptions of a durable session, until every message that their consumers have begun is complete.

Messages that were sent are completed, and messages that a remaining subscription has left to the ended one are still
delivered by it. See docs/internals/delivery.md#ended-subscriptions.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.codec import matches
from mqtt_nats.ingress.retained.replay import close_gate
from mqtt_nats.protocol.durable_sender import SEQUENCE_EVER
from mqtt_nats.protocol.inflight import Delivery, SubscriptionState
from mqtt_nats.protocol.overlap import patterns_meet
from mqtt_nats.sessions.record import claimed
from mqtt_nats.sessions.unrecorded import save_when_room
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

DRAINED_CHECK_S: Final = 1.0
"""Seconds until JetStream is asked again whether a consumer has a message left: its messages may be removed."""


READ_CHECK_S: Final = 0.1
"""Seconds until the gateway looks again whether a reader has come further for a lowered subscription."""


def _strike(side: DurableDelivery, key: str) -> tuple[V5, ConsumerBinding]:
    """Take a subscription out of the session record; return the record's `v5` part, and the consumer's binding."""
    record, v5 = claimed(side.client.record)
    consumer = record.cons.pop(key)
    v5.start.pop(key, None)
    v5.replay.pop(key, None)
    v5.was.pop(key, None)
    return v5, side.bindings[consumer.durable_name]


def drain(side: DurableDelivery, key: str) -> Draining | None:
    """End a subscription's source; return its entry in the record, or None if its consumer can be deleted now."""
    v5, binding = _strike(side, key)
    consumer = binding.consumer
    side.settle()
    others = side.overlap.after(binding)
    unmatch(side, binding)
    source = binding.source
    binding.end_subscription({other: other.last for other in others})
    if others:
        side.machine.end_up_to(max(source.last, *binding.handover_limits.values()))
    for former in side.bindings.values():  # messages that this one left to `former`, others had left to this one
        limit = former.handover_limits.get(source, 0) if former.source.ended and not former.drained else 0
        for heir in former.handover_limits.keys() & binding.handover_limits.keys() if limit else ():
            former.handover_limits[heir] = max(former.handover_limits[heir], min(heir.last, limit))

    def keep(delivery: Delivery) -> bool:
        message: Stored = delivery.body
        qos = inherited(side, binding, message, delivery.sequence)
        if qos:
            delivery.regrant(min(message.qos, qos))
        return bool(qos)

    inflight = side.machine.drain(source, keep)
    if source.live:  # the session's position has the messages in flight
        v5.draining.append(Draining(consumer.durable_name, consumer.filter_subject, 0, source.end, source.start))
        return None
    qos = [delivery.qos for delivery in inflight]
    if any(other.last > source.last for other in others):
        # They have acknowledged messages that this subscription delivers, which its consumer may not have brought yet.
        source.end_at(max(binding.handover_limits.values()))
        qos += [other.qos for other in others]
        binding.stand_before(binding.handover_limits)
        watch(side, binding)
    if binding.missed or binding.redelivering:  # messages that an earlier connection sent may still come again
        source.end_at(binding.gone[1])
        qos.append(max(source.qos, source.was_qos))
    most = max(qos, default=0)
    draining = Draining(consumer.durable_name, consumer.filter_subject, most, source.end, source.start)
    v5.draining.append(draining)
    return draining if qos or side.machine.holds(source) else None


def lower(side: DurableDelivery, key: str, end: int, gates: list[Gate], retained: bool) -> ConsumerBinding:
    """Lower a subscription to QoS 0; its consumer goes on up to sequence ``end`` [MQTT-3.8.4-4] (5.0).

    Args:
        gates: keep the messages that come at QoS 0 until all messages of the consumer are sent.
        retained: whether a replay of retained messages that had begun goes on, at QoS 0.
    """
    v5, binding = _strike(side, key)
    consumer = binding.consumer
    source = binding.source
    side.machine.lower(source, end, retained)
    binding.lowered(list(gates))
    stand_before_others(side, binding)
    qos = max(source.qos, source.was_qos) if source.end else 0  # at 0 the stream has no message for the consumer
    v5.draining.append(Draining(consumer.durable_name, consumer.filter_subject, qos, source.end, source.start, True))
    return binding


def stand_before_others(side: DurableDelivery, binding: ConsumerBinding) -> None:
    """Have new messages of overlapping subscriptions wait for a lowered one; a reader brings all in stream order."""
    binding.stand_before([] if binding.source.live else side.overlap.after(binding))


def unmatch(side: DurableDelivery, binding: ConsumerBinding) -> None:
    """Take an ended subscription out of the overlap; the record notes the higher QoS that it leaves to others."""
    _, v5 = claimed(side.client.record)
    for other in side.overlap.remove(binding):
        v5.was[other.key] = (other.source.was_qos, other.source.until)


def still_draining(side: DurableDelivery, binding: ConsumerBinding, gates: list[Gate]) -> None:
    """Set up a subscription that had ended before the resume; messages at QoS 0 in its place wait in ``gates``."""
    subject = binding.consumer.filter_subject.removeprefix(STORED_PREFIX)
    source = binding.source
    if source.whole:
        binding.lowered(gates)
        stand_before_others(side, binding)
        return
    binding.end_subscription(dict.fromkeys(side.overlap.after_ended(source.start, subject), source.end))
    side.machine.end_up_to(source.end)
    binding.stand_before(binding.handover_limits)


def handle_delivery(
    side: DurableDelivery, binding: ConsumerBinding, message: Stored, sequence: int, pending: int, *, unwanted: bool
) -> None:
    """Handle a message that the consumer of an ended subscription has brought; ``pending`` more are to come."""
    source = binding.source
    if binding.gates and sequence <= source.end:
        binding.brings(message)
    if source.whole and not pending:
        binding.emptied()
    if not binding.drained and (sequence >= source.end or (not pending and not source.whole)):
        note_exhausted(side, binding)
    elif unwanted and source.collected:
        finish(side, binding)


def note_read(side: DurableDelivery, message: Stored, sequence: int) -> None:
    """Handle a message that a reader has brought: a lowered subscription may match it, and core NATS its copy."""
    for binding in side.overlap.matching(message.subject, sequence, own=False):
        if binding.gates:
            binding.brings(message)


def note_exhausted(side: DurableDelivery, binding: ConsumerBinding) -> None:
    """Note that an ended subscription has no message left, except for redeliveries of messages that were pending."""
    binding.exhaust()
    release_waiting(side, binding)
    finish(side, binding)


def note_redelivered(side: DurableDelivery, binding: ConsumerBinding) -> None:
    """Note that all messages that were pending when the consumer was attached have come again, or are gone."""
    binding.end_redelivery()
    release_waiting(side, binding)


def release_waiting(side: DurableDelivery, binding: ConsumerBinding) -> None:
    """Let the subscriptions go on that wait for an ended one, if none of its messages is left: see `is_passed`."""
    if not is_passed(side, binding):
        return
    for gate in binding.release():
        close_gate(side.client, gate)
    for other in binding.take_behind():
        side.machine.drop_hold(other, SubscriptionState.BEHIND)
    if binding.source.whole:
        finish(side, binding)


def release_waiting_for(side: DurableDelivery, source: SubscriptionState) -> None:
    """Let lowered subscriptions go on that wait for messages of ``source``, of which one was sent."""
    for binding in list(side.bindings.values()):
        if binding.source.whole and source in (binding.source, side.past):
            release_waiting(side, binding)


def is_passed(side: DurableDelivery, binding: ConsumerBinding) -> bool:
    """Whether other subscriptions need not wait any more for messages of an ended subscription.

    An earlier connection may have taken such messages from the shared reader: `past` has these from the start.
    """
    if not binding.drained or not binding.source.whole:
        return binding.drained
    machine, past = side.machine, side.past
    return machine.begun and not machine.waits(binding.source) and (past is None or not machine.waits(past))


def meeting(member: Member, subjects: Collection[str]) -> list[Filter]:
    """Return the filters of a client by which core NATS may bring it messages of ``subjects``."""
    return [
        found
        for found in member.filters
        if any(patterns_meet(one.decode(), other) for one in found.subjects for other in subjects)
    ]


def still_bringing(side: DurableDelivery) -> list[ConsumerBinding]:
    """Return the lowered subscriptions whose consumers still bring older messages."""
    return [one for one in side.bindings.values() if one.source.whole and not is_passed(side, one)]


def stand_behind(side: DurableDelivery, older: list[ConsumerBinding], source: SubscriptionState, subject: str) -> None:
    """Keep back the messages of a new subscription until the ``older`` subscriptions have brought theirs.

    Messages of QoS 0 that wait in a gate are sent before them, too.
    """
    before = 0
    for binding in older:
        if patterns_meet(binding.consumer.filter_subject.removeprefix(STORED_PREFIX), subject):
            binding.behind.append(source)
            before += 1
    waiting = {found: gate for found, gate in (side.client.gates or {}).items() if gate.waiting}
    for found in meeting(side.client, [subject]) if waiting else ():
        if found in waiting:
            waiting[found].after.append(partial(side.machine.drop_hold, source, SubscriptionState.BEHIND))
            before += 1
    source.hold(SubscriptionState.BEHIND, before)


def watch(side: DurableDelivery, binding: ConsumerBinding) -> None:
    """Start to look whether an ended subscription has a message left that other subscriptions wait for."""
    side.client.services.tasks.spawn(_look_for_rest(side, binding), f"rest of {binding.consumer.durable_name}")


async def _look_for_rest(side: DurableDelivery, binding: ConsumerBinding) -> None:
    name, source = binding.consumer.durable_name, binding.source
    asked = -1
    while side.client.alive and not binding.drained and side.bindings.get(name) is binding:
        side.settle()
        if source.live and source.last == asked:  # the reader has not come further: what was left then is left
            await binding.rest(READ_CHECK_S)
            continue
        asked = source.last
        try:
            nothing = await _has_nothing(side, binding)
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("%s: the state of consumer %s is not known yet: %s", side.client, name, error)
        else:
            if nothing:
                note_exhausted(side, binding)
                return
        await binding.rest(READ_CHECK_S if source.live else DRAINED_CHECK_S)


async def _has_nothing(side: DurableDelivery, binding: ConsumerBinding) -> bool:
    """Whether the consumer of an ended subscription has no undelivered message left (up to its end)."""
    services = side.client.services
    consumer, source = binding.consumer, binding.source
    if source.live:
        reached = max(source.last, source.start - 1)
        return await services.head.nothing_left([consumer.filter_subject], reached, source.end)
    info = await consumer_info(services.nats.inbox, MESSAGES, consumer.durable_name)
    if info is None:
        return True
    if source.whole:  # num_pending may not count a message that was stored a moment ago
        return await services.head.beyond(consumer.filter_subject, max(source.last + 1, source.start), source.end)
    return side.machine.exhausted(source, info.delivered_seq, info.num_pending, info.num_ack_pending)


def inherited(side: DurableDelivery, binding: ConsumerBinding, message: Stored, sequence: int) -> int:
    """Return the QoS at which a remaining subscription takes a message that it had left to an ended one; 0 = none."""
    own = message.sender == side.client.client_id
    if own and binding.source.no_local:
        return 0
    owner, granted = side.overlap.owner(message.subject, sequence, own)
    if own:  # the present owner may have had No Local when it left the message, and not have it now
        owners = side.overlap.matching(message.subject, sequence, own)
        owner = next((one for one in owners if one.source in binding.handover_limits), None)
    return granted if owner is not None and sequence <= binding.handover_limits.get(owner.source, 0) else 0


def was_sent(side: DurableDelivery, binding: ConsumerBinding, message: Stored, sequence: int) -> int:
    """Return the QoS at which an ended subscription may have sent a message; 0 = it never delivered the message."""
    own = message.sender == side.client.client_id
    if own:
        return 0 if binding.source.no_local else binding.source.granted(sequence)
    owner, _ = side.overlap.owner(message.subject, sequence)
    if owner is not None and owner.source not in binding.handover_limits:
        return 0
    return binding.source.granted(sequence)


def may_have(side: DurableDelivery, delivery: Delivery, message: Stored, dup: bool) -> bool:
    """Whether the access rules let the client have a message that may not come from its present subscriptions.

    Such a message is one of an ended subscription, or one that an earlier connection may have sent. Where the client
    may know a refused QoS 2 message by its packet identifier, PUBREL has the client give up the identifier.
    """
    client, source = side.client, delivery.source
    guard = client.guarded
    if guard is not None and guard.at_delivery:
        if guard.withholds(message.key, source.qos, message.identity):
            if dup and delivery.qos == 2:
                side.machine.ask(delivery.id)
            return False
        return True
    if not (dup or source.ended or source is side.past) or side.overlap.matching(message.subject, SEQUENCE_EVER, False):
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


def finished(side: DurableDelivery, binding: ConsumerBinding) -> bool:
    """Whether the consumer of an ended subscription has no message left, and all of its messages are complete."""
    source = binding.source
    come = binding.drained and not (binding.redelivering or binding.missed)
    return source.ended and come and is_passed(side, binding) and not side.machine.holds(source)


def finish(side: DurableDelivery, binding: ConsumerBinding) -> None:
    """Remove the consumer of an ended subscription if it has no message left and all are complete."""
    if finished(side, binding):
        side.client.do(_remove(side, binding))


async def _remove(side: DurableDelivery, binding: ConsumerBinding) -> None:
    name = binding.consumer.durable_name
    if side.bindings.get(name) is binding and finished(side, binding):
        await retry_until_answered(side.client, partial(side.remove, [name]))
        try:
            await save_when_room(side.client)
        except Conflict:
            side.client.taken_over()
