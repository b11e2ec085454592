# SPDX-License-Identifier: Apache-2.0
"""Subscriptions of a durable session begin, or take the place of others: its record, then the consumers."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mqtt_nats.broker.attachment import Attachment, backstop
from mqtt_nats.broker.draining import drain
from mqtt_nats.broker.grounding import bound
from mqtt_nats.broker.patience import patiently
from mqtt_nats.broker.record import save_record
from mqtt_nats.broker.replay import Replay
from mqtt_nats.broker.resuming import descend, keep_taken, set_options
from mqtt_nats.pubsub.table import Options
from mqtt_nats.rooted import rooted
from mqtt_nats.session.delivery import Source
from mqtt_streams.api import ApiError, call
from mqtt_streams.consumers import create_consumer
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.sessions import SubscriptionOptions, second_sid

if TYPE_CHECKING:
    from mqtt_nats.broker.client import Client

log = logging.getLogger("mqtt_nats.broker")


class Wish(NamedTuple):
    """One subscription that is asked for and may be had."""

    qos: int
    subjects: tuple[str, ...]
    options: Options
    handling: int
    """Retain handling: 0, 1 or 2."""
    replay: bool
    """Retained messages are wanted [MQTT-3.3.1-9] [MQTT-3.3.1-10] [MQTT-3.3.1-11] (5.0)."""

    def described(self, topic_filter: str) -> SubscriptionOptions:
        """As the session record has it."""
        options = self.options
        return SubscriptionOptions(
            topic_filter, options.no_local, options.retain_as_published, self.handling, options.identifier
        )


async def grant(client: Client, wanted: dict[str, Wish], replays: dict[str, Replay]) -> set[str]:
    """Write the record, then make the consumers what it says.

    Args:
        replays: what is to be sent first, by key in the session record.

    Returns:
        The filters for which JetStream does not create a consumer.

    Raises:
        Conflict: the session belongs to somebody else.
        ApiError: JetStream does not store the record.
    """
    broker = client.broker
    side = client.durable_side
    record = client.record
    assert side is not None
    assert record is not None
    assert record.v5 is not None
    if any(not wish.qos for wish in wanted.values()):
        await descend(client)
    side.settle()
    created: list[tuple[str, Attachment]] = []
    start = 0
    gone: list[str] = []
    if any(wish.qos == 2 for wish in wanted.values()) and not side.has_pubrels:
        await patiently(client, side.attach_pubrels)
    for topic_filter, wish in wanted.items():
        qos, subjects = wish.qos, wish.subjects
        described = wish.described(topic_filter)
        for index, subject in enumerate(subjects):
            key = subject if index == 0 else second_sid(subject)
            known = record.cons.get(key)
            if known is not None and qos:
                source = side.attachments[known.durable_name].source
                set_options(source, described)
                if key in replays:
                    replays[key].hold(source)
                if source.qos != qos:
                    # An overlapping subscription may have brought what this one's consumer has yet to bring.
                    until = max(each.last for each in side.machine.sources)
                    source.was_qos, source.until, source.qos = source.qos, until, qos
                    record.v5.was[key] = (source.was_qos, source.until)
            elif known is not None:
                if drain(side, key, not wish.replay) is None:
                    gone.append(known.durable_name)
            elif qos:
                if not start:
                    info = await patiently(client, partial(call, broker.inbox, f"STREAM.INFO.{MESSAGES}"))
                    # What another subscription has brought meanwhile is not for this one: it would come twice.
                    start = max(int(info["state"]["last_seq"]), *(one.last for one in side.machine.sources), 0) + 1
                record.cons[key] = consumer = subscription_consumer(
                    client.hash,
                    subject,
                    name_nuid=broker.new_nuid(),
                    deliver_nuid=broker.new_nuid(),
                    max_ack_pending=side.window(),
                    start_seq=start,
                    inactive_threshold=backstop(record.v5.expiry),
                )
                record.v5.start[key] = start
                source = Source(qos, start, side.window())
                set_options(source, described)
                if key in replays:
                    replays[key].hold(source)
                source.expected = 0
                created.append((topic_filter, side.add(key, consumer, source)))
        record.subs[subjects[0]] = qos
        record.v5.options[subjects[0]] = described
    if gone:
        await keep_taken(client)
    await save_record(client, client.epoch)
    if gone:
        await patiently(client, partial(side.remove, gone))
    if created:
        bound(side)  # each has a window of its own
    results = await patiently(client, partial(_create, client, created))
    return {created[at][0] for at, done in enumerate(results) if not done}


async def _create(client: Client, wanted: list[tuple[str, Attachment]]) -> list[bool]:
    """Create the consumers of these filters; which of them JetStream has created."""
    return await asyncio.gather(*(rooted(_create_one(client, *one)) for one in wanted))


async def _create_one(client: Client, topic_filter: str, attachment: Attachment) -> bool:
    try:
        await create_consumer(client.broker.inbox, MESSAGES, attachment.consumer)
    except ApiError as error:
        log.warning("%s: subscribing to %r failed: %s", client, topic_filter, error)
        return False
    return True
