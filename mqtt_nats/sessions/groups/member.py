# SPDX-License-Identifier: Apache-2.0
"""Members of shared subscriptions: each message of a group goes to one member, connected to any gateway.

Messages at QoS 0, also those of NATS clients, come through a NATS queue group with one subscription per member.
Messages at QoS 1 and 2 come from the group's pull consumer: each member asks for as many as it has room for.

    ======= ==================== =================================================================================
    QoS     session              the group's consumer is acknowledged
    ======= ==================== =================================================================================
    0       any                  when the message is written
    1       any                  on PUBACK; when the connection ends before, the message goes to another member
    2       regular              with the message: a sent message goes to no other member, even when the session ends
    2       durable              when the assignment to this client is stored; the message is sent again after a resume
    ======= ==================== =================================================================================

See docs/internals/sessions.md#shared-subscriptions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.backbone.inbox import frame
from mqtt_nats.backbone.pending_stores import STALE, IgnoredStore, PendingStore, sequence
from mqtt_nats.backbone.retry import retry_in_background, retry_until_answered
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.codec import QuotaExceeded
from mqtt_nats.messages.headers import is_status, publish_qos
from mqtt_nats.messages.message import Stored, encoded_id
from mqtt_nats.messages.publish_encoder import encode_for_subscriber
from mqtt_nats.protocol.ack_tokens import assigned
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.pubsub.fanout import received
from mqtt_nats.pubsub.routing_table import Choice, Filter
from mqtt_nats.pubsub.shared_filters import parse_shared
from mqtt_nats.sessions.groups.ownership import CLOCK_INEXACT_S, NAK, OwnershipChecks, answer, confirmed_at, room_of
from mqtt_nats.sessions.paused_consumers import resume
from mqtt_nats.sessions.record import claimed, leave_groups, stored_part, take_back
from mqtt_streams.api import ApiError
from mqtt_streams.consumers import Ack, backstop, parse_ack
from mqtt_streams.hashing import registered_as
from mqtt_streams.headers import for_some
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.shared import CONSUMER_PREFIX, IN_TIME_NS, TAKEN, Owner, assigned_block, assigned_subject, group_hash
from mqtt_streams.shared import STREAM as SHARED
from mqtt_streams.stored import delete, get_sequence
from mqtt_streams.subjects import filter_to_subjects, starts_with_wildcard, visible_to_wildcard

if TYPE_CHECKING:
    from mqtt_nats.sessions.session import Session
    from mqtt_streams.sessions import SharedSubscription

log = logging.getLogger("mqtt_nats.broker")

PULL_MOST: Final = 32
"""Maximum messages of a pull request: few enough that each member gets some."""

PULL_NS: Final = 30_000_000_000
"""Nanoseconds after which a request for messages expires at the consumer and is made again."""

PULL_OVERDUE_S: Final = 40.0
"""Seconds after which a request that was neither served nor ended counts as lost."""


class Membership:
    """A client's membership in one group of a shared subscription."""

    __slots__ = (
        "address",
        "asked",
        "choice",
        "client",
        "doubtful",
        "filter",
        "found",
        "group",
        "held",
        "inbox",
        "queues",
        "restoring",
        "since",
        "source",
        "text",
    )

    def __init__(self, client: Session, text: str, wanted: SharedSubscription) -> None:
        services = client.services
        name, self.filter = parse_shared(text, services.settings.max_topic_levels)
        self.client = client
        self.text = text
        self.group = group_hash(name, self.filter)
        subjects = tuple(subject.encode() for subject in filter_to_subjects(self.filter))
        self.found = Filter(self.filter, subjects, services.nats.shared, False)
        """Stands for the subscription where a `Filter` is needed, as for the response topics of requests."""
        self.source = SubscriptionState(wanted.qos, 0)
        self.choice = Choice(self.found, wanted.qos, b"", False)
        self.queues: list[bytes] = []
        # Never used again: the request of a member that has left waits at the consumer while its address has interest.
        self.address = b"%bm%b" % (services.nats.inbox.prefix[:-1], services.nats.inbox.token())
        """NATS subject on which messages of the group's consumer arrive."""
        self.inbox = b""
        """NATS subscription id of `address`; empty = the member takes no part (yet)."""
        self.asked = 0
        """Number of messages of the last request that have not come; 0 = no request is open."""
        self.since = 0.0
        """Loop time in seconds of the last request."""
        self.restoring = False
        """Whether the group's consumer is being created again."""
        self.held: set[bytes] = set()
        """Acknowledgement subjects of QoS 1 messages that a regular session's client has not acknowledged."""
        self.doubtful = OwnershipChecks(self)
        self.change(wanted)

    def change(self, wanted: SharedSubscription) -> None:
        """Take the options of a new SUBSCRIBE for the same filter."""
        self.source.grant(wanted.qos)
        self.source.take_options(no_local=False, kept=wanted.rap, identifier=wanted.id)
        client = self.client
        ids = encoded_id(wanted.id) if client.version == 5 else b""
        kept = wanted.rap if client.version == 5 else client.bridge
        self.choice = Choice(self.found, wanted.qos, ids, kept)

    # -- NATS -----------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Register the member, make sure that the group's consumer exists, and take part.

        The session may have another owner by now, which has removed the registrations that it knew: then the new
        registration is taken back.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not do it.
        """
        client, services = self.client, self.client.services
        _, v5 = claimed(client.record)
        groups = services.streams.groups
        start, threshold = v5.shared[self.text].start, backstop(client.expiry)
        register = partial(groups.join, self.group, client.hash, client.client_id, self.text, threshold)
        try:
            await register()
            subjects = filter_to_subjects(self.filter)
            if await groups.ensure_consumer(self.group, self.text, subjects, start, threshold):
                await resume(services.nats.inbox, MESSAGES, CONSUMER_PREFIX + self.group)
            present, sequence = await stored_part(client)
        except asyncio.CancelledError:  # the session has moved, and the registration may be on its way
            later = partial(take_back, services, client.hash, client.client_id, self.text, register)
            services.tasks.spawn(retry_in_background(services.nats.online, later), f"a group of {client.client_id}")
            raise
        # A record write under way may be stored (then its nonce is known), or the record is still that of the epoch.
        if present is not None and (present.nonce == v5.nonce or sequence == client.epoch):
            self.begin()
        else:
            await leave_groups(services, client.hash, client.client_id, [self.text])

    def begin(self) -> None:
        """Take part: QoS 0 messages may come from now on, others once the member asks for them."""
        services = self.client.services
        if not self.queues:
            group = self.group.encode()
            self.queues = [
                services.nats.shared.subscribe_raw(subject, self._zero_arrived, group)
                for subject in self.found.subjects
            ]
            self.inbox = services.nats.link.subscribe_raw(self.address, self._arrived)

    def renew(self) -> None:
        """Subscribe the queue group again on a new connection."""
        for sid, subject in zip(self.queues, self.found.subjects, strict=False):  # no queues before it takes part
            link = self.client.services.nats.shared
            link.out.append(b"SUB %b %b %b\r\n" % (subject, self.group.encode(), sid))
            link.kick()

    def renew_inbox(self) -> None:
        """Subscribe the address again on a new connection for requests, and ask for messages."""
        if self.inbox:  # else there is no id yet: nats-server ends a connection that subscribes without an id
            self.client.path.link.renew(self.inbox, self.address)
            self.ask_again()

    def ask(self) -> None:
        """Ask for as many messages as the client has room for."""
        client = self.client
        if self.asked or not client.alive or not self.inbox:
            return
        room = room_of(client)
        if room:
            self.asked = batch = min(room, PULL_MOST)
            services = client.services
            self.since = services.clock.now
            body = b'{"batch":%d,"expires":%d}' % (batch, PULL_NS)
            subject = f"{services.nats.inbox.api_prefix}.CONSUMER.MSG.NEXT.{MESSAGES}.{CONSUMER_PREFIX}{self.group}"
            services.nats.link.out.append(frame(subject.encode(), self.address, b"", body))
            services.nats.link.kick()

    def ask_again(self) -> None:
        """Ask again: the last request was lost, and so may be the last acknowledgements at QoS 1."""
        for reply in self.source.doubtful():
            answer(self.client.services, reply, b"")
        self.asked = 0
        self.ask()

    def leave_group(self, *, all_: bool) -> None:
        """Leave the group: give back unsent messages, with ``all_`` also unacknowledged ones, for other members."""
        client = self.client
        services = client.services
        for sid in self.queues:
            services.nats.shared.unsubscribe_raw(sid)
        if self.inbox:
            services.nats.link.unsubscribe_later(self.inbox)  # messages on their way are given back
        self.queues, self.inbox = [], b""
        if client.consumers is not None:
            back = client.consumers.machine.unshare(self.source, all_=all_)
        elif all_:
            back = list(self.held)
        else:
            back = []
        for reply in back + self.doubtful.give_back():
            self.held.discard(reply)
            answer(services, reply, NAK)

    # -- messages -------------------------------------------------------------------------------

    def _zero_arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Handle a message of the queue group; the consumer brings QoS 1 and 2 messages as well."""
        client = self.client
        services = client.services
        if not client.alive or reply.startswith(b"$JS.ACK.") or (headers and is_status(headers)):
            return
        if publish_qos(headers):
            services.path.fanout.look_at_shared(self.found, subject, headers, payload)
            return
        if self.filter[0] in "#+" and not visible_to_wildcard(subject.decode("utf-8", "replace")):
            return
        route = services.path.table.by_subject.get(subject) or services.path.table.route_of_subject(subject)
        if route is None:
            return
        topic = b""
        if reply and client.version == 5 and services.path.fanout.response_topic is not None:
            topic = services.path.fanout.response_topic(self.found, route, headers, reply)
        client.deliver(self.choice, received(route.key, payload, 0, headers, topic=topic))

    def _arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Handle a message of the group's consumer, or the status that ends a request."""
        ack = parse_ack(reply) if reply else None
        client = self.client
        if ack is None:
            self.asked = 0
            gone = headers[9:12] == b"503" or b"Deleted" in headers
            if gone and client.alive and self.inbox and not self.restoring:
                self.restoring = True
                client.do(self._restore())
            elif headers[9:12] in (b"404", b"408"):  # the request has expired without further messages
                self.source.trust()  # one leader has served the whole request
                self.ask()
            return
        if self.asked:
            self.asked -= 1
        qos = publish_qos(headers)
        services = client.services
        bare = subject.removeprefix(STORED_PREFIX.encode())
        hidden = starts_with_wildcard(self.found.subjects[0].decode()) and not visible_to_wildcard(bare.decode())
        if not qos or hidden or for_some(headers):
            answer(services, reply, b"")
            self.ask()
        elif not client.alive or not self.inbox or services.nats.standing or not room_of(client):
            answer(services, reply, NAK)
        else:
            message = services.path.recent.message(ack.stream_seq, b"%d" % ack.timestamp_ns, subject, headers, payload)
            qos = min(qos, self.choice.qos)  # [MQTT-4.8.2-3] (5.0)
            doubtful = qos == 2 and self._doubtful(ack)
            if client.checks_each and client.withheld(message.key, self.choice.qos, message.identity):
                answer(services, reply, b"")
            elif doubtful or self.doubtful.waiting:
                self.doubtful.add(message, ack.stream_seq, qos, reply, doubtful)
            else:
                self.send_or_assign(message, ack.stream_seq, qos, reply)
            self.ask()

    def _doubtful(self, ack: Ack) -> bool:
        """Whether a message may be assigned to a durable session already.

        Its gateway may have died between the store that says so and the acknowledgement, or nats-server after both:
        then it has forgotten what it wrote last, and every gateway has had to connect anew. To a durable session it is
        assigned only where no record says whose it is.
        """
        if self.client.consumers is not None:
            return ack.delivered > 1
        since = natstime.converted(self.client.services.nats.linked) + CLOCK_INEXACT_S
        return ack.delivered > 1 or ack.timestamp_ns < since * 1e9

    async def owner(self, number: int, message: Stored) -> Owner | None:
        """Return the owner of the group's copy of a message; raises ApiError, NoResponders, RequestTimeout."""
        groups = self.client.services.streams.groups
        return await groups.owner(self.group, number, int(message.stamp))

    def send_or_assign(self, message: Stored, number: int, qos: int, reply: bytes, arrived: int = 0) -> None:
        """Send a message of the group's consumer, or first store whose it is.

        ``arrived``: when it came (nanoseconds since 1970), 0 = now.
        """
        client = self.client
        services = client.services
        if qos == 2:
            side = client.consumers
            if side is None:
                self.send(message, 2, b"")
                services.nats.store.call(reply, b"", TakenOp())
            else:
                AssignOp(self, message, number, side.machine.allocate_packet_id(number), reply, arrived).put()
            services.nats.link.kick()
        elif qos == 1:
            if client.consumers is not None:
                machine = client.consumers.machine
                machine.share(self.source, number, machine.allocate_packet_id(number), 1, message, reply)
            else:
                self.held.add(reply)
                self.send(message, 1, reply)
        else:
            self.send(message, 0, b"")
            answer(services, reply, b"")

    def send(self, message: Stored, qos: int, token: bytes) -> None:
        """Send a message to a regular session, or at QoS 0 to any session."""
        client = self.client
        if not client.alive:
            return
        late = encode_for_subscriber(client, message, qos, self.choice.qos, self.choice.ids, kept=self.choice.kept)
        client.services.counters.send(qos, len(message.payload))
        if qos == 0:
            data = late(0)
            if data:
                client.write_buffer.write(data)
        elif client.regular_side is not None:
            try:
                client.regular_side.publish(qos, b"", b"", late, token, message.size)
            except QuotaExceeded as error:
                client.end_connection(error)

    async def _restore(self) -> None:
        """Create the group's consumer again, which was deleted, unless the member has left."""
        try:
            if self.inbox:
                await retry_until_answered(self.client, self.enter)
        finally:
            self.restoring = False
        self.ask()

    def unfinished(self) -> list[bytes]:
        """Return the acknowledgement subjects of messages for which JetStream has to be asked for more time."""
        side = self.client.consumers
        held = list(self.held) if side is None else side.machine.shared(self.source)
        return held + [one.reply for one in self.doubtful.waiting]


