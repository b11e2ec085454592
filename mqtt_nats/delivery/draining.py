# SPDX-License-Identifier: Apache-2.0
"""Ended subscriptions of a durable session, and those that were lowered to QoS 0.

An ended subscription leaves its messages in flight to the session's position. A lowered one is served by readers up to
the stream sequence of its end. See docs/internals/delivery.md#ended-subscriptions.
"""

from __future__ import annotations

import asyncio
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
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.sessions import V5, Conflict, Draining
from mqtt_streams.subjects import subject_to_topic

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.pubsub.backlog import Gate
    from mqtt_nats.pubsub.routing_table import Filter, Member
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding

log = logging.getLogger("mqtt_nats.broker")

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


def drain(side: DurableDelivery, key: str) -> str:
    """End a subscription; return the name of its consumer, which can be deleted.

    Messages in flight are completed by the session's position. A waiting message that a remaining subscription matches
    is still sent, at the QoS of that one.
    """
    v5, binding = _strike(side, key)
    consumer = binding.consumer
    side.settle()
    unmatch(side, binding)
    binding.end_subscription()
    # Messages that an earlier connection may have sent do not come again: the client may use their identifiers.
    side.machine.suspect(side.machine.reached + 1, side.machine.perhaps_sent)
    source = binding.source

    def keep(delivery: Delivery) -> bool:
        message: Stored = delivery.body
        _, qos = side.overlap.owner(message.subject, delivery.sequence, message.sender == side.client.client_id)
        if qos:
            delivery.regrant(min(message.qos, qos))
        return bool(qos)

    side.machine.drain(source, keep)
    v5.draining.append(Draining(consumer.durable_name, consumer.filter_subject, 0, source.end, source.start))
    return consumer.durable_name


def lower(side: DurableDelivery, key: str, end: int, gates: list[Gate], retained: bool) -> ConsumerBinding:
    """Lower a subscription to QoS 0; readers serve it up to sequence ``end`` [MQTT-3.8.4-4] (5.0).

    Args:
        gates: keep the messages that come at QoS 0 until all messages of the readers are sent.
        retained: whether a replay of retained messages that had begun goes on, at QoS 0.
    """
    v5, binding = _strike(side, key)
    consumer = binding.consumer
    source = binding.source
    side.machine.lower(source, end, retained)
    binding.lowered(list(gates))
    qos = max(source.qos, source.was_qos) if source.end else 0  # at 0 the stream has no message for the consumer
    v5.draining.append(Draining(consumer.durable_name, consumer.filter_subject, qos, source.end, source.start, True))
    return binding


def unmatch(side: DurableDelivery, binding: ConsumerBinding) -> None:
    """Take an ended subscription out of the overlap; the record notes the higher QoS that it leaves to others."""
    _, v5 = claimed(side.client.record)
    for other in side.overlap.remove(binding):
        v5.was[other.key] = (other.source.was_qos, other.source.until)


def still_draining(binding: ConsumerBinding, gates: list[Gate]) -> None:
    """Set up a subscription that was lowered before the resume; messages at QoS 0 in its place wait in ``gates``."""
    binding.lowered(gates)


def note_read(side: DurableDelivery, message: Stored, sequence: int) -> None:
    """Handle a message that a reader has brought: a lowered subscription may match it, and core NATS its copy."""
    for binding in side.overlap.matching(message.subject, sequence, own=False):
        if binding.gates:
            binding.brings(message)


def note_exhausted(side: DurableDelivery, binding: ConsumerBinding) -> None:
    """Note that readers have brought all messages of a lowered subscription."""
    binding.exhaust()
    release_waiting(side, binding)


def release_waiting(side: DurableDelivery, binding: ConsumerBinding) -> None:
    """Let the subscriptions go on that wait for a lowered one, if none of its messages is left: see `is_passed`."""
    if not is_passed(side, binding):
        return
    for gate in binding.release():
        close_gate(side.client, gate)
    for other in binding.take_behind():
        side.machine.drop_hold(other, SubscriptionState.BEHIND)
    finish(side, binding)


def release_waiting_for(side: DurableDelivery, source: SubscriptionState) -> None:
    """Let lowered subscriptions go on that wait for messages of ``source``, of which one was sent."""
    for binding in list(side.bindings.values()):
        if binding.source.whole and source in (binding.source, side.past):
            release_waiting(side, binding)


def is_passed(side: DurableDelivery, binding: ConsumerBinding) -> bool:
    """Whether other subscriptions need not wait any more for messages of a lowered subscription.

    An earlier connection may have taken such messages from the shared reader: `past` has these from the start.
    """
    machine, past = side.machine, side.past
    waits = machine.waits(binding.source) or (past is not None and machine.waits(past))
    return binding.drained and machine.begun and not side.stalled and not waits


def meeting(member: Member, subjects: Collection[str]) -> list[Filter]:
    """Return the filters of a client by which core NATS may bring it messages of ``subjects``."""
    return [
        found
        for found in member.filters
        if any(patterns_meet(one.decode(), other) for one in found.subjects for other in subjects)
    ]


def still_bringing(side: DurableDelivery) -> list[ConsumerBinding]:
    """Return the lowered subscriptions of which readers still bring older messages."""
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
    """Start to look whether a lowered subscription has a message left that other subscriptions wait for."""
    side.client.services.tasks.spawn(_look_for_rest(side, binding), f"rest of {binding.consumer.durable_name}")


async def _look_for_rest(side: DurableDelivery, binding: ConsumerBinding) -> None:
    name, source = binding.consumer.durable_name, binding.source
    head, client = side.client.services.head, side.client
    asked = -1
    while client.alive and not binding.drained and side.bindings.get(name) is binding:
        side.settle()
        if source.last != asked:  # else the reader has not come further: the messages left then are left
            asked = source.last
            reached = max(source.last, source.start - 1)
            try:
                if await head.nothing_left([binding.consumer.filter_subject], reached, source.end):
                    note_exhausted(side, binding)
                    return
            except (ApiError, NoResponders, RequestTimeout) as error:
                log.debug("%s: the rest of %s is not known yet: %s", client, name, error)
                asked = -1
        await asyncio.sleep(READ_CHECK_S)


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
    """Whether a lowered subscription has no message left, and all of its messages are complete."""
    source = binding.source
    return source.ended and is_passed(side, binding) and not side.machine.holds(source)


def finish(side: DurableDelivery, binding: ConsumerBinding) -> None:
    """Remove a lowered subscription if it has no message left and all are complete."""
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
