# SPDX-License-Identifier: Apache-2.0
"""Recovery after the connection to NATS was lost: subscriptions, ownership, and missed messages."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.backbone.retry import TimedPermit
from mqtt_nats.delivery.dormant_consumers import check_dormant
from mqtt_nats.delivery.resume import recover as go_on
from mqtt_nats.delivery.resume import write_changed_record
from mqtt_nats.sessions.groups.subscribe import recover_inboxes
from mqtt_nats.sessions.takeover import still_owner
from mqtt_nats.transport.connection import Hold
from mqtt_streams.messages import STREAM as MESSAGES

if TYPE_CHECKING:
    from mqtt_nats.client.account import Account
    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.shared_reader.sessions import SharedReaderSessions

log = logging.getLogger("mqtt_nats.broker")

# Maximum number of sessions that are checked at the same time.
SESSIONS_CHECKED_AT_ONCE: Final = 64

MEND_AFTER_S: Final = 0.25
"""Seconds until a deleted consumer is created again: nats-server tells of the deletion before it removes the consumer,
and would remove another one of its name, too."""

DELETED: Final = f"$JS.EVENT.ADVISORY.CONSUMER.DELETED.{MESSAGES}.*".encode()


def register(account: Account, live: SharedReaderSessions) -> None:
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
        if live.reader.name == name:
            live.reader.broken()
            return
        client = account.registry.attached.get(name)
        side = client.durable_side if client is not None else None
        if client is not None and side is not None and side.begin_repair():
            asyncio.get_running_loop().call_later(MEND_AFTER_S, lambda: client.do(_mend(client, side)))

    account.services.nats.reconnect.subscribe(DELETED, deleted)


async def _mend(client: Client, side: DurableDelivery) -> None:
    """Create the deleted consumers of a session again; those that JetStream refuses are created at the next resume."""
    side.end_repair()
    await check_dormant(client, side)
    await write_changed_record(client, side)


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
            await go_on(client, side)
