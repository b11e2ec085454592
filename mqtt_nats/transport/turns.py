# SPDX-License-Identifier: Apache-2.0
"""Turns of the event loop: for how long clients' packets are handled in one of them, and which clients are next.

`Hold` has the reasons for which nothing is read from a client, its turn among them.

What one read brings may take seconds: packets on topics that are new each, or with many receivers. So the packets of a
client are handled for `SLICE_S` at once, and those of all clients for `TURN_S` in a turn, and as long again for those
that have waited. A client that sends more than is handled at once, again and again, is busy: it comes after all others,
with what it has sent and with what it sends next. So who sends little waits for a turn, however much others send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mqtt_nats.transport.connection import Connection

TURN_S: Final = 0.01
"""Seconds in one turn of the event loop for what is read in it, and for what was read before."""

SLICE_S: Final = 0.005
"""Seconds for one client."""

EXCESS_S: Final = 1.0
"""Seconds in which a client makes up for having sent more than is handled at once; what is owed beyond is busy."""

BUSY_S: Final = 5.0
"""What it owes at most, in seconds."""

PACKETS: Final = 16
"""Packets that are handled without a look at the time, and messages of a run before the first look."""

GROWTH: Final = 4
"""Many times more messages of a run are handled before the next look."""

CLOCK_STEP: Final = 0.5
"""The clock is read this often (seconds), so something may be this much newer than its time says."""

STANDSTILL: Final = 1.0 + CLOCK_STEP
"""An event loop whose clock was not read for this long has stood still (seconds): rules.md#standstill."""


class Hold:
    """Why nothing is read from a client: bits, plain integers for speed."""

    HANDSHAKE: Final = 1
    """Its CONNECT is being answered."""
    WINDOW: Final = 2
    """Too much of what it sent is not stored yet."""
    NATS: Final = 4
    """NATS takes nothing."""
    OUTBOUND: Final = 8
    """It does not read what it asked for."""
    JOBS: Final = 16
    """It asks for more than is being done."""
    TURN: Final = 32
    """It has had its turn."""
    LEASE: Final = 64
    """Its session may be somebody else's."""
    STANDSTILL: Final = 128
    """The gateway stood still: the same, for all."""
    RATE: Final = 256
    """It has sent more than it may in such a time."""
    HOOKS: Final = 512
    """An async hook looks at what it has published."""
    ORDER: Final = 1024
    """Much of what it has sent waits for what it has sent before."""


KEPT: Final = Hold.STANDSTILL | Hold.LEASE | Hold.HANDSHAKE | Hold.TURN
"""While one of these holds, what is read is kept as it is."""

MOVED: Final = Hold.STANDSTILL | Hold.LEASE
"""While one of these holds, nothing more is handled of what was read before: the session may be somebody else's."""


class Turns:
    """The present turn, and the connections that wait for one."""

    __slots__ = ("_begun", "_busy", "_fresh", "_others", "_present", "_schedule", "_until")

    def __init__(self, schedule: Callable[[Callable[[], None]], object]) -> None:
        """``schedule`` runs a function at the end of the turn (``loop.call_soon``)."""
        self._schedule = schedule
        self._begun = False
        self._until = 0.0
        self._fresh: deque[Connection] = deque()
        """Those that are not busy, and of which nothing has been handled yet in their turn."""
        self._others: deque[Connection] = deque()
        self._busy: dict[Connection, float] = {}
        """When those that have sent more than is handled at once have made up for it."""
        self._present: Connection | None = None
        """Whose turn it is."""

    def until(self, now: float, connection: Connection) -> float:
        """Up to when a client's packets may be handled that are read now; 0 = they wait for another turn."""
        if not self._begun:
            self._begin(now)
        if now >= self._until or (self._busy and connection is not self._present and self._is_busy(connection, now)):
            return 0.0
        return now + SLICE_S

    def wait(self, connection: Connection, fresh: bool) -> None:
        """Call :meth:`Connection.go_on` when it is the connection's turn; ``fresh``: nothing has been handled yet."""
        now = monotonic()
        (self._fresh if fresh and not self._is_busy(connection, now) else self._others).append(connection)
        if not self._begun:
            self._begin(now)

    def exceeded(self, connection: Connection) -> None:
        """A client has sent more than is handled at once; again, and it comes after the others for a while."""
        now = monotonic()
        self._busy[connection] = min(max(self._busy.pop(connection, 0.0), now) + EXCESS_S, now + BUSY_S)

    def _is_busy(self, connection: Connection, now: float) -> bool:
        return self._busy.get(connection, 0.0) > now + EXCESS_S

    @property
    def waiting(self) -> int:
        """How many connections wait."""
        return len(self._fresh) + len(self._others)

    def _begin(self, now: float) -> None:
        busy = self._busy  # what was changed longest ago is the first
        while busy and now >= busy[first := next(iter(busy))]:
            del busy[first]
        self._begun = True
        self._until = now + TURN_S
        self._schedule(self._end)

    def _end(self) -> None:
        """The turn is over: go on with those that wait, one at least of those that had a turn before."""
        self._begun = False
        fresh, others = self._fresh, self._others
        if not fresh and not others:
            return
        now = monotonic()
        end = now + TURN_S
        while fresh and now < end:
            fresh.popleft().go_on(now + SLICE_S)
            now = monotonic()
        for _ in range(len(others)):
            self._present = others.popleft()
            self._present.go_on(now + SLICE_S)
            now = monotonic()
            if now >= end:
                break
        self._present = None
        if (fresh or others) and not self._begun:
            self._begin(now)


class Clock:
    """The event loop's time, read once per tick: precise enough for deadlines, free for the message path."""

    __slots__ = ("now", "read", "stood_still")

    def __init__(self, now: float) -> None:
        self.now = now
        self.read = monotonic()
        """When it was read last, in seconds of the system's own monotonic clock."""
        self.stood_still: Callable[[], None] = lambda: None
        """Called by who finds that it was not read for longer than `STANDSTILL`."""
