# SPDX-License-Identifier: Apache-2.0
"""Recovery after the connection to NATS was lost: subscriptions, ownership, and missed messages."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.backbone.retry import TimedPermit, retry_until_answered
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.delivery.reconcile import Reconciling
from mqtt_nats.delivery.resume import rebind_consumers
from mqtt_nats.pubsub.backfill import expect_gap, repair
from mqtt_nats.sessions.ownership import still_owner
from mqtt_nats.sessions.record import save_record
from mqtt_nats.sessions.shared_subscribe import recover_inboxes
from mqtt_nats.transport.connection import Hold
from mqtt_streams.consumers import ConsumerExists, consumer_info, create_consumer
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import Conflict

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.gateway.broker import Broker

log = logging.getLogger("mqtt_nats.broker")

# Maximum number of sessions that are checked at the same time.
AT_ONCE: Final = 64

DELETED: Final = f"$JS.EVENT.ADVISORY.CONSUMER.DELETED.{MESSAGES}.*".encode()


def watch_consumers(broker: Broker) -> None:
    """Watch for deleted consumers: a connected client's consumer is created again at once.

    Watch also for consumers with a new leader.
    """

    def deleted(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        name = subject.rpartition(b".")[2].decode()
        if broker.live is not None and broker.live.reader.name == name:
            broker.live.reader.broken()
            return
        client = broker.attached.get(name)
        side = client.durable_side if client is not None else None
        if client is not None and side is not None and not side.damaged:
            side.damaged = True
            client.do(_mend(client, side))

    broker.advisories = broker.link.subscribe_raw(DELETED, deleted)
    broker.reconciling = Reconciling(broker)
    broker.generation.watch()


async def _mend(client: Client, side: DurableDelivery) -> None:
    side.damaged = False
    record = client.record
    inbox = client.broker.inbox
    anew = False
    for one in list(side.attachments.values()):
        if not one.source.live or record is None:
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
            record.cons[one.key] = one.consumer = again
            anew = True
    if anew:
        try:
            await save_record(client, client.epoch)
        except Conflict:
            client.taken_over()
            return
    await rebind_consumers(client, side)


async def recover(broker: Broker, link: NatsConnection) -> None:
    """Recover all state: takeover signals first, then clients' subscriptions, then durable sessions."""
    broker.linked, broker.relinked = natstime.elapsed(), asyncio.get_running_loop().time()
    broker.claims.renew(link)
    link.renew(broker.advisories, DELETED)
    if broker.reconciling is not None:
        broker.reconciling.renew(link)
    broker.generation.renew(link)
    if broker.control is not None:
        broker.control.renew(link)
    broker.replying.renew(link)
    if broker.live is not None:
        broker.live.hold()
        broker.live.reader.broken()
        if broker.live.company is not None:
            broker.live.company.renew(link)
    broker.nodes.renew(link)
    broker.leaving.renew(link)
    broker.belated.renew(link)
    broker.banning.renew(link)
    broker.system.renew(link)
    broker.service.renew(link)
    if broker.fleet is not None:
        broker.fleet.renew(link)
    expect_gap(broker, link)
    broker.table.renew(link)
    recover_inboxes(broker)
    if not await _passed(link):
        return
    broker.online.set()
    broker.presence.flush()
    limit = asyncio.Semaphore(AT_ONCE)

    async def check(client: Client) -> None:
        async with TimedPermit(limit):
            try:
                await _check(client)
            finally:
                client.connection.release(Hold.STANDSTILL)

    for client in list(broker.clients.values()):
        if client.alive:
            client.do(check(client))
    await repair(broker, link)


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


async def recover_wild(broker: Broker, link: NatsConnection) -> None:
    """Recover the filters that start with a wildcard."""
    broker.nodes.renew(link)
    expect_gap(broker, link)
    broker.table.renew(link)
    if not await _passed(link):
        return
    await repair(broker, link)


async def _check(client: Client) -> None:
    """Continue a session, unless another connection has claimed it meanwhile."""
    if await still_owner(client):
        client.broker.unchecked.discard(client)
        if client.durable_side is not None:
            await rebind_consumers(client, client.durable_side)
