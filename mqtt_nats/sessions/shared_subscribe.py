# SPDX-License-Identifier: Apache-2.0
"""Shared subscriptions: joining groups, leaving groups, and upkeep of the members while the gateway runs.

See :mod:`mqtt_nats.sessions.shared_member` for the way of messages to a member.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import in_turn
from mqtt_nats.backbone.retry import ask_once_for_all, retry_until_answered
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
from mqtt_streams.shared import EXPIRED_NS, Assignment

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.gateway.broker import Broker
    from mqtt_streams.sessions import SharedSubscription
    from mqtt_streams.stored import StoredMessage

log = logging.getLogger("mqtt_nats.broker")

PROGRESS: Final = 10.0
"""Seconds between two requests for more time (``+WPI``): a third of the AckWait after which messages go to others."""

VOUCHED: Final = 0.2
"""Seconds from the election of a leader until members have asked it for more time for what they have."""

EXPIRING: Final = 0.3
"""Seconds in which nats-server finds what has expired: it looks a tenth of a second after a change of the AckWait."""

RESTORE_PAUSES: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds after each refusal of the former AckWait."""

STEP: Final = 1.0
"""Seconds between two rounds of `look_after`."""


# -- joining and leaving ------------------------------------------------------------------------------


async def join(client: Client, members: list[Membership]) -> None:
    """Have a client's members take part in their groups: registry, consumer, subscriptions.

    Raises:
        ApiError, NoResponders, RequestTimeout, TimeoutError: NATS does not do it.
    """
    broker = client.broker
    if any(member.choice.qos == 2 for member in members):
        side = client.durable_side
        if side is not None and not side.has_pubrels:
            await side.attach_pubrels()
    if client.regular_side is not None:
        client.regular_side.call_on_settled(lambda token: settled(client, token))
    for member in members:
        await member.enter()
    await broker.nodes.fence(broker.shared)


async def subscribe_shared(client: Client, wanted: dict[str, SharedSubscription]) -> None:
    """Begin shared subscriptions, or change their options.

    Raises:
        Conflict: the session has another owner.
        ApiError: JetStream does not do it.
    """
    broker = client.broker
    record = client.record
    assert record is not None
    assert record.v5 is not None
    shares = client.make_shares()
    start = await retry_until_answered(client, partial(mark(broker.nats).position, broker.inbox)) + 1
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
    """End shared subscriptions: sent messages are completed, unsent ones go to other members.

    Raises:
        Conflict: the session has another owner.
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
    """Acknowledge a message that a regular session's client has acknowledged or refused [MQTT-4.8.2-6] (5.0)."""
    for member in (client.shares or {}).values():
        if token in member.held:
            member.held.discard(token)
            member.source.settle(token)
    answer(client.broker, token, b"")


def acknowledged(client: Client) -> None:
    """Ask for more messages after a client's acknowledgement, which may have made room."""
    for member in (client.shares or {}).values():
        member.ask()


def detach(client: Client) -> None:
    """Give back QoS 1 messages that a client has not acknowledged, at the end of its connection (section 4.8.2)."""
    for member in (client.shares or {}).values():
        member.end(all_=True)


async def forget_later(client: Client) -> None:
    """Leave the groups of a regular session that has ended; the client's next session may have joined already."""
    groups = client.broker.groups
    try:
        for member in (client.shares or {}).values():
            await groups.leave(member.group, client.hash, member.note)
    except (ApiError, NoResponders, RequestTimeout) as error:
        log.warning("%s: it could not leave its shared subscriptions: %s", client, error)


async def rejoin_shared(client: Client) -> None:
    """Join the groups of a durable session again at its resume; messages assigned to it are sent first: `resend`."""
    record = client.record
    if record is None or record.v5 is None or not record.v5.shared:
        return
    members = {}
    for text, wanted in record.v5.shared.items():
        try:
            members[text] = Membership(client, text, wanted)
        except (TopicFilterInvalid, ValueError) as error:
            log.warning("%s: its subscription %r is not resumed: %s", client, text, error)
    client.make_shares().update(members)
    await join(client, list(members.values()))


