# SPDX-License-Identifier: Apache-2.0
"""A client beside an event that concerns others: how long its messages take before the event and meanwhile."""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import Final, NamedTuple

from benchmarks import peers
from benchmarks.generator import packets
from benchmarks.generator.answers import packet_at
from benchmarks.generator.clients import Client, Connection, Greeting, Loop, connect_all
from benchmarks.generator.packets import Layout
from benchmarks.job import CROWD_TIMEOUT

PAUSE_S: Final = 0.02
"""Seconds between two publishes."""

QUIET_S: Final = 2.0
"""Seconds in which the bystander is watched before anything happens."""

TOPIC: Final = "bench/bystander/echo"
"""Of its messages."""

HEADS: Final = ("p99, longest of another client before", "meanwhile")
"""Columns of a table, for both `Delay` of an event."""

_PROCESSES: Final = multiprocessing.get_context("spawn")


class Trip(NamedTuple):
    """Message from its PUBLISH until it is back."""

    begun: float
    """Monotonic time in seconds."""
    seconds: float


class Delay(NamedTuple):
    """Round trips of some time, in seconds."""

    p99: float
    longest: float

    def __str__(self) -> str:
        return f"{self.p99 * 1000:.0f} ms, {self.longest * 1000:.0f} ms"


def percentile(trips: Sequence[float]) -> float:
    """Return the 99th percentile; 0 without trips."""
    return statistics.quantiles(trips, n=100, method="inclusive")[98] if len(trips) > 1 else sum(trips)


def delay(trips: Sequence[Trip], begin: float, end: float = math.inf) -> Delay:
    """Return the delay of the trips that began between two monotonic times in seconds.

    Raises:
        PeerError: there was none.
    """
    found = [one.seconds for one in trips if begin <= one.begun < end]
    if not found:
        raise peers.PeerError("the bystander has published nothing in the time that counts")
    return Delay(percentile(found), max(found))


class Echo(Connection):
    """Publishes to itself at QoS 1, and notes how long each message takes."""

    def __init__(self, greeting: Greeting) -> None:
        super().__init__(greeting.loop, greeting.sock, greeting.name)
        self.trips: list[Trip] = []
        self.sent: deque[float] = deque()
        """Monotonic times in seconds at which the messages were sent that are not back."""
        self._count = 0
        self._layout = Layout(TOPIC, 128, 1)
        self._template = bytearray(self._layout.template)
        self.loop.add(self)

    def publish(self) -> None:
        """Send the next message."""
        at = self._layout.packet_id
        self._template[at : at + 2] = (self._count % packets.PID_PERIOD + 1).to_bytes(2)
        self._count += 1
        self.sent.append(time.monotonic())
        self.send(bytes(self._template))

    def readable(self) -> None:
        end, start = self.fill(), 0
        while (found := packet_at(self.loop.view, start, end)) is not None:
            kind, body, start = found
            if kind & 0xF0 == packets.PUBLISH:
                at = 2 + int.from_bytes(body[:2])
                self.send(b"\x40\x02" + body[at : at + 2])
                begun = self.sent.popleft()
                self.trips.append(Trip(begun, time.monotonic() - begun))
        self.keep(start, end)


def _run(port: int, pipe: Pipe) -> None:
    """Publish again and again, however late the messages come back; send all trips whenever they are asked for."""
    loop = Loop()
    (greeting,) = connect_all(loop, (peers.HOST, port), [Client("bystander", TOPIC, 1)], timeout=CROWD_TIMEOUT)
    echo = Echo(greeting)
    while True:
        echo.publish()
        until = time.monotonic() + PAUSE_S
        while (left := until - time.monotonic()) > 0:
            loop.turn(left)
        if pipe.poll():
            pipe.recv()
            echo.publish()  # one at least since the event has begun, however short the event is
            while echo.sent:
                loop.turn(0.1)
            pipe.send(echo.trips)


class Bystander:
    """Client in a process of its own, so that nothing in this process delays it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def trips(self) -> list[Trip]:
        """Return all trips; those that have begun are waited for.

        Raises:
            PeerError: a message does not come back in `CROWD_TIMEOUT`, or the process has ended.
        """
        try:
            self._pipe.send(None)
            if not self._pipe.poll(CROWD_TIMEOUT):
                raise peers.PeerError(f"a message of the bystander is not back after {CROWD_TIMEOUT:.0f} s")
            trips: list[Trip] = self._pipe.recv()
        except (EOFError, OSError):
            raise peers.PeerError("the bystander has lost its connection") from None
        return trips


@contextmanager
def bystander(port: int) -> Iterator[Bystander]:
    """A client that publishes to itself at this port until the block ends; it is served when the block begins."""
    pipe, other = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_run, args=(port, other), daemon=True)
    process.start()
    other.close()
    try:
        client = Bystander(pipe)
        client.trips()
        yield client
    finally:
        process.kill()
        process.join()
        pipe.close()
