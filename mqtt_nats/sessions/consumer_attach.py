# SPDX-License-Identifier: Apache-2.0
"""Attaching a consumer to a new connection, so that it sends its pending messages again.

Theory of operation. A deliver subject that was never used before makes nats-server send all pending messages again,
in order and at once. nats-server refuses the change while the present subject has interest: of the former owner, for a
moment, or for good of a client that listens to everything (a ``#`` subscriber, a NATS client on ``>``). Then the
subject is kept, and the pending messages are made to expire once, with the same effect a tenth of a second later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.inbox import FORMER_LEADER_ANSWER_S
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.sessions.paused_consumers import resume
from mqtt_nats.sessions.record import claimed
from mqtt_streams.api import ApiError, call
from mqtt_streams.consumers import (
    ConsumerInfo,
    ConsumerNotFound,
    ConsumerRef,
    DeliverSubjectBusy,
    consumer_info,
    create_consumer,
    delete_consumer,
    existing_consumer,
    update_consumer,
)
from mqtt_streams.error_codes import CONSUMER_CREATE_FAILED, CONSUMER_NAME_EXISTS
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.pubrel import pubrel_consumer

if TYPE_CHECKING:
    from mqtt_nats.backbone.inbox import RequestInbox
    from mqtt_nats.protocol.durable_sender import DurableSender
    from mqtt_nats.protocol.inflight import SubscriptionState
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding, SessionConsumers
    from mqtt_nats.sessions.services import Services

log = logging.getLogger("mqtt_nats.broker")

# Seconds for which the former owner may still listen to a deliver subject. After that the listener is a client that
# listens to everything: for `CROWDED_S` other deliver subjects are waited for no longer than `LET_GO_CROWDED_WAIT_S`.
LET_GO_WAIT_S: Final = 1.0
LET_GO_CROWDED_WAIT_S: Final = 0.1
CROWDED_S: Final = 60.0

ATTACH_POLL_S: Final = 0.02
"""Seconds between two attempts, or two looks."""

# Window of the consumer of PUBREL records: as many places as there are packet identifiers.
PUBREL_WINDOW: Final = 65535

CREATE_PAUSES_S: Final = (0.02,) * 5 + (0.1,) * 9 + (0.5,) * 8
"""Seconds before each further attempt to create a consumer, while nats-server removes a former one of its name."""

EXPIRE_NS: Final = 100_000_000
"""AckWait in nanoseconds that is set for a moment, so that pending messages expire and are sent again."""

EXPIRED: Final = 5.0
"""Seconds to wait for the expired messages to come again."""

POLLS_PER_PENDING_CHECK: Final = 25
"""Steps between two looks at how many messages are still pending."""

EARLY: Final = 10
"""Steps between two looks at whether any pending message has yet to come; the state of a new leader counts when two
looks agree."""

RETURN_ATTEMPTS: Final = 20
"""Attempts to have pending messages sent again; the consumer may lose its leader during an attempt."""

PENDING_RETURN_S: Final = 1.0
"""Seconds in which pending messages come again after a change of the deliver subject."""


async def move(services: Services, stream: str, consumer: ConsumerRef) -> ConsumerInfo:
    """Change a consumer's deliver subject.

    Raises:
        DeliverSubjectBusy: the present deliver subject has interest, and keeps it.
        ConsumerNotFound: there is no such consumer.
    """
    now = asyncio.get_running_loop().time
    deadline = now() + (LET_GO_CROWDED_WAIT_S if now() < services.nats.crowded_until else LET_GO_WAIT_S)
    while True:
        try:
            info = await update_consumer(services.nats.inbox, stream, consumer)
            if info.paused:
                await resume(services.nats.inbox, stream, consumer.durable_name)
            return info
        except DeliverSubjectBusy:
            if now() > deadline:
                services.nats.crowd(now() + CROWDED_S)
                raise
            await asyncio.sleep(ATTACH_POLL_S)


def outdated(info: ConsumerInfo, consumer: ConsumerRef) -> bool:
    """Whether nats-server's answer to a change has the state that the consumer had when it got its leader.

    The first answer after the start of nats-server, or the election of a leader, is such a one. The change is made.
    """
    config = info.config
    return bool(config["deliver_subject"] != consumer.deliver_subject or config["ack_wait"] != consumer.ack_wait)


async def attach_moved(side: SessionConsumers, binding: ConsumerBinding) -> tuple[ConsumerInfo, bool]:
    """Have a consumer deliver to this connection.

    Returns:
        State of the consumer since then, and whether the state was requested after the change.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not do it.
        MqttError: the consumer was deleted at the same moment, or the stream was replaced.
    """
    services = side.session.services
    consumer = binding.consumer
    now = asyncio.get_running_loop().time
    asked = now()
    try:
        try:
            info = await move(services, MESSAGES, consumer)
        except ApiError as error:
            if error.err_code != CONSUMER_CREATE_FAILED or not await _adopt_start(side, binding):
                raise
            consumer = binding.consumer
            info = await move(services, MESSAGES, consumer)
    except ConsumerNotFound:
        return await make_anew(side, binding), False
    except DeliverSubjectBusy:
        return await attach_in_place(side, binding), False
    if (
        outdated(info, consumer) or now() - asked > FORMER_LEADER_ANSWER_S
    ):  # a slow answer may be to the repeated request
        latest = await consumer_info(services.nats.inbox, MESSAGES, consumer.durable_name)
        if latest is None:
            raise MqttError("a consumer was deleted while it was being attached", ReasonCode.SERVER_BUSY)
        return latest, True
    return info, False


async def _adopt_start(side: SessionConsumers, binding: ConsumerBinding) -> bool:
    """Take over the start of a consumer that was created again before the record was written; False = same start."""
    consumer = binding.consumer
    found = await existing_consumer(
        side.session.services.nats.inbox, MESSAGES, consumer.durable_name, side.session.client_id
    )
    if found is None or found.start_seq == consumer.start_seq:
        return False
    side.reconfigure(binding, replace(consumer, start_seq=found.start_seq))
    return True


async def attach_in_place(side: SessionConsumers, binding: ConsumerBinding) -> ConsumerInfo:
    """Attach a consumer without a change of its deliver subject.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not do it.
        MqttError: the consumer was deleted at the same moment.
    """
    services = side.session.services
    link = services.nats.link
    found = await existing_consumer(
        services.nats.inbox, MESSAGES, binding.consumer.durable_name, side.session.client_id
    )
    if found is None:
        raise MqttError("a consumer was deleted while it was being attached", ReasonCode.SERVER_BUSY)
    source = binding.source
    source.hold(source.REPLAYING)  # new messages come before the redeliveries, and have to wait
    link.unsubscribe_raw(binding.sid)
    source.await_delivery(0)
    side.reconfigure(binding, replace(binding.consumer, deliver_subject=found.deliver_subject))
    binding.listen(link.subscribe_raw(found.deliver_subject.encode(), side.arrival(binding)), link.wire)
    try:
        return await send_again(services, MESSAGES, binding.consumer, lambda: source.again)
    finally:
        side.machine.drop_hold(source)


async def make_anew(side: SessionConsumers, binding: ConsumerBinding) -> ConsumerInfo:
    """Create a deleted consumer again, to go on where it was, as far as that is known.

    Raises:
        ApiError, MqttError: JetStream does not create it; or the stream was replaced.
    """
    client, services = side.session, side.session.services
    source = binding.source
    consumer = binding.consumer
    record, v5 = claimed(client.record)
    await services.stream.check()  # no consumer may be created in a stream in which the session does not count
    if not client.alive:
        raise MqttError("stream $MQTT_msgs was replaced", ReasonCode.SERVER_BUSY)
    last = int((await call(services.nats.inbox, f"STREAM.INFO.{MESSAGES}"))["state"]["last_seq"])
    start: int | None
    if side.replaced is not None:
        lost = "the stream was replaced, and with it what this client has not had yet"
        start = None if source.ended else side.replaced + 1
    elif last < source.last or last + 1 < source.start:
        lost = "its messages are lost, the stream begins anew"
        start = None if source.ended else 1
        source.begin_anew()
        side.machine.begin_anew()
        side.overlap.begin_anew(binding)
        v5.was.pop(binding.key, None)
    elif source.last:
        lost = "it is created again from the first message that the client has not acknowledged"
        begun = [one.sequence for one in side.machine.on_their_way() if one.source is source and one.sequence > 0]
        start = min([source.last + 1, source.forgotten_from or source.last + 1, *begun])
    elif source.start and await services.head.beyond(consumer.filter_subject, source.start, last):
        lost = ""
        start = source.start
    else:
        lost = "it was removed, or was not created when its gateway ended in SUBSCRIBE; messages since then are lost"
        start = None
    if lost:
        log.warning("%s: consumer %s is gone; %s", client, consumer.durable_name, lost)
    else:
        text = "%s: consumer %s is created again; none of its messages is stored since SUBSCRIBE"
        log.info(text, client, consumer.durable_name)
    consumer = replace(consumer, start_seq=start)
    side.reconfigure(binding, consumer)
    if binding.key in record.cons:
        v5.start[binding.key] = source.start
    return await create_again(services.nats.inbox, MESSAGES, consumer)


async def create_again(inbox: RequestInbox, stream: str, consumer: ConsumerRef) -> ConsumerInfo:
    """Create a consumer of a name that another one had until now.

    A nats-server of a cluster that has not removed the former one takes the new configuration for a change. It answers
    that the name is in use, and keeps the assignment. So the name is deleted once more before the next attempt.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not create it.
    """
    for pause in CREATE_PAUSES_S:
        try:
            return await create_consumer(inbox, stream, consumer)
        except ApiError as error:
            if error.err_code not in (CONSUMER_CREATE_FAILED, CONSUMER_NAME_EXISTS):
                raise
            if error.err_code == CONSUMER_NAME_EXISTS:
                await delete_consumer(inbox, stream, consumer.durable_name)
        await asyncio.sleep(pause)
    return await create_consumer(inbox, stream, consumer)


async def send_again(services: Services, stream: str, consumer: ConsumerRef, come: Callable[[], int]) -> ConsumerInfo:
    """Have a consumer send its pending messages again on its present deliver subject, by a short AckWait.

    Args:
        consumer: the wanted configuration, with the present deliver subject.
        come: returns how many redeliveries have arrived.
    """
    short = replace(consumer, ack_wait=EXPIRE_NS)
    try:
        info = await update_consumer(services.nats.inbox, stream, short)
        if info.paused:
            await resume(services.nats.inbox, stream, consumer.durable_name)
        if outdated(info, short):
            info = await update_consumer(services.nats.inbox, stream, short)
        pending = info.num_ack_pending
        for step in range(1, int(EXPIRED / ATTACH_POLL_S)):
            if come() >= pending:
                break
            await asyncio.sleep(ATTACH_POLL_S)
            if not step % POLLS_PER_PENDING_CHECK:  # messages acknowledged meanwhile do not come again
                latest = await consumer_info(services.nats.inbox, stream, consumer.durable_name)
                pending = min(pending, latest.num_ack_pending) if latest is not None else 0
    finally:
        await update_consumer(services.nats.inbox, stream, consumer)
    return info


async def bring_back(
    side: SessionConsumers,
    binding: ConsumerBinding,
    patience: float = PENDING_RETURN_S,
    attempts: int = RETURN_ATTEMPTS,
) -> bool:
    """Wait until a consumer's pending messages have come again; make the consumer send them when they do not come.

    A change of the deliver subject without a leader sends no message again. ``patience``: seconds to wait before.

    Returns:
        False when the consumer has to be attached once more: it does not send, or one of the messages, or the
        connection to NATS, was lost.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    services = side.session.services
    source = binding.source
    name = binding.consumer.durable_name

    def deaf() -> bool:
        """Whether this connection does not listen to the deliver subject any more."""
        return binding.missed or binding.wire is not services.nats.link.wire

    calm = 0
    for step in range(1, int(patience / ATTACH_POLL_S) + 1):
        if source.collected or deaf():
            break
        await asyncio.sleep(ATTACH_POLL_S)
        if not step % EARLY and not source.collected:
            calm = calm + 1 if await _all_have_come(side, binding) else 0
            if calm > 1:
                return True
    refused: ApiError | None = None
    for _ in range(attempts):
        if deaf():
            return False
        if source.collected and refused is None:
            return True
        info = await consumer_info(services.nats.inbox, MESSAGES, name)
        if info is None or (refused is None and info.num_ack_pending <= outstanding(side.machine, source, info)):
            return True
        log.info("consumer %s does not redeliver its pending messages: redelivery is requested", name)
        refused = await _ask_again(side, binding, refused, deaf)
    if refused is not None:
        raise refused
    log.warning("consumer %s does not redeliver all its pending messages", name)
    return False


