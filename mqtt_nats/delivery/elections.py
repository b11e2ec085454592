# SPDX-License-Identifier: Apache-2.0
"""Advisories that streams and consumers of nats-server have new leaders.

What the former leader had may be lost: requests are sent again, readers are watched, groups are asked again, and the
PUBREL records of a session come again. See docs/internals/delivery.md#new-leaders.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.retry import TimedPermit, retry_until_answered
from mqtt_nats.protocol.ack_tokens import RECORD
from mqtt_nats.sessions.groups.subscribe import ask_groups_again
from mqtt_nats.sessions.pubrel_consumer import attach_pubrels
from mqtt_streams.consumers import consumer_info
from mqtt_streams.pubrel import CONSUMER_PREFIX
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.shared import CONSUMER_PREFIX as SHARED_PREFIX

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver, SharedFeed
    from mqtt_nats.sessions.services import Registry, Services

ELECTED: Final = (b"$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED.*", b"$JS.EVENT.ADVISORY.CONSUMER.LEADER_ELECTED.*.*")
"""Advisories that a stream, or a consumer, has a new leader."""

SESSIONS_CHECKED_AT_ONCE: Final = 64
"""Sessions that are checked at the same time; a third of all consumers may have lost their leader."""

SETTLE_BEFORE_CHECK_S: Final = 0.25
"""Seconds before a check: records and acknowledgements that are on their way arrive."""

AT_SAME_TIME: Final = 0.05
"""Seconds in which many leaders are elected; the advisory of one comes a moment before it takes requests."""


class Elections:
    """Handles new leaders of streams and consumers."""

    def __init__(self, services: Services, registry: Registry[Receiver], feed: SharedFeed) -> None:
        self._services, self._registry, self._feed = services, registry, feed
        self._limit = asyncio.Semaphore(SESSIONS_CHECKED_AT_ONCE)
        self._groups: set[str] = set()
        """Hashes of groups of shared subscriptions whose consumers have new leaders."""
        for subject in ELECTED:
            services.nats.reconnect.subscribe(subject, self._elected)

    def _elected(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        services, loop = self._services, asyncio.get_running_loop()
        stream, _, name = subject.partition(b".LEADER_ELECTED.")[2].decode().partition(".")
        services.nats.inbox.elected(stream, name)
        self._feed.elected(name)
        if not name:
            services.nats.store.elected(stream)
        elif name.startswith(SHARED_PREFIX):
            services.nats.relink()
            if not self._groups:
                loop.call_later(AT_SAME_TIME, self._ask_again)
            self._groups.add(name.removeprefix(SHARED_PREFIX))
        elif name.startswith(CONSUMER_PREFIX):
            client = self._registry.attached.get(name)
            side = client.durable_side if client is not None else None
            if client is not None and side is not None and client.alive:
                loop.call_later(SETTLE_BEFORE_CHECK_S, lambda: client.do(self._check_pubrels(client, side)))

    def _ask_again(self) -> None:
        groups, self._groups = self._groups, set()
        ask_groups_again(self._services, groups)

    async def _check_pubrels(self, client: Receiver, side: DurableDelivery) -> None:
        """Have PUBREL records come again if their consumer has more of them pending than have come."""
        async with TimedPermit(self._limit):
            inbox, name = client.services.nats.inbox, CONSUMER_PREFIX + client.hash
            info = await retry_until_answered(client, partial(consumer_info, inbox, OUT, name))
            releases = side.machine.releases.values()
            come = sum(one.startswith(RECORD) for release in releases for one in release.records)
            if info is not None and info.num_ack_pending > come:
                await retry_until_answered(client, partial(attach_pubrels, side))
