# SPDX-License-Identifier: Apache-2.0
"""Subscriptions of a durable session begin, or take the place of others: its record, then the consumers."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from itertools import islice
from time import time_ns
from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.backbone.retry import patiently
from mqtt_nats.base.logs import log_failure
from mqtt_nats.base.tasks import rooted
from mqtt_nats.delivery.draining import lower, stand_behind, watch
from mqtt_nats.delivery.position_recovery import bound
from mqtt_nats.delivery.resume import descend, set_options
from mqtt_nats.ingress.retained_replay import Replay
from mqtt_nats.messages.headers import identity
from mqtt_nats.protocol.inflight import Source
from mqtt_nats.protocol.requeue import EVER
from mqtt_nats.pubsub.routing_table import PLAIN, Options
from mqtt_nats.sessions.consumer_binding import Attachment
from mqtt_nats.sessions.record import save_record
from mqtt_streams.api import ApiError, call
from mqtt_streams.consumers import backstop, create_consumer
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.sessions import SubscriptionOptions, second_sid

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.pubsub.routing_table import Filter

log = logging.getLogger("mqtt_nats.broker")

ID_LENGTH: Final = 32
"""Digits of the ids that gateways make, of which the first 16 are the time in microseconds."""


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


def is_lowered(client: Client, wish: Wish) -> bool:
    """Whether QoS 0 is to take the place of a subscription that has consumers."""
    record = client.record
    return not wish.qos and record is not None and wish.subjects[0] in record.cons


class Lowering:
    """QoS 0 takes the place of a durable subscription, of which nothing may be lost [MQTT-3.8.4-4] (5.0).

    From when the client has joined at QoS 0 core NATS brings what is new, and what its consumer brings waits. Then the
    stream says how far it is: up to there the consumer goes on, but for what has come at QoS 0.
    """

    def __init__(self, client: Client, topic_filter: str, wish: Wish) -> None:
        """The client is about to join."""
        self._client = client
        self.filter = topic_filter
        self._wish = wish
        self._found: Filter = client.broker.table.filters[topic_filter]
        self._seen, self._count = self._found.seen, len(self._found.seen)
        self._since = time_ns() // 1000
        self._came: frozenset[bytes] = frozenset()
        side, record = client.durable_side, client.record
        assert side is not None
        assert record is not None
        self._keys = [key for key in (wish.subjects[0], *map(second_sid, wish.subjects[1:])) if key in record.cons]
        self._sources = [side.attachments[record.cons[key].durable_name].source for key in self._keys]
        for source in self._sources:
            source.held += Source.REPLAYING

    def let_go(self) -> None:
        """Send what has waited."""
        side = self._client.durable_side
        sources, self._sources = self._sources, []
        for source in sources:
            if side is not None:
                side.machine.release_held(source)

    def give_up(self) -> None:
        """The subscription stays as it was."""
        record = self._client.record
        if record is not None and self.filter in {found.text for found in self._client.filters}:
            options = (self._client.options or {}).get(self._found, PLAIN)
            self._client.join(self.filter, record.subs[self._wish.subjects[0]], options)
        self.let_go()

    def apply(self, last: int) -> list[Attachment]:
        """The stream has got to ``last``; returns the consumers that go on up to there."""
        side, record = self._client.durable_side, self._client.record
        if side is None or record is None or record.v5 is None:
            return []
        found = self._found
        if found.seen is self._seen:
            self._came = frozenset(islice(found.seen, self._count, None))
        else:  # the older half has been forgotten meanwhile
            self._came = frozenset((*islice(self._seen, self._count, None), *found.seen))
        keys = [key for key in self._keys if key in record.cons]
        attachments = [lower(side, key, last, self._has_come, not self._wish.replay) for key in keys]
        record.subs[self._wish.subjects[0]] = 0
        record.v5.options[self._wish.subjects[0]] = self._wish.described(self.filter)
        return attachments

    def _has_come(self, message: Stored) -> bool:
        side = self._client.durable_side
        if side is None or side.overlap.matching(message.subject, EVER, False):
            return False  # another subscription is to bring it: core NATS has not
        headers = message.headers
        known = identity(headers)
        if known in self._came:
            return True
        # What this gateway has published was delivered when it got its id.
        if not self._found.local or not self._client.broker.is_own(headers) or len(known) != ID_LENGTH:
            return False
        return int(known[:16], 16) >= self._since


async def finish_lowering(client: Client, lowering: list[Lowering]) -> None:
    """The server has the subscriptions: let consumers go on up to what is stored now.

    Raises:
        Conflict: the session belongs to somebody else.
        ApiError: JetStream does not store the record.
    """
    side = client.durable_side
    if not lowering or side is None:
        return
    attachments: list[Attachment] = []
    info = await patiently(client, partial(call, client.broker.inbox, f"STREAM.INFO.{MESSAGES}"))
    for one in lowering:
        attachments += one.apply(int(info["state"]["last_seq"]))
        one.let_go()  # before anything that stands behind it
    await save_record(client, client.epoch)
    for attachment in attachments:
        watch(side, attachment)


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
    lowered = {topic_filter for topic_filter, wish in wanted.items() if is_lowered(client, wish)}
    if lowered:
        await descend(client, wholly=True)
    side.settle()
    created: list[tuple[str, Attachment]] = []
    start = 0
    if any(wish.qos == 2 for wish in wanted.values()) and not side.has_pubrels:
        await patiently(client, side.attach_pubrels)
    for topic_filter, wish in wanted.items():
        if topic_filter in lowered:
            continue
        qos, subjects, described = wish.qos, wish.subjects, wish.described(topic_filter)
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
                    client_id=client.client_id,
                )
                record.v5.start[key] = start
                source = Source(qos, start, side.window())
                set_options(source, described)
                if key in replays:
                    replays[key].hold(source)
                source.expected, source.place = 0, 1  # nobody else has had anything of it: one that is lost is missed
                stand_behind(side, source, subject)
                created.append((topic_filter, side.add(key, consumer, source)))
        record.subs[subjects[0]] = qos
        record.v5.options[subjects[0]] = described
    await save_record(client, client.epoch)
    if created:
        bound(side)  # each has a window of its own
    results = await patiently(client, partial(_create, client, created))
    return {created[at][0] for at, done in enumerate(results) if not done}


async def _create(client: Client, wanted: list[tuple[str, Attachment]]) -> list[bool]:
    """Create the consumers of these filters; which of them JetStream has created."""
    await client.broker.quotas.pace(client.hash)
    return await asyncio.gather(*(rooted(_create_one(client, *one)) for one in wanted))


async def _create_one(client: Client, topic_filter: str, attachment: Attachment) -> bool:
    try:
        await create_consumer(client.broker.inbox, MESSAGES, attachment.consumer)
    except ApiError as error:
        log_failure(log, logging.WARNING, "subscribe", "%s: subscribing to %r failed: %s", client, topic_filter, error)
        return False
    return True
