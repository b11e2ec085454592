# SPDX-License-Identifier: Apache-2.0
"""The consumer of a session's PUBREL records, attached to a new connection so that all records come again.

Theory of operation. A deliver subject that was never used before makes nats-server send all pending records again,
in order and at once. nats-server refuses the change while the present subject has interest: of the former owner, for a
moment, or for good of a client that listens to everything (a ``#`` subscriber, a NATS client on ``>``). Then the
subject is kept, and the pending records are made to expire once, with the same effect a tenth of a second later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.base.logs import log_failure
from mqtt_nats.sessions.paused_consumers import resume
from mqtt_streams.api import ApiError
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
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.pubrel import pubrel_consumer

if TYPE_CHECKING:
    from mqtt_nats.backbone.inbox import RequestInbox
    from mqtt_nats.sessions.consumer_binding import SessionConsumers
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
        side.listen_for_pubrels(b"")
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
        try:
            await create_again(services.nats.inbox, OUT, consumer)  # of the name that the former session's had
        except BaseException:  # without the consumer JetStream keeps no record: who stores the first one tries again
            services.nats.link.unsubscribe_raw(side.pubrel_sid)
            side.listen_for_pubrels(b"")
            raise
    services.registry.attached[consumer.durable_name] = client
    if client.record is not None and client.record.pubrel != consumer:
        client.record.deliver_pubrels_by(consumer)  # nats-server's listener looks for the consumer there
        side.change_record()


async def try_to_attach_pubrels(side: SessionConsumers) -> None:
    """Attach the consumer of PUBREL records before there is one; the session goes on where JetStream refuses it.

    nats-server's listener finds it in the session's record.
    """
    client = side.session
    try:
        await retry_until_answered(client, partial(attach_pubrels, side))
    except ApiError as error:
        log_failure(log, logging.DEBUG, "subscribe", "%s: no consumer of PUBREL records: %s", client, error)
