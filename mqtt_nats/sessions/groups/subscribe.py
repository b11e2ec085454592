# SPDX-License-Identifier: Apache-2.0
"""Shared subscriptions: joining and leaving groups, late assignments, and upkeep of the members.

See :mod:`mqtt_nats.sessions.groups.member` for the way of messages to a member.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import in_turn
from mqtt_nats.backbone.pending_stores import IgnoredStore
from mqtt_nats.backbone.retry import ask_once_for_all, retry_in_background, retry_until_answered
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.codec import TopicFilterInvalid
from mqtt_nats.protocol.ack_tokens import assigned, removed
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.groups.ended_shares import end_share, members_of
from mqtt_nats.sessions.groups.member import PULL_OVERDUE_S, Membership
from mqtt_nats.sessions.groups.ownership import answer
from mqtt_nats.sessions.message_stream import mark
from mqtt_nats.sessions.pubrel_consumer import attach_pubrels
from mqtt_nats.sessions.record import claimed, discard_session, leave_groups, save_record
from mqtt_streams import stored
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.gateway_subjects import ASSIGNED
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.shared import EXPIRED_NS, Assignment
from mqtt_streams.stored import get_sequence

if TYPE_CHECKING:
    from collections.abc import Set

    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.protocol.durable_sender import DurableSender
    from mqtt_nats.sessions.consumer_binding import SessionConsumers
    from mqtt_nats.sessions.services import Registry, Services
    from mqtt_nats.sessions.session import Session
    from mqtt_streams.sessions import SharedSubscription
    from mqtt_streams.stored import StoredMessage

log = logging.getLogger("mqtt_nats.broker")

PROGRESS_REQUEST_S: Final = 10.0
"""Seconds between two requests for more time (``+WPI``): a third of the AckWait after which messages go to others."""

LEADER_VOUCHED_S: Final = 0.2
"""Seconds from the election of a leader until members have asked it for more time for what they have."""

EXPIRING: Final = 0.3
"""Seconds in which nats-server finds what has expired: it looks a tenth of a second after a change of the AckWait."""

RESTORE_PAUSES: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds after each refusal of the former AckWait."""

LOOK_AFTER_ROUND_S: Final = 1.0
"""Seconds between two rounds of `look_after`."""


# -- joining and leaving ------------------------------------------------------------------------------


async def join(client: Session, members: list[Membership]) -> None:
    """Have a client's members take part in their groups: registry, consumer, subscriptions.

    Raises:
        ApiError, NoResponders, RequestTimeout, TimeoutError: NATS does not do it.
    """
    services = client.services
    if any(member.choice.qos == 2 for member in members):
        side = client.consumers
        if side is not None and not side.has_pubrels:
            await attach_pubrels(side)
    if client.regular_side is not None:
        client.regular_side.call_on_settled(lambda token: settled(client, token))
    await in_turn([member.enter for member in members])
    await services.nodes.fence(services.nats.shared)


async def subscribe_shared(client: Session, wanted: dict[str, SharedSubscription]) -> None:
    """Begin shared subscriptions, or change their options.

    Raises:
        Conflict: the session has another owner.
        ApiError: JetStream does not do it.
    """
    services = client.services
    _, v5 = claimed(client.record)
    shares = client.make_shares()
    start = await retry_until_answered(client, partial(mark(services.nats).position, services.nats.inbox)) + 1
    members = []
    for text, one in wanted.items():
        known = v5.shared.get(text)
        one = replace(one, start=start if known is None else known.start)
        v5.share(text, one)
        member = shares.get(text)
        if member is None:
            member = shares[text] = Membership(client, text, one)
        member.change(one)
        members.append(member)
    await save_record(client, client.epoch)
    await retry_until_answered(client, lambda: join(client, members))


async def unsubscribe_shared(client: Session, texts: list[str]) -> None:
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
    for text in texts:
        end_share(client, shares.pop(text))
    record.v5.unshare(texts)
    await save_record(client, client.epoch)
    await _leave_ended(client)


