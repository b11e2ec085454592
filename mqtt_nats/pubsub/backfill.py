# SPDX-License-Identifier: Apache-2.0
"""Backfill of messages that regular sessions missed while their gateway had no connection to NATS.

Regular sessions get their messages from core NATS, which keeps nothing. QoS 1 and 2 messages are also stored, so after
a gap the gateway reads them from the stream, and delivers those that have not come and are not older than the
subscription. New messages wait meanwhile. A gap is closed in three steps: the subscriptions are in force on every
server, the stores that were under way then have ended, and the stream's leader has said up to where the messages go.
See docs/internals/pubsub.md#gaps.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol

from mqtt_nats.backbone.batch import in_turn
from mqtt_nats.messages.headers import identity, is_retained
from mqtt_nats.pubsub.backlog import Backlog
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.error_codes import NO_MESSAGE_FOUND
from mqtt_streams.gateway_subjects import AGAIN
from mqtt_streams.headers import for_some
from mqtt_streams.messages import PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.stored import StoredMessage, direct_page, message_of, rfc3339

if TYPE_CHECKING:
    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.backbone.link import Handler, NatsConnection
    from mqtt_nats.backbone.store_barrier import StoreBarrier
    from mqtt_nats.pubsub.data_path import Path
    from mqtt_nats.pubsub.interest_propagation import Nodes
    from mqtt_nats.pubsub.subscribers import Filter, Group

log = logging.getLogger("mqtt_nats.broker")

# Seconds by which the gap is taken to have begun before the server was last heard: a message may have waited in the
# server, and clocks differ. The ids of delivered messages are remembered for longer.
GAP_BEFORE_S: Final = 8.0
PAGE_MESSAGES: Final = 256
PAGE_BYTES: Final = 512 * 1024

COUNTED_BEFORE_S: Final = 1.0
"""Seconds before the loss of a nats-server in which the leader may have counted messages that the server still had."""

# Seconds for which new messages wait while JetStream does not answer after core NATS is back.
BACKFILL_TIMEOUT: Final = 30.0
BACKFILL_RETRY_S: Final = 0.25

# Maximum bytes of new messages per filter that wait while older ones are read; beyond it they are read as well.
BACKLOG_BYTES: Final = 4 * 1024 * 1024


class Head(Protocol):
    """The head of the stream of messages, as its leader knows it."""

    replicated: bool

    async def state(self) -> dict[str, Any]:
        """Return the state of the stream at some time after the call."""

    async def following(self, subject: str, start: int) -> StoredMessage | None:
        """Return the first message of ``subject`` from sequence ``start`` on; None without one."""


class Gaps:
    """Gaps of one gateway: what regular sessions have missed, for each connection by itself."""

    def __init__(self, nats: NatsLinks, path: Path, nodes: Nodes, head: Head, store_barrier: StoreBarrier) -> None:
        self.nats, self.path, self.nodes, self.head, self.store_barrier = nats, path, nodes, head, store_barrier
        self.delivered = 0
        """Number of messages that were missed and delivered."""
        self._suspicions: Counter[NatsConnection] = Counter()
        """Number of gaps that other gateways suspect, by connection."""
        self._turns = {link: asyncio.Lock() for link in (nats.link, nats.wild)}
        """Locks for one repair at a time."""
        self._again = {link: link.subscribe_raw(AGAIN + b">", self._arrival(link)) for link in (nats.link, nats.wild)}

    def _arrival(self, link: NatsConnection) -> Handler:
        def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
            self.path.fanout.again(link, subject[len(AGAIN) :], headers, payload)

        return arrived

    def expect(self, link: NatsConnection) -> None:
        """Queue new messages of the subscriptions of ``link`` until missed ones are read; called before renewal."""
        link.renew(self._again[link], AGAIN + b">")
        if link in self.nats.gaps:
            for found in self._regular(link):
                found.queue(Backlog(BACKLOG_BYTES))

    def _regular(self, link: NatsConnection) -> list[Filter]:
        """Return the filters of a connection that have regular sessions at QoS 1 or 2."""
        return [
            found
            for found in self.path.table.filters.values()
            if found.link is link and any(qos and not member.durable for member, qos in found.members.items())
        ]

    async def repair(self, link: NatsConnection) -> None:
        """Deliver the messages that were stored since ``link`` was lost and have not come through ``link``."""
        async with self._turns[link]:
            since = self.nats.gaps.pop(link, None)
            if since is None:
                return
            self.nats.begin_repair()
            try:
                await Repair(self, link, since).run()
            finally:
                self.nats.end_repair()

    def suspect(
        self, link: NatsConnection, since: float, missed: Callable[[], Awaitable[bool]]
    ) -> Coroutine[Any, Any, None]:
        """Queue new messages of ``link``; once the result is awaited, and ``missed()`` says so, repair a gap.

        Args:
            since: Unix time of nats-server in seconds since which messages may have been missed.
        """
        self._suspicions[link] += 1
        self.nats.begin_repair()
        self._queue(link)
        return self._repair_suspected(link, link.wire, since, missed)

    def _queue(self, link: NatsConnection) -> None:
        for found in self._regular(link):
            if found.backlog is None:
                found.queue(Backlog(BACKLOG_BYTES))

    async def _repair_suspected(
        self, link: NatsConnection, wire: object, since: float, missed: Callable[[], Awaitable[bool]]
    ) -> None:
        try:
            async with self._turns[link]:
                self._queue(link)
                if not await missed() and not any(one.backlog and one.backlog.full for one in self._regular(link)):
                    return
                for found in self._regular(link):
                    found.doubt_beginnings(since - COUNTED_BEFORE_S)
                if link.wire is wire and link not in self.nats.gaps:
                    await Repair(self, link, since, identified=True).run()
                else:  # the repair of the connection's own gap follows
                    self.nats.gaps[link] = min(since, self.nats.gaps.get(link, since))
        finally:
            self.nats.end_repair()
            self._suspicions[link] -= 1
            if not self._suspicions[link] and link not in self.nats.gaps and link.wire is wire:
                self.let_all_go(link)

    def queued(self, link: NatsConnection) -> list[Filter]:
        """Return the filters of ``link`` whose new messages are queued, also those whose regular sessions have left."""
        return [one for one in self.path.table.filters.values() if one.link is link and one.backlog is not None]

    def let_all_go(self, link: NatsConnection) -> None:
        """Deliver everything that is queued for ``link``."""
        for found in self.queued(link):
            self.let_go(found)

    def let_go(self, found: Filter) -> None:
        """Deliver the queued messages of a filter; later messages are delivered as they come."""
        backlog, path = found.take_backlog(), self.path
        if backlog is None:
            return
        for number, (route, headers, payload, reply) in enumerate(backlog.waiting):
            current = path.table.route_of_subject(route.subject.encode())
            group = None if current is None else current.groups.get(found)
            if current is not None and group is not None:
                late = backlog.later(number, kept=is_retained(headers))
                group = group.without(late) if late else group
                path.fanout.from_nats(found, group, current, headers, payload, reply=reply)

    def count(self) -> None:
        """Count a message that was missed and is delivered."""
        self.delivered += 1


class Repair:
    """Repair of one gap.

    Args:
        since: Unix time of nats-server in seconds since which messages may have been missed.
        identified: messages without an id are not read: nothing tells which of them have come.
    """

    def __init__(self, gaps: Gaps, link: NatsConnection, since: float, *, identified: bool = False) -> None:
        self._identified = identified
        self._gaps, self._nats, self._path = gaps, gaps.nats, gaps.path
        self._link, self._since = link, since
        self._wire = link.wire
        self._start = 0
        """Sequence of the first message that may have been missed; 0 = not known yet."""
        filters = gaps.path.table.filters.values()
        self._missed = [found for found in filters if found.link is link and found.backlog is not None]
        """Filters whose messages are to be read."""
        self._places = {(found, bare): 0 for found in self._missed for bare in found.subjects}
        """Sequence of the next message to be read, by filter and subject."""

    async def run(self) -> None:
        """Read until everything that was missed is delivered, or the connection is lost again."""
        nats, loop = self._nats, asyncio.get_running_loop()
        await nats.online.wait()
        patience = loop.time() + BACKFILL_TIMEOUT
        while self._missed:
            try:
                await self._close()
                continue
            except (ApiError, NoResponders, RequestTimeout, TimeoutError) as error:
                reason = error
            if not self._link.online or self._link.wire is not self._wire:  # the next connection starts over
                nats.gaps[self._link] = min(self._since, nats.gaps.get(self._link, self._since))
                return
            if not nats.link.online:
                await nats.online.wait()
                patience = loop.time() + BACKFILL_TIMEOUT
            elif loop.time() >= patience and self._gaps.queued(self._link):
                log.error("messages of %d filters may have been missed, and come late: %s", len(self._missed), reason)
                self._gaps.let_all_go(self._link)
            else:
                await asyncio.sleep(BACKFILL_RETRY_S)

    async def _close(self) -> None:
        """Read what was missed, and go on with new messages.

        Raises:
            ApiError, NoResponders, RequestTimeout, TimeoutError: NATS or JetStream does not answer.
        """
        gaps = self._gaps
        await gaps.nodes.fence(self._link)
        await gaps.store_barrier.settled()
        end = int((await gaps.head.state())["last_seq"])
        self._start = self._start or await self._first()
        before = gaps.delivered
        try:
            await in_turn([partial(self._complete, found, end) for found in self._missed])
        finally:
            self._missed = [found for found in self._missed if (found, found.subjects[0]) in self._places]
            if gaps.delivered > before:
                text = "%d messages that NATS has not brought are delivered"
                log.info(text, gaps.delivered - before)

    async def _first(self) -> int:
        """Return the sequence of the first message that may have been missed.

        The leader is asked: another replica may not have any of these messages yet.
        """
        body = {"next_by_subj": f"{PREFIX}>", "start_time": rfc3339(int((self._since - GAP_BEFORE_S) * 1e9))}
        try:
            return message_of(await call(self._nats.inbox, f"STREAM.MSG.GET.{MESSAGES}", body)).seq
        except ApiError as error:
            if error.err_code != NO_MESSAGE_FOUND:
                raise
        return 1 + int((await self._gaps.head.state())["last_seq"])

    async def _complete(self, found: Filter, end: int) -> None:
        """Read a filter's messages up to sequence ``end``; unless others had no room to wait, its gap is closed."""
        for bare in found.subjects:
            await self._read(found, bare, end)
        if self._link.wire is not self._wire:  # other messages may have been missed since
            raise RequestTimeout("the connection to NATS was lost again")
        if found.backlog is not None and found.backlog.full:
            # Messages that had no room are being stored: they are read in the next round.
            found.backlog.reset()
            return
        for bare in found.subjects:
            del self._places[found, bare]
        self._gaps.let_go(found)

    async def _read(self, found: Filter, bare: bytes, end: int) -> None:
        """Deliver the messages of a subject up to sequence ``end``: from any replica, then from the leader."""
        inbox, head, subject = self._nats.inbox, self._gaps.head, PREFIX + bare.decode()
        place = max(self._places[found, bare], self._start)
        more = True
        while place <= end:
            if more:
                page, more = await direct_page(
                    inbox, MESSAGES, subject, {"seq": place}, messages=PAGE_MESSAGES, size=PAGE_BYTES
                )
            elif head.replicated and (following := await head.following(subject, place)) is not None:
                page, more = [following], True  # the replica was behind
            else:
                place = end + 1
                break
            late = Latecomers(found)  # nobody joins while a page is delivered
            for message in page:
                if message.seq <= end:
                    self._deliver(found, message, late)
                    place = message.seq + 1
                else:
                    place = end + 1
            self._places[found, bare] = place
        self._places[found, bare] = place

    def _deliver(self, found: Filter, message: StoredMessage, late: Latecomers) -> None:
        born = message.time_ns / 1e9
        if for_some(message.headers) or (self._identified and not identity(message.headers) and not _had(found, born)):
            return
        path, subject = self._path, message.subject.removeprefix(PREFIX)
        route = path.table.route_of_subject(subject.encode(errors="surrogateescape"))
        group = route.groups.get(found) if route is not None else None
        if route is None or group is None or (found.local and path.ids.is_own(message.headers)):
            return  # the local members had it directly
        group = late.removed_from(group, message.seq, born)
        if not _counts(group):
            path.fanout.note(found, message.headers, route.subject)
            return
        before = sum(path.fanout.sent)
        path.fanout.from_nats(found, group, route, message.headers, message.payload, born)
        if sum(path.fanout.sent) > before:
            self._gaps.count()


