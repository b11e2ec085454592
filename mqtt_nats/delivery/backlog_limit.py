# SPDX-License-Identifier: Apache-2.0
"""Limit of the messages that wait for a session (`max_backlog`): the oldest are passed over at a resume.

Messages are not counted while the client is away: the stream has each of them once for all sessions, for the retention
period. A message that is passed over is acknowledged like a message that another subscription delivers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mqtt_streams.consumers import consumer_info, parse_ack
from mqtt_streams.messages import STREAM as MESSAGES

if TYPE_CHECKING:
    from collections.abc import Callable

    from mqtt_nats.backbone.link import Handler
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.protocol.durable_sender import DurableSender
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding

log = logging.getLogger("mqtt_nats.broker")

SENT_MOST: Final = 10_000
"""Most messages that a dead gateway may have sent and that are sent again instead of being passed over."""


async def pass_over(side: DurableDelivery, attachment: ConsumerBinding) -> None:
    """Have the oldest messages of a consumer passed over if more than `max_backlog` wait; called before it is attached.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not say how many messages wait.
    """
    client = side.client
    services = client.services
    most = services.settings.max_backlog
    if most is None or attachment.source.end or side.falling:
        return
    info = await consumer_info(services.nats.inbox, MESSAGES, attachment.consumer.durable_name)
    left = 0 if info is None else info.num_pending - most
    sid = attachment.sid
    if left <= 0 or sid not in services.nats.link.handlers:
        return
    handler = side.arrival(attachment)  # the present handler may be one of an earlier attempt to pass over
    log.warning("%s: one subscription exceeds max_backlog: its oldest %d messages are not sent", client, left)

    def given() -> None:
        attachment.end_passing()
        if sid in services.nats.link.handlers:
            services.nats.link.handlers[sid] = handler

    def passed(last: bool) -> None:
        services.counters.pass_over()
        if last:
            given()

    attachment.begin_passing()
    services.nats.link.handlers[sid] = _without(side.machine, attachment, handler, left, passed, given)


def _without(
    machine: DurableSender,
    attachment: ConsumerBinding,
    handler: Handler,
    left: int,
    passed: Callable[[bool], None],
    given: Callable[[], None],
) -> Handler:
    source = attachment.source
    sent = SENT_MOST

    def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        nonlocal left, sent
        ack = parse_ack(reply)
        if ack is None or ack.delivered > 1 or not source.follows(ack.consumer_seq):
            handler(subject, reply, headers, payload)  # the client may have the message, or one before it is lost
            return
        if sent and machine.perhaps(ack.stream_seq):  # a dead gateway may have sent the message
            sent -= 1
            left -= 1
            if not left:
                given()
            handler(subject, reply, headers, payload)
            return
        source.await_delivery(ack.consumer_seq + 1)
        source.began(ack.consumer_seq, True)
        machine.passed_over(source, ack.stream_seq, 1, reply)
        left -= 1
        passed(not left)

    return arrived
