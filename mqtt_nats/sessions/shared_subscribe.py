# SPDX-License-Identifier: Apache-2.0
"""Shared subscriptions: joining groups, leaving them, and what goes on while clients are members.

See :mod:`mqtt_nats.sessions.shared_member` for how messages come to a member.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.codec import TopicFilterInvalid
from mqtt_nats.protocol.ack_tokens import assigned, removed
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.record import save_record
from mqtt_nats.sessions.shared_member import OVERDUE, Membership
from mqtt_nats.sessions.shared_ownership import answer
from mqtt_nats.sessions.stream_head import mark
from mqtt_streams import stored
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.shared import Assignment

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.gateway.broker import Broker
    from mqtt_streams.sessions import SharedSubscription
    from mqtt_streams.stored import StoredMessage

log = logging.getLogger("mqtt_nats.broker")

PROGRESS: Final = 10.0
"""Seconds between two signs that a member is still there: a third of the time after which others get its messages."""

STEP: Final = 1.0


# -- joining and leaving ------------------------------------------------------------------------------


async def join(client: Client, members: list[Membership]) -> None:
    """Have clients take part in groups: registry, consumer, subscriptions.

    Raises:
        ApiError, NoResponders, RequestTimeout, TimeoutError: NATS does not do it.
    """
    broker = client.broker
    if any(member.choice.qos == 2 for member in members):
        side = client.durable_side
        if side is not None and not side.has_pubrels:
            await side.attach_pubrels()
    if client.regular_side is not None:
        client.regular_side.settled = lambda token: settled(client, token)
    for member in members:
        await member.enter()
    await broker.nodes.fence(broker.shared)


async def subscribe_shared(client: Client, wanted: dict[str, SharedSubscription]) -> None:
    """Begin shared subscriptions, or change them.

    Raises:
        Conflict: the session belongs to somebody else.
        ApiError: JetStream does not do it.
    """
    broker = client.broker
    record = client.record
    assert record is not None
    assert record.v5 is not None
    if client.shares is None:
        client.shares = {}
    shares = client.shares
    start = await retry_until_answered(client, partial(mark(broker).position, broker)) + 1
    members = []
    for text, one in wanted.items():
        known = record.v5.shared.get(text)
        record.v5.shared[text] = one = replace(one, start=start if known is None else known.start)
        member = shares.get(text)
        if member is None:
            member = shares[text] = Membership(client, text, one)
        member.change(one)
        members.append(member)
    await save_record(client, client.epoch)
    await retry_until_answered(client, lambda: join(client, members))


async def unsubscribe_shared(client: Client, texts: list[str]) -> None:
    """End shared subscriptions: what was sent is completed, what was not goes to the others.

    Raises:
        Conflict: the session belongs to somebody else.
        ApiError: the session record cannot be stored.
    """
    record = client.record
    shares = client.shares
    if not texts or shares is None:
        return
    assert record is not None
    assert record.v5 is not None
    members = []
    for text in texts:
        member = shares.pop(text)
        member.end(all_=False)
        members.append(member)
        record.v5.shared.pop(text, None)
    await save_record(client, client.epoch)
    for member in members:
        await retry_until_answered(client, partial(client.broker.groups.leave, member.group, client.hash, member.note))


def settled(client: Client, token: bytes) -> None:
    """A regular session's client has acknowledged a message, or refused it [MQTT-4.8.2-6] (5.0)."""
    for member in (client.shares or {}).values():
        member.held.discard(token)
    answer(client.broker, token, b"")


def acknowledged(client: Client) -> None:
    """A client has acknowledged something: it may have room again."""
    for member in (client.shares or {}).values():
        member.ask()


def detach(client: Client) -> None:
    """The connection has ended: others get what the client has not acknowledged at QoS 1 (section 4.8.2)."""
    for member in (client.shares or {}).values():
        member.end(all_=True)