async def _leave_ended(client: Session) -> None:
    """Remove the registrations for ended subscriptions; the next owner, or the end of the session, completes it."""
    _, v5 = claimed(client.record)
    leave = partial(leave_groups, client.services, client.hash, client.client_id, v5.leaving)
    await retry_until_answered(client, leave)
    v5.forget_leaving()


def settled(client: Session, token: bytes) -> None:
    """Acknowledge a message that a regular session's client has acknowledged or refused [MQTT-4.8.2-6] (5.0)."""
    for member in members_of(client):
        if token in member.held:
            member.held.discard(token)
            member.source.settle(token)
            if client.ended_shares is not None:
                client.ended_shares.drop(member)
    answer(client.services, token, b"")


def acknowledged(client: Session) -> None:
    """Ask for more messages after a client's acknowledgement, which may have made room."""
    for member in (client.shares or {}).values():
        member.ask()


def detach(client: Session) -> None:
    """Give back QoS 1 messages that a client has not acknowledged, at the end of its connection (section 4.8.2)."""
    for member in members_of(client):
        member.leave_group(all_=True)


async def leave_at_end(client: Session) -> bool:
    """Leave the groups of a regular session that has ended, before its record is removed, which names them.

    Returns:
        False when JetStream refuses it: the record has to stay until it is done.
    """
    record, services = client.record, client.services
    assert record is not None
    try:
        await retry_in_background(services.nats.online, partial(discard_session, services, record, client.epoch))
    except ApiError as error:
        log.warning("%s: it could not leave its shared subscriptions yet: %s", client, error)
        return False
    return True


def begin_shared(client: Session, denied: Set[str]) -> list[Membership]:
    """Have the members of a durable session take part at its resume, except ``denied`` ones; return those that do.

    QoS 0 messages may come from now on. Others come when :func:`rejoin_shared` is done and the client has room.
    """
    _, v5 = claimed(client.record)
    members: dict[str, Membership] = {}
    for text, wanted in v5.shared.items():
        try:
            members[text] = Membership(client, text, wanted)
        except (TopicFilterInvalid, ValueError) as error:
            log.warning("%s: its subscription %r is not resumed: %s", client, text, error)
    if not members:
        return []
    client.make_shares().update(members)
    begun = [member for text, member in members.items() if text not in denied]
    for member in begun:
        member.begin()
    return begun


async def rejoin_shared(client: Session, begun: list[Membership]) -> None:
    """Join the groups of a durable session again at its resume; messages assigned to it are sent first: `resend`.

    Args:
        begun: members that take part already.
    """
    _, v5 = claimed(client.record)
    if v5.leaving:
        await _leave_ended(client)
    if begun:
        await join(client, begun)


async def resend(client: Session, assignments: list[Assignment]) -> None:
    """Send again the QoS 2 messages that are assigned to this client, unless their PUBREL is owed.

    Called before the state machine is opened, so that these messages come before new ones.
    """
    services = client.services
    side = client.consumers
    assert side is not None
    machine = side.machine
    unsent = _unsent(machine, assignments)
    taken = {one.packet_id for one in assignments}
    side.know_assignments(one.seq for one in assignments)
    for one in assignments:
        found = None
        other = side.replaced is not None and one.message_seq > side.replaced
        if one.seq in unsent:
            found = None if other else await stored.get_sequence(services.nats.inbox, MESSAGES, one.message_seq)
            if found is None:
                services.drop_assignment(b"%d" % one.seq, IgnoredStore())
            else:
                identifier = machine.allocate_packet_id(one.message_seq, taken)
                await _send_unsent(client, side, one, found, identifier)
            continue
        if not other:
            machine.answered(one.packet_id, one.message_seq)
        release = machine.releases.get(one.packet_id)
        if not other and (release is None or release.sequence != one.message_seq):
            found = await stored.get_sequence(services.nats.inbox, MESSAGES, one.message_seq)
        if found is None:
            if release is not None and not other:
                release.await_one_more()  # the client has it; its PUBREL is owed for as long as the assignment exists
                side.ack(assigned(one.seq, one.ack, 0.0), one.packet_id)
            else:  # the message was removed; the client may know its identifier, and must give it up
                machine.owe(one.packet_id, one.message_seq, other)
                machine.releases[one.packet_id].records.append(removed(one.seq))
            continue
        send_assigned(client, side, one, found, dup=True)