async def resend(client: Client, assignments: list[Assignment]) -> None:
    """Send the QoS 2 messages again that are assigned to this client, unless their PUBREL is owed.

    Called before the machine is opened, so that they come before new messages.
    """
    broker = client.broker
    side = client.durable_side
    assert side is not None
    side.know_assignments(one.seq for one in assignments)
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
                release.await_one_more()  # the client has it; its PUBREL is owed for as long as the assignment exists
                side.ack_confirmed(assigned(one.seq, one.ack, 0.0), one.packet_id)
            else:  # the message was removed; the client may know its identifier, and must give it up
                machine.owe(one.packet_id, one.message_seq, other)
                machine.releases[one.packet_id].records.append(removed(one.seq))
            continue
        send_assigned(client, side, one, found, dup=True)


def send_assigned(client: Client, side: DurableDelivery, one: Assignment, found: StoredMessage, *, dup: bool) -> None:
    """Send a QoS 2 message that is assigned to this client, under the identifier of the assignment."""
    stamp = b"%d" % found.time_ns
    message = client.broker.stored_message(found.seq, stamp, found.subject.encode(), found.headers, found.payload)
    member = (client.shares or {}).get(one.subscription)
    source = member.source if member is not None else SubscriptionState(2, 0, 1)
    token = assigned(one.seq, one.ack, 0.0)
    side.machine.share(source, one.message_seq, one.packet_id, 2, message, token, dup)


# -- while the gateway runs ---------------------------------------------------------------------------


async def look_after(broker: Broker) -> None:
    """Ask for messages where there is room again, and ask JetStream for more time for slow members (``+WPI``)."""
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
    """Subscribe the members' addresses again on a new connection for requests."""
    for client in broker.clients.values():
        for member in (client.shares or {}).values():
            member.renew_inbox()


def ask_groups_again(broker: Broker, groups: set[str]) -> None:
    """Repeat the requests to the consumers of ``groups``, whose new leaders do not have them.

    Messages that were lost with the former leaders are to be delivered again, and those that members have are not.
    """
    held = dict.fromkeys(groups, 0)
    for client in broker.clients.values():
        for member in (client.shares or {}).values():
            if member.group in held:
                unfinished = member.unfinished()
                held[member.group] += len(unfinished)
                for reply in unfinished:
                    answer(broker, reply, b"+WPI")
                member.ask_again()
    broker.spawn(_return_lost(broker, held), "lost messages of groups")


async def _return_lost(broker: Broker, held: dict[str, int]) -> None:
    """Have groups deliver messages again that no member has; ``held``: number of those at members here, by group."""
    await asyncio.sleep(VOUCHED)  # members at other gateways have asked for more time, too
    await in_turn([partial(_expire, broker, group, most) for group, most in held.items()])


async def _expire(broker: Broker, group: str, most: int) -> None:
    """Give the consumer of a group a short AckWait for a moment, if more than ``most`` messages are pending there."""
    short = True  # also where the outcome is unknown
    try:
        short = await broker.groups.set_wait(group, EXPIRED_NS, most)
        if short:
            await asyncio.sleep(EXPIRING)
    except (ApiError, NoResponders, RequestTimeout) as error:
        log.debug("the consumer of a group: %s", error)
    finally:
        if short:
            await asyncio.shield(_restore_wait(broker, group))  # also when the gateway ends


async def _restore_wait(broker: Broker, group: str) -> None:
    """Give the consumer of a group its AckWait again; a short one has messages delivered twice."""
    for pause in RESTORE_PAUSES:
        try:
            await ask_once_for_all(partial(broker.groups.restore_wait, group))
            return
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.warning("the consumer of a group has a short AckWait still: %s", error)
        await asyncio.sleep(pause)
    log.error("the consumer of a group keeps a short AckWait until a member joins")


def recover_queues(broker: Broker) -> None:
    """Subscribe the queue groups again on a new connection for queue groups."""
    broker.nodes.renew(broker.shared)
    for client in broker.clients.values():
        for member in (client.shares or {}).values():
            member.renew()