async def forget_later(client: Client) -> None:
    """A regular session has ended with its connection; the next one of the client may have joined already."""
    groups = client.broker.groups
    try:
        for member in (client.shares or {}).values():
            await groups.leave(member.group, client.hash, member.note)
    except (ApiError, NoResponders, RequestTimeout) as error:
        log.warning("%s: a shared subscription may go on without it: %s", client, error)


async def rejoin_shared(client: Client) -> None:
    """A durable session goes on: take part again, with what belongs to this client first."""
    record = client.record
    if record is None or record.v5 is None or not record.v5.shared:
        return
    members = {}
    for text, wanted in record.v5.shared.items():
        try:
            members[text] = Membership(client, text, wanted)
        except (TopicFilterInvalid, ValueError) as error:
            log.warning("%s: its subscription %r is not continued: %s", client, text, error)
    client.shares = members
    await join(client, list(members.values()))


async def resend(client: Client, assignments: list[Assignment]) -> None:
    """Send again the QoS 2 messages that belong to this client, unless their PUBREL is owed.

    Called before the machine is opened, so that they come before anything new.
    """
    broker = client.broker
    side = client.durable_side
    assert side is not None
    side.assigned = {one.seq for one in assignments} or None
    machine = side.machine
    for one in assignments:
        found = None
        other = side.replaced is not None and one.message_seq > side.replaced
        if not other:
            machine.answered(one.packet_id, one.message_seq)
        release = machine.releases.get(one.packet_id)
        if not other and (release is None or release.sequence != one.message_seq):
            found = await stored.get_sequence(broker.inbox, MESSAGES, one.message_seq)
        if found is None:
            if release is not None and not other:
                release.await_one_more()  # the client has it; its PUBREL is owed while there is the assignment
                side.ack_confirmed(assigned(one.seq, one.ack, 0.0), one.packet_id)
            else:  # removed; the client may know it by its identifier, and must give that up
                machine.owe(one.packet_id, one.message_seq, other)
                machine.releases[one.packet_id].records.append(removed(one.seq))
            continue
        send_assigned(client, side, one, found, dup=True)


def send_assigned(client: Client, side: DurableDelivery, one: Assignment, found: StoredMessage, *, dup: bool) -> None:
    """Send a QoS 2 message that belongs to this client, under the identifier that it has."""
    stamp = b"%d" % found.time_ns
    message = client.broker.stored_message(found.seq, stamp, found.subject.encode(), found.headers, found.payload)
    member = (client.shares or {}).get(one.subscription)
    source = member.source if member is not None else SubscriptionState(2, 0, 1)
    token = assigned(one.seq, one.ack, 0.0)
    side.machine.share(source, one.message_seq, one.packet_id, 2, message, token, dup)


# -- while the gateway runs ---------------------------------------------------------------------------


async def look_after(broker: Broker) -> None:
    """Ask for messages where there is room again, and tell JetStream of members that take their time."""
    loop = asyncio.get_running_loop()
    told = loop.time()
    while True:
        await asyncio.sleep(STEP)
        progress = loop.time() - told > PROGRESS
        if progress:
            told = loop.time()
        for client in list(broker.clients.values()):
            for member in (client.shares or {}).values():
                if loop.time() - member.since > OVERDUE:
                    member.ask_again()
                else:
                    member.ask()
                if progress:
                    for reply in member.unfinished():
                        answer(broker, reply, b"+WPI")


def recover_inboxes(broker: Broker) -> None:
    """The connection for requests is a new one."""
    for client in broker.clients.values():
        for member in (client.shares or {}).values():
            member.renew_inbox()


def ask_groups_again(broker: Broker, groups: set[str]) -> None:
    """The consumers of these groups have new leaders, which know of no requests."""
    for client in broker.clients.values():
        for member in (client.shares or {}).values():
            if member.group in groups:
                member.ask_again()


def recover_queues(broker: Broker) -> None:
    """The connection for queue groups is a new one."""
    broker.nodes.renew(broker.shared)
    for client in broker.clients.values():
        for member in (client.shares or {}).values():
            member.renew()
