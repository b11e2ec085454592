# SPDX-License-Identifier: Apache-2.0
"""Beginnings: from which stream sequence on stored messages are for a subscription.

After a gap of NATS stored messages are delivered that have not come, and some of them may be older than a subscription.
The sequence is read from the stream's leader when the subscription is made, at once for all subscriptions of a moment.
SUBACK waits for it only while a gap is not repaired yet: the repair reads messages that are stored after SUBACK, too.
Only recent subscriptions are noted: no gap reaches further back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from math import inf
from typing import TYPE_CHECKING, Final

from mqtt_nats.base import server_clock as natstime
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout

if TYPE_CHECKING:
    from mqtt_nats.backbone.connect import NatsLinks
    from mqtt_nats.base.tasks import Tasks
    from mqtt_nats.pubsub.subscribers import Filter, Member

BEGINNINGS_KEPT_S: Final = 40.0
"""Seconds for which beginnings are kept."""

SEQUENCE_UNREAD: Final = 1 << 62
"""Sequence that was not read yet: no message is behind it."""

GAPS_NEVER: Final = -1
"""A number of gaps that there never is."""

ONE_BEGINNING_S: Final = 0.001
"""Seconds in which subscriptions have one beginning."""

SEQUENCE_READ_PAUSE_S: Final = 0.05
"""Least seconds between two reads of the last sequence."""

SEQUENCE_READ_RETRY_S: Final = 1.0
"""Seconds after which the last sequence is read again when JetStream has not answered."""

SEQUENCE_WAIT_MOST_S: Final = 5.0
"""Most seconds for which SUBACK waits for the last sequence while a gap is not repaired yet."""

BEGINNINGS_WAITING_MOST: Final = 10_000
"""Maximum number of beginnings that wait for their sequence; of others, the time alone is known."""


class Beginning:
    """Beginning of subscriptions that were made in the same moment."""

    __slots__ = ("_gaps", "at", "exact", "last", "read_at")

    def __init__(self) -> None:
        self._gaps: int | None = None
        """Number of gaps when the first SUBACK left; None = none has left."""
        self.at = natstime.now()
        """Unix time in seconds, by nats-server's clock."""
        self.last = SEQUENCE_UNREAD
        """Last sequence of the stream, read afterwards."""
        self.read_at = inf
        """Unix time in seconds at which `last` was read."""
        self.exact = False
        """Whether every message up to `last` is older than the subscriptions, or has come."""

    def confirm(self, gaps: int) -> None:
        """Note that a SUBACK leaves; ``gaps``: number of gaps until now."""
        if self._gaps is None:
            self._gaps = gaps

    def read(self, last: int, gaps: int) -> None:
        """Set the last sequence of the stream; ``gaps``: number of gaps until now.

        What was stored before SUBACK is not owed. Behind a SUBACK messages may have been missed in a gap.
        """
        self.last, self.read_at, self.exact = last, natstime.now(), self._gaps in (None, gaps)

    def doubt(self) -> None:
        """Note that messages up to `last` may have come, and were dropped before they were delivered."""
        self._gaps, self.exact = GAPS_NEVER, False

    def covers(self, sequence: int, born: float) -> bool:
        """Return whether a stored message is for the subscriptions.

        Args:
            born: Unix time in seconds of its store.
        """
        return sequence > self.last or (not self.exact and born > self.at)


class Beginnings:
    """Beginnings of one gateway's recent subscriptions.

    Args:
        last: reads the last sequence of the stream from its leader.
    """

    def __init__(self, nats: NatsLinks, tasks: Tasks, last: Callable[[], Awaitable[int]]) -> None:
        self._nats, self._tasks, self._last = nats, tasks, last
        self._present: Beginning | None = None
        """Beginning of the subscriptions that are made now; None = there is none."""
        self._waiting: deque[Beginning] = deque(maxlen=BEGINNINGS_WAITING_MOST)
        """Beginnings whose sequence is not known, and is not being read."""
        self._reading = False
        self._noted: set[Filter] = set()

    def begin(self, found: Filter, member: Member, qos: int) -> None:
        """Note that a member's subscription begins now."""
        present = self._present
        if present is None or natstime.now() - present.at > ONE_BEGINNING_S:
            present = self._present = Beginning()
        found.begin(member, present)
        self._noted.add(found)
        if not qos or member.durable or (self._waiting and self._waiting[-1] is present):
            return
        self._waiting.append(present)
        if not self._reading:
            self._reading = True
            self._tasks.spawn(self._read(), "beginnings of subscriptions")

    async def _read(self) -> None:
        """Read the last sequence until no beginning waits for it."""
        try:
            while self._waiting:
                some = list(self._waiting)
                self._waiting.clear()
                self._present = None  # later subscriptions wait for the next read
                try:
                    last = await self._last()
                except (ApiError, NoResponders, RequestTimeout):
                    self._waiting.extendleft(reversed(some))
                    if self._nats.online.is_set():
                        await asyncio.sleep(SEQUENCE_READ_RETRY_S)
                    await self._nats.online.wait()
                    continue
                for one in some:
                    one.read(last, self._nats.lost_count)
                await asyncio.sleep(SEQUENCE_READ_PAUSE_S)
        finally:
            self._reading = False

    async def settle(self, member: Member, filters: Iterable[Filter]) -> None:
        """Wait until a member's subscriptions have their sequence, while a gap is not repaired yet.

        Called before SUBACK. When JetStream does not answer for long, SUBACK leaves, and the clock decides. A durable
        session reads what is stored by itself, and messages at QoS 0 are not stored.
        """
        if member.durable:
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + SEQUENCE_WAIT_MOST_S
        begun = [(found.beginnings or {}).get(member) for found in filters if found.members.get(member)]
        unread = [one for one in begun if one is not None and one.last == SEQUENCE_UNREAD]
        while unread and not self._repaired() and loop.time() < until:
            await asyncio.sleep(SEQUENCE_READ_PAUSE_S)
            unread = [one for one in unread if one.last == SEQUENCE_UNREAD]
        for one in unread:
            if self._repaired():
                one.confirm(self._nats.lost_count)
            else:
                one.doubt()

    def _repaired(self) -> bool:
        """Whether no gap has to be repaired."""
        return self._nats.steady

    def rotate(self) -> None:
        """Forget beginnings that are too old for any gap; called while there is no gap."""
        old = natstime.now() - BEGINNINGS_KEPT_S
        self._noted = {found for found in self._noted if found.forget_beginnings(old)}
