# SPDX-License-Identifier: Apache-2.0
"""What got lost between the consumers of durable sessions and this gateway, other than with its connection to NATS.

A nats-server that dies takes along messages that it was handing on, and acknowledgements that it, or a consumer without
a leader, was sent. JetStream takes those messages for delivered and would send them again after half a minute; those
acknowledgements keep their places in the consumer's window. See docs/internals/rules.md#reconciliation.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.retry import TimedPermit, retry_until_answered
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.delivery.draining import finish, returned
from mqtt_nats.delivery.resume import rebind_consumers
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.consumer_attach import outstanding
from mqtt_nats.sessions.shared_subscribe import ask_groups_again
from mqtt_streams.consumers import ConsumerInfo, consumer_info
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import CONSUMER_PREFIX
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.shared import CONSUMER_PREFIX as SHARED_PREFIX

if TYPE_CHECKING:
    from mqtt_nats.backbone.link import NatsConnection
    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.gateway.broker import Broker
    from mqtt_nats.protocol.durable_sender import DurableSender
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding

log = logging.getLogger("mqtt_nats.broker")

ELECTED: Final = tuple(f"$JS.EVENT.ADVISORY.CONSUMER.LEADER_ELECTED.{stream}.*".encode() for stream in (MESSAGES, OUT))

AT_ONCE: Final = 64
"""Sessions looked at at the same time: a third of all consumers may have lost their leader."""

SETTLE: Final = 0.5
"""Seconds for what is under way, and for further consumers of the session to have a leader."""

ATTEMPTS: Final = 10
"""Times in a row that a session is attached anew."""


class Reconciling:
    """Looks at the consumers of sessions that may have missed something."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._groups: set[str] = set()
        """Groups of shared subscriptions whose consumers have new leaders."""
        self._subscriptions = [(broker.link.subscribe_raw(subject, self._elected), subject) for subject in ELECTED]

    def renew(self, link: NatsConnection) -> None:
        """Listen again, on a new connection."""
        for sid, subject in self._subscriptions:
            link.renew(sid, subject)

    def _elected(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """A consumer has a new leader."""
        name = subject.rpartition(b".")[2].decode()
        client = self._broker.attached.get(name)
        if client is not None:
            self.due(client, name)
        elif name.startswith(SHARED_PREFIX):
            self._broker.linked = natstime.elapsed()
            self._broker.relinked = asyncio.get_running_loop().time()
            if not self._groups:  # many of them are elected at the same time
                asyncio.get_running_loop().call_later(SETTLE, self._ask_again)
            self._groups.add(name.removeprefix(SHARED_PREFIX))

    def _ask_again(self) -> None:
        groups, self._groups = self._groups, set()
        ask_groups_again(self._broker, groups)

    def due(self, client: Client, name: str) -> None:
        """Have a session's consumer looked at; there is no more than one look per session to come."""
        side = client.durable_side
        if side is None or not client.alive:
            return
        if not side.doubtful:
            asyncio.get_running_loop().call_later(SETTLE, self._begin, client, side)
        side.doubtful.add(name)

    def _begin(self, client: Client, side: DurableDelivery) -> None:
        client.do(self._reconcile(client, side))

    async def _reconcile(self, client: Client, side: DurableDelivery) -> None:
        async with TimedPermit(self._limit):
            names, side.doubtful = side.doubtful, set()  # what happens from now on is a reason to look again
            if side.stall is not None:
                return  # everything comes again when the client reads
            unclear = await self._unclear(side, names)
            if unclear is not None:
                side.attempts = 0
                self._let_go(client, side, names, unclear)
                return
            log.info("%s: deliveries or acknowledgements were lost: they come again", client)
            await rebind_consumers(client, side)
            side.attempts += 1
            if side.attempts < ATTEMPTS:  # servers that had just lost each other have answered what did not come to be
                for name in side.attachments:
                    self.due(client, name)

    def _let_go(self, client: Client, side: DurableDelivery, names: set[str], unclear: set[str]) -> None:
        """What had not come again when a consumer was attached last has come since, or is complete."""
        for name in names if side.stall is None else ():
            one = side.attachments.get(name)
            if one is None or one.source.live or not one.source.held & SubscriptionState.RETURNING:
                continue
            if name in unclear or one.missed or one.wire is not client.broker.link.wire:
                self.due(client, name)  # or what is new would wait for good
            else:
                side.machine.release_held(one.source, SubscriptionState.RETURNING)
                returned(side, one)
                finish(side, one)

    async def _unclear(self, side: DurableDelivery, names: set[str]) -> set[str] | None:
        """Compare what JetStream and this gateway know that the session has been given and has acknowledged.

        Returns:
            Those of which acknowledgements, or messages, may be on their way; None when something was lost.
        """
        if any(attachment.missed for attachment in side.attachments.values()):
            return None
        found = await self._suspects(side, names)
        if not found:
            return set()
        await asyncio.sleep(SETTLE)
        again = await self._suspects(side, set(found))
        # Where acknowledgements are only on their way, the oldest that is pending is another one by now.
        return None if any(again.get(name) == floor for name, floor in found.items()) else set(again)

    async def _suspects(self, side: DurableDelivery, names: set[str]) -> dict[str, int]:
        """Those that have more pending than is on its way, and up to where everything is acknowledged."""
        client = side.client
        inbox = client.broker.inbox
        found: dict[str, int] = {}
        for name in names:
            attachment = side.attachments.get(name)
            if attachment is None or attachment.source.live:
                continue
            info = await retry_until_answered(client, partial(consumer_info, inbox, MESSAGES, name))
            if info is not None and _suspicious(info, side.machine, attachment):
                found[name] = info.ack_floor_seq
        name = CONSUMER_PREFIX + client.hash
        if side.has_pubrels and name in names:
            info = await retry_until_answered(client, partial(consumer_info, inbox, OUT, name))
            records = sum(len(release.records) for release in side.machine.releases.values())
            if info is not None and info.num_ack_pending > records:
                found[name] = info.ack_floor_seq
        return found


def _suspicious(info: ConsumerInfo, machine: DurableSender, attachment: ConsumerBinding) -> bool:
    source = attachment.source
    unseen = source.place and info.delivered_consumer_seq >= abs(source.place)
    astray = info.config["deliver_subject"] != attachment.consumer.deliver_subject or not info.push_bound
    return bool(unseen) or astray or info.num_ack_pending > outstanding(machine, source)
