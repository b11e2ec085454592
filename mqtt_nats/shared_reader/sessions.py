# SPDX-License-Identifier: Apache-2.0
"""Sessions of the shared reader: durable sessions that keep up get their messages from it.

A subscription is *plain* while its own consumer brings its messages, and *live* while the shared reader does. See
docs/internals/shared_reader.md#shared-reader.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.delivery.draining import note_read
from mqtt_nats.delivery.position_recovery import (
    check_dormant,
    create_dormant,
    end_shared_delivery,
    limit_in_flight,
    remove_dormant,
)
from mqtt_nats.delivery.position_writer import NO_POSITION, PositionWriter
from mqtt_nats.delivery.receiver import Receiver, SharedFeed
from mqtt_nats.delivery.resume import deliver_by_consumers, write_changed_record
from mqtt_nats.delivery.states import DeliveryEvent
from mqtt_nats.protocol.ack_tokens import TAKEN
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.sessions.consumer_attach import attach_pubrels
from mqtt_nats.sessions.record import claimed, name_position
from mqtt_nats.shared_reader.catch_up import CatchUpReader
from mqtt_nats.shared_reader.catch_up_places import CatchUpPlaces
from mqtt_nats.shared_reader.consumer_choice import ConsumerChoice
from mqtt_nats.shared_reader.index import ServedFilters
from mqtt_nats.shared_reader.new_subscriptions import let_go, may_join_directly, subscribe
from mqtt_nats.shared_reader.promotion import (
    CONSUMER_REST_MOST_S,
    DORMANT_RENEWAL_S,
    Promotion,
    PromotionLimit,
    ReaderSession,
    bring_rest,
    far_apart,
    may_join,
    move_to_records,
    much_left,
    rest,
    settled,
    take_over,
    undo,
    vain,
)
from mqtt_nats.shared_reader.reader import SharedReader
from mqtt_nats.transport.turns import TimingWheel
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.sessions import Conflict

if TYPE_CHECKING:
    from collections.abc import Callable

    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.messages.message import Stored
    from mqtt_nats.sessions.consumer_binding import ConsumerBinding
    from mqtt_nats.sessions.services import Registry, Services

log = logging.getLogger("mqtt_nats.broker")

READY: Final = 2.0
"""Maximum seconds until the reader has the wanted filters."""

QUEUE_MOST: Final = 4096
"""Maximum number of messages that wait for a place in a session's window, unless `max_backlog` is less."""

SOON: Final = 0.02
"""Seconds from SUBSCRIBE to the attempt to make its subscriptions live."""


