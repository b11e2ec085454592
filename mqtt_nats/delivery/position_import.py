# SPDX-License-Identifier: Apache-2.0
"""Import of a session's position from its consumers, which nats-server's listener or an older gateway has moved on.

A consumer says up to where it has delivered, and how many of these messages are not acknowledged: these are pending.
The session's position reaches up to the least of the subscriptions; one that is ahead begins behind what it has had.
Subscriptions that overlap are brought to one sequence: else their new beginnings would decide anew which of them has a
message. What the ones behind have yet to bring becomes pending, without having been sent. An older gateway sends a
message only through the first subscription that matches it, and acknowledges it at the others' consumers: so what
another subscription delivers is complete, and what this one delivers is not, however far the others are.
An ended subscription leaves its pending messages, and those that others have passed over in its favour.
Where not everything can be found out, a message comes twice rather than not at all.
The position is stored before the record that names it: after a crash between the two the import is made again.
See docs/internals/shared_reader.md#resumed-sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import in_turn
from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.overlap import PAIRS_MOST, Overlap, patterns_meet
from mqtt_nats.sessions.pubrel_consumer import move
from mqtt_nats.sessions.record import claimed, save_record
from mqtt_streams.api import RequestTimeout
from mqtt_streams.consumers import (
    ConsumerInfo,
    ConsumerNotFound,
    DeliverSubjectBusy,
    consumer_info,
    existing_consumer,
    parse_ack,
)
from mqtt_streams.messages import DELIVER_PREFIX
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.positions import Position
from mqtt_streams.sessions import Conflict, first_subject
from mqtt_streams.subjects import starts_with_wildcard, visible_to_wildcard

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.messages.message import Stored
    from mqtt_streams.consumers import ConsumerRef
    from mqtt_streams.sessions import Draining, SubscriptionOptions

log = logging.getLogger("mqtt_nats.broker")

OVERLAPPING_MOST: Final = 1000
"""Most messages that are read at one import to bring overlapping subscriptions to one sequence.

