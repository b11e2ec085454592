# SPDX-License-Identifier: Apache-2.0
"""Catch-up reader: brings one session the messages stored while its client was away, in pages, unacknowledged.

A session has the reader until the session is where the gateway's shared reader is. See
docs/internals/shared_reader.md#catching-up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import TRANSIENT
from mqtt_nats.base.logs import log_failure
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.delivery.dormant_consumers import remove_dormant
from mqtt_nats.protocol.ack_tokens import TAKEN
from mqtt_nats.protocol.durable_sender import SEQUENCE_EVER
from mqtt_nats.shared_reader.filters import chosen
from mqtt_nats.shared_reader.index import shown
from mqtt_nats.shared_reader.reader_session import ReaderHandover, ReaderSession
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.consumers import delete_consumer, describe, reader_request
from mqtt_streams.error_codes import MAXIMUM_CONSUMERS
from mqtt_streams.messages import DELIVER_PREFIX
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.subjects import starts_with_wildcard

if TYPE_CHECKING:
    from mqtt_nats.shared_reader.sessions import SharedReaderSessions
    from mqtt_streams.stored import StoredMessage

log = logging.getLogger("mqtt_nats.broker")

PAGE: Final = 1024
"""Maximum number of messages that wait or were asked for; more are asked for when half of that is left."""

PAGE_BYTES: Final = 1024 * 1024
"""Maximum bytes that wait or were asked for, estimated from earlier messages; never less than one message."""

SLOW_BYTES: Final = 64 * PAGE_BYTES
"""Bytes that the readers with slow clients share: of more than 64 each has less than `PAGE_BYTES`."""

SILENCE: Final = 2.0
"""Seconds without the messages asked for after which the reader is created again."""

PAUSE: Final = 0.25
"""Seconds before JetStream is asked again."""

REFUSED_PAUSE_S: Final = 2.0
"""Seconds before a reader that JetStream refuses is created again."""

HANDOVER_POLL_S: Final = 0.02
"""Seconds between two looks whether the shared reader has the rest."""

IDLE: Final = 60
"""Seconds without a pull request after which nats-server removes the reader."""

HANDOVER: Final = 5.0
"""Maximum seconds until the shared reader reads a session's filters, and then for the messages stored before that."""

KEPT_OVERHEAD: Final = 500
"""Bytes that a waiting message takes besides its headers and its payload, about."""

NOT_YET: Final = 1 << 30
"""Value of `_asked` while the reader's consumer does not exist: it prevents pull requests."""

NO_MORE: Final = (b"404", b"408")
"""Status codes for "no messages left". nats-server before 2.15 sends 408 after part of a page; `_hand_over` checks."""
COMPLETED: Final = b"Batch Completed"
TOO_MUCH: Final = b"MaxBytes"
"""Texts in the status of a pull request: the page was delivered; its byte limit was reached."""