def _unsent(machine: DurableSender, assignments: list[Assignment]) -> set[int]:
    """Return the records of assignments whose packet identifier a later connection has used for another message.

    That connection has not known the assignment, which was stored late: so no connection has sent its message. Of the
    other message an owed PUBREL may be left, and no assignment.
    """
    latest: dict[int, tuple[int, int, int]] = {}
    """Epoch, rank within the epoch, and assignment (0 = none) of the last use of each packet identifier."""
    for one in assignments:
        release, use = machine.releases.get(one.packet_id), (one.epoch, 1, one.seq)
        if release is not None and release.sequence == one.message_seq:
            use = (max(one.epoch, release.epoch), 2, one.seq)
        elif release is not None:
            latest.setdefault(one.packet_id, (release.epoch, 0, 0))
        if use[:2] > latest.get(one.packet_id, (-1, 0))[:2]:
            latest[one.packet_id] = use
    return {one.seq for one in assignments if latest[one.packet_id][2] != one.seq}


async def _send_unsent(
    client: Session, side: SessionConsumers, one: Assignment, found: StoredMessage, identifier: int
) -> None:
    """Send an assigned message for the first time, under another packet identifier than that of its assignment."""
    groups = client.services.streams.groups
    changed = await groups.change_packet_id(one, identifier, client.epoch, int(natstime.now() * 1e9))
    if changed is None:
        side.machine.reserved.discard(identifier)
        return
    side.know_assignments([changed.seq])
    send_assigned(client, side, changed, found, dup=False)


def send_assigned(client: Session, side: SessionConsumers, one: Assignment, found: StoredMessage, *, dup: bool) -> None:
    """Send a QoS 2 message that is assigned to this client, under the identifier of the assignment."""
    stamp = b"%d" % found.time_ns
    message = client.path.recent.message(found.seq, stamp, found.subject.encode(), found.headers, found.payload)
    member = (client.shares or {}).get(one.subscription)
    source = member.source if member is not None else SubscriptionState(2, 0)
    token = assigned(one.seq, one.ack, 0.0)
    side.machine.share(source, one.message_seq, one.packet_id, 2, message, token, dup)


# -- late assignments ---------------------------------------------------------------------------------


