# SPDX-License-Identifier: Apache-2.0
"""Turns of the event loop: the time for handling clients' packets in a turn, and the slices of the clients.

`Hold` has the reasons for which nothing is read from a client, waiting for a slice among them.

To handle the packets of one read may take seconds: each on a new topic, or with many receivers. So the packets of one
client are handled for `SLICE_S` at once, and the packets of all clients for `TURN_S` in a turn. Then the waiting
clients have a slice each, and after these the clients whose CONNECT is not read yet: thousands may connect at once. A
client that again and again sends more than is handled at once is busy: all other clients are served before it. So a
client that sends little waits for one slice only, however much other clients send. The bytes that the packets of a turn
have caused are sent before packets of waiting clients are handled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from mqtt_nats.transport.connection import Connection

T = TypeVar("T")

TURN_S: Final = 0.02
"""Seconds in one turn of the event loop for packets of clients, and as many again for clients that wait for a slice.

A client whose packets do not fit waits, which costs two system calls: 500 clients with a message each fit. Clients that
had a slice before get the time that is left, at least `SLICE_S`.
"""

SLICE_S: Final = 0.005
"""Maximum seconds in a turn for one client, for the ends of connections that wait, and for long work of jobs."""

SHARE_S: Final = 0.001
"""Minimum seconds for one client in a turn, where many clients wait and share `TURN_S`."""

EXCESS_S: Final = 1.0
"""Seconds that an excess costs a client; a client that owes more than this is busy."""

BUSY_S: Final = 5.0
"""Maximum seconds that a client owes."""

ITEMS_PER_STEP: Final = 8
"""Items, as filters that are added to the routing table, in one step of long work."""

PACKETS: Final = 16
"""Number of packets handled between two looks at the clock, and of messages of a run before the first look."""

GROWTH: Final = 4
"""Factor by which the number of messages of a run grows between two looks at the clock."""

CLOCK_STEP: Final = 0.5
"""Seconds between two updates of the clock: real times may be later than its time by as much."""

STANDSTILL: Final = 1.0 + CLOCK_STEP
"""Seconds without an update of the clock after which the event loop has stood still: lifecycle.md#standstill."""


class Hold:
    """Reasons not to read from a client, as bits; plain integers for speed."""

    HANDSHAKE: Final = 1
    """The client's CONNECT is being answered."""
    WINDOW: Final = 2
    """Too many messages of the client are not stored yet."""
    NATS: Final = 4
    """NATS takes no more data."""
    OUTBOUND: Final = 8
    """The client does not read the data sent to it."""
    JOBS: Final = 16
    """Too many requests of the client wait."""
    TURN: Final = 32
    """The client has had its slice of the turn."""
    LEASE: Final = 64
    """Another connection may own the client's session."""
    STANDSTILL: Final = 128
    """The gateway stood still: other connections may own any of its sessions."""
    RATE: Final = 256
    """The client has exceeded its rate."""
    HOOKS: Final = 512
    """An async hook handles a message of the client."""
    ORDER: Final = 1024
    """Too many of its packets wait for earlier packets to take effect."""


KEPT: Final = Hold.STANDSTILL | Hold.LEASE | Hold.HANDSHAKE | Hold.TURN
"""Reasons for which read data is kept unparsed."""

MOVED: Final = Hold.STANDSTILL | Hold.LEASE
"""Reasons for which no packets are handled, not even packets read before: the session may have another owner."""