class CatchUpReader:
    """Reader that brings one session its missed messages, in order and none twice.

    Args:
        position: stream sequence after which the reader begins.
        missed: whether such messages are stored; else that is asked first.
    """

    def __init__(
        self, live: SharedReaderSessions, member: ReaderSession, position: int, *, missed: bool = True
    ) -> None:
        self.position = position
        """Stream sequence up to which the session was given every message that matches a live subscription."""
        self._live = live
        self._services = live.services
        self._recent = live.services.path.recent
        self._member = member
        self._page = max(min(PAGE, live.queue_most // 2), 1)
        self._size = self._most = live.services.nats.store.max_payload
        """Estimated message size in bytes: at least the size of the last one; it falls by 1/64 of the difference."""
        self._name = ""
        self._sid = self._subject = self._request = b""
        self._filters: tuple[str, ...] = ()
        self._plain = False
        """Whether the session has a single subscription, so that every message belongs to it."""
        self._next = 1
        self._asked = NOT_YET
        """Number of messages that were asked for and have not arrived."""
        self._kept: deque[tuple[int, bytes, bytes, bytes, bytes]] = deque()
        """Messages that wait for a place in the window: sequence, store time, subject, headers, payload."""
        self._bytes = 0
        """Bytes of the headers and payloads of the waiting messages."""
        self._heard = 0.0
        self._broken = missed
        self._end = not missed
        """Whether JetStream has no more messages for this reader."""
        self._over = False
        self._placed = False
        """Whether this reader has one of the places."""
        self.together = False
        """Whether this reader reads together with others that wait for a place."""
        self._alone = False
        """Whether its client is too slow to read together with others."""
        self._wake = asyncio.Event()
        member.side.machine.call_on_room(self._deal)

    @property
    def reads(self) -> bool:
        """Whether messages were missed, so that this reader reads pages."""
        return bool(self._name) or self._broken

    @property
    def _at_end(self) -> bool:
        """Whether everything was read and given, and the session has no other reader by now."""
        return self._end and not self._kept and not self._over

    def begin(self) -> None:
        """Begin to read; until then the session gets no message, and keeps its place."""
        if not self._over:
            self._services.tasks.spawn(self._run(), f"what {self._member.client.client_id} has missed")

    def broken(self) -> None:
        """Create the reader again: a message is missing, or may be, or the subscriptions have changed."""
        self._broken = True
        self._wake.set()

    def end(self) -> None:
        """Stop reading; messages that still arrive are ignored."""
        self._over = True
        self._services.nats.link.unsubscribe_raw(self._sid)
        self._live.places.forget(self)
        self._member.side.machine.call_on_room(None)
        self._wake.set()

    async def _run(self) -> None:
        member = self._member
        try:
            await self._read()
        except Exception:
            log.exception("%s: what it has missed cannot be read", member.client)
            if not self._over:  # its next connection, at any gateway, goes on from its position
                member.client.end_connection(MqttError("internal error", ReasonCode.UNSPECIFIED_ERROR))
        finally:
            self._services.nats.link.unsubscribe_raw(self._sid)
            self._leave_place()
            self._live.slow.discard(self)
        if self._name:
            try:
                await delete_consumer(self._services.nats.inbox, MESSAGES, self._name)
            except (ApiError, NoResponders, RequestTimeout) as error:
                log.debug("the reader of %s: %s", member.client, error)

    async def _read(self) -> None:
        """Read until the session is handed over or this reader has to end."""
        member = self._member
        while not self._over:
            await self._services.nats.online.wait()
            try:
                if self._at_end and await self._has_missed():
                    self._broken = True
                if self._broken and not self._crowded and await self._take_place():
                    await asyncio.sleep(PAUSE if self._name else 0)
                    if not self._over:
                        await self._make()
                self._deal()  # an acknowledgement is not the only way in which room is made
                if self._at_end and await self._hand_over():
                    return
                await self._signal()
            except (NoResponders, RequestTimeout, TimeoutError) as error:
                log.debug("%s: missed messages cannot be read yet: %s", member.client, error)
                self._broken = True
            except ApiError as error:
                self._broken = True
                if error.err_code not in TRANSIENT and not self._over:
                    text = "%s: JetStream refuses the reader of what it has missed: %s"
                    log_failure(log, logging.WARNING, "reader", text, member.client, error)
                    self._leave_place()
                    # Readers need the places of consumers that only show the session.
                    if error.err_code == MAXIMUM_CONSUMERS and not member.client.busy:
                        member.client.do(remove_dormant(member.client, member.side))
                    await asyncio.sleep(REFUSED_PAUSE_S)

    async def _has_missed(self) -> bool:
        """Ask whether anything was missed, before the filters of the shared reader are changed."""
        if self._name or self._member.handover is not None:
            return False  # it has read to the end, or the shared reader has most of the filters
        return not await self._services.head.nothing_left(self.subjects(), self.position, SEQUENCE_EVER)

    async def _take_place(self) -> bool:
        """Wait for a place, unless this reader has one; False: no place is needed any more."""
        if not self._placed:
            self._placed = await self._live.places.take(self)
        return self._placed

    def _slow_down(self) -> None:
        """Leave the place to others, since messages wait for the client."""
        if self._placed:
            self._leave_place()
            self._live.slow.add(self)

    def _leave_place(self) -> None:
        if self._placed:
            self._placed = False
            self._live.places.leave()

    async def _signal(self) -> None:
        """Wait until there is work; after `SILENCE` without the messages asked for, mark the reader as broken."""
        try:
            async with asyncio.timeout(SILENCE):
                await self._wake.wait()
        except TimeoutError:
            if 0 < self._asked < NOT_YET and asyncio.get_running_loop().time() - self._heard > SILENCE:
                self._broken = True
        self._wake.clear()

    async def _make(self) -> None:
        """Create the reader's consumer, or create it again after :attr:`position`."""
        services, link = self._services, self._services.nats.link
        subjects = self.subjects()
        if not subjects:
            self._live.end_catching(self._member.side)
            if self._member.end_handover() is not None:
                self._live.remove(self._member.client)
            return
        self._begin_anew(subjects)
        former, self._name = self._name, f"{services.identity.id}_reader_{services.identity.new_nuid()}"
        link.unsubscribe_raw(self._sid)
        self._filters = chosen(subjects)
        self._subject = (DELIVER_PREFIX + services.identity.new_nuid()).encode()
        self._sid = link.subscribe_raw(self._subject, self._arrived)
        self._request = b"PUB %b.CONSUMER.MSG.NEXT.%b.%b %b " % (
            services.nats.inbox.api_prefix.encode(),
            MESSAGES.encode(),
            self._name.encode(),
            self._subject,
        )
        about = f"{describe(self._member.client.client_id)}: what it has missed"
        try:
            await call(
                services.nats.inbox,
                f"CONSUMER.CREATE.{MESSAGES}.{self._name}",
                reader_request(MESSAGES, self._name, self._filters, self.position + 1, IDLE, description=about),
            )
            if former:
                await delete_consumer(services.nats.inbox, MESSAGES, former)
        except ApiError:
            self._name = former  # it is deleted when the next one is created
            self._broken = True
            raise
        except BaseException:
            self._broken = True
            raise
        self._asked = 0
        self._more()

    def _begin_anew(self, subjects: list[str]) -> None:
        """Forget what waits: it is read again after :attr:`position`."""
        if self._member.end_handover() is not None:
            self._live.remove(self._member.client)
        self._plain = len(subjects) == 1 and not starts_with_wildcard(subjects[0].removeprefix(STORED_PREFIX))
        self._next, self._asked, self._bytes, self._size = 1, NOT_YET, 0, self._most
        self._kept.clear()
        self._broken = self._end = False

    def subjects(self) -> list[str]:
        """Return the filter subjects of the live subscriptions."""
        bindings = self._member.side.bindings.values()
        return [one.consumer.filter_subject for one in bindings if one.source.is_served]

    # -- pages ----------------------------------------------------------------------------------

    def _more(self) -> None:
        """Ask for the next page if few enough messages wait or are under way."""
        there = len(self._kept) + self._asked
        size = self._bytes + self._asked * self._size + there * KEPT_OVERHEAD
        most = min(PAGE_BYTES, SLOW_BYTES // max(len(self._live.slow), 1))
        if self._broken or self._over or (there and (there > self._page // 2 or size > most // 2)):
            return
        count = max(min(self._page - there, (most - size) // (self._size + KEPT_OVERHEAD)), 1)
        self._asked += count
        self._heard = asyncio.get_running_loop().time()
        # With the largest payload added to the byte limit, one message always fits.
        body = b'{"batch":%d,"no_wait":true,"max_bytes":%d}' % (count, most + self._most)
        link = self._services.nats.link
        link.out.append(b"%b%d\r\n%b\r\n" % (self._request, len(body), body))
        link.kick()

    def _arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if self._over or self._broken:
            return
        self._heard = self._services.clock.now
        tokens = reply.split(b".")
        if len(tokens) < 9 or tokens[1] != b"ACK":
            self._status(headers)
            return
        at = 5 if len(tokens) == 9 else 7
        if int(tokens[at + 1]) != self._next:
            self.broken()
            return
        size = len(payload)
        if self._next == 1:
            self._size = size
        self._next += 1
        self._asked -= 1
        self._size = max(size, self._size - ((self._size - size) >> 6))
        if self._kept or self._room() <= 0:
            self._kept.append((int(tokens[at]), tokens[at + 2], subject, headers, payload))
            self._bytes += len(headers) + size
            self._slow_down()
        else:
            self._give(int(tokens[at]), tokens[at + 2], subject, headers, payload)
        if tokens[at + 3] == b"0":
            self._ended()
        else:
            self._more()

    def _room(self) -> int:
        """Return how many messages have a place in the session's window now."""
        machine = self._member.side.machine
        # Waiting messages of other subscriptions may wait until this reader has come as far as they are.
        crowd = machine.crowd_before(self.position) if machine.crowd else 0
        return machine.limit - len(machine.inflight) - machine.released - crowd

    @property
    def _crowded(self) -> bool:
        """Whether the client has to take messages that were given to the session before more are read."""
        return self._member.side.machine.crowd > 0 and self._room() <= 0

    def _deal(self) -> None:
        """Give the session the waiting messages that have a place in its window; called on acknowledgements."""
        kept = self._kept
        while kept and self._room() > 0 and not self._over:
            first = kept.popleft()
            self._bytes -= len(first[3]) + len(first[4])
            self._give(*first)
        self._more()
        if (self._end and not kept) or (self._broken and not self._crowded):
            self._wake.set()

    def _give(self, sequence: int, stamp: bytes, subject: bytes, headers: bytes, payload: bytes) -> None:
        self.position = sequence
        message = self._recent.message(sequence, stamp, subject, headers, payload)
        if not message.qos:
            return
        member = self._member
        mark = TAKEN + b"%d" % sequence
        try:
            if self._plain:
                self._live.give(member, sequence, message, mark)
            elif shown(message.subject):
                self._live.put_through(member, sequence, message, mark)
        except Exception as error:
            self._live.failed(member, sequence, message.qos, error)

    def _status(self, headers: bytes) -> None:
        """Handle a status message: the page is complete, was cut short, or failed."""
        if headers[9:12] in NO_MORE:
            self._ended()
        elif TOO_MUCH in headers:
            self._asked = 0
            self._more()
        elif COMPLETED not in headers:
            self.broken()

    def _ended(self) -> None:
        self._asked = 0
        self._end = True
        self._wake.set()

    # -- reading together with others -----------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether this reader has messages to read, and waits for a place."""
        return self._broken and not self._over

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the messages that wait for the client without a consumer of this reader, about."""
        return 0 if self._name else self._bytes + len(self._kept) * KEPT_OVERHEAD

    def may_join(self) -> bool:
        """Return whether this reader may read together with others."""
        return self.waits and not (self._alone or self._name or self.together) and bool(self.subjects())

    def begin_together(self) -> None:
        """Begin to read together with others, after :attr:`position`."""
        self._begin_anew(self.subjects())
        self.together = True

    def bring(self, message: StoredMessage, most: int) -> bool:
        """Take a message; False: this reader cannot go on, or more than ``most`` bytes would wait for its client."""
        if self._over or self._broken:
            return False
        if message.seq <= self.position:
            return True
        subject = message.subject.encode("utf-8", "surrogateescape")
        taken = message.seq, b"%d" % message.time_ns, subject, message.headers, message.payload
        if not self._kept and self._room() > 0:
            self._give(*taken)
            return True
        size = len(message.headers) + len(message.payload)
        self._alone = self.waiting_bytes + size > most
        if self._alone:
            return False
        self._bytes += size
        self._kept.append(taken)
        return True

    def end_together(self, last: int | None) -> None:
        """End the reading together with others: every message up to ``last`` was brought; None: the rest was not."""
        self.together = False
        if last is None or self._broken:
            self.broken()
        else:
            if not self._kept:
                self.position = max(self.position, last)
            self._end = True
            self._wake.set()

    # -- handover to the shared reader ----------------------------------------------------------

    async def _hand_over(self) -> bool:
        """Hand the session over to the shared reader; False when messages have to be read first."""
        live, member, loop = self._live, self._member, asyncio.get_running_loop()
        self._end = False
        self._leave_place()  # others may read while the shared reader's filters are changed, which takes a second
        handover = member.handover
        if handover is None:
            handover = ReaderHandover()
            member.begin_handover(handover)
        subjects = self.subjects()
        # The shared reader has brought, or has kept back, what came by the filters that it has for this session.
        unread = [one for one in subjects if one.removeprefix(STORED_PREFIX) not in member.filters]
        live.interest.put(member)
        try:
            async with asyncio.timeout(HANDOVER):
                last = await live.reader.ready()
            since = max(last, live.reader.position, self.position)
            # Thousands of sessions may ask: how long one waits for the first answer is not limited.
            late = inf
            while not await self._services.head.nothing_left(unread, self.position, since):
                if self._over or self._broken or not self._name or loop.time() > late:
                    return False
                late = min(late, loop.time() + HANDOVER)
                self._deal()
                await asyncio.sleep(HANDOVER_POLL_S)
            if self._over or self._broken or handover.overfull:
                return False
            if len(unread) == len(subjects):
                self.position = max(self.position, since)
            live.caught_up(member, handover, self.position)
            return True
        finally:
            if member.handover is handover:
                member.end_handover()
                if not self._over:
                    live.remove(member.client)
                    self.broken()
