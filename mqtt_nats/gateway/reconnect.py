# SPDX-License-Identifier: Apache-2.0
"""Recovery after the connection to NATS was lost: subscriptions, ownership, and missed messages."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.backbone.retry import TimedPermit, retry_until_answered
from mqtt_nats.delivery.resume import rebind_consumers
from mqtt_nats.sessions.groups.subscribe import recover_inboxes
from mqtt_nats.sessions.takeover import still_owner
from mqtt_nats.sessions.unrecorded import save_when_room
from mqtt_nats.transport.connection import Hold
from mqtt_streams.consumers import ConsumerExists, consumer_info, create_consumer
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import Conflict

if TYPE_CHECKING:
    from mqtt_nats.client.account import Account
    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.shared_reader.sessions import SharedReaderSessions

log = logging.getLogger("mqtt_nats.broker")

# Maximum number of sessions that are checked at the same time.
SESSIONS_CHECKED_AT_ONCE: Final = 64

DELETED: Final = f"$JS.EVENT.ADVISORY.CONSUMER.DELETED.{MESSAGES}.*".encode()


def register(account: Account, live: SharedReaderSessions | None) -> None:
    """Have subscriptions of clients, and their sessions, renewed on each further connection to NATS.

    A consumer of a connected client that is deleted is created again at once.
    """
    link, register = account.services.nats.link, account.services.nats.reconnect.register
    register(Phase.ROUTES, partial(account.gaps.expect, link))
    register(Phase.ROUTES, partial(account.services.path.table.renew, link))
    register(Phase.ROUTES, partial(recover_inboxes, account.services))
    register(Phase.SESSIONS, account.presence.flush)
    register(Phase.SESSIONS, partial(_check_all, account))

    def deleted(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        name = subject.rpartition(b".")[2].decode()
        if live is not None and live.reader.name == name:
            live.reader.broken()
            return
        client = account.registry.attached.get(name)
        side = client.durable_side if client is not None else None
        if client is not None and side is not None and side.begin_repair():
            client.do(_mend(client, side))

    account.services.nats.reconnect.subscribe(DELETED, deleted)


async def _mend(client: Client, side: DurableDelivery) -> None:
    side.end_repair()
    record = client.record
    inbox = client.services.nats.inbox
    anew = False
    for one in list(side.bindings.values()):
        if not one.source.live or one.removed or record is None:
            continue
        if (
            await retry_until_answered(client, partial(consumer_info, inbox, MESSAGES, one.consumer.durable_name))
            is None
        ):
            side.settle()
            again = replace(one.consumer, start_seq=one.source.last + 1)
            try:
                await retry_until_answered(client, partial(create_consumer, inbox, MESSAGES, again))
            except ConsumerExists:  # a restore of the stream from a backup has restored the consumer, too
                continue
            one.reconfigure(again)
            record.cons[one.key] = again
            anew = True
    if anew:
        try:
            await save_when_room(client)
        except Conflict:
            client.taken_over()
            return
    await rebind_consumers(client, side)


async def recover(account: Account, link: NatsConnection) -> None:
    """Recover all state: takeover signals first, then clients' subscriptions, then durable sessions."""
    account.services.nats.reconnect.renew(Phase.CLAIMS, Phase.REQUESTS, Phase.ROUTES)
    if not await _passed(link):
        return
    account.services.nats.online.set()
    account.services.nats.reconnect.renew(Phase.SESSIONS)
    await account.gaps.repair(link)


def _check_all(account: Account) -> None:
    """Begin to check the sessions of all clients; nothing of a client is handled before."""
    limit = asyncio.Semaphore(SESSIONS_CHECKED_AT_ONCE)

    async def check(client: Client) -> None:
        async with TimedPermit(limit):
            try:
                await _check(client)
            finally:
                client.connection.release(Hold.STANDSTILL)

    for client in list(account.registry.clients.values()):
        if client.alive:
            client.do(check(client))


async def _passed(link: NatsConnection) -> bool:
    """Wait until the server has handled all sent frames; False: the connection was lost again and the next starts over.

    With many frames sent again the answer may take longer than one fence waits.
    """
    wire = link.wire
    while wire is not None and wire is link.wire:
        try:
            await link.fence()
            return True
        except TimeoutError:
            log.debug("nats-server has not processed the repeated messages yet")
    return False


async def recover_wild(account: Account, link: NatsConnection) -> None:
    """Recover the filters that start with a wildcard."""
    account.services.nodes.renew(link)
    account.lost_servers.renew(link)
    account.gaps.expect(link)
    account.services.path.table.renew(link)
    if not await _passed(link):
        return
    await account.gaps.repair(link)


async def _check(client: Client) -> None:
    """Continue a session, unless another connection has claimed it meanwhile."""
    if await still_owner(client):
        client.services.registry.unchecked.discard(client)
        side = client.durable_side
        if side is not None:
            await rebind_consumers(client, side)
            for name in side.bindings:  # their leaders may not have made the changes that were confirmed
                client.delivery.reconciling.due(client, name)