async def _all_have_come(side: SessionConsumers, binding: ConsumerBinding) -> bool:
    """Whether no message is pending that has not come: a new leader may have counted acknowledged ones, too."""
    info = await consumer_info(side.session.services.nats.inbox, MESSAGES, binding.consumer.durable_name)
    return info is None or info.num_ack_pending <= outstanding(side.machine, binding.source, info)


async def _ask_again(
    side: SessionConsumers, binding: ConsumerBinding, refused: ApiError | None, deaf: Callable[[], bool]
) -> ApiError | None:
    """Have a consumer send its pending messages again; return the error after which another attempt has to follow.

    Args:
        refused: the error of the attempt before; None = there was none.
        deaf: whether this connection does not listen to the deliver subject any more.
    """
    source = binding.source
    before = source.again
    try:
        await send_again(
            side.session.services,
            MESSAGES,
            binding.consumer,
            lambda: PUBREL_WINDOW if deaf() else source.again - before,
        )
    except (ConsumerNotFound, DeliverSubjectBusy):
        return refused  # a deleted consumer is created again by the handler of its advisory
    except ApiError as error:
        if error.err_code != CONSUMER_CREATE_FAILED:
            raise
        await asyncio.sleep(ATTACH_POLL_S)
        return error  # the short AckWait may be set, and not set back
    return None


