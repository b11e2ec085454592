# SPDX-License-Identifier: Apache-2.0
"""Shared reader: the gateway's one reader of stored messages for all durable sessions that keep up.

See docs/internals/shared_reader.md#shared-reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.backbone.pending_stores import TRANSIENT
from mqtt_nats.shared_reader.filters import EVERYTHING, FilterSet, chosen
from mqtt_streams import headers as names
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.consumers import delete_consumer, reader_request
from mqtt_streams.messages import DELIVER_PREFIX
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES

if TYPE_CHECKING:
    from mqtt_nats.sessions.services import Services

log = logging.getLogger("mqtt_nats.broker")

HEARTBEAT: Final = 0.25
"""Seconds without a message after which nats-server sends a heartbeat with the reader's place."""

READER_SILENCE_S: Final = 2.0
"""Seconds without a message or heartbeat after which the reader is created again."""

SUSPICIOUS_SILENCE_S: Final = 0.6
"""Seconds as of `READER_SILENCE_S` after an election: the nats-server that goes, or has gone, may have the reader."""

SUSPICIOUS_AFTER_ELECTION_S: Final = 15.0
"""Seconds after an election in which `SUSPICIOUS_SILENCE_S` applies: a server hands leaderships over before it ends."""

READER_RETRY_S: Final = 0.25
"""Seconds before JetStream is asked again."""

READER_IDLE_S: Final = 60
"""Seconds without interest in the deliver subject after which nats-server removes the reader."""

NOTHING: Final = (STORED_PREFIX + "$MQTT",)
"""Filter that matches no message, since no client may publish there; used while no session wants anything."""

UNFILTERED_FRACTION: Final = 0.9
"""Wanted fraction of the stored messages above which the reader reads everything: to filter costs nats-server more."""

FILTERED_FRACTION: Final = 0.7
"""Wanted fraction of the stored messages below which the reader filters again."""

SAMPLE_MESSAGES: Final = 2000
"""Minimum number of stored messages over which the wanted fraction is measured."""

CHANGE_PAUSE_LEAST: Final = 0.01
"""Least seconds from one change of the filters to the next: sessions that subscribe meanwhile share the next one."""

CHANGE_PAUSE: Final = 0.6e-6
"""The same with many filters, by the square of their number: nats-server works a twentieth of the time."""

NARROWING_PAUSE_LEAST_S: Final = 5.0
"""Least seconds between two looks for fewer filters, while more than half of the messages are not wanted."""

Dispatch = Callable[[int, bytes, bytes, bytes, bytes], None]
"""``dispatch(sequence, stamp, subject, headers, payload)``: called for each message of the reader."""


