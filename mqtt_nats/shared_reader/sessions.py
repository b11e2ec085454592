# SPDX-License-Identifier: Apache-2.0
"""Sessions of the shared reader: the connected durable sessions of a gateway get their messages from it.

See docs/internals/shared_reader.md#shared-reader.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.delivery.dormant_consumers import check_dormant, create_dormant, remove_dormant
from mqtt_nats.delivery.draining import note_read
from mqtt_nats.delivery.receiver import Receiver, SharedFeed
from mqtt_nats.delivery.resume import write_changed_record
from mqtt_nats.delivery.states import DeliveryEvent
from mqtt_nats.protocol.ack_tokens import TAKEN
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.pubrel_consumer import attach_pubrels
from mqtt_nats.sessions.record import claimed, store_position_name
from mqtt_nats.shared_reader.catch_up import CatchUpReader
from mqtt_nats.shared_reader.catch_up_places import CatchUpPlaces
from mqtt_nats.shared_reader.consumer_choice import ConsumerChoice
from mqtt_nats.shared_reader.index import ServedFilters
from mqtt_nats.shared_reader.new_subscriptions import let_go, subscribe
from mqtt_nats.shared_reader.reader import SharedReader
from mqtt_nats.shared_reader.reader_session import ReaderHandover, ReaderSession
from mqtt_nats.transport.turns import TimingWheel
from mqtt_streams.consumers import NOT_CHANGED
from mqtt_streams.sessions import Conflict

if TYPE_CHECKING:
    from collections.abc import Callable

    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding
    from mqtt_nats.sessions.services import Registry, Services

log = logging.getLogger("mqtt_nats.broker")

QUEUE_MOST: Final = 4096
"""Maximum number of messages that wait for a place in a session's window, unless `max_backlog` is less."""

DORMANT_RENEWAL_S: Final = 40_000.0
"""Seconds between renewals of a dormant consumer: half of the time by which the consumer outlives its session."""


