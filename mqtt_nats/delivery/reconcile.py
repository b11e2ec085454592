# SPDX-License-Identifier: Apache-2.0
"""Repair of lost deliveries and acknowledgements of durable sessions, while the connection to NATS lasts.

A nats-server that dies loses messages on their way, and acknowledgements. See
docs/internals/delivery.md#reconciliation.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.retry import TimedPermit, retry_until_answered
from mqtt_nats.delivery.draining import finish, note_redelivered
from mqtt_nats.delivery.resume import rebind_consumers
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.consumer_attach import outstanding
from mqtt_nats.sessions.groups.subscribe import ask_groups_again
from mqtt_streams.consumers import ConsumerInfo, consumer_info
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import CONSUMER_PREFIX
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.shared import CONSUMER_PREFIX as SHARED_PREFIX

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver, SharedFeed
    from mqtt_nats.protocol.durable_sender import DurableSender
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding
    from mqtt_nats.sessions.services import Registry, Services

log = logging.getLogger("mqtt_nats.broker")

ELECTED: Final = (b"$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED.*", b"$JS.EVENT.ADVISORY.CONSUMER.LEADER_ELECTED.*.*")
"""Advisories that a stream, or a consumer, has a new leader."""

SESSIONS_CHECKED_AT_ONCE: Final = 64
"""Sessions that are checked at the same time; a third of all consumers may have lost their leader."""

SETTLE_BEFORE_CHECK_S: Final = 0.25
"""Seconds before a check: acknowledgements on their way arrive, and more consumers of the session get a leader."""

AT_SAME_TIME: Final = 0.05
"""Seconds in which many leaders are elected; the advisory of one comes a moment before it takes requests."""

ATTACH_ATTEMPTS: Final = 10
"""Times in a row that the consumers of a session are attached anew and checked again."""


class Reconciling:
    """Checks consumers whose deliveries or acknowledgements may be lost, and has them attached anew."""

    def __init__(self, services: Services, registry: Registry[Receiver], feed: SharedFeed) -> None:
        self._services, self._registry, self._feed = services, registry, feed
        self._limit = asyncio.Semaphore(SESSIONS_CHECKED_AT_ONCE)
        self._groups: set[str] = set()
        """Hashes of groups of shared subscriptions whose consumers have new leaders."""
        for subject in ELECTED:
            services.nats.reconnect.subscribe(subject, self._elected)

    def _elected(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Handle the advisory that a stream or a consumer has a new leader: what the former one had is done again."""
        services = self._services
        stream, _, name = subject.partition(b".LEADER_ELECTED.")[2].decode().partition(".")
        services.nats.inbox.elected(stream, name)
        self._feed.elected(name)
        if not name:
            services.nats.store.elected(stream)
            return
        client = self._registry.attached.get(name)
        if client is not None:
            self.due(client, name)
        elif name.startswith(SHARED_PREFIX):
            self._services.nats.relink()
            if not self._groups:
                asyncio.get_running_loop().call_later(AT_SAME_TIME, self._ask_again)
            self._groups.add(name.removeprefix(SHARED_PREFIX))

    def _ask_again(self) -> None:
        groups, self._groups = self._groups, set()
        ask_groups_again(self._services, groups)

    def due(self, client: Receiver, name: str) -> None:
        """Schedule a check of a session's consumer; one scheduled check covers all consumers of the session."""
        side = client.durable_side
        if side is None or not client.alive:
            return
        if not side.doubtful:
            asyncio.get_running_loop().call_later(
                SETTLE_BEFORE_CHECK_S, lambda: client.do(self._reconcile(client, side))
            )
        side.doubtful.add(name)

    async def _reconcile(self, client: Receiver, side: DurableDelivery) -> None:
        async with TimedPermit(self._limit):
            names = side.take_doubtful()
            if side.stalled:
                return  # all pending messages come again when the client reads
            unclear = await self._unclear(side, names)
            if unclear is not None:
                side.clear_attempts()
                self._let_go(client, side, names, unclear)
                return
            log.info("%s: deliveries or acknowledgements were lost: its consumers deliver again", client)
            await rebind_consumers(client, side)
            # nats-servers that lost each other may confirm changes that are not made.
            if side.count_attempt() < ATTACH_ATTEMPTS:
                for name in side.bindings:
                    self.due(client, name)

    def _let_go(self, client: Receiver, side: DurableDelivery, names: set[str], unclear: set[str]) -> None:
        """Send the new messages of checked consumers: their pending messages have come again, or are complete."""
        for name in names if not side.stalled else ():
            one = side.bindings.get(name)
            if one is None or one.source.live or not one.source.held & SubscriptionState.RETURNING:
                continue
            if name in unclear or one.missed or one.wire is not client.path.link.wire:
                self.due(client, name)  # without another check new messages would wait for ever
            else:
                side.machine.drop_hold(one.source, SubscriptionState.RETURNING)
                note_redelivered(side, one)
                finish(side, one)

    async def _unclear(self, side: DurableDelivery, names: set[str]) -> set[str] | None:
        """Compare the deliveries and acknowledgements of consumers that JetStream and this gateway know.

        Returns:
            Consumers whose acknowledgements or messages may be on their way; None when one was lost.
        """
        if any(binding.missed for binding in side.bindings.values()):
            return None
        found = await self._suspects(side, names)
        if not found:
            return set()
        await asyncio.sleep(SETTLE_BEFORE_CHECK_S)
        again = await self._suspects(side, set(found))
        # If acknowledgements were only on their way, the acknowledgement floor has moved by now.
        return None if any(again.get(name) == floor for name, floor in found.items()) else set(again)

    async def _suspects(self, side: DurableDelivery, names: set[str]) -> dict[str, int]:
        """Return the acknowledgement floor of each consumer that may have lost deliveries or acknowledgements."""
        client = side.client
        inbox = client.services.nats.inbox
        found: dict[str, int] = {}
        for name in names:
            binding = side.bindings.get(name)
            if binding is None or binding.source.live:
                continue
            info = await retry_until_answered(client, partial(consumer_info, inbox, MESSAGES, name))
            if info is not None and _suspicious(info, side.machine, binding):
                found[name] = info.ack_floor_seq
        name = CONSUMER_PREFIX + client.hash
        if side.has_pubrels and name in names:
            info = await retry_until_answered(client, partial(consumer_info, inbox, OUT, name))
            records = sum(len(release.records) for release in side.machine.releases.values())
            if info is not None and info.num_ack_pending > records:
                found[name] = info.ack_floor_seq
        return found


def _suspicious(info: ConsumerInfo, machine: DurableSender, binding: ConsumerBinding) -> bool:
    """Whether a delivery was not seen, more is pending than on its way, or the deliver subject is a wrong one."""
    source = binding.source
    unseen = source.place and info.delivered_consumer_seq >= abs(source.place)
    astray = info.config["deliver_subject"] != binding.consumer.deliver_subject or not info.push_bound
    return bool(unseen) or astray or info.num_ack_pending > outstanding(machine, source, info)