class Turns:
    """The present turn, and the connections that wait for a slice of a turn."""

    __slots__ = (
        "_begun",
        "_busy",
        "_fresh",
        "_jobs",
        "_leave",
        "_lost",
        "_new",
        "_others",
        "_present",
        "_schedule",
        "_share",
        "_until",
    )

    def __init__(
        self, schedule: Callable[[Callable[[], None]], object], leave: Callable[[], None] = lambda: None
    ) -> None:
        """``schedule`` runs a function at the end of the turn (``loop.call_soon``).

        Args:
            leave: writes what packets have caused to NATS and to clients; called before waiting packets are handled.
        """
        self._schedule = schedule
        self._leave = leave
        self._begun = False
        self._until = 0.0
        self._fresh: deque[Connection] = deque()
        """Waiting connections that are not busy and have had no slice since they were read."""
        self._others: deque[Connection] = deque()
        """Waiting connections that are busy, or of which packets were handled already."""
        self._new: deque[Connection] = deque()
        """Waiting connections whose CONNECT is not read yet."""
        self._lost: deque[Connection] = deque()
        """Connections whose end waits."""
        self._jobs: deque[tuple[Iterator[None], asyncio.Future[None]]] = deque()
        """Steps of jobs that take long, with the futures for which the jobs wait."""
        self._busy: dict[Connection, float] = {}
        """Time at which a connection's excess is balanced, on the system's monotonic clock in seconds."""
        self._present: Connection | None = None
        """Connection that has its slice now; None = no such connection."""
        self._share = SLICE_S
        """Seconds for one client in the present turn."""

    def until(self, now: float, connection: Connection) -> float:
        """Return the end of the time for packets that are read now, monotonic; 0 = they wait for another turn."""
        if connection is self._present:
            return now + self._share
        if not self._begun:
            self._begin(now)
        if now >= self._until or (self._busy and self._is_busy(connection, now)):
            return 0.0
        return now + self._share

    def wait(self, connection: Connection, fresh: bool, *, new: bool = False) -> None:
        """Call :meth:`Connection.go_on` in the connection's slice.

        Args:
            fresh: no packet of the connection was handled in its present slice.
            new: its CONNECT is not read yet.
        """
        now = monotonic()
        others = self._fresh if fresh and not self._is_busy(connection, now) else self._others
        (self._new if new else others).append(connection)
        if not self._begun:
            self._begin(now)

    def exceeded(self, connection: Connection) -> None:
        """Note that a client has sent more than is handled at once; a second time within `EXCESS_S` makes it busy."""
        now = monotonic()
        self._busy[connection] = min(max(self._busy.pop(connection, 0.0), now) + EXCESS_S, now + BUSY_S)

    def _is_busy(self, connection: Connection, now: float) -> bool:
        return self._busy.get(connection, 0.0) > now + EXCESS_S

    def may_end(self, connection: Connection) -> bool:
        """Whether there is time for the end of a connection; else a later turn calls `Connection.socket_closed`."""
        now = monotonic()
        if not self._begun:
            self._begin(now)
        if now < self._until and not self._lost:
            return True
        self._lost.append(connection)
        return False

    async def run(self, steps: Iterator[None]) -> None:
        """Run long work of a job, in steps: all jobs have `SLICE_S` in a turn; without others the first step is now.

        Raises:
            Exception: what a step raises.
        """
        if not self._jobs:
            for _ in steps:
                break
            else:
                return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.append((steps, done))
        if not self._begun:
            self._begin(monotonic())
        await done

    @property
    def waiting(self) -> int:
        """Number of waiting connections."""
        return len(self._fresh) + len(self._others) + len(self._new)

    def _begin(self, now: float) -> None:
        busy = self._busy  # the entry that was changed first is the first
        while busy and now >= busy[first := next(iter(busy))]:
            del busy[first]
        self._begun = True
        self._until = now + TURN_S
        self._share = min(SLICE_S, max(SHARE_S, TURN_S / (self.waiting or 1)))
        self._schedule(self._end)

    def _end(self) -> None:
        """End the turn: serve waiting connections, at least one of each kind, and one job."""
        try:
            if self._waited_for():
                self._leave()
                self._serve()
        finally:
            if self._waited_for():
                self._begin(monotonic())
            else:
                self._begun = False

    def _waited_for(self) -> bool:
        """Whether anything waits for a slice or for time in a turn."""
        return bool(self._fresh or self._others or self._new or self._lost or self._jobs)

    def _serve(self) -> None:
        fresh, others, new, lost = self._fresh, self._others, self._new, self._lost
        now = monotonic()
        end = now + TURN_S
        while fresh and now < end:
            now = self._go_on(fresh.popleft(), now)
        end = max(self._until, now + SLICE_S)
        for _ in range(len(others)):
            now = self._go_on(others.popleft(), now)
            if now >= end:
                break
        end = now + SLICE_S
        for _ in range(len(new)):
            now = self._go_on(new.popleft(), now)
            if now >= end:
                break
        end = now + SLICE_S
        while lost:
            lost.popleft().socket_closed()
            now = monotonic()
            if now >= end:
                break
        end = now + SLICE_S
        while self._jobs and now < end:
            self._step()
            now = monotonic()

    def _go_on(self, connection: Connection, now: float) -> float:
        """Give a connection its slice of the turn; return the time afterwards."""
        self._present = connection
        try:
            connection.go_on(now + self._share)
        finally:
            self._present = None
        return monotonic()

    def _step(self) -> None:
        """Make the next step of the first job, which then is the last."""
        steps, done = self._jobs.popleft()
        if done.done():  # the job was cancelled
            return
        failure: Exception | None = None
        try:
            next(steps)
        except StopIteration:
            pass
        except Exception as error:
            failure = error
        else:
            self._jobs.append((steps, done))
            return
        if done.done():  # the step has cancelled its own job, as the end of a connection does
            return
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(failure)