class Latecomers:
    """Recent members of a filter for whose subscriptions the next stored messages are too old.

    A storm of clients may have joined: they are looked at when the messages reach the next beginning, not each time.
    """

    def __init__(self, found: Filter) -> None:
        self._left = dict(found.beginnings or {})
        self._groups: dict[int, tuple[Group, Group]] = {}
        """Groups without these members, with the whole groups, by the whole group's `id`."""
        self._soonest, self._earliest = 0, 0.0
        """Sequence, and Unix time of a store in seconds, up to which the members stay the same."""

    def removed_from(self, group: Group, sequence: int, born: float) -> Group:
        """Return a group without the members for whom a message is too old; messages come in their order."""
        if self._left and (sequence > self._soonest or born > self._earliest):
            self._left = {member: one for member, one in self._left.items() if not one.covers(sequence, born)}
            self._groups.clear()
            some = self._left.values()
            self._soonest = min((one.last for one in some), default=0)
            self._earliest = min((one.at for one in some if not one.exact), default=inf)
        if not self._left:
            return group
        if id(group) not in self._groups:
            self._groups[id(group)] = group, group.without(self._left.keys())
        return self._groups[id(group)][1]


def _had(found: Filter, born: float) -> bool:
    """Return whether a message that was stored at a Unix time in seconds has come, and had no room in the queue."""
    return found.backlog is not None and found.backlog.overflowed and born >= found.backlog.begun


def _counts(group: Group) -> bool:
    """Return whether a member of the group gets QoS 1 or 2 messages from core NATS."""
    return bool(group.high) or any(choice.qos and not member.durable for member, choice in group.guarded)