Subscriptions stay behind with what is left; where others have delivered it, it comes twice."""

PENDING_MOST: Final = 10_000
"""Most messages of one subscription that are taken for pending, unless its consumer says that more are."""

REDELIVERY_MOST_S: Final = 2.0
"""Most seconds until a consumer has delivered its pending messages once more."""


class _Subscription:
    """A subscription of the session, and the progress of its consumer."""

    def __init__(self, key: str, name: str, filter_subject: str, source: SubscriptionState) -> None:
        self.key = key
        """Key in the session record; empty for an ended one."""
        self.name = name
        """Name of the consumer."""
        self.filter_subject = filter_subject
        self.pattern = filter_subject.removeprefix(STORED_PREFIX)
        self.source = source
        """Begin, end and QoS; nothing is delivered through it."""
        self.delivered = 0
        """Stream sequence up to which it has delivered, or passed over, every message."""
        self.wild = starts_with_wildcard(self.pattern)

    @property
    def over(self) -> bool:
        """Whether the subscription has ended, and brings no message itself any more: see `Draining.whole`."""
        return self.source.ended and not self.source.whole

    @property
    def finished(self) -> bool:
        """Whether the subscription has ended, and come to its end."""
        return self.source.ended and self.delivered >= self.source.end

    def stand_at(self, sequence: int) -> None:
        """Note the stream sequence up to which all is delivered, or pending."""
        self.delivered = sequence

    def begin_anew(self) -> None:
        """Begin with a stream that counts from 1 again."""
        former = self.source
        self.source = SubscriptionState(former.qos, 1)
        self.source.take_options(no_local=former.no_local, kept=former.kept, identifier=former.identifier)
        self.delivered = 0

    def before(self, other: _Subscription) -> bool:
        """Whether this ended subscription may have had messages that the other one matches, too: see `Overlap`."""
        own = (self.source.start, self.pattern)
        return not self.source.start or own <= (other.source.start, other.pattern)


async def import_position(
    client: Receiver, side: DurableDelivery, expected: int, found: Position | None = None
) -> set[str]:
    """Give a session the position at which its consumers are; they lie dormant from then on.

    Args:
        expected: sequence of the position that is stored; 0 = none is.
        found: that position, if it is the session's and replaces some of the consumers (`live`); what it says is
            limited to the present stream. `perhaps` says up to where its owner may have sent messages. The caller
            restores identifiers and owed PUBRELs in the sender, and DUP up to the writer's `perhaps`; this function
            has set the messages that were not sent. None: no position replaces any.

    Returns:
        The names of the consumers that the position replaces: of all subscriptions, and of those lowered to QoS 0.
        Empty: the session has none; if it had ended ones, it has got a position with their messages all the same.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer, or the session has another owner.
    """
    record, v5 = claimed(client.record)
    if not record.cons and not any(entry.qos for entry in v5.draining):
        return set()
    work = _Import(client, side, found)
    await work.read()
    for one in work.subscriptions:
        if one.over:
            await work.inherit(one)
    await work.level()
    position = work.position()
    await _store(client, side, expected, position, work)
    side.machine.not_sent({*work.unsent, *(() if found is None else found.unsent)})
    if position.perhaps > position.reached:
        side.machine.sent_perhaps(position.perhaps)
    side.resume_from(position.reached)
    log.debug("%s: readers go on where its consumers are", client)
    return set(position.live)


async def _store(client: Receiver, side: DurableDelivery, expected: int, position: Position, work: _Import) -> None:
    """Store a position, then the record with what follows from it. A first position gets an id."""
    _, v5 = claimed(client.record)
    begins = work.found is None
    if begins:
        v5.name_position(client.services.identity.new_nuid())
    writer = PositionWriter(client, expected)
    writer.restore(position)
    if begins:
        writer.end_restore()
    side.store_position_with(writer)
    side.change_record()
    if not await writer.flush():
        if begins:
            writer.end_if_moved()
        raise RequestTimeout("the position of the session cannot be stored")
    work.begin_behind(position.reached)  # not before: another attempt is to find the former beginnings
    try:
        await save_record(client, client.epoch)
    except Conflict:
        client.taken_over()
        raise RequestTimeout("the session belongs to another connection") from None
    side.take_record_change()
    writer.end_restore()


class _Import:
    """The work of one import: what the subscriptions have delivered, and what is pending."""

    def __init__(self, client: Receiver, side: DurableDelivery, found: Position | None) -> None:
        record, v5 = claimed(client.record)
        self.client, self.side, self.found = client, side, found
        self.pending: dict[int, int] = {} if found is None else dict(found.pending)
        """QoS of the messages that were taken and are not complete, by stream sequence."""
        self.unsent: set[int] = set()
        """Stream sequences of those of them that were never sent to the client."""
        self.perhaps = 0 if found is None else found.perhaps
        """Stream sequence up to which messages may have been sent that are not pending."""
        self.present: set[str] = set()
        """Names of the consumers that exist."""
        self.subscriptions = [self._subscription(key, one) for key, one in record.cons.items()]
        self.subscriptions += [self._ended(entry) for entry in v5.draining if entry.qos]
        self._overlap: Overlap[_Subscription] = Overlap()

    def _subscription(self, key: str, consumer: ConsumerRef) -> _Subscription:
        record, v5 = claimed(self.client.record)
        qos = record.subs.get(first_subject(key), 0) or 1
        source = SubscriptionState(qos, v5.start.get(key, 0), was=v5.was.get(key, (0, 0)))
        _take_options(source, v5.options.get(first_subject(key)))
        return _Subscription(key, consumer.durable_name, consumer.filter_subject, source)

    def _ended(self, entry: Draining) -> _Subscription:
        _, v5 = claimed(self.client.record)
        source = SubscriptionState(entry.qos, entry.start, end=entry.end, whole=entry.whole)
        subject = entry.filter_subject.removeprefix(STORED_PREFIX)
        if entry.whole:
            _take_options(source, v5.options.get(subject) or v5.options.get(f"{subject}.>"))
        return _Subscription("", entry.name, entry.filter_subject, source)

    # -- what the consumers say ---------------------------------------------------------------------

    async def read(self) -> None:
        """Read how far every subscription is, and which messages are pending."""
        plain = []
        for one in self.subscriptions:
            if self.found is not None and one.name in self.found.live:
                one.stand_at(self.found.reached)
            elif self.side.replaced is not None:  # the former consumers are gone, or void
                one.stand_at(self.side.replaced)
            else:
                plain.append(one)
        infos = await in_turn([partial(self._state, one) for one in plain])
        states = list(zip(plain, infos, strict=True))
        for one, info in states:
            if info is not None:
                one.stand_at(info.delivered_seq)
        await self._find_missing([one for one, info in states if info is None])
        for one in self._going:
            self._overlap.add(one.pattern, one, one.source)
        self.present.update(one.name for one, info in states if info is not None)
        pending = [(one, info) for one, info in states if info is not None and info.num_ack_pending]
        await in_turn([partial(self._take_pending, one, info) for one, info in pending])

    async def _state(self, one: _Subscription) -> ConsumerInfo | None:
        """Return the state of a consumer to which nobody listens any more; None: it does not exist."""
        inbox = self.client.services.nats.inbox
        info = await consumer_info(inbox, MESSAGES, one.name)
        if info is None or not info.push_bound:
            return info
        await self._move(one, info)  # the former owner may get messages for a moment
        return await consumer_info(inbox, MESSAGES, one.name)

    async def _move(self, one: _Subscription, info: ConsumerInfo, deliver: str = "") -> bool:
        """Have a consumer deliver to another subject, by default to nobody; False: it keeps the present one.

        It is gone then, or a client listens to everything.
        """
        services = self.client.services
        record, _ = claimed(self.client.record)
        consumer = record.cons.get(one.key)
        if consumer is None:
            consumer = await existing_consumer(services.nats.inbox, MESSAGES, one.name, self.client.client_id)
        if consumer is None:
            return False
        start = info.config.get("opt_start_seq")  # the record may not have the one of a consumer that was made again
        deliver = deliver or DELIVER_PREFIX + services.identity.new_nuid()
        moved = replace(consumer, deliver_subject=deliver, start_seq=start)
        try:
            await move(services, MESSAGES, moved)
        except (ConsumerNotFound, DeliverSubjectBusy):
            return False
        if one.key:
            record.cons[one.key] = moved
        return True

    async def _unacknowledged(self, one: _Subscription, info: ConsumerInfo) -> set[int] | None:
        """Have a consumer deliver its pending messages once more, to this import; return their sequences.

        Returns:
            None: they do not all come, since some are not stored any more, or the consumer has no leader.
        """
        link = self.client.services.nats.link
        come: set[int] = set()
        complete = asyncio.Event()

        def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
            ack = parse_ack(reply)
            if ack is not None and ack.delivered > 1 and ack.stream_seq <= info.delivered_seq:
                come.add(ack.stream_seq)
                if len(come) >= info.num_ack_pending:
                    complete.set()

        deliver = DELIVER_PREFIX + self.client.services.identity.new_nuid()
        sid = link.subscribe_raw(deliver.encode(), arrived)
        try:
            if not await self._move(one, info, deliver):
                return None
            async with asyncio.timeout(REDELIVERY_MOST_S):
                await complete.wait()
        except TimeoutError:
            return None
        finally:
            link.unsubscribe_raw(sid)
        await self._move(one, info)
        return come

    async def _find_missing(self, missing: list[_Subscription]) -> None:
        """Find out how far subscriptions are whose consumers do not exist.

        Raises:
            RequestTimeout: the stream was replaced, and the connection ends.
        """
        services = self.client.services
        if not missing:
            return
        await services.stream.check()  # the sequences may be those of another stream
        if not self.client.alive:
            raise RequestTimeout("stream $MQTT_msgs was replaced")
        last = int((await services.head.state())["last_seq"])
        await in_turn([partial(self._find, one, last) for one in missing])

    async def _find(self, one: _Subscription, last: int) -> None:
        """Find out how far a subscription without a consumer is; ``last`` is the last sequence of the stream."""
        start = one.source.start
        if one.source.ended:
            one.stand_at(last)
            return
        if last + 1 < start:
            one.begin_anew()
            claimed(self.client.record)[1].was.pop(one.key, None)
            lost = "its messages are lost, the stream begins anew"
        elif start and await self.client.services.head.beyond(one.filter_subject, start, last):
            one.stand_at(start - 1)
            return
        else:
            one.stand_at(last)
            lost = (
                "it was removed, or was not created when its gateway ended in SUBSCRIBE; messages since then are lost"
            )
        log.warning("%s: consumer %s is gone; %s", self.client, one.name, lost)

    async def _take_pending(self, one: _Subscription, info: ConsumerInfo) -> None:
        """Take the messages that a consumer has delivered and that are not acknowledged.

        They are behind its acknowledgement floor. If more are there, later ones were acknowledged first: then the
        consumer delivers those that are pending once more. If it does not, all are taken that no other subscription
        delivers, and come with DUP; a QoS 2 message doubles then if its exchange has ended before an earlier one's.
        """
        floor, delivered = info.ack_floor_seq, info.delivered_seq
        most = max(PENDING_MOST, info.num_ack_pending)
        every: dict[int, int] = {}
        delivering: dict[int, int] = {}
        count = 0
        async for sequence, message in self._stored(one, floor, delivered):
            if count == most:
                log.warning("%s: messages of consumer %s after %d are sent again", self.client, one.name, sequence - 1)
                one.stand_at(sequence - 1)
                self.perhaps = max(self.perhaps, delivered)
                break
            count += 1
            if qos := self._qos(one, message, sequence):
                every[sequence] = qos
                if one.over or not self._left(one, message, sequence):
                    delivering[sequence] = qos
        if count < info.num_ack_pending:  # the rest is not stored any more, and the client may know the identifiers
            self.side.machine.suspect(floor + 1, delivered)
        if count > info.num_ack_pending and one.delivered == delivered:
            come = await self._unacknowledged(one, info)
            delivering = delivering if come is None else {at: qos for at, qos in every.items() if at in come}
        self._add(every if count <= info.num_ack_pending else delivering)

    # -- messages that other subscriptions match, too -----------------------------------------------

    async def inherit(self, one: _Subscription) -> None:
        """Take the messages that an ended subscription has left, and that others have passed over in its favour."""
        met = [other.delivered for other in self._going if patterns_meet(one.pattern, other.pattern)]
        passed = max(met, default=0)
        count = 0
        async for sequence, message in self._stored(one, one.delivered, min(one.source.end, passed)):
            if count == PENDING_MOST:
                log.warning("%s: messages of consumer %s after %d are lost", self.client, one.name, sequence - 1)
                break
            count += 1
            owner = self._owner(message, sequence)
            if owner is None or owner.delivered < sequence or not one.before(owner):
                continue
            if qos := self._qos(one, message, sequence):
                self._add({sequence: qos}, sent=False)

    async def level(self) -> None:
        """Bring overlapping subscriptions to one sequence; up to there, what is not delivered becomes pending."""
        left = OVERLAPPING_MOST
        for group in _overlapping([one for one in self._going if not one.finished]):
            to = group[0].delivered
            for one in group[1:]:
                left = await self._bring(one, to, left)

    async def _bring(self, one: _Subscription, to: int, left: int) -> int:
        """Bring a subscription to a sequence, or as far as ``left`` messages go; return how many are left."""
        until = min(to, one.source.end) if one.source.ended else to
        async for sequence, message in self._stored(one, max(one.delivered, one.source.start - 1), until):
            if not left:
                one.stand_at(sequence - 1)
                return 0
            left -= 1
            if not self._left(one, message, sequence) and (qos := self._qos(one, message, sequence)):
                self._add({sequence: qos}, sent=False)
        one.stand_at(max(to, one.delivered))
        return left

    # -- stored messages ------------------------------------------------------------------------------

    async def _stored(self, one: _Subscription, after: int, to: int) -> AsyncIterator[tuple[int, Stored]]:
        """Yield the stored messages of a filter after one sequence up to another, with their sequences."""
        services = self.client.services
        while after < to:
            found = await services.head.following(one.filter_subject, after + 1)
            if found is None or found.seq > to:
                return
            after = found.seq
            subject = found.subject.encode("utf-8", "surrogateescape")
            stamp = b"%d" % found.time_ns
            yield after, services.path.recent.message(after, stamp, subject, found.headers, found.payload)

    def _owner(self, message: Stored, sequence: int) -> _Subscription | None:
        """Return the subscription that delivers a message, of those that have not ended."""
        return self._overlap.owner(message.subject, sequence, message.sender == self.client.client_id)[0]

    def _left(self, one: _Subscription, message: Stored, sequence: int) -> bool:
        """Whether a subscription leaves a message to another one.

        Of one whose begin is not known, nobody knows whether it has had the message: nats-server's listener made it,
        which delivers each message through every subscription.
        """
        owner = self._owner(message, sequence)
        return owner not in (None, one) and owner.source.start > 0

    def _qos(self, one: _Subscription, message: Stored, sequence: int) -> int:
        """Return the QoS at which a subscription delivers a message; 0: the client does not get it."""
        own = message.sender == self.client.client_id
        if own and (self.client.bridge or one.source.no_local):
            return 0
        if one.wild and not visible_to_wildcard(message.subject):
            return 0
        if one.over:
            return min(message.qos, one.source.qos)
        _, granted = self._overlap.owner(message.subject, sequence, own)
        return min(message.qos, max(granted, one.source.granted(sequence)))

    def _add(self, messages: dict[int, int], *, sent: bool = True) -> None:
        """Add pending messages, with the highest QoS; those that may have been ``sent`` first."""
        for sequence, qos in messages.items():
            if not sent and sequence > self.perhaps and sequence not in self.pending:
                self.unsent.add(sequence)
            self.pending[sequence] = max(qos, self.pending.get(sequence, 0))

    # -- the result -----------------------------------------------------------------------------------

    @property
    def _going(self) -> list[_Subscription]:
        """The subscriptions that the position replaces."""
        return [one for one in self.subscriptions if not one.over]

    def begin_behind(self, reached: int) -> None:
        """Put into the record where subscriptions begin that are ahead of the position."""
        _, v5 = claimed(self.client.record)
        starts: dict[str, int] = {}
        for one in self._going:
            start = max(one.source.start, one.delivered + 1) if one.delivered > reached else one.source.start
            if not one.key:
                starts[one.name] = start
            elif start != v5.start.get(one.key, 0):
                v5.start[one.key] = start
        for at, entry in enumerate(v5.draining):
            if entry.name in starts:
                v5.draining[at] = replace(entry, start=starts[entry.name])

    def position(self) -> Position:
        """Return the position."""
        _, v5 = claimed(self.client.record)
        going = self._going
        unfinished = [one for one in going if not one.finished]
        reached = min(one.delivered for one in unfinished or going or self.subscriptions)
        found = self.found or Position(v5.pos)
        present = {*found.present, *(self.present if v5.consumerless else ())}
        return Position(
            found.id,
            live=[one.name for one in going],
            reached=reached,
            pending=self.pending,
            released=found.released,
            perhaps=self.perhaps,
            present=sorted(present),
            identifiers=found.identifiers,
        )


def _take_options(source: SubscriptionState, options: SubscriptionOptions | None) -> None:
    if options is not None:
        source.take_options(no_local=options.nl, kept=options.rap, identifier=options.id)


def _overlapping(subscriptions: list[_Subscription]) -> list[list[_Subscription]]:
    """Return the subscriptions that overlap and are not equally far: groups, each with the one that is furthest first.

    None where there are too many to compare: then messages may come twice.
    """
    left = sorted(subscriptions, key=lambda one: -one.delivered)
    groups: list[list[_Subscription]] = []
    compared = 0
    while left and left[0].delivered > left[-1].delivered:
        group = [left.pop(0)]
        for one in group:  # it grows meanwhile
            compared += len(left)
            if compared > PAIRS_MOST:
                return []
            met = [other for other in left if patterns_meet(one.pattern, other.pattern)]
            group += met
            left = [other for other in left if other not in met]
        groups.append([group[0], *(one for one in group[1:] if one.delivered < group[0].delivered)])
    return groups
