# SPDX-License-Identifier: Apache-2.0
"""Ended shared subscriptions with QoS 1 messages that their client has received and not acknowledged.

While the connection lasts, the messages are the client's. When it ends they go to another member of the group at once.
Where no member is left, and so no consumer of the group, the session record of a durable session has them: its next
connection sends them again. See docs/internals/sessions.md#shared-subscriptions.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from mqtt_nats.backbone.batch import in_turn
from mqtt_nats.codec import TopicFilterInvalid
from mqtt_nats.sessions.groups.member import Membership
from mqtt_nats.sessions.record import claimed, save_record
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import Conflict, EndedShare, SharedSubscription
from mqtt_streams.stored import get_sequence

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

    from mqtt_nats.protocol.inflight import SubscriptionState
    from mqtt_nats.sessions.consumer_binding import SessionConsumers
    from mqtt_nats.sessions.session import Session

log = logging.getLogger("mqtt_nats.broker")


class EndedShares:
    """Ended memberships of one client with unacknowledged QoS 1 messages."""

    __slots__ = ("_client", "_due", "members", "unwritten")

    def __init__(self, client: Session) -> None:
        self._client = client
        self.members: list[Membership] = []
        self._due = False
        """Whether messages were acknowledged that the record in memory still names; a job takes them out."""
        self.unwritten = False
        """Whether the record in memory has to be written."""

    def add(self, member: Membership) -> None:
        """Add an ended membership."""
        member.source.end_at(1)
        self.members.append(member)

    def drop(self, member: Membership) -> None:
        """Forget a membership of a regular session if its messages are all acknowledged."""
        if member in self.members and not member.held:
            self.members.remove(member)

    def acknowledged(self, source: SubscriptionState) -> None:
        """Have the session record forget a message that a durable session's client has acknowledged."""
        if not self._due and any(member.source is source for member in self.members):
            self._due = True
            self._client.do(self._store())

    async def _store(self) -> None:
        if self.take_acknowledged():
            try:
                await save_record(self._client, self._client.epoch)
            except Conflict:
                self._client.taken_over()
            else:
                self.unwritten = False  # otherwise the end of the connection has cancelled the write

    def take_acknowledged(self) -> bool:
        """Take acknowledged messages out of the session record; return whether the record has to be written."""
        side = self._client.consumers
        if side is None or not self._due:
            return self.unwritten
        self._due = False
        _, v5 = claimed(self._client.record)
        left: dict[str, set[tuple[int, int]]] = {}
        for member in self.members:
            left.setdefault(member.text, set()).update(side.machine.unacknowledged(member.source))
        for text in left.keys() & v5.ended.keys():
            one = v5.ended[text]
            sent = tuple(message for message in one.sent if message in left[text])
            self.unwritten = self.unwritten or sent != one.sent
            v5.end_share(text, replace(one, sent=sent))
        self.members = [one for one in self.members if side.machine.unacknowledged(one.source)]
        return self.unwritten


def end_share(client: Session, member: Membership) -> None:
    """End a membership: unsent messages go to other members, and the client completes those that were sent.

    The caller writes the session record, which then names the messages of a durable session.
    """
    member.leave_group(all_=False)
    if not member.unfinished():
        return
    _ended_shares(client).add(member)
    side, source = client.consumers, member.source
    if side is not None:
        _, v5 = claimed(client.record)
        known = v5.ended.get(member.text)
        sent = [] if known is None else [*known.sent]
        sent += side.machine.unacknowledged(source)
        v5.end_share(member.text, EndedShare(source.kept, source.identifier, tuple(sent)))


def _ended_shares(client: Session) -> EndedShares:
    return client.ended_shares or client.keep_ended_shares(EndedShares(client))


def members_of(client: Session) -> Iterable[Membership]:
    """Return a client's memberships, also ended ones with unacknowledged messages."""
    ended = client.ended_shares.members if client.ended_shares is not None else []
    return [*(client.shares or {}).values(), *ended]


async def resend_unacknowledged(client: Session, taken: Set[int]) -> None:
    """Send again the QoS 1 messages of ended memberships, unless their group goes on: it has them.

    Called before the state machine is opened, so that these messages come before new ones.

    Args:
        taken: packet identifiers of other messages.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    _, v5 = claimed(client.record)
    side = client.consumers
    if side is None:
        return
    for text, ended in list(v5.ended.items()):
        sent: tuple[tuple[int, int], ...] = ()
        try:
            member = Membership(client, text, SharedSubscription(1, ended.rap, ended.id, 0))
        except (TopicFilterInvalid, ValueError) as error:
            log.warning("%s: messages of its subscription %r are not sent again: %s", client, text, error)
        else:
            sent = await _resend(client, side, member, ended, taken)
        if sent:
            _ended_shares(client).add(member)
        if sent != ended.sent:
            v5.end_share(text, replace(ended, sent=sent))
            side.change_record()


async def _resend(
    client: Session, side: SessionConsumers, member: Membership, ended: EndedShare, taken: Set[int]
) -> tuple[tuple[int, int], ...]:
    """Send messages of an ended membership again; return packet identifier and stream sequence of each."""
    services, machine = client.services, side.machine
    begin = await services.streams.groups.beginning(member.group)
    own = [one for one in ended.sent if begin is None or one[1] < begin]
    inbox = services.nats.inbox
    found = await in_turn([partial(get_sequence, inbox, MESSAGES, sequence) for _, sequence in own])
    sent = []
    for (identifier, sequence), message in zip(own, found, strict=True):
        if message is None:
            continue
        if identifier in taken or identifier in machine.releases or identifier in machine.reserved:
            identifier = machine.allocate_packet_id(sequence, taken)  # a later connection has used the former one
        stamp, subject = b"%d" % message.time_ns, message.subject.encode()
        body = client.path.recent.message(sequence, stamp, subject, message.headers, message.payload)
        machine.share(member.source, sequence, identifier, 1, body, b"", dup=True)
        sent.append((identifier, sequence))
    return tuple(sent)