class LateAssignments:
    """Late assignments of which this gateway informs other gateways, or is informed.

    The assignment of a group's QoS 2 message was on its way to JetStream when the connection ended, and the session's
    next connection had looked already. The gateway of the ended connection has not sent the message; it names the
    record to all gateways, and the present owner sends the message.
    See docs/internals/sessions.md#shared-subscriptions.
    """

    def __init__(self, nats: NatsLinks, registry: Registry[Session]) -> None:
        self._link, self._registry = nats.link, registry
        nats.reconnect.subscribe(ASSIGNED, self._heard)

    def tell(self, name: str, record: int) -> None:
        """Announce an assignment to a client whose connection here has ended.

        Args:
            name: of the client, as `registered_as` has it.
            record: sequence of the assignment in ``$MQTT_shared``.
        """
        link = self._link
        body = b"%d %b" % (record, name.encode())
        link.out.append(b"PUB %b %d\r\n%b\r\n" % (ASSIGNED, len(body), body))
        link.kick()
        self._told(name, record)  # a connection to NATS does not get its own messages

    def _heard(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        record, _, name = payload.partition(b" ")
        if record.isdigit() and len(record) < 20:
            self._told(name.decode("utf-8", "replace"), int(record))

    def _told(self, name: str, record: int) -> None:
        client = self._registry.clients.get(name)
        if client is not None and client.alive and client.durable:
            client.do(_look(client, record))


async def _look(client: Session, record: int) -> None:
    """Send the message of a late assignment, unless this connection knows the assignment; runs after the resume."""
    services = client.services
    side = client.consumers
    if side is None or record in (side.assigned or ()):
        return
    assignments, _ = await retry_until_answered(client, partial(services.streams.groups.assigned, client.hash))
    one = next((one for one in assignments if one.seq == record), None)
    if one is None or one.subscription not in (client.shares or {}):  # the next resume handles an ended subscription
        return
    found = await retry_until_answered(client, partial(get_sequence, services.nats.inbox, MESSAGES, one.message_seq))
    if not client.alive:
        return
    side.know_assignments([record])
    if found is None:  # the message was removed from the stream, and never sent to the client
        services.drop_assignment(b"%d" % record, IgnoredStore())
    else:  # this connection has not known the identifier, and may have used it
        identifier = side.machine.allocate_packet_id(one.message_seq)
        await retry_until_answered(client, partial(_send_unsent, client, side, one, found, identifier))
        services.path.round.start()
    services.nats.link.kick()


# -- while the gateway runs ---------------------------------------------------------------------------


async def look_after(services: Services) -> None:
    """Ask for messages where there is room again, and ask JetStream for more time for slow members (``+WPI``)."""
    loop = asyncio.get_running_loop()
    told = loop.time()
    while True:
        await asyncio.sleep(LOOK_AFTER_ROUND_S)
        progress = loop.time() - told > PROGRESS_REQUEST_S
        if progress:
            told = loop.time()
        for client in [one for one in services.registry.sharing if one.here]:
            for member in (client.shares or {}).values():
                if loop.time() - member.since > PULL_OVERDUE_S:
                    member.ask_again()
                else:
                    member.ask()
            for member in members_of(client) if progress else ():
                for reply in member.unfinished():
                    answer(services, reply, b"+WPI")


def recover_inboxes(services: Services) -> None:
    """Subscribe the members' addresses again on a new connection for requests."""
    for client in services.registry.clients.values():
        for member in (client.shares or {}).values():
            member.renew_inbox()


def ask_groups_again(services: Services, groups: set[str]) -> None:
    """Repeat the requests to the consumers of ``groups``, whose new leaders do not have them.

    Messages that were lost with the former leaders are to be delivered again, and those that members have are not.
    """
    held = dict.fromkeys(groups, 0)
    for client in services.registry.clients.values():
        for member in members_of(client):
            if member.group in held:
                unfinished = member.unfinished()
                held[member.group] += len(unfinished)
                for reply in unfinished:
                    answer(services, reply, b"+WPI")
                member.ask_again()
    services.tasks.spawn(_return_lost(services, held), "lost messages of groups")


async def _return_lost(services: Services, held: dict[str, int]) -> None:
    """Have groups deliver messages again that no member has; ``held``: number of those at members here, by group."""
    await asyncio.sleep(LEADER_VOUCHED_S)  # members at other gateways have asked for more time, too
    await in_turn([partial(_expire, services, group, most) for group, most in held.items()])


async def _expire(services: Services, group: str, most: int) -> None:
    """Give the consumer of a group a short AckWait for a moment, if more than ``most`` messages are pending there."""
    short = True  # also where the outcome is unknown
    try:
        short = await services.streams.groups.set_wait(group, EXPIRED_NS, most)
        if short:
            await asyncio.sleep(EXPIRING)
    except (ApiError, NoResponders, RequestTimeout) as error:
        log.debug("the consumer of a group: %s", error)
    finally:
        if short:
            await asyncio.shield(_restore_wait(services, group))  # also when the gateway ends


async def _restore_wait(services: Services, group: str) -> None:
    """Give the consumer of a group its AckWait again; a short one has messages delivered twice."""
    for pause in RESTORE_PAUSES:
        try:
            await ask_once_for_all(partial(services.streams.groups.restore_wait, group))
            return
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.warning("the consumer of a group has a short AckWait still: %s", error)
        await asyncio.sleep(pause)
    log.error("the consumer of a group keeps a short AckWait until a member joins")


def recover_queues(services: Services) -> None:
    """Subscribe the queue groups again on a new connection for queue groups."""
    services.nodes.renew(services.nats.shared)
    for client in services.registry.clients.values():
        for member in (client.shares or {}).values():
            member.renew()
