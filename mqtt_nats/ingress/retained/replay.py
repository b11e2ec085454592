# SPDX-License-Identifier: Apache-2.0
"""Retained messages for a new subscription.

They are read page by page, as fast as the client takes them. Until they are sent, the subscription's new messages
wait, so that the last message that a client gets on a topic is the newest. In a durable session retained messages at
QoS 1 and 2 have packet identifiers that follow from their own sequence, and a cursor in the session record tells the
next gateway where to go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.ingress.retained.waiting_copies import WaitingCopies, let_copies_pass
from mqtt_nats.messages.message import Stored, encoded_id
from mqtt_nats.observability.sys_topics import of_system
from mqtt_nats.pubsub.backlog import Gate
from mqtt_nats.pubsub.fanout import received
from mqtt_nats.pubsub.routing_table import PLAIN, Choice
from mqtt_nats.sessions.record import claimed, save_record
from mqtt_nats.sessions.unrecorded import save_when_room
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.pages import PAGE_BYTES
from mqtt_streams.retained import RetainedMessage
from mqtt_streams.sessions import Conflict
from mqtt_streams.subjects import wire_topic

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from mqtt_nats.ingress.publish import Publisher
    from mqtt_nats.protocol.inflight import SubscriptionState
    from mqtt_nats.pubsub.routing_table import Filter

log = logging.getLogger("mqtt_nats.broker")

# Largest number, and bytes of payload, of retained messages that are sent at once behind SUBACK.
INLINE: Final = 64
INLINE_BYTES: Final = 1024 * 1024

# Seconds between two checks whether the client has room for a replay: the first pause, and the longest.
ROOM_STEP: Final = 0.002
ROOM_MOST: Final = 0.1

# Bytes of each filter that are read before SUBACK even where the client has many filters.
EARLY_LEAST: Final = 64 * 1024

# Filters of one client whose retained messages are read and sent at the same time: each has two pages in memory.
FILTERS_REPLAYED_AT_ONCE: Final = 4

# Number of a client's filters with unfinished replays above which its next SUBSCRIBE waits, and most seconds for that:
# acknowledgements may stand behind packets that wait for it.
REPLAYS_MOST: Final = 64
REPLAYS_WAIT_S: Final = 2.0
# Part of `max_unread_bytes` from which pages are small, and are not read ahead.
SMALL_PAGES_PART: Final = 0.25

# Bytes of new messages that are kept back for a subscription while retained messages are sent. All gates count for
# `max_unread_bytes`.
GATE_BYTES: Final = 4 * 1024 * 1024


class Replay:
    """The retained messages of one NATS subject of one subscription [MQTT-3.3.1-6] (3.1.1), [MQTT-3.8.4-4] (5.0)."""

    def __init__(self, client: Publisher, topic_filter: str, key: str, subject: str, qos: int, start: int = 0) -> None:
        self.client = client
        self.filter = topic_filter
        self.key = key
        """Key of the consumer in the session record."""
        self.qos = qos
        self.again = start > 0
        """An earlier connection has begun this replay: the client may have some of the messages."""
        self.page: list[RetainedMessage] = []
        self._bytes = 0
        """Bytes of the present page."""
        self._count: Callable[[int], None] | None = None
        """Function that counts the bytes of pages, negative when they are sent; None = they are not counted yet."""
        self.complete = False
        """Whether no messages follow the first page."""
        self.cursor = start
        self.gate: Gate | None = None
        self._marks: deque[int] = deque()
        """Cursors behind pages that were sent and are not noted in the session record."""
        self._sent = start
        """Stream sequence before which all messages were sent."""
        self._told = start
        """Cursor in the session record, or in a write that is queued."""
        self._written = False
        self._subject = subject
        self._literal = "" if "*" in subject or ">" in subject else subject
        self._pages: AsyncGenerator[list[RetainedMessage], None] | None = None
        self._source: SubscriptionState | None = None
        self._holding = False
        self.copies = WaitingCopies(client, topic_filter, subject)
        self._awaited = False
        """Whether the copies of the present page have come."""

    async def await_copies(self, last: int) -> None:
        """Wait for the copies of the page's messages; ``last``: see `WaitingCopies.come`. Errors: as that."""
        await retry_until_answered(self.client, partial(self.copies.come, self.page, self._gates, self.source, last))
        self._awaited = True

    @property
    def recent(self) -> bool:
        """Whether messages of the present page may also come as new messages."""
        return any(map(self.copies.may_have, self.page))

    def hold(self, source: SubscriptionState) -> None:
        """Keep back the new messages of the consumer of this subscription until :meth:`finish`."""
        self._source = source
        self._holding = True
        source.hold(source.REPLAYING)

    @property
    def _gates(self) -> list[Gate]:
        """The gates that keep back new messages of the subscription."""
        return [] if self.gate is None else list(self.gate.chain())

    def wait_at(self, gate: Gate) -> None:
        """Set the gate that keeps back new messages until the replay is complete."""
        self.gate = gate

    async def first_page(self) -> None:
        """Read the first page; the last values of `$SYS` topics come before stored messages.

        Raises:
            ApiError, NoResponders, RequestTimeout: the stream does not answer.
        """
        self.keep_page([])  # of an attempt that has failed, or of an earlier reading
        self.complete = False
        if self._pages is not None:
            await self._pages.aclose()
        if of_system(self.filter) and not self.again:
            self.page = self.client.ingress.system.page(self.filter, self._subject)  # shared by all its readers
        if self._literal:
            message = await self.client.services.streams.retained.get(self._literal)
            self.keep_page(self.page + ([] if message is None or message.seq < self.cursor else [message]))
            self.complete = True
            return
        early = EARLY_LEAST if self._crowded else max(PAGE_BYTES // max(len(self.client.gates or ()), 1), EARLY_LEAST)
        pages = self._pages = self.client.services.streams.retained.matching(self._subject, self.cursor, early)
        page = await anext(pages, None)
        if page is None:
            self.complete = True
            return
        self.keep_page(self.page + page)
        if len(page) <= INLINE:
            following = await anext(pages, None)
            if following is None:
                self.complete = True
            else:
                self.keep_page(self.page + following)

    def keep_page(self, page: list[RetainedMessage]) -> None:
        """Set the present page and count its bytes."""
        size = sum(len(message.payload) + len(message.headers) for message in page) if page else 0
        if self._count is not None and size != self._bytes:
            self._count(size - self._bytes)
        self.page, self._bytes = page, size

    def count(self, count: Callable[[int], None]) -> None:
        """Have the bytes of pages counted from now on."""
        self._count = count
        count(self._bytes)

    @property
    def _crowded(self) -> bool:
        """Whether so much waits in memory for clients that pages have to be small."""
        return self.client.path.round.held > self.client.services.settings.max_unread_bytes * SMALL_PAGES_PART

    @property
    def source(self) -> SubscriptionState | None:
        """Consumer of the subscription with which the replay began; None = that subscription has ended, or has none."""
        source = self._source
        return source if source is not None and not source.ended else None

    @property
    def stored(self) -> bool:
        """True when the session record needs a cursor: the session is durable and the QoS is above 0."""
        return self.client.consumers is not None and self.qos > 0

    @property
    def noted(self) -> bool:
        """True when the session record names this replay; messages behind the first page may be at QoS 1 or 2."""
        return self.stored and (self.again or not self.complete or any(message.qos for message in self.page))

    def send(self, message: RetainedMessage) -> None:
        """Send one retained message [MQTT-3.3.1-8], unless its copy is sent as a new message."""
        topic = wire_topic(message.subject.encode())
        if topic is None:
            return
        client = self.client
        encoded = topic.encode()
        key = len(encoded).to_bytes(2, "big") + encoded
        if self.copies.may_have(message) and not self.copies.replaced_by(message, key, self._gates, self._source):
            return
        qos = min(message.qos, self.qos)  # [MQTT-3.8.4-6] (3.1.1), [MQTT-3.8.4-8] (5.0)
        side = client.consumers
        source = self.source
        if qos and side is not None and source is None:
            qos = 0  # the filter was subscribed again at QoS 0: the remaining messages come at QoS 0, too
        elif qos and side is not None and source is not None:
            identifier = side.machine.retained_identifier(message.seq)
            stamp = b"%d" % message.time_ns
            body = Stored(message.subject, key, message.payload, message.qos, identifier, True, stamp, message.headers)
            side.machine.replay(source, message.seq, qos, body, self.again)
            return
        found = received(key, message.payload, qos, message.headers, born=message.time_ns / 1e9, retain=True)
        client.deliver(self._choice(self.qos if self.source is not None or side is None else qos), found)

    def _choice(self, qos: int) -> Choice:
        """Return the options of this subscription only: others did not ask for the messages [MQTT-3.3.4-5] (5.0)."""
        client = self.client
        found = client.path.table.filters[self.filter]
        options = (client.options or {}).get(found, PLAIN)
        ids = encoded_id(options.identifier) if client.version == 5 else b""
        return Choice(found, qos, ids, False)

    def finish(self) -> None:
        """End the replay and send the new messages that were kept back."""
        source = self._source  # also an ended one: it may still bring messages for other subscriptions
        side = self.client.consumers
        if self._holding and source is not None and side is not None:
            self._holding = False
            side.machine.drop_hold(source)

    @property
    def wanted(self) -> bool:
        """False when the subscription or the connection has ended."""
        return self.client.alive and self.gate is not None and not self.gate.ended

    async def room(self, size: int | None) -> bool:
        """Wait until the client can take ``size`` bytes more; False: the subscription or the connection has ended.

        Args:
            size: None = until nothing waits to be sent.
        """
        wait = ROOM_STEP
        while self.wanted:
            if self._free(size):
                return True
            await self._acknowledged(wait)
            wait = min(wait * 2, ROOM_MOST)
        return False

    async def _acknowledged(self, most: float) -> None:
        """Wait until the client has acknowledged many of its messages, at ``most`` so many seconds."""
        regular = self.client.regular_side
        if regular is None or not regular.waiting:
            await asyncio.sleep(most)
            return
        come = asyncio.Event()
        regular.call_on_room(come.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most):
                await come.wait()

    def _free(self, size: int | None) -> bool:
        """Whether the client can take ``size`` bytes more; None = nothing waits to be sent."""
        client = self.client
        regular, side = client.regular_side, client.consumers
        if regular is not None:
            free = not regular.waiting or (size is not None and regular.has_room_for(size))
        else:
            free = side is None or not side.machine.others
        return free and not client.write_buffer.clogged

    async def run(self) -> None:
        """Send page after page, and read the next page meanwhile."""
        client = self.client
        if self.noted:
            client.services.tasks.spawn(self._follow(), f"retained messages for {client.client_id}")
        following: asyncio.Task[list[RetainedMessage]] | None = None
        try:
            while self.page and self.wanted:
                if not self.complete and self._pages is not None and not self._crowded:
                    following = asyncio.create_task(self._read(self._pages))
                    for _ in range(3):  # the request leaves in three turns: nats-server reads while this page is sent
                        await asyncio.sleep(0)
                if self.recent and not self._awaited:
                    await self.await_copies(await retry_until_answered(client, partial(let_copies_pass, client)))
                for message in self.page:
                    size = len(message.payload)
                    if not (self._free(size) and self.wanted) and not await self.room(size):
                        return
                    self.send(message)
                    self._sent = message.seq + 1
                self.copies.pass_page()
                self._awaited = False
                self.cursor = self.page[-1].seq + 1
                self._marks.append(self.cursor)
                self.keep_page([])
                if following is not None:
                    self.keep_page(await following)
                elif not self.complete and self._pages is not None:
                    self.keep_page(await self._read(self._pages))
                following = None
            # New messages at QoS 0 must not pass retained messages that wait for acknowledgements.
            await self.room(None)
        except (ApiError, NoResponders, RequestTimeout, TimeoutError) as error:
            log.error("%s: the retained messages of %r were not all sent: %s", client, self.filter, error)
        except Exception:  # the new messages are sent all the same
            log.exception("%s: the retained messages of %r were not all sent", client, self.filter)
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            if self._pages is not None:
                await self._pages.aclose()
        self._written = True

    async def _read(self, pages: AsyncGenerator[list[RetainedMessage], None]) -> list[RetainedMessage]:
        """Read the page after the page that is being sent; empty at the end."""
        return await anext(pages, [])

    async def _follow(self) -> None:
        """Note the acknowledged pages as the cursor in the session record, and at last the end of the replay.

        The cursor moves within pages where PUBREL records of complete messages are kept (QoS 2).
        """
        side = self.client.consumers
        source = self.source
        if side is None:  # the connection has ended before this began
            return
        wait = ROOM_STEP
        marks = self._marks
        while self.client.alive and source is not None and not source.ended:
            oldest = side.machine.oldest_replayed(source)
            if oldest is None and self._written:
                self.client.do(self._note(None))
                return
            passed = 0
            while marks and (oldest is None or marks[0] <= oldest):
                passed = marks.popleft()
            wait = ROOM_STEP if passed else min(wait * 2, ROOM_MOST)
            if side.machine.keeps:
                passed = self._sent if oldest is None else oldest
            if passed > self._told:
                self._told = passed
                self.client.do(self._note(passed))
            await asyncio.sleep(wait)

    async def _note(self, cursor: int | None) -> None:
        """Write the cursor into the session record; None = the client has all messages."""
        _, v5 = claimed(self.client.record)
        side, source = self.client.consumers, self.source
        if side is None or source is None:  # a later subscription of the filter has its own cursor
            return
        if cursor is not None:
            v5.replay[self.key] = cursor
        elif v5.replay.pop(self.key, None) is None:
            return
        try:
            await save_when_room(self.client)
        except Conflict:
            self.client.taken_over()
        else:
            side.machine.replayed(source, cursor)


async def prepare(client: Publisher, replays: list[Replay]) -> None:
    """Note the replays that begin in the session record, before the first of their messages is sent.

    Raises:
        Conflict: the session belongs to another connection.
    """
    record = client.record
    begun = [replay for replay in replays if replay.noted and not replay.again]
    if begun and record is not None and record.v5 is not None:
        for replay in begun:
            record.v5.replay[replay.key] = 1
            if client.consumers is not None and replay.source is not None:
                client.consumers.machine.replayed(replay.source, 1)
        await save_record(client, client.epoch)


def open_gate(client: Publisher, found: Filter) -> Gate:
    """Keep back a subscription's new messages; every gate goes to :func:`start_replays` or :func:`close_gate`.

    Where a consumer's messages follow the messages of the present gate, new messages get a gate of their own, which
    follows that consumer.
    """
    former = gate = client.gate(found)
    if gate is None or gate.after:
        gate = Gate(found, GATE_BYTES if former is None else former.room, former, client.write_buffer.round.holding)
        client.close_by(gate)
        if former is None:
            client.path.table.changed(found)
        else:
            gate.hold()
            former.after.append(partial(close_gate, client, gate))
    gate.hold()
    return gate


def drop_gates(client: Publisher) -> None:
    """Discard what gates have kept back for a client whose connection has ended."""
    for present in (client.gates or {}).values():
        for gate in present.chain():
            gate.close()


def drop_gate(client: Publisher, topic_filter: str) -> None:
    """Discard the gates of an ended subscription with the messages that they have kept back."""
    for found in client.gates or ():
        if found.text == topic_filter:
            present = client.forget_gate(found)
            for gate in present.chain() if present is not None else ():
                gate.close()
                gate.let_go()
            return


def close_gate(client: Publisher, gate: Gate) -> None:
    """Remove one reason of a closed gate; after the last reason the messages that the gate has kept back are sent."""
    if not gate.unhold() or gate.ended:
        return
    if client.gate(gate.found) is gate:
        client.forget_gate(gate.found)
        client.path.table.changed(gate.found)
    if gate.dropped:
        client.path.round.drop(gate.dropped)
        log.debug("%s: %d messages that came while retained messages were sent were dropped", client, gate.dropped)
    for choice, message in gate.close():
        if client.alive:
            client.deliver(choice, message)
    gate.let_go()


def start_replays(client: Publisher, replays: list[Replay], gates: dict[str, Gate]) -> None:
    """Send the replays that fit at once, and the others as the client takes them.

    Args:
        gates: gates by topic filter, which keep back new messages until then.
    """
    longer: dict[str, list[Replay]] = {}
    places, octets = INLINE, INLINE_BYTES  # for all filters together: a packet may have a thousand filters
    for replay in replays:
        replay.wait_at(gates[replay.filter])
        count, size = len(replay.page), sum(len(message.payload) for message in replay.page)
        if replay.complete and not replay.noted and count <= places and size <= octets:
            places, octets = places - count, octets - size
            for message in replay.page:
                replay.send(message)
            replay.finish()
        else:
            longer.setdefault(replay.filter, []).append(replay)
    for topic_filter, gate in gates.items():
        group = longer.get(topic_filter)
        if group:
            client.services.tasks.spawn(_run(client, gate, group), f"retained messages for {client.client_id}")
        else:
            close_gate(client, gate)


class _Turns:
    """Places for the concurrent replays of one client; exists while the client has replays."""

    def __init__(self, hold: Callable[[int], None]) -> None:
        """``hold`` counts the bytes of pages in memory, negative when they are sent."""
        self.places = asyncio.Semaphore(FILTERS_REPLAYED_AT_ONCE)
        self.bytes = 0
        """Bytes of the pages in memory."""
        self._hold = hold
        self.users = 0
        self.few = asyncio.Event()
        """Set when at most `REPLAYS_MOST` groups are left."""

    def enter(self, group: list[Replay]) -> None:
        """Add a group of replays."""
        self.users += 1
        for replay in group:
            replay.count(self._add)

    def leave(self, group: list[Replay]) -> bool:
        """Remove a group of replays; return whether it was the last one."""
        for replay in group:
            replay.keep_page([])
        self.users -= 1
        if self.users <= REPLAYS_MOST:
            self.few.set()
        return not self.users

    def _add(self, size: int) -> None:
        self.bytes += size
        self._hold(size)


_turns: dict[Publisher, _Turns] = {}


def pages_of(client: Publisher) -> int:
    """Return the bytes of retained messages that were read for a client and are not sent yet."""
    turns = _turns.get(client)
    return 0 if turns is None else turns.bytes


async def room_for_replays(client: Publisher) -> None:
    """Wait while the retained messages of many filters are not sent yet; a SUBSCRIBE may come again and again."""
    if (turns := _turns.get(client)) is not None and turns.users > REPLAYS_MOST:
        turns.few.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPLAYS_WAIT_S):
                await turns.few.wait()


async def _run(client: Publisher, gate: Gate, group: list[Replay]) -> None:
    turns = _turns.get(client)
    if turns is None:
        turns = _turns[client] = _Turns(client.write_buffer.round.holding)
    turns.enter(group)
    try:
        async with turns.places:
            for replay in group:
                await replay.run()
    finally:
        if turns.leave(group):
            del _turns[client]
    for replay in group:
        replay.finish()
    close_gate(client, gate)