class SharedReaderSessions(SharedFeed):
    """Sessions of a gateway that the shared reader serves."""

    def __init__(self, services: Services, registry: Registry[Receiver]) -> None:
        super().__init__()
        self.services, self.registry, self._recent = services, registry, services.path.recent
        self.reader = SharedReader(services, self._dispatch)
        self.interest = ServedFilters(self.reader.wanted)
        self.choice = ConsumerChoice(services.settings)
        """Which sessions have no consumers."""
        self.queue_most = min(QUEUE_MOST, services.settings.max_backlog or QUEUE_MOST)
        self.members: dict[Receiver, ReaderSession] = {}
        self.candidates: TimingWheel[Receiver] = TimingWheel()
        """Sessions by the time of the next attempt to make subscriptions live; without those that are wholly live."""
        self.renewals: TimingWheel[Receiver] = TimingWheel()
        """Sessions by the time at which the dormant consumers are renewed, before nats-server removes them."""
        self._turns = PromotionLimit(self._try)
        self.returning: set[Receiver] = set()
        """Sessions on their way back to their own consumers."""
        self.catching: dict[DurableDelivery, CatchUpReader] = {}
        """Catch-up readers of the sessions that are catching up."""
        self.places = CatchUpPlaces(services, self.catching.values())
        """Places of catch-up readers that read pages, except those that wait for their clients."""
        self.slow: set[CatchUpReader] = set()
        """Catch-up readers whose messages wait for their clients."""
        services.nats.reconnect.register(Phase.REQUESTS, self.hold)
        services.stream.call_on_replaced(self.reader.begin_anew)

    # -- sessions and their filters -------------------------------------------------------------

    def reached(self, side: DurableDelivery) -> int:
        """Return the stream sequence up to which a session has been given every message."""
        if (catching := self.catching.get(side)) is not None:
            return catching.position
        # After catching up a session may be further than the shared reader.
        return max(self.reader.position, side.position_writer.ledger.reached if side.position_writer is not None else 0)

    def remove(self, client: Receiver) -> None:
        """Take no more messages for a session."""
        self._consider(client, 0.0)
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
        self._turns.end_promotion(client)
        self.returning.discard(client)
        self.remove(client)
        self.candidates.discard(client)
        self.renewals.discard(client)
        if (member := self.members.pop(client, None)) is not None:
            self.end_catching(member.side)

    def hold(self) -> None:
        """Keep back messages of live sessions after NATS was lost, until this gateway is known to own them still."""
        for member in self.members.values():
            if member.side.live:
                for one in member.side.bindings.values():
                    if one.source.live:
                        one.source.hold(SubscriptionState.RETURNING)
        self.reader.broken()
        for catching in self.catching.values():
            catching.broken()

    def elected(self, consumer: str) -> None:
        """Note that a consumer of the stream, or with an empty name the stream, has a new leader."""
        if consumer in ("", self.reader.name):
            self.reader.suspect()

    def promote_later(self, client: Receiver) -> None:
        """Leave a session to its own consumers for a while, since it has fallen behind or cannot become live."""
        if (member := self._member(client)) is not None:
            member.put_off(asyncio.get_running_loop().time())
            self._consider(client, member.retry)

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
                joining = member.joining
                if joining is not None:
                    joining.keep_back(sequence, message)
                    side = member.side
                    if side in self.catching or (sequence > joining.since and not side.live):
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
            or not source.live
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
        if member.joining is not None:  # a promotion of further subscriptions, which ends first
            member.joining.fail()
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
        if owner is None or not owner.source.live or (own and client.bridge):
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

    def leave_shared_reader(self, client: Receiver, side: DurableDelivery) -> None:
        """Have a session leave the shared reader, in a job: its own consumers bring its messages from then on."""
        end_shared_delivery(side)
        self.returning.add(client)
        client.do(self._leave_reader(client, side))

    async def _leave_reader(self, client: Receiver, side: DurableDelivery) -> None:
        try:
            await deliver_by_consumers(client, side)
        finally:
            self.returning.discard(client)

    # -- promotion ------------------------------------------------------------------------------

    def promote_soon(self, client: Receiver) -> None:
        """Try promotion shortly: a session has begun, or has new subscriptions."""
        self._consider(client, 0.0)
        asyncio.get_running_loop().call_later(SOON, self._try, client)

    def _consider(self, client: Receiver, at: float) -> None:
        """Have a session made live at ``at``, loop time in seconds, or as soon after as it may become live."""
        if client.alive:
            self.candidates.put(client, at)

    def _try(self, client: Receiver) -> None:
        side = client.durable_side
        if side is not None and client.alive:
            self.begin(client, side, asyncio.get_running_loop().time())

    def begin(self, client: Receiver, side: DurableDelivery, now: float) -> None:
        """Begin the promotion of a session, if it may become live."""
        if client in self._turns or not settled(client) or not self._may_join(client, side):
            return
        if self.reader.refused or not self.services.nats.online.is_set():
            return
        member = self._member(client)
        if member is None or now < member.retry:
            return
        member.end_joining()  # left by a catch-up reader that has ended before it handed the session over
        if self._turns.begin_or_wait(client, len(side.bindings)):
            client.do(self._join(member))

    def _may_join(self, client: Receiver, side: DurableDelivery) -> bool:
        return self.allowed and may_join(client, side)

    async def _join(self, member: ReaderSession) -> None:
        client, side = member.client, member.side
        plain = [one for one in side.bindings.values() if not one.source.live]
        try:
            if client.durable_side is not side or not self._may_join(client, side):
                return
            # A session that has dormant consumers keeps them until its next connection.
            if not side.dormant and self.wants_records(client):
                await move_to_records(client)
            else:
                await name_position(client)
            async with asyncio.timeout(CONSUMER_REST_MOST_S * 2):
                await self._join_plain(member, plain)
        except (ApiError, NoResponders, RequestTimeout, TimeoutError) as error:
            log.debug("%s does not become live: %s", client, error)
            self.promote_later(client)
        except Conflict:
            client.taken_over()
        finally:
            self._turns.end_promotion(client)
            joining = member.end_joining()
            if joining is not None:  # the promotion failed
                undo(self, member, joining)
                joining.forget_handlers()
        live = [one.source for one in plain if one.source.live]
        if live and side.position_writer is not None:
            # Nothing is sent before the stored position says that it may have been sent.
            if not await side.position_writer.flush():
                side.position_writer.end_if_moved()
                return
            for source in live:
                side.machine.drop_hold(source, SubscriptionState.RETURNING)
            if claimed(client.record)[1].consumerless:
                await remove_dormant(client, side)

    async def _join_plain(self, member: ReaderSession, bindings: list[ConsumerBinding]) -> None:
        client, side = member.client, member.side
        behind = await much_left(self.services.nats.inbox, bindings)
        if client.crowded:
            return
        if behind is None or (behind and side.live):
            self.promote_later(client)
            return
        if behind and await far_apart(self.services.head, bindings):
            self.promote_later(client)
            return
        if side.position_writer is None:
            side.store_position_with(PositionWriter(client, NO_POSITION))
        before = len(member.filters)
        last = 0
        if not behind:
            for one in bindings:
                self.interest.add(member, one.consumer.filter_subject)
            try:
                async with asyncio.timeout(READY):
                    last = max(await self.reader.ready(), self.reader.position)
            except BaseException:
                if not before:
                    self.remove(client)
                raise
        since = max(last, *(one.source.last for one in side.bindings.values()))
        if vain(self, member):
            if not before:
                self.remove(client)
            return
        joining = Promotion(bindings, since, behind)
        member.begin_joining(joining)
        for one in bindings:
            handlers = self.services.nats.link.handlers
            if one.sid in handlers:
                joining.handlers[one] = handlers[one.sid]
                handlers[one.sid] = joining.rests[one] = rest(joining, one, handlers[one.sid])
        if await bring_rest(self, member, joining):
            member.end_joining()
            self._switch(member, joining)
            joining.forget_handlers()

    def _switch(self, member: ReaderSession, joining: Promotion) -> None:
        """Switch a session to the shared reader: the reader's messages count from now on."""
        side = member.side
        position_writer = side.position_writer
        assert position_writer is not None
        sources = {one.source for one in joining.bindings}
        take_over(joining, side.machine, position_writer.ledger)
        link = self.services.nats.link
        for one in joining.bindings:
            link.unsubscribe_raw(one.sid)
            one.become_live(joining.since)
            position_writer.live.add(one.consumer.durable_name)
        if claimed(member.client.record)[1].consumerless:
            position_writer.expect_consumers(one.consumer.durable_name for one in joining.bindings)
        position_writer.ledger.reach(joining.since)
        position_writer.ledger.change()
        side.change(DeliveryEvent.JOINED)
        limit_in_flight(side)
        for sequence, message in joining.kept:
            self._take_kept(member, sequence, message, sources)
        member.kept_up()
        if member.client not in self.renewals:
            self.renewals.put(member.client, self.services.clock.now + DORMANT_RENEWAL_S)
        if joining.behind:
            self.catch_up(member, joining.since).begin()
        else:
            self._settle(member)
        log.debug("%s is live from sequence %d", member.client, joining.since)

    def _settle(self, member: ReaderSession) -> None:
        """Complete a session's switch to the shared reader: the session is where the reader is."""
        side = member.side
        if side.position_writer is not None and all(one.source.live for one in side.bindings.values()):
            side.position_writer.confirm_sent()
        if side.machine.crowd > self.queue_most:
            self.fall_behind(member)

    def takes(self, client: Receiver, side: DurableDelivery) -> bool:
        """Return whether the shared reader serves new subscriptions of a session from the start."""
        return may_join_directly(self, client, side)

    def without_consumers(self, client: Receiver) -> bool:
        """Return whether the new subscriptions of a session are to have no consumers: it has none, or needs none."""
        record, v5 = claimed(client.record)
        return v5.consumerless or (not record.cons and self.wants_records(client))

    async def subscribe(
        self, client: Receiver, place: int, put: Callable[[], list[ConsumerBinding]]
    ) -> list[ConsumerBinding]:
        """Begin new subscriptions that the shared reader serves; see :func:`new_subscriptions.subscribe`."""
        member = self._member(client)
        assert member is not None
        return await subscribe(self, member, place, put)

    def wants_records(self, client: Receiver) -> bool:
        """Return whether a session is to have no consumers; see :class:`ConsumerChoice`."""
        record, v5 = claimed(client.record)
        stream = self.services.stream
        having = v5.consumerless, len(record.cons), stream.consumers, stream.replicas
        return self.admit() and self.choice.wants_records(*having, listener=v5.listener)

    def admit(self) -> bool:
        """Return whether the shared reader can serve sessions without consumers."""
        return self.allowed and not self.reader.refused

    def go_on(self, client: Receiver, side: DurableDelivery) -> None:
        """Serve a session from its position on; nothing is done for one that its consumers serve."""
        member = self._member(client) if side.dormant else None
        if member is None or side.position_writer is None:
            return
        member.end_joining()  # left by a catch-up reader that has ended before it handed the session over
        side.change(DeliveryEvent.JOINED)
        self.catch_up(member, side.position_writer.ledger.reached, missed=False).begin()
        let_go(self, side, side.dormant)
        record, v5 = claimed(client.record)
        in_records = self.wants_records(client)
        if v5.consumerless and in_records:
            return
        if v5.consumerless:  # counted with the decision: many sessions may decide at the same time
            self.services.stream.count_consumers(len(record.cons))
        self.renewals.put(client, self.services.clock.now + DORMANT_RENEWAL_S)
        client.do(self._settle_consumers(client, side, in_records=in_records))

    async def _settle_consumers(self, client: Receiver, side: DurableDelivery, *, in_records: bool) -> None:
        """Check the dormant consumers of a resumed session, or create them; ``in_records``: remove them."""
        position_writer = side.position_writer
        if position_writer is None or not side.live:
            return
        try:
            if not in_records:
                await retry_until_answered(client, partial(self._keep_consumers, client, side))
                return
            await move_to_records(client)
            position_writer.expect_consumers(one.consumer.durable_name for one in side.dormant)
            if await position_writer.flush():
                await remove_dormant(client, side)
            else:
                position_writer.end_if_moved()
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("%s: its dormant consumers stay as they are: %s", client, error)
        except Conflict:
            client.taken_over()

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

    def caught_up(self, member: ReaderSession, joining: Promotion, since: int) -> None:
        """End a session's catch-up: after sequence ``since`` the shared reader's messages count."""
        side = member.side
        position_writer = side.position_writer
        assert position_writer is not None
        self.end_catching(side)
        member.end_joining()
        position_writer.ledger.reach(since)
        for one in side.bindings.values():
            if one.source.live:
                one.catch_up_to(since)
                one.source.deliver_to(max(one.source.last, since))
        for sequence, message in joining.kept:
            if sequence > since:
                self._take_kept(member, sequence, message)
        self._settle(member)
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

    def _take_kept(
        self, member: ReaderSession, sequence: int, message: Stored, sources: set[SubscriptionState] | None = None
    ) -> None:
        """Give a session a message that was kept back; ``sources``: see :meth:`put_through`."""
        try:
            self.put_through(member, sequence, message, TAKEN + b"%d" % sequence, sources)
        except Exception as error:  # the messages that follow are given all the same
            self.failed(member, sequence, message.qos, error)
