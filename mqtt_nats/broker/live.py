# SPDX-License-Identifier: Apache-2.0
"""Durable sessions that keep up get their messages from the gateway's shared reader.

Theory of operation. A subscription is *plain* while its own consumer brings its messages, and *live* while the shared
reader does; its consumer then lies dormant. It becomes live at a sequence after which the reader brings it all:
what its consumer brings after that is dropped, what the reader brings is kept back until the consumer has brought the
rest. It becomes plain again where its client falls behind (:mod:`mqtt_nats.broker.grounding`).
See docs/internals/rules.md#shared-reader.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.broker.attaching import STEP
from mqtt_nats.broker.grounding import bound, parts, stop
from mqtt_nats.broker.joining import Joining, Member, Turns, consumer_of, name_position, rest, settled
from mqtt_nats.broker.keeping import TAKEN, Keeper
from mqtt_nats.broker.reader import Reader
from mqtt_nats.broker.resuming import demote, reattach
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.pubsub.trie import FilterTrie
from mqtt_nats.session.delivery import Source
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import consumer_info
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import Conflict
from mqtt_streams.stored import get_next
from mqtt_streams.subjects import visible_to_wildcard

if TYPE_CHECKING:
    from mqtt_nats.broker.attachment import Attachment
    from mqtt_nats.broker.client import Client
    from mqtt_nats.broker.company import Company
    from mqtt_nats.broker.context import Broker
    from mqtt_nats.broker.durable import DurableSide
    from mqtt_nats.pubsub.message import Stored

log = logging.getLogger("mqtt_nats.broker")

RESETS: Final = (2, 14)
"""The first nats-server that sets the position of a consumer."""

READY: Final = 2.0
"""Seconds in which the reader must have what is wanted."""

PASSED: Final = 5.0
"""Seconds in which a consumer must have brought the rest."""

BEHIND: Final = 1000
"""A subscription with more left to bring is not made live."""

QUEUE_MOST: Final = 4096
"""Messages that wait for a place in the window of a session, or `max_backlog`; beyond it is behind."""

RENEWAL: Final = 40_000.0
"""Seconds until nats-server hears again that a dormant consumer is needed: half of what it outlives its session by."""

SOON: Final = 0.02
"""Seconds from SUBSCRIBE until its subscriptions become live."""

TOPICS_MOST: Final = 16384
SWAPPED: Final = {ord("."): "/", ord("/"): "."}
"""From a NATS subject, in whose tokens there may be slashes, to the levels of a topic."""


class Live:
    """The sessions of a gateway that the shared reader serves."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.allowed = False
        """Positions may be stored, as :attr:`company` has found out."""
        self.company: Company | None = None
        self.reader = Reader(broker, self._dispatch)
        self._queue_most = min(QUEUE_MOST, broker.settings.max_backlog or QUEUE_MOST)
        self.members: dict[Client, Member] = {}
        self._turns = Turns(self._try)
        self.falling: set[Client] = set()
        """Sessions on their way to their own consumers."""
        self._index: FilterTrie[dict[Member, None]] = FilterTrie()
        self._present: dict[str, dict[Member, None]] = {}
        self._targets: dict[bytes, list[Member]] = {}

    # -- who gets what --------------------------------------------------------------------------

    def _put(self, member: Member, subject: str) -> None:
        if subject in member.filters:
            return
        members = self._present.get(subject)
        if members is None:
            members = self._present[subject] = {}
            self._index.add(_as_filter(subject), members)
        members[member] = None
        member.filters.append(subject)
        self.reader.wanted[STORED_PREFIX + subject] += 1
        self._targets.clear()

    def remove(self, client: Client) -> None:
        """Nothing is taken for a session any more."""
        member = self.members.get(client)
        if member is None or not member.filters:
            return
        for subject in member.filters:
            members = self._present[subject]
            members.pop(member, None)
            if not members:
                del self._present[subject]
                self._index.remove(_as_filter(subject))
            wanted = self.reader.wanted
            wanted[STORED_PREFIX + subject] -= 1
            if wanted[STORED_PREFIX + subject] <= 0:
                del wanted[STORED_PREFIX + subject]
        member.filters = []
        self._targets.clear()

    def refresh(self, client: Client) -> None:
        """Subscriptions of a session have ended."""
        member = self.members.get(client)
        if member is not None and member.filters:
            self.remove(client)
            for one in member.side.attachments.values():
                if one.source.live and not one.source.end:
                    self._put(member, one.consumer.filter_subject.removeprefix(STORED_PREFIX))

    def forget(self, client: Client) -> None:
        """The connection has ended."""
        self._turns.end(client)
        self.falling.discard(client)
        self.remove(client)
        self.members.pop(client, None)

    def hold(self) -> None:
        """NATS was lost: nothing is sent to a session before it is known that it is still this gateway's."""
        for member in self.members.values():
            if member.side.live:
                for one in member.side.attachments.values():
                    if one.source.live:
                        one.source.held |= Source.RETURNING

    def later(self, client: Client) -> None:
        """A session has fallen behind: leave it to its consumers for a while."""
        member = self._member(client)
        if member is not None:
            member.put_off(asyncio.get_running_loop().time())

    def _member(self, client: Client) -> Member | None:
        side = client.durable_side
        if side is None:
            return None
        member = self.members.get(client)
        if member is None or member.side is not side:
            member = self.members[client] = Member(client, side)
        return member

    # -- what the reader brings -----------------------------------------------------------------

    def _dispatch(self, sequence: int, stamp: bytes, subject: bytes, headers: bytes, payload: bytes) -> None:
        targets = self._targets.get(subject)
        if targets is None:
            targets = self._find(subject)
        if not targets:
            return
        message = self.broker.stored_message(sequence, stamp, subject, headers, payload)
        if not message.qos:
            return
        mark = TAKEN + b"%d" % sequence
        for member in targets:
            try:
                self._give(member, sequence, message, mark)
            except Exception as error:  # the others have to have it all the same
                log.exception("%s: message %d", member.client, sequence)
                keeper = member.side.keeper
                if keeper is not None and keeper.taking:
                    keeper.ledger.pending.setdefault(sequence, message.qos)
                member.client.end(MqttError(f"message {sequence}: {error}", ReasonCode.UNSPECIFIED_ERROR))

    def _give(self, member: Member, sequence: int, message: Stored, mark: bytes) -> None:
        side = member.side
        joining = member.joining
        if joining is not None:
            joining.keep_back(sequence, message)
            if sequence > joining.since and not side.live:
                return
        client = member.client
        attachments = side.attachments
        keeper = side.keeper
        if keeper is None or not keeper.taking:
            return
        if len(attachments) != 1 or client.picky or client.options or client.no_local or message.timed:
            self._take(member, sequence, message, mark)
            return
        (attachment,) = attachments.values()
        source = attachment.source
        machine = side.machine
        qos = message.qos
        if source.qos < qos:
            qos = source.qos
        machine.reached = sequence
        if (
            sequence <= attachment.since
            or not source.live
            or source.end
            or not machine.sent_at_once(source, sequence, qos, mark)
        ):
            self._take(member, sequence, message, mark)
            return
        ledger = keeper.ledger
        ledger.pending[sequence] = qos
        ledger.dirty = True
        counters = self.broker.counters
        counters.sent[qos] += 1
        counters.sent_bytes[qos] += len(message.payload)
        if client.version == 5:
            data = message.packets5[qos] or message.packet5(qos)
        else:
            data = message.packets[qos] or message.packet(qos)
        outlet = client.outlet
        outlet.chunks.append(data)
        if outlet.clogged:
            outlet.hold(len(data))
        elif not outlet.dirty:
            outlet.dirty = True
            outlet.round.add(outlet)

    def _find(self, subject: bytes) -> list[Member]:
        if len(self._targets) >= TOPICS_MOST:
            self._targets.clear()
        text = subject[len(STORED_PREFIX) :].decode("utf-8", "replace")
        found: dict[Member, None] = {}
        if text[:1] == "$" or visible_to_wildcard(text):  # reply inboxes are nobody's
            for members in self._index.match(text.translate(SWAPPED)):
                found.update(members)
        targets = self._targets[subject] = list(found)
        return targets

    def _take(self, member: Member, sequence: int, message: Stored, mark: bytes) -> None:
        """A message that is not simply the next one of a session with one subscription."""
        self._put_through(member, sequence, message, mark)
        self._look_after(member)

    def _look_after(self, member: Member) -> None:
        """Leave a session to its consumers for which too much waits."""
        if member.side.machine.crowd > self._queue_most:
            log.info("%s has fallen behind: its consumers go on", member.client)
            self.give_back(member.client, member.side)

    def _put_through(self, member: Member, sequence: int, message: Stored, mark: bytes) -> None:
        side = member.side
        client = member.client
        keeper = side.keeper
        assert keeper is not None
        machine = side.machine
        machine.reached = sequence
        own = bool(client.no_local or client.options) and message.sender == client.client_id
        owner, granted = side.overlap.owner(message.subject, sequence, own)
        if owner is None or not owner.source.live or sequence <= owner.since or (own and client.no_local):
            return
        qos = min(message.qos, granted)
        keeper.ledger.take(sequence, qos)
        machine.arrived(owner.source, sequence, 1, mark, message, qos)

    def give_back(self, client: Client, side: DurableSide) -> None:
        """Leave a session to its own consumers."""
        stop(side)
        self.falling.add(client)
        client.do(self._fall(client, side))

    async def _fall(self, client: Client, side: DurableSide) -> None:
        try:
            await demote(client, side)
        finally:
            self.falling.discard(client)

    # -- becoming live --------------------------------------------------------------------------

    def soon(self, client: Client) -> None:
        """A session has begun, or has new subscriptions."""
        asyncio.get_running_loop().call_later(SOON, self._try, client)

    def _try(self, client: Client) -> None:
        side = client.durable_side
        if side is not None and client.alive:
            self.begin(client, side, asyncio.get_running_loop().time())

    def begin(self, client: Client, side: DurableSide, now: float) -> None:
        """Have a session become live, if it may."""
        if client in self._turns or not settled(client) or not self._may_join(client, side):
            return
        if self.reader.refused or not self.broker.online.is_set():
            return
        member = self._member(client)
        if member is None or member.joining is not None or now < member.retry:
            return
        if self._turns.take(client, len(side.attachments)):
            client.do(self._join(member))

    def _may_join(self, client: Client, side: DurableSide) -> bool:
        record = client.record
        return (
            self.allowed
            and client.alive
            and side.stall is None
            and not side.doubtful
            and side.machine.open
            and record is not None
            and record.v5 is not None
            and not side.frozen
            and any(not one.source.live for one in side.attachments.values())
            and not any(
                one.source.end or one.source.held or one.missed or not (one.source.live or one.source.collected)
                for one in side.attachments.values()
            )
            and side.machine.crowd == 0
        )

    async def _join(self, member: Member) -> None:
        client, side = member.client, member.side
        plain = [one for one in side.attachments.values() if not one.source.live]
        try:
            if client.durable_side is not side or not self._may_join(client, side):
                return
            await name_position(client)
            async with asyncio.timeout(PASSED * 2):
                await self._join_plain(member, plain)
        except (ApiError, NoResponders, RequestTimeout, TimeoutError) as error:
            log.debug("%s does not become live: %s", client, error)
            self.later(client)
        except Conflict:
            client.taken_over()
        finally:
            self._turns.end(client)
            joining, member.joining = member.joining, None
            if joining is not None:  # it did not work out
                self._undo(member, joining)
        live = [one.source for one in plain if one.source.live]
        if live and side.keeper is not None:
            # Nothing is sent before the position says that it may have been.
            if not await side.keeper.flush():
                side.keeper.left()
                return
            for source in live:
                side.machine.release_held(source, Source.RETURNING)

    def _undo(self, member: Member, joining: Joining) -> None:
        client, side = member.client, member.side
        if not joining.gave_way:
            self.later(client)
        if not (side.keeper is not None and side.keeper.taking):
            self.remove(client)
        if not client.alive:
            return
        handlers = self.broker.link.handlers
        for one in joining.attachments:
            if one.sid in handlers and one in joining.handlers:
                handlers[one.sid] = joining.handlers[one]
        if joining.dropped or joining.wrong:
            client.do(reattach(client, side))

    async def _join_plain(self, member: Member, attachments: list[Attachment]) -> None:
        client, side = member.client, member.side
        inbox = self.broker.inbox
        for some in parts(attachments):
            infos = await asyncio.gather(*(consumer_info(inbox, MESSAGES, one.consumer.durable_name) for one in some))
            if client.crowded:
                return
            if any(info is None or info.num_pending > BEHIND for info in infos):
                self.later(client)
                return
        if side.keeper is None:
            _, sequence = await self.broker.positions.load(client.hash)
            side.keeper = Keeper(client, sequence)
        before = len(member.filters)
        for one in attachments:
            self._put(member, one.consumer.filter_subject.removeprefix(STORED_PREFIX))
        try:
            async with asyncio.timeout(READY):
                last = await self.reader.ready()
        except BaseException:
            if not before:
                self.remove(client)
            raise
        sources = [one.source for one in side.attachments.values()]
        since = max(last, self.reader.position, *(source.last for source in sources))
        if self._vain(member):
            if not before:
                self.remove(client)
            return
        member.joining = joining = Joining(attachments, since)
        for one in attachments:
            handlers = self.broker.link.handlers
            if one.sid in handlers:
                joining.handlers[one] = handlers[one.sid]
                handlers[one.sid] = joining.rests[one] = rest(joining, one, handlers[one.sid])
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PASSED
        left = list(attachments)
        # Of subscriptions that are live everything up to there has to have been taken.
        while left or (side.live and self.reader.position < since):
            joining.gave_way = client.crowded  # such as one more SUBSCRIBE: it is not to wait for this
            if self._vain(member) or joining.gave_way or loop.time() > deadline:
                return
            left = await self._left(joining, left)
            if left or (side.live and self.reader.position < since):
                await asyncio.sleep(STEP)
        if not self._vain(member):
            member.joining = None
            self._switch(member, joining)

    def _vain(self, member: Member) -> bool:
        """Whether a session cannot become live now."""
        client, side, joining = member.client, member.side, member.joining
        handlers = self.broker.link.handlers
        if joining is not None and any(
            one.missed or handlers.get(one.sid) is not joining.rests.get(one) for one in joining.attachments
        ):
            joining.wrong = True
        gone = not client.alive or client.durable_side is not side or side.stall is not None or side.frozen
        return gone or (joining is not None and joining.wrong)

    async def _left(self, joining: Joining, attachments: list[Attachment]) -> list[Attachment]:
        """Those consumers that have yet to bring something."""
        left: list[Attachment] = []
        for some in parts(attachments):
            passed = await asyncio.gather(*(self._passed(joining, one) for one in some))
            left += [one for one, done in zip(some, passed, strict=True) if not done]
        return left

    async def _passed(self, joining: Joining, attachment: Attachment) -> bool:
        """Whether a consumer has brought everything up to where the reader begins."""
        source = attachment.source
        if attachment in joining.passed or source.last >= joining.since:
            return True
        # The consumer may be on a server that has not all of it yet, and would say that it has nothing left.
        start = max(source.last, source.start - 1) + 1
        broker, subject = self.broker, attachment.consumer.filter_subject
        found = await get_next(broker.inbox, MESSAGES, subject, start)
        if found is None and broker.latest.replicated:  # a new leader may not count all of it yet
            await broker.latest.state()
            found = await get_next(broker.inbox, MESSAGES, subject, start)
        return found is None or found.seq > joining.since

    def _switch(self, member: Member, joining: Joining) -> None:
        """From here on the reader's messages count."""
        side = member.side
        keeper = side.keeper
        assert keeper is not None
        ledger = keeper.ledger
        names = {one.consumer.durable_name for one in joining.attachments}
        sources = {one.source for one in joining.attachments}
        for delivery in side.machine.on_their_way():
            if delivery.source in sources and delivery.sequence > 0 and not delivery.reply.startswith(TAKEN):
                ledger.take(delivery.sequence, delivery.qos)
                others = [one for one in delivery.others or () if consumer_of(one) not in names]
                delivery.reply = TAKEN + b"%d" % delivery.sequence
                delivery.others = others or None
        link = self.broker.link
        for one in joining.attachments:
            link.unsubscribe_raw(one.sid)
            one.sid = b""
            one.since = joining.since
            one.source.live = True
            one.source.held |= Source.RETURNING
            one.source.last = one.source.first = max(one.source.last, joining.since)
            keeper.live.add(one.consumer.durable_name)
        ledger.reached = max(ledger.reached, joining.since)
        ledger.dirty = True
        keeper.taking = True
        side.live = True
        bound(side)
        for sequence, message in joining.kept:
            self._take_kept(member, sequence, message, sources)
        member.kept_up()
        member.renewal = min(member.renewal, self.broker.clock.now + RENEWAL)
        if all(one.source.live for one in side.attachments.values()):
            keeper.perhaps = 0
        self._look_after(member)
        log.debug("%s is live from sequence %d", member.client, joining.since)

    def _take_kept(self, member: Member, sequence: int, message: Stored, sources: set[Source]) -> None:
        client = member.client
        own = bool(client.no_local or client.options) and message.sender == client.client_id
        owner, _ = member.side.overlap.owner(message.subject, sequence, own)
        if owner is not None and owner.source in sources:
            self._put_through(member, sequence, message, TAKEN + b"%d" % sequence)


def _as_filter(subject: str) -> str:
    tokens = subject.translate(SWAPPED).split("/")
    return "/".join({"*": "+", ">": "#"}.get(token, token) for token in tokens)