def outstanding(machine: DurableSender, source: SubscriptionState, info: ConsumerInfo) -> int:
    """Return how many messages of a consumer are on their way to the client, or acknowledged and not confirmed.

    Args:
        info: state of the consumer. Messages that it has delivered later are not counted, nor are they pending in
            `info`; they may have come before it.
    """
    last = info.delivered_seq
    return machine.taken(source, last) + sum(
        release.unconfirmed
        for release in machine.releases.values()
        if release.delivery is not None and release.delivery.source is source and release.delivery.sequence <= last
    )


async def attach_pubrels(side: SessionConsumers) -> None:
    """Make sure that the consumer of PUBREL records exists and delivers to this connection.

    It keeps the deliver subject that nats-server's listener uses, which subscribes that subject and does not change the
    consumer. The subject is changed to another one and back, so that all pending records are sent again.
    """
    client, services = side.session, side.session.services
    consumer = pubrel_consumer(client.hash, max_ack_pending=PUBREL_WINDOW, client_id=client.client_id)
    aside = replace(consumer, deliver_subject=f"{consumer.deliver_subject}.{services.identity.new_nuid()}")
    if side.pubrel_sid:
        services.nats.link.unsubscribe_raw(side.pubrel_sid)
    known, moved = True, False
    try:
        await move(services, OUT, aside)
        moved = True
    except ConsumerNotFound:
        known = False
    except DeliverSubjectBusy:
        pass
    side.listen_for_pubrels(services.nats.link.subscribe_raw(consumer.deliver_subject.encode(), side.pubrel_arrived))
    if moved:
        try:
            await move(services, OUT, consumer)
        except DeliverSubjectBusy:
            moved = False
    if not moved and known:
        found = await existing_consumer(services.nats.inbox, OUT, consumer.durable_name, client.client_id)
        if found is not None and found.deliver_subject != consumer.deliver_subject:
            services.nats.link.unsubscribe_raw(side.pubrel_sid)
            consumer = replace(consumer, deliver_subject=found.deliver_subject)
            sid = services.nats.link.subscribe_raw(consumer.deliver_subject.encode(), side.pubrel_arrived)
            side.listen_for_pubrels(sid)
        await send_again(services, OUT, consumer, lambda: side.pubrels_come)
    elif not known:
        await create_again(services.nats.inbox, OUT, consumer)  # of the name that the former session's had
    services.registry.attached[consumer.durable_name] = client
    if client.record is not None:
        client.record.deliver_pubrels_by(consumer)  # nats-server's listener looks for the consumer there
