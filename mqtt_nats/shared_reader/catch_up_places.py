# SPDX-License-Identifier: Apache-2.0
"""Places of catch-up readers, and the common reading for many readers that wait for a place.

nats-server searches all stored messages for those of one session. It brings all of them in little more time.
See docs/internals/shared_reader.md#catching-up.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.pubsub.filter_index import FilterIndex
from mqtt_nats.shared_reader.filters import common
from mqtt_nats.shared_reader.index import SWAPPED, as_filter, shown
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.messages import PREFIX as STORED_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pages import Pages

if TYPE_CHECKING:
    from collections.abc import ValuesView

    from mqtt_nats.sessions.services import Services
    from mqtt_nats.shared_reader.catch_up import CatchUpReader

log = logging.getLogger("mqtt_nats.broker")

PLACES: Final = 16
"""Number of readers that read alone at the same time: nats-server searches for each, and more at once take it longer.

With 64 places, sessions that came back to a busy nats-server never waited in such number that they read together.
"""

TOGETHER_MIN: Final = 256
"""Smallest number of waiting readers that read together: for fewer, nats-server has less work with each alone."""

READ_EACH: Final = 300
"""Largest number of messages, for each reader, that readers read together: with more, each alone costs less."""

ALONE_MEANWHILE: Final = 4
"""Places of readers that read alone while others read together: each search keeps nats-server from the others."""

LEFT_OUT: Final = 8
"""One of so many readers may be left out, those that begin furthest back: for one of them all would read far more."""

PAGE: Final = 1024
PAGE_BYTES: Final = 1024 * 1024
"""Maximum number of messages, and of bytes, of a page that is read together."""

SLICE: Final = 1024
"""Messages that readers take before other work of the gateway goes on: a page may be for thousands of readers."""

READERS_SLICE: Final = 32
"""Readers that begin or end to read together before other work goes on: each that ends hands its session over."""

KEPT_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of the messages that wait for the clients of all readers together."""


class CatchUpPlaces:
    """Places of a gateway's catch-up readers that read pages, and the readers that wait for a place.

    Args:
        readers: all catch-up readers of the gateway.
    """

    def __init__(self, services: Services, readers: ValuesView[CatchUpReader]) -> None:
        self._services = services
        self._readers = readers
        self.free = PLACES
        """Number of places that no reader has."""
        self._waiting: dict[CatchUpReader, asyncio.Future[bool]] = {}
        self._needed = TOGETHER_MIN
        """Number of waiting readers from which on they read together."""
        self._reading = False
        """Whether readers read together, or are about to."""

    async def take(self, reader: CatchUpReader) -> bool:
        """Wait for a place; False: the reader needs none any more, as it has read together with others."""
        if self.free > self._kept:
            self.free -= 1
            return True
        if not self._waiting:
            self._needed = TOGETHER_MIN
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[reader] = turn
        self._begin()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.leave()
            raise
        finally:
            del self._waiting[reader]

    def leave(self) -> None:
        """Give a place back."""
        self.free += 1
        self._begin()  # the waiting readers may have begun before, and have failed
        self._give()

    @property
    def _kept(self) -> int:
        """Number of places that nobody gets at present."""
        return PLACES - ALONE_MEANWHILE if self._reading else 0

    def _give(self) -> None:
        """Give free places to the readers that have waited longest, of those that do not read together."""
        for reader, turn in self._waiting.items():
            if self.free <= self._kept:
                return
            if not (reader.together or turn.done()):
                self.free -= 1
                turn.set_result(True)

    def forget(self, reader: CatchUpReader) -> None:
        """Let a reader that has ended wait no longer."""
        if self._has_no_turn(reader):
            self._waiting[reader].set_result(False)

    def _begin(self) -> None:
        """Have the waiting readers read together, if they are enough."""
        if not self._reading and len(self._waiting) >= self._needed:
            self._reading = True
            self._services.tasks.spawn(self._read_together(), "messages that many sessions have missed")

    def _has_no_turn(self, reader: CatchUpReader) -> bool:
        """Return whether a reader waits, and has got no place yet."""
        turn = self._waiting.get(reader)
        return turn is not None and not turn.done()

    async def _read_together(self) -> None:
        try:
            while (waiting := len(self._waiting)) >= self._needed:
                await self._services.nats.online.wait()
                self._needed = TOGETHER_MIN if await self._read() else waiting * 2
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("sessions do not read together what they have missed: %s", error)
        finally:
            self._reading = False
            self._give()

    async def _read(self) -> bool:
        """Read the messages of the waiting readers; False: the readers are too few, or the messages too many.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not bring all messages.
        """
        willing = [one for one in self._waiting if self._has_no_turn(one) and one.may_join()]
        if len(willing) < TOGETHER_MIN:
            return False
        start = sorted(one.position for one in willing)[len(willing) // LEFT_OUT]
        wanted = {one: one.subjects() for one in willing if one.position >= start}
        subject = common(subject for subjects in wanted.values() for subject in subjects)
        pages = await Pages.open(self._services.nats.inbox, MESSAGES, subject, start + 1)
        try:
            if pages.pending > READ_EACH * len(wanted):
                return False
            # Meanwhile some may have got a place, have ended, or have other subscriptions.
            left = (one for one in wanted if self._has_no_turn(one) and one.may_join())
            readers = {one: wanted[one] for one in left if one.subjects() == wanted[one]}
            try:
                for one in readers:
                    one.begin_together()
                last = await self._deal(pages, readers, start)
                for at, one in enumerate(readers, 1):
                    self._end(one, last)
                    if not at % READERS_SLICE:
                        await asyncio.sleep(0)
            finally:
                for one in readers:
                    self._end(one, None)
            return True
        finally:
            await pages.close()

    async def _deal(self, pages: Pages, readers: dict[CatchUpReader, list[str]], last: int) -> int:
        """Give each reader its messages; returns the sequence up to which all messages were read."""
        index: FilterIndex[list[CatchUpReader]] = FilterIndex()
        by_subject: dict[str, list[CatchUpReader]] = {}
        for reader, subjects in readers.items():
            for subject in subjects:
                by_subject.setdefault(subject, []).append(reader)
        for at, (subject, some) in enumerate(by_subject.items(), 1):
            index.add(as_filter(subject.removeprefix(STORED_PREFIX)), some)
            if not at % READERS_SLICE:
                await asyncio.sleep(0)
        kept = sum(one.waiting_bytes for one in self._readers)
        most, more, taken = (KEPT_BYTES - kept) // max(len(readers), 1), True, 0
        while more:
            page, more = await pages.page(PAGE, PAGE_BYTES)
            for message in page:
                last = message.seq
                text = message.subject.removeprefix(STORED_PREFIX)
                if shown(text):
                    found = index.match(text.translate(SWAPPED))
                    for reader in dict.fromkeys(one for some in found for one in some):
                        if reader.together and not reader.bring(message, most):
                            self._end(reader, None)
                        if not (taken := taken + 1) % SLICE:
                            await asyncio.sleep(0)
        return last

    def _end(self, reader: CatchUpReader, last: int | None) -> None:
        """End a reader's part in the common reading; where messages are left, it waits for a place."""
        if reader.together:
            reader.end_together(last)
            if self._has_no_turn(reader) and not reader.waits:
                self._waiting[reader].set_result(False)