def in_steps(items: Iterable[T], work: Callable[[T], None]) -> Iterator[None]:
    """Return the steps of work on many items, for :meth:`Turns.run`."""
    for at, item in enumerate(items):
        if at and not at % ITEMS_PER_STEP:
            yield
        work(item)


class TimingWheel(Generic[T]):
    """Items with a due time each, in buckets of `CLOCK_STEP`: no walk over all items finds those that are due."""

    __slots__ = ("_buckets", "_next", "_places")

    def __init__(self) -> None:
        self._buckets: dict[int, dict[T, None]] = {}
        """Items by the number of their bucket: the number of `CLOCK_STEP` in the loop time."""
        self._places: dict[T, int] = {}
        self._next = 0
        """Number of the first bucket that :meth:`due` has not emptied."""

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def put(self, item: T, at: float) -> None:
        """Make an item due at ``at``, loop time in seconds rounded down to `CLOCK_STEP`; a former time is forgotten."""
        self.discard(item)
        self._places[item] = place = max(int(at / CLOCK_STEP), self._next)
        self._buckets.setdefault(place, {})[item] = None

    def discard(self, item: T) -> None:
        """Remove an item, if it is there."""
        place = self._places.pop(item, None)
        if place is not None:
            bucket = self._buckets[place]
            del bucket[item]
            if not bucket:
                del self._buckets[place]

    def due(self, now: float) -> list[T]:
        """Remove and return the items that are due at ``now``, loop time in seconds; the earliest come first."""
        last = int(now / CLOCK_STEP)
        places: Iterable[int] = range(self._next, last + 1)
        if last - self._next > len(self._buckets):
            places = sorted(one for one in self._buckets if one <= last)
        found = [item for place in places for item in self._buckets.pop(place, ())]
        for item in found:
            del self._places[item]
        self._next = max(self._next, last + 1)
        return found


class Clock:
    """Clock with the event loop's time, updated once per tick: precise enough for deadlines, free to read."""

    __slots__ = ("now", "read", "stood_still")

    def __init__(self, now: float) -> None:
        self.now = now
        self.read = monotonic()
        """Time of the last update, on the system's monotonic clock in seconds."""
        self.stood_still: Callable[[], None] = lambda: None
        """Function called when code finds that the last update is older than `STANDSTILL`."""

    def set(self, now: float) -> None:
        """Set the time to ``now``, loop time in seconds."""
        self.now = now

    def touch(self) -> None:
        """Note that the clock is kept: the process does not stand still."""
        self.read = monotonic()

    def call_on_standstill(self, stood_still: Callable[[], None]) -> None:
        """Call a function when code finds that the last update is older than `STANDSTILL`."""
        self.stood_still = stood_still