class TakenOp(IgnoredStore):
    """The acknowledgement of a QoS 2 message that was sent to a regular session: no other member may get it."""

    __slots__ = ()

    optional = True


class AssignOp(PendingStore):
    """The store of an assignment: a group's QoS 2 message is this client's, and no other's [MQTT-4.8.2-4] (5.0)."""

    __slots__ = ("arrived", "identifier", "member", "message", "number", "reply")

    def __init__(
        self, member: Membership, message: Stored, number: int, identifier: int, reply: bytes, arrived: int = 0
    ) -> None:
        self.arrived = arrived or int(natstime.now() * 1e9)
        self.member = member
        self.message = message
        self.number = number
        self.identifier = identifier
        self.reply = reply

    def put(self, *, sole: bool = True) -> None:
        """Store it; ``sole``: unless there is one of the group and that sequence already."""
        client = self.member.client
        group, text = self.member.group, self.member.text
        target = b"HPUB %b " % assigned_subject(client.hash, group, self.number).encode()
        headers = assigned_block(
            self.identifier, group, self.number, text, self.arrived, self.reply, epoch=client.epoch, sole=sole
        )
        client.path.store.put(target, headers, b"", self)
        client.path.link.kick()

    def stored(self, ack: bytes) -> None:
        """Acknowledge the assigned message to the group's consumer; then it is sent.

        If the gateway stood still before it wrote the store to NATS, the store may be so late that another member got
        the message meanwhile, and completed it.
        """
        if self.stale():
            self._look(partial(self._late, sequence(ack)))
        else:
            self._own(sequence(ack))

    def _look(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a lookup of the message's owner, however long JetStream is away, also when the connection has ended."""
        client = self.member.client
        services = client.services
        services.tasks.spawn(retry_in_background(services.nats.online, look), f"message of {client.client_id}")

    async def _late(self, record: int) -> None:
        """Keep the message if only the answer was late; give it back if the assignment was stored too late."""
        client = self.member.client
        inbox = client.services.nats.inbox
        found = await retry_until_answered(client, lambda: get_sequence(inbox, SHARED, record))
        if found is not None and found.time_ns - self.arrived > IN_TIME_NS:
            # The next member must not find an owner.
            await retry_until_answered(client, lambda: delete(inbox, SHARED, record))
            self._leave(NAK)
        else:
            self._own(record)

    def stale(self) -> bool:
        """Whether the store would be too late: another member may get the message before, and complete it."""
        return natstime.now() * 1e9 - self.arrived > IN_TIME_NS

    def _own(self, record: int) -> None:
        services = self.member.client.services
        services.nats.store.call(self.reply, b"", AssignedOp(self, record))
        services.nats.link.kick()

    def failed(self, error: ApiError) -> None:
        """Handle a refused or stale assignment: another member has the message, or may have it."""
        client = self.member.client
        if error.err_code in TAKEN or error is STALE:
            self._look(partial(self._contested, error.err_code == TAKEN[0]))
            return
        log.warning("%s: a message was not assigned to it: %s", client, error)
        self._leave(NAK)

    async def _contested(self, decided: bool) -> None:
        """Decide about a message that may be assigned already: to this client by an earlier attempt, or to another.

        Nothing is decided while a store is on its way, perhaps an earlier attempt of this one: its record has the time
        of that attempt, and counts. Whoever is given the message then finds that it is this client's, and drops it.
        Without an assignment the message is assigned, or given back.

        Args:
            decided: whether an assignment for the sequence is stored. If it is not one of this message, a message of a
                stream that was replaced had the sequence.
        """
        client = self.member.client
        groups = client.services.streams.groups
        place = client.hash, self.member.group, self.number
        if not decided:
            await retry_until_answered(client, lambda: groups.decide(*place))
        found = await retry_until_answered(client, lambda: self.member.owner(self.number, self.message))
        if found is None and client.alive and not self.stale():
            self.put(sole=not decided)
        elif found is None:
            await retry_until_answered(client, lambda: groups.remove_void(*place))
            self._leave(NAK)
        elif (found.client_hash, found.packet_id, found.arrived_ns) == (client.hash, self.identifier, self.arrived):
            self._own(found.seq)  # all three: an assignment of an earlier delivery may have this identifier, too
        else:
            self._leave(b"")

    def _leave(self, body: bytes) -> None:
        client = self.member.client
        if client.consumers is not None:
            client.consumers.machine.reserved.discard(self.identifier)
        answer(client.services, self.reply, body)


class AssignedOp(PendingStore):
    """The acknowledgement of a QoS 2 message that is assigned to a durable session."""

    __slots__ = ("assignment", "record")

    optional = True

    def __init__(self, assignment: AssignOp, record: int) -> None:
        self.assignment = assignment
        self.record = record

    def stored(self, ack: bytes) -> None:
        """Send the message, which no other member gets; after the connection's end, announce the assignment."""
        one = self.assignment
        client = one.member.client
        if client.consumers is not None and client.alive:
            confirmed = confirmed_at(client.services, one.reply, one.arrived)
            token = assigned(self.record, one.reply, confirmed)
            client.consumers.machine.share(one.member.source, one.number, one.identifier, 2, one.message, token)
            client.path.round.start()
        else:
            client.services.late_assignments.tell(registered_as(client.client_id, client.hash), self.record)

    def failed(self, error: ApiError) -> None:
        """Treat the message as acknowledged: the consumer is gone, and the message with it."""
        self.stored(b"")