class SharedReader:
    """Reader of the ``$MQTT_msgs`` messages that a session of this gateway wants, in order and none twice."""

    def __init__(self, services: Services, dispatch: Dispatch) -> None:
        self._services = services
        self.position = 0
        """Stream sequence up to which every message that matches the filters was dispatched."""
        self.wanted: Counter[str] = Counter()
        """Filters of the sessions of this gateway, with the number of sessions for each."""
        self.used = 0
        """Number of messages after sequence `_counted` that a session wanted."""
        self._counted = 0
        """Stream sequence at which the counting of `used` began."""
        self._counted_next = 1
        """Consumer sequence at which it began."""
        self._everything = False
        """Whether the reader reads everything, since most of it is wanted."""
        self._turning = False
        """Whether the filters have to change and nats-server does not have the change yet."""
        self._dispatch = dispatch
        self.name = ""
        """Name of the reader's consumer; empty before the first consumer."""
        self._subject = ""
        self._sid = b""
        self._filters: tuple[str, ...] = ()
        self._read = FilterSet()
        """The filters that the consumer has."""
        self._covered: set[str] = set()
        """Wanted filters that are known to be covered by those of the consumer."""
        self._narrowed = 0.0
        """Loop time in seconds at which fewer filters were looked for."""
        self._changeable = 0.0
        """Loop time in seconds from which the filters may be changed."""
        self._next = 1
        self._start = 1
        self._heard = 0.0
        self._wary_until = 0.0
        self._broken = True
        self._anew = False
        self._tickets = 0
        self._refused = False
        """Whether JetStream refuses the reader, which is logged once."""
        self._waiting: list[tuple[int, asyncio.Future[int]]] = []
        self._wake = asyncio.Event()

    def count_used(self) -> None:
        """Count a message that a session wanted."""
        self.used += 1

    async def ready(self) -> int:
        """Have the reader use the filters wanted now; return a sequence after which it certainly brings them all."""
        self._tickets += 1
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._tickets, future))
        self._wake.set()
        return await future

    def broken(self) -> None:
        """Create the reader again: a message is missing, or may be."""
        self._broken = True
        self._wake.set()

    def suspect(self) -> None:
        """Create the reader again after a shorter silence for a while: a server goes that may have the reader."""
        self._wary_until = asyncio.get_running_loop().time() + SUSPICIOUS_AFTER_ELECTION_S

    def begin_anew(self) -> None:
        """Create the reader again at the end of the stream: the stream was replaced, so old sequences mean nothing."""
        self._anew = True
        self.broken()

    async def run(self) -> None:
        """Keep the reader running for as long as the gateway runs."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            now = loop.time()
            if self.name and now - self._heard > (SUSPICIOUS_SILENCE_S if now < self._wary_until else READER_SILENCE_S):
                self._broken = True
            try:
                await self._services.nats.online.wait()
                await self._keep()
                self._refused = False
            except (ApiError, NoResponders, RequestTimeout) as error:
                log.debug("the shared reader: %s", error)
                if not isinstance(error, ApiError) or error.err_code in TRANSIENT:
                    self._refused = False
                elif not self._refused:
                    self._refused = True
                    log.warning("JetStream refuses the shared reader: %s", error)
                await asyncio.sleep(READER_RETRY_S)
                self._wake.set()

    async def _keep(self) -> None:
        if not self.wanted and not self.name:
            self._answer(self._tickets, self.position)
            return
        tickets = self._tickets
        self._waiting = [one for one in self._waiting if not one[1].done()]
        self._turning = self._turned() or self._turning
        loop = asyncio.get_running_loop()
        fits = bool(self._filters) and not self._turning and (not self._waiting or self._covers_wanted())
        if not (fits or self._broken) and loop.time() < self._changeable:
            loop.call_at(self._changeable, self._wake.set)
            return  # whoever waits shares the next change with those that come until then
        filters = self._filters if fits else self._choice()
        if self._broken:
            await self._make(filters)
        elif filters != self._filters:
            await self._change(filters)
        self._turning = False
        if self._waiting:
            state = await self._services.head.state()
            if not self._broken:
                self._answer(tickets, int(state["last_seq"]))
            else:
                self._wake.set()

    def _choice(self) -> tuple[str, ...]:
        """Return the filters to read, by what is wanted now."""
        return EVERYTHING if self._everything else chosen(self.wanted) or NOTHING

    def _covers_wanted(self) -> bool:
        """Return whether the consumer's filters cover all wanted ones; those of before are not compared again."""
        new = self.wanted.keys() - self._covered
        if not all(map(self._read.covers, new)):
            return False
        if new:
            self._covered = set(self.wanted)
        return True

    def _note(self, filters: tuple[str, ...]) -> None:
        """Note the filters that the consumer has."""
        self._filters, self._read, self._covered = filters, FilterSet(filters), set()
        pause = max(CHANGE_PAUSE_LEAST, CHANGE_PAUSE * len(filters) ** 2)
        self._changeable = asyncio.get_running_loop().time() + pause

    async def _change(self, filters: tuple[str, ...]) -> None:
        request = f"CONSUMER.CREATE.{MESSAGES}.{self.name}"
        try:
            await call(self._services.nats.inbox, request, self._config(filters, "update"))
        except RequestTimeout:
            self.broken()  # the update may have been made: which filters are read is unknown
            raise
        self._note(filters)

    def _turned(self) -> bool:
        """Return whether the filters may have to change: to everything, or to those that are wanted now."""
        stored = self.position - self._counted
        if stored < SAMPLE_MESSAGES:
            return False
        part, unused = self.used / stored, self._next - self._counted_next - self.used
        now = asyncio.get_running_loop().time()
        wide = not self.wanted or (unused > self.used and now >= self._narrowed + NARROWING_PAUSE_LEAST_S)
        if wide:
            self._narrowed = now
        self._counted, self._counted_next, self.used = self.position, self._next, 0
        former, self._everything = (
            self._everything,
            part > (FILTERED_FRACTION if self._everything else UNFILTERED_FRACTION),
        )
        return former is not self._everything or (wide and not self._everything)

    def _answer(self, tickets: int, last: int) -> None:
        for ticket, future in self._waiting:
            if ticket <= tickets and not future.done():
                future.set_result(last)
        self._waiting = [one for one in self._waiting if not one[1].done()]

    def _config(self, filters: tuple[str, ...], action: str) -> dict[str, Any]:
        return reader_request(
            MESSAGES,
            self.name,
            filters,
            self._start,
            READER_IDLE_S,
            action,
            description=f"shared reader of gateway {self._services.identity.id}",
            deliver_subject=self._subject,
            flow_control=True,
            idle_heartbeat=int(HEARTBEAT * 1e9),
        )

    async def _make(self, filters: tuple[str, ...]) -> None:
        """Create the reader's consumer, or create it again after :attr:`position`."""
        services = self._services
        inbox, link = services.nats.inbox, services.nats.link
        if self.name:  # the consumer may have gone with a stream that was replaced
            await services.stream.check()
        state = await services.head.state()
        former, self.name = self.name, f"{services.identity.id}_reader_{services.identity.new_nuid()}"
        link.unsubscribe_raw(self._sid)
        if not former or self._anew or self.position > state["last_seq"]:
            self.position = self._counted = state["last_seq"]  # first consumer, or the stream was replaced
            self.used = 0
            self._anew = False
        self._start = self.position + 1
        self._next = self._counted_next = 1
        self._subject = DELIVER_PREFIX + services.identity.new_nuid()
        self._sid = link.subscribe_raw(self._subject.encode(), self._arrived)
        self._broken = False
        self._heard = asyncio.get_running_loop().time()
        try:
            await call(inbox, f"CONSUMER.CREATE.{MESSAGES}.{self.name}", self._config(filters, "create"))
        except BaseException:
            self._broken = True
            raise
        self._heard = asyncio.get_running_loop().time()
        self._note(filters)
        if former:
            log.info("the shared reader was made again, from sequence %d", self._start)
            try:
                await delete_consumer(inbox, MESSAGES, former)
            except (ApiError, NoResponders, RequestTimeout) as error:
                log.debug("the former shared reader: %s", error)

    def _arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        self._heard = self._services.clock.now
        tokens = reply.split(b".")
        if len(tokens) < 9 or tokens[1] != b"ACK":
            self._status(reply, headers)
            return
        at = 5 if len(tokens) == 9 else 7
        if int(tokens[at + 1]) != self._next or self._broken:
            self.broken()
            return
        self._next += 1
        sequence = int(tokens[at])
        if sequence > self.position:
            self.position = sequence
            self._dispatch(sequence, tokens[at + 2], subject, headers, payload)

    def _status(self, reply: bytes, headers: bytes) -> None:
        """Handle a status message: answer flow control; a heartbeat moves the position or shows a loss."""
        link = self._services.nats.link
        stalled = names.get_last(headers, "Nats-Consumer-Stalled")
        if stalled:
            link.out.append(b"PUB %b 0\r\n\r\n" % stalled.encode())
            link.kick()
        if reply:
            link.out.append(b"PUB %b 0\r\n\r\n" % reply)
            link.kick()
            return
        last, position = names.get_last(headers, "Nats-Last-Consumer"), names.get_last(headers, "Nats-Last-Stream")
        if last is None or position is None:
            return
        if int(last) != self._next - 1:
            self.broken()
        elif not self._broken:
            self.position = max(self.position, int(position))
