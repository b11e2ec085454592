# SPDX-License-Identifier: Apache-2.0
"""Room for the subscriptions of a SUBSCRIBE packet: limits of the client, its session, its quota and the gateway."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.pubsub.filter_index import OverlapLimit
from mqtt_nats.pubsub.shared_filters import PREFIX as SHARED
from mqtt_nats.pubsub.shared_filters import is_open, plain_filter
from mqtt_nats.sessions.quotas import holder
from mqtt_streams.record_size import subscription_bytes
from mqtt_streams.sessions import second_sid

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.codec import Subscribe, Subscription

LEVELS_EACH: Final = 8
"""Levels that the filters of a session may have on the average: each level takes memory of the gateway."""

RECORD_SPARE: Final = 2048
"""Bytes of max_payload that subscriptions leave to the rest of the session record: headers, later changes."""

OVERLAPS: Final = "overlapping_filters"
"""Name of the limit :class:`OverlapLimit` in the log and in metrics."""


def consumer_keys(subjects: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys in the session record of the consumers of a filter's subjects."""
    return subjects[0], *map(second_sid, subjects[1:])


async def room_for(client: Client, packet: Subscribe) -> Room:
    """Return the room for the subscriptions of a SUBSCRIBE packet; JetStream is asked for the use of the quota."""
    wanted, quota = _consumers(client, packet)
    if not wanted or not quota:
        return Room(client, wanted)
    who = holder(client.user, client.connection.host)
    work = partial(client.services.quotas.reserve, client.hash, quota, who, wanted)
    return Room(client, await retry_until_answered(client, work))


def known_room(client: Client, packet: Subscribe) -> Room | None:
    """Return the room for the subscriptions of a SUBSCRIBE packet; None: the use of the quota is not known yet."""
    wanted, quota = _consumers(client, packet)
    if not wanted or not quota:
        return Room(client, wanted)
    who = holder(client.user, client.connection.host)
    reserved = client.services.quotas.reserve_known(client.hash, quota, who, wanted)
    return None if reserved is None else Room(client, reserved)


def _consumers(client: Client, packet: Subscribe) -> tuple[int, str | None]:
    """Return the number of consumers that a SUBSCRIBE packet may need, and the quota in which they count."""
    record = client.record
    if client.durable_side is None or record is None or record.v5 is None:
        return 0, None
    having = {found.text for found, qos in client.filters.items() if qos}
    texts = {one.topic_filter for one in packet.filters if one.qos} - having
    return sum(1 + text.endswith("/#") for text in texts if not text.startswith(SHARED)), record.v5.quota


class Room:
    """Room for further subscriptions of a session, and for their consumers."""

    def __init__(self, client: Client, consumers: int) -> None:
        self._client = client
        self._consumers = consumers
        self._refused: dict[str, int] = {}
        self._having = client.record.cons if client.durable_side is not None and client.record is not None else None
        self._present = {found.text for found in client.filters} | set(client.shares or ())
        self._overlaps: OverlapLimit | None = None
        """Overlaps of the session's filters with wildcards or of groups; None = not needed yet."""
        self._count = client.connection.settings.max_subscriptions
        gateway = client.services.settings.max_subscriptions_per_gateway
        self._free = None if gateway is None else gateway - client.path.table.subscriptions
        """Subscriptions, shared ones not counted, that the gateway has room for; None = it has no limit."""
        most = LEVELS_EACH * self._count + client.services.settings.max_topic_levels
        self._levels = most - sum(map(_level_count, self._present))
        """Levels that further filters may have."""
        self._bytes: int | None = None
        """Bytes by which the session record, one message, may grow; None = the session is not durable."""
        if client.durable_side is not None and client.record is not None:
            self._bytes = client.path.store.max_payload - len(client.record.encode()) - RECORD_SPARE

    def reserve(self, entry: Subscription, subjects: tuple[str, ...]) -> bool:
        """Whether there is room for a subscription; the room is then taken."""
        limit = self._exceeded(entry, subjects)
        if limit:
            self._refused[limit] = self._refused.get(limit, 0) + 1
        return not limit

    def tell(self) -> None:
        """Count and log the refused subscriptions."""
        if self._refused:
            self._client.refuse_filters(self._refused)

    def _exceeded(self, entry: Subscription, subjects: tuple[str, ...]) -> str:
        """Return the name in `FILTER_LIMITS` of the limit that a subscription exceeds; empty: the room is taken."""
        topic_filter = entry.topic_filter
        consumers = 0
        shared = topic_filter.startswith(SHARED)
        if self._having is not None and entry.qos and not shared:
            consumers = sum(key not in self._having for key in consumer_keys(subjects))
        if consumers > self._consumers:
            return "consumers"
        if topic_filter in self._present:
            if consumers and not self._may_overlap(topic_filter):
                return OVERLAPS
            self._consumers -= consumers
            return ""
        levels = _level_count(topic_filter)
        if len(self._present) >= self._count:
            return "max_subscriptions"
        if levels > self._levels:
            return "filter_levels"
        if not shared and self._free is not None and self._free <= 0:  # else its consumers would be made for nothing
            return "max_subscriptions_per_gateway"
        if self._bytes is not None:
            size = subscription_bytes(topic_filter, subjects)
            if size > self._bytes:
                return "max_payload"
        if (consumers or shared) and not self._may_overlap(topic_filter):
            return OVERLAPS
        if self._bytes is not None:
            self._bytes -= size
        self._levels -= levels
        self._present.add(topic_filter)
        self._consumers -= consumers
        if self._free is not None:
            self._free -= not shared
        return ""

    def _may_overlap(self, topic_filter: str) -> bool:
        """Whether a new filter with consumers stays within the number of filters that may match one topic."""
        if not is_open(topic_filter):
            return True
        client, overlaps = self._client, self._overlaps
        if overlaps is None:
            overlaps = self._overlaps = OverlapLimit()
            durable = self._having is not None
            having = [found.text for found, qos in client.filters.items() if qos and durable]
            for text in filter(is_open, chain(having, client.shares or ())):
                overlaps.add(plain_filter(text))
        return overlaps.add_if_fits(plain_filter(topic_filter))


def _level_count(topic_filter: str) -> int:
    return topic_filter.count("/") + 1