class SharedReaderSessions(SharedFeed):
    """Sessions of a gateway that the shared reader serves."""

    def __init__(self, services: Services, registry: Registry[Receiver]) -> None:
        self.services, self.registry, self._recent = services, registry, services.path.recent
        self.reader = SharedReader(services, self._dispatch)
        self.interest = ServedFilters(self.reader.wanted)
        self.choice = ConsumerChoice(services.settings)
        """Which sessions have no consumers."""
        self.queue_most = min(QUEUE_MOST, services.settings.max_backlog or QUEUE_MOST)
        self.members: dict[Receiver, ReaderSession] = {}
        self.renewals: TimingWheel[Receiver] = TimingWheel()
        """Sessions by the time at which the dormant consumers are renewed, before nats-server removes them."""
        self.catching: dict[DurableDelivery, CatchUpReader] = {}
        """Catch-up readers of the sessions that are catching up."""
        self.places = CatchUpPlaces(services, self.catching.values())
        """Places of catch-up readers that read pages, except those that wait for their clients."""
        self.listener = False
        """Whether nats-server's listener has clients: dormant consumers of connected clients follow the positions."""
        self.slow: set[CatchUpReader] = set()
        """Catch-up readers whose messages wait for their clients."""
        services.nats.reconnect.register(Phase.REQUESTS, self.hold)
        services.stream.call_on_replaced(self.reader.begin_anew)

    # -- sessions and their filters -------------------------------------------------------------

    def reached(self, side: DurableDelivery) -> int:
        """Return the stream sequence up to which a session has been given every message."""
        if (catching := self.catching.get(side)) is not None:
            return catching.position
        reached = side.position_writer.ledger.reached if side.position_writer is not None else 0
        # After catching up a session may be further than the shared reader.
        return max(self.reader.position, reached) if side.live else reached

    def remove(self, client: Receiver) -> None:
        """Take no more messages for a session."""
        if (member := self.members.get(client)) is not None:
            self.interest.remove(member)

    def refresh(self, client: Receiver) -> None:
        """Update the filters of a session whose subscriptions have ended."""
        member = self.members.get(client)
        if member is not None and (catching := self.catching.get(member.side)) is not None:
            catching.broken()
        elif member is not None and member.filters:
            self.interest.remove(member)
            self.interest.put(member)

    def forget(self, client: Receiver) -> None:
        """Forget a session whose connection has ended."""
        self.remove(client)
        self.renewals.discard(client)
        if (member := self.members.pop(client, None)) is not None:
            self.end_catching(member.side)

    def follow_positions(self, listener: bool) -> None:
        """Note whether nats-server's listener has clients, and may take over sessions of connected clients."""
        self.listener = listener

    def hold(self) -> None:
        """Keep back messages of live sessions after NATS was lost, until this gateway is known to own them still."""
        for member in self.members.values():
            if member.side.live:
                for one in member.side.bindings.values():
                    one.source.hold(SubscriptionState.RETURNING)
        self.reader.broken()
        for catching in self.catching.values():
            catching.broken()

    def elected(self, consumer: str) -> None:
        """Note that a consumer of the stream, or with an empty name the stream, has a new leader."""
        if consumer in ("", self.reader.name):
            self.reader.suspect()

    def _member(self, client: Receiver) -> ReaderSession | None:
        side = client.durable_side
        if side is None:
            return None
        member = self.members.get(client)
        if member is None or member.side is not side:
            member = self.members[client] = ReaderSession(client, side)
        return member

    # -- messages of the reader -----------------------------------------------------------------

    def _dispatch(self, sequence: int, stamp: bytes, subject: bytes, headers: bytes, payload: bytes) -> None:
        interest = self.interest
        targets = interest.targets.get(subject)
        if targets is None:
            targets = interest.find(subject)
        if not targets:
            return
        self.reader.count_used()
        message = self._recent.message(sequence, stamp, subject, headers, payload)
        if not message.qos:
            return
        mark = TAKEN + b"%d" % sequence
        for member in targets:
            try:
                handover = member.handover
                if handover is not None:
                    handover.keep_back(sequence, message)
                    continue
                self.give(member, sequence, message, mark)
            except Exception as error:  # one failing session does not keep the message from the others
                self.failed(member, sequence, message.qos, error)

    def failed(self, member: ReaderSession, sequence: int, qos: int, error: Exception) -> None:
        """End a session that could not be given a message; the message stays pending for its next connection."""
        log.error("%s: message %d", member.client, sequence, exc_info=error)
        position_writer = member.side.position_writer
        if position_writer is not None and member.side.live:
            position_writer.ledger.pending.setdefault(sequence, qos)
        member.client.end_connection(MqttError(f"message {sequence}: {error}", ReasonCode.UNSPECIFIED_ERROR))

    def give(self, member: ReaderSession, sequence: int, message: Stored, mark: bytes) -> None:
        """Give a session the next message of the shared reader."""
        side = member.side
        client = member.client
        bindings = side.bindings
        position_writer = side.position_writer
        if position_writer is None or not side.live:
            return
        if len(bindings) != 1 or client.checks_each or client.options or client.bridge or message.timed:
            self._take(member, sequence, message, mark)
            return
        (binding,) = bindings.values()
        source = binding.source
        machine = side.machine
        qos = message.qos
        if source.qos < qos:
            qos = source.qos
        if (
            sequence <= binding.since
            or sequence <= source.until
            or binding.came is not None
            or source.ended
            or not machine.sent_at_once(source, sequence, qos, mark)
        ):
            self._take(member, sequence, message, mark)
            return
        position_writer.ledger.add_pending(sequence, qos)
        side.send_shared(message, qos)

    def _take(self, member: ReaderSession, sequence: int, message: Stored, mark: bytes) -> None:
        """Give a session a message for which the fast path of :meth:`give` does not apply."""
        self.put_through(member, sequence, message, mark)
        if member.side.machine.crowd > self.queue_most:
            self.fall_behind(member)

    def fall_behind(self, member: ReaderSession) -> None:
        """Give a session for which too many messages wait no more of them before its client has taken these."""
        side, position_writer = member.side, member.side.position_writer
        if position_writer is None or not side.live or side in self.catching:
            return
        log.debug("%s has fallen behind", member.client)
        position_writer.ledger.reach(self.reached(side))
        self.interest.remove(member)
        self.catch_up(member, position_writer.ledger.reached).begin()

    def put_through(
        self,
        member: ReaderSession,
        sequence: int,
        message: Stored,
        mark: bytes,
        sources: set[SubscriptionState] | None = None,
    ) -> None:
        """Give a session a message through the subscription that owns its subject; ``sources``: only one of these."""
        side = member.side
        client = member.client
        position_writer = side.position_writer
        assert position_writer is not None
        machine = side.machine
        own = bool(client.bridge or client.options) and message.sender == client.client_id
        owner, granted = side.overlap.owner(message.subject, sequence, own)
        if sources is not None and (owner is None or owner.source not in sources):
            return
        machine.read_to(sequence)
        if client.gates:
            note_read(side, message, sequence)
        if owner is None or (own and client.bridge):
            return
        if owner.resent < sequence <= owner.since:
            return
        if owner.came is not None and owner.came(message, sequence):
            position_writer.ledger.change()
            position_writer.hurry()  # the next gateway does not know what core NATS has brought
            return
        qos = min(message.qos, granted)
        position_writer.ledger.add_pending(sequence, qos)
        machine.arrived(owner.source, sequence, 1, mark, message, qos)

    def without_consumers(self, client: Receiver) -> bool:
        """Return whether the new subscriptions of a session are to have no consumers: it has none, or needs none."""
        record, v5 = claimed(client.record)
        return v5.consumerless or (not record.cons and self._wants_records(client))

    async def subscribe(
        self, client: Receiver, place: int, put: Callable[[], list[ConsumerBinding]]
    ) -> list[ConsumerBinding]:
        """Begin new subscriptions that the shared reader serves; see :func:`new_subscriptions.subscribe`."""
        member = self._member(client)
        assert member is not None
        added = await subscribe(self, member, place, put)
        if not claimed(client.record)[1].consumerless:
            self.renew_later(client)
        return added

    def _wants_records(self, client: Receiver) -> bool:
        """Return whether a session is to have no consumers; see :class:`ConsumerChoice`."""
        record, v5 = claimed(client.record)
        stream = self.services.stream
        having = v5.consumerless, len(record.cons), stream.consumers, stream.replicas
        # A client of nats-server's listener might need the consumers that a session has.
        needed = v5.listener or (self.listener and bool(record.cons) and not v5.consumerless)
        return self.choice.wants_records(*having, listener=needed)

    def go_on(self, client: Receiver, side: DurableDelivery) -> None:
        """Serve a session from its position on."""
        member = self._member(client) if side.bindings else None
        if member is None or side.position_writer is None:
            return
        member.end_handover()  # left by a catch-up reader that has ended before it handed the session over
        self.catch_up(member, side.position_writer.ledger.reached, missed=False).begin()
        let_go(self, side, list(side.bindings.values()))

    def settle_consumers(self, client: Receiver, side: DurableDelivery) -> None:
        """Have the dormant consumers of a resumed session checked, created or removed."""
        if side.position_writer is None or not side.bindings:
            return
        record, v5 = claimed(client.record)
        in_records = self._wants_records(client)
        if v5.consumerless and in_records and not side.position_writer.present:
            return
        if v5.consumerless and not in_records:  # counted with the decision: many sessions may decide at a time
            self.services.stream.count_consumers(len(record.cons))
        self.renew_later(client)
        client.do(self._settle_consumers(client, side, in_records=in_records))

    def renew_later(self, client: Receiver) -> None:
        """Have the dormant consumers of a session renewed in time."""
        self.renewals.put(client, self.services.clock.now + DORMANT_RENEWAL_S)

    async def _settle_consumers(self, client: Receiver, side: DurableDelivery, *, in_records: bool) -> None:
        """Check the dormant consumers of a resumed session, or create them; ``in_records``: remove them."""
        position_writer = side.position_writer
        if position_writer is None or not side.live:
            return
        try:
            if not in_records:
                await self._keep_consumers(client, side)
                return
            await self._move_to_records(client)
            left = [one.consumer.durable_name for one in side.bindings.values() if not one.removed]
            position_writer.expect_consumers(left)
            if await position_writer.flush():
                await remove_dormant(client, side)
            else:
                position_writer.end_if_moved()
        except NOT_CHANGED as error:
            log.debug("%s: its dormant consumers stay as they are: %s", client, error)
        except Conflict:
            client.taken_over()

    async def _move_to_records(self, client: Receiver) -> None:
        """Note in the record that the session needs no consumers; they are removed then.

        Raises:
            ApiError: the record cannot be stored.
            Conflict: another connection has claimed the session.
        """
        record, v5 = claimed(client.record)
        if v5.pos and v5.consumerless:
            return
        with_consumers = not v5.consumerless
        v5.move_to_records()
        if with_consumers:
            self.services.stream.count_consumers(-len(record.cons))
        try:
            await store_position_name(client)
        except BaseException:
            if with_consumers:
                v5.move_to_consumers()
            raise

    async def _keep_consumers(self, client: Receiver, side: DurableDelivery) -> None:
        """Check the dormant consumers of a session, or create them.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not do it.
        """
        record, v5 = claimed(client.record)
        if not v5.consumerless:
            await check_dormant(client, side)
        elif not await create_dormant(client, side):
            return
        if 2 in record.subs.values() and not side.has_pubrels:
            await attach_pubrels(side)
        await write_changed_record(client, side)

    def caught_up(self, member: ReaderSession, handover: ReaderHandover, since: int) -> None:
        """End a session's catch-up: after sequence ``since`` the shared reader's messages count."""
        side = member.side
        position_writer = side.position_writer
        assert position_writer is not None
        self.end_catching(side)
        member.end_handover()
        position_writer.ledger.reach(since)
        for one in side.bindings.values():
            one.catch_up_to(since)
            one.source.deliver_to(max(one.source.last, since))
        for sequence, message in handover.kept:
            if sequence > since:
                self._take_kept(member, sequence, message)
        position_writer.confirm_sent()
        if side.machine.crowd > self.queue_most:
            self.fall_behind(member)
        log.debug("%s has caught up at sequence %d", member.client, since)

    def catch_up(self, member: ReaderSession, position: int, *, missed: bool = True) -> CatchUpReader:
        """Return the catch-up reader that brings a session's messages from now on; see :class:`CatchUpReader`."""
        member.side.change(DeliveryEvent.FAR_BEHIND)
        reader = self.catching[member.side] = CatchUpReader(self, member, position, missed=missed)
        return reader

    def end_catching(self, side: DurableDelivery) -> None:
        """Stop a session's catch-up reader."""
        if (catching := self.catching.pop(side, None)) is not None:
            side.change(DeliveryEvent.CATCH_UP_ENDED)
            catching.end()

    def _take_kept(self, member: ReaderSession, sequence: int, message: Stored) -> None:
        """Give a session a message that was kept back."""
        try:
            self.put_through(member, sequence, message, TAKEN + b"%d" % sequence)
        except Exception as error:  # the messages that follow are given all the same
            self.failed(member, sequence, message.qos, error)
