# SPDX-License-Identifier: Apache-2.0
"""What was stored while a client was away, read in pages and without acknowledgements.

A live session with much left to get has a reader of its own until it is where the gateway's shared reader is. A page is
asked for when little of the one before waits for a place in the session's window; so it is read at the pace of the
client, and sent as soon as the client has acknowledged what came before. See docs/internals/rules.md#catching-up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.acked_publisher import TRANSIENT
from mqtt_nats.protocol.ack_tokens import TAKEN
from mqtt_nats.sessions.consumer_attach import STEP
from mqtt_nats.sessions.stream_head import nothing_left
from mqtt_nats.shared_reader.index import shown
from mqtt_nats.shared_reader.promotion import Member, Promotion
from mqtt_nats.shared_reader.reader import chosen
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.consumers import delete_consumer, describe, reader_request
from mqtt_streams.messages import DELIVER_PREFIX
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.subjects import starts_with_wildcard

if TYPE_CHECKING:
    from mqtt_nats.shared_reader.sessions import SharedReaderSessions

log = logging.getLogger("mqtt_nats.broker")

PAGE: Final = 1024
"""Messages that have come or were asked for, at most; more are asked for when it is half of that."""

PAGE_BYTES: Final = 1024 * 1024
"""Payload that has come or was asked for, as far as the messages before tell how large they are; or one message."""

SILENCE: Final = 2.0
"""Seconds without what was asked for after which the reader is made again."""

PAUSE: Final = 0.25
"""Seconds until JetStream is asked again."""

IDLE: Final = 60
"""Seconds without a request after which the server removes such a reader."""

HANDOVER: Final = 5.0
"""Seconds in which the shared reader must have taken over."""

NOT_YET: Final = 1 << 30
"""As if so many messages had been asked for."""

NO_MORE: Final = (b"404", b"408")
"""Nothing is left: 408 where nats-server before 2.15 had some of what was asked for. It is looked into."""
COMPLETED: Final = b"Batch Completed"
TOO_MUCH: Final = b"MaxBytes"
"""Of a status of a pull request."""


class CatchUpReader:
    """Brings one session what it has missed, in order and none twice."""

    def __init__(self, live: SharedReaderSessions, member: Member, position: int) -> None:
        self.position = position
        """Everything up to this sequence that matches the session's live subscriptions has been brought."""
        self._live = live
        self._broker = live.broker
        self._member = member
        self._page = max(min(PAGE, live.queue_most // 2), 1)
        self._size = self._most = live.broker.store.max_payload
        """Of messages lately, in bytes: no less than that of the last, and falling slowly."""
        self._name = ""
        self._sid = self._subject = self._request = b""
        self._filters: tuple[str, ...] = ()
        self._plain = False
        """There is one subscription, and whatever comes is its."""
        self._next = 1
        self._asked = 0
        """Messages that were asked for and have not come."""
        self._kept: deque[tuple[int, bytes, bytes, bytes, bytes]] = deque()
        """Those that have come and have no place yet, with store time, subject and headers."""
        self._bytes = 0
        """Their payloads."""
        self._heard = 0.0
        self._broken = True
        self._end = False
        """There was nothing more."""
        self._over = False
        self._wake = asyncio.Event()
        member.side.machine.on_room = self._deal
        self._broker.spawn(self._run(), f"what {member.client.client_id} has missed")

    def broken(self) -> None:
        """Something is missing, or may be, or other messages are wanted."""
        self._broken = True
        self._wake.set()

    def end(self) -> None:
        """Nothing is taken any more."""
        self._over = True
        self._broker.link.unsubscribe_raw(self._sid)
        self._member.side.machine.on_room = None
        self._wake.set()

    async def _run(self) -> None:
        live, member = self._live, self._member
        while not self._over:
            await self._broker.online.wait()
            try:
                if self._broken:
                    await asyncio.sleep(PAUSE if self._name else 0)
                    if not self._over:
                        await self._make()
                self._deal()  # room may have been made otherwise than by acknowledgements
                if self._end and not self._kept and await self._hand_over():
                    break
                await self._signal()
            except (NoResponders, RequestTimeout, TimeoutError) as error:
                log.debug("what %s has missed: %s", member.client, error)
                self._broken = True
            except ApiError as error:
                self._broken = True
                if error.err_code not in TRANSIENT and not self._over:
                    log.warning("%s gets what it has missed from its consumers: %s", member.client, error)
                    live.give_back(member.client, member.side)
        self._broker.link.unsubscribe_raw(self._sid)
        if self._name:
            try:
                await delete_consumer(self._broker.inbox, MESSAGES, self._name)
            except (ApiError, NoResponders, RequestTimeout) as error:
                log.debug("the reader of %s: %s", member.client, error)

    async def _signal(self) -> None:
        """Wait until something is to be done, or what was asked for does not come."""
        try:
            async with asyncio.timeout(SILENCE):
                await self._wake.wait()
        except TimeoutError:
            if self._asked and asyncio.get_running_loop().time() - self._heard > SILENCE:
                self._broken = True
        self._wake.clear()

    async def _make(self) -> None:
        """Make the reader, or make it again where it was."""
        broker, link = self._broker, self._broker.link
        subjects = self._subjects()
        if not subjects:
            self._live.end_catching(self._member.side)
            return
        former, self._name = self._name, f"{broker.identity}_reader_{broker.new_nuid()}"
        link.unsubscribe_raw(self._sid)
        self._filters = chosen(subjects)
        self._plain = len(subjects) == 1 and not starts_with_wildcard(subjects[0].removeprefix(STORED_PREFIX))
        self._subject = (DELIVER_PREFIX + broker.new_nuid()).encode()
        self._sid = link.subscribe_raw(self._subject, self._arrived)
        self._request = b"PUB $JS.API.CONSUMER.MSG.NEXT.%b.%b %b " % (
            MESSAGES.encode(),
            self._name.encode(),
            self._subject,
        )
        self._next, self._asked, self._bytes, self._size = 1, NOT_YET, 0, self._most
        self._kept.clear()
        self._broken = self._end = False
        about = f"{describe(self._member.client.client_id)}: what it has missed"
        try:
            await call(
                broker.inbox,
                f"CONSUMER.CREATE.{MESSAGES}.{self._name}",
                reader_request(MESSAGES, self._name, self._filters, self.position + 1, IDLE, description=about),
            )
            if former:
                await delete_consumer(broker.inbox, MESSAGES, former)
        except BaseException:
            self._broken = True
            raise
        self._asked = 0
        self._more()

    def _subjects(self) -> list[str]:
        attachments = self._member.side.attachments.values()
        return [one.consumer.filter_subject for one in attachments if one.source.live and not one.source.end]

    # -- pages ----------------------------------------------------------------------------------

    def _more(self) -> None:
        """Ask for a page, if it is time."""
        there = len(self._kept) + self._asked
        size = self._bytes + self._asked * self._size
        if self._broken or self._over or (there and (there > self._page // 2 or size > PAGE_BYTES // 2)):
            return
        count = max(min(self._page - there, (PAGE_BYTES - size) // (self._size + 1)), 1)
        self._asked += count
        self._heard = asyncio.get_running_loop().time()
        # So many that one message always fits.
        body = b'{"batch":%d,"no_wait":true,"max_bytes":%d}' % (count, PAGE_BYTES + self._most)
        link = self._broker.link
        link.out.append(b"%b%d\r\n%b\r\n" % (self._request, len(body), body))
        link.kick()

    def _arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if self._over or self._broken:
            return
        self._heard = self._broker.clock.now
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
            self._bytes += size
        else:
            self._give(int(tokens[at]), tokens[at + 2], subject, headers, payload)
        if tokens[at + 3] == b"0":
            self._ended()
        else:
            self._more()

    def _room(self) -> int:
        """How many messages have a place in the session's window now."""
        machine = self._member.side.machine
        # What waits of other subscriptions may wait for this reader to have come so far.
        crowd = machine.crowd_before(self.position) if machine.crowd else 0
        return machine.limit - len(machine.inflight) - machine.released - crowd

    def _deal(self) -> None:
        """The client has acknowledged something: send what has a place now."""
        kept = self._kept
        while kept and self._room() > 0 and not self._over:
            first = kept.popleft()
            self._bytes -= len(first[4])
            self._give(*first)
        self._more()
        if self._end and not kept:
            self._wake.set()

    def _give(self, sequence: int, stamp: bytes, subject: bytes, headers: bytes, payload: bytes) -> None:
        self.position = sequence
        message = self._broker.stored_message(sequence, stamp, subject, headers, payload)
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
        """What was asked for does not come, or not all of it."""
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

    # -- to the shared reader -------------------------------------------------------------------

    async def _hand_over(self) -> bool:
        """Leave the session to the shared reader; False when there is more to read first."""
        live, member = self._live, self._member
        self._end = False
        member.joining = joining = Promotion([], 0)
        live.interest.put(member)
        try:
            async with asyncio.timeout(HANDOVER):
                last = await live.reader.ready()
                since = max(last, live.reader.position, self.position)
                while not await nothing_left(self._broker, self._subjects(), self.position, since):
                    if self._over or self._broken:
                        return False
                    self._deal()
                    await asyncio.sleep(STEP)
            if self._over or self._broken or joining.wrong:
                return False
            self.position = max(self.position, since)
            live.caught_up(member, joining, self.position)
            return True
        finally:
            if member.joining is joining:
                member.joining = None
                if not self._over:
                    live.remove(member.client)
                    self.broken()
