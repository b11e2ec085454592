# SPDX-License-Identifier: Apache-2.0
"""Costs of the positions of busy durable sessions: ``python -m benchmarks.positions``.

Each session gets messages at QoS 1, at a fixed rate, and acknowledges each. A NATS client stores them, as another
gateway would: the gateway that is measured delivers them and writes positions. Each row begins with a fresh gateway and
fresh nats-servers; with three, streams have three replicas.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import page, peers, proc
from benchmarks.absent import Reader
from benchmarks.durable_sessions import UNLIMITED
from benchmarks.generator.clients import Client, LoadError, Loop, connect_all
from benchmarks.job import CROWD_TIMEOUT
from benchmarks.natsclients import NatsRequester
from benchmarks.report import table
from benchmarks.runner import machine
from benchmarks.storing import Connection as Asking
from mqtt_streams.positions import PREFIX
from mqtt_streams.positions import STREAM as POSITIONS

SETTLE_S: Final = 3.0
"""Seconds with messages before anything is counted."""

COUNTED_S: Final = 3.0
"""Seconds, behind those that are measured, in which records are read to know their sizes: that takes CPU time."""

MOST_UNSTORED: Final = 10_000
"""Messages that wait to be stored; nats-server refuses more of a stream with replicas."""

TURN_S: Final = 0.005

PAYLOAD: Final = bytes(128)


class Row(NamedTuple):
    """Figures of one number of sessions."""

    servers: int
    sessions: int
    rate: float
    """Messages for each session in each second, as wanted."""
    arrived: float
    """Messages that all sessions have got in each second."""
    records: float
    """Positions that were stored in each second."""
    size: float
    """Bytes of one of them: subject, headers and payload."""
    effort: tuple[float, float]
    """CPU seconds of the gateway and all nats-servers for each message that has arrived."""
    busy: tuple[float, float, float]
    """Part of a core that the gateway, the busiest nats-server and the load generator take."""


class Storing(NatsRequester):
    """Has messages stored for sessions in turn, at a fixed rate."""

    def __init__(self, loop: Loop, port: int, sessions: int, rate: float) -> None:
        super().__init__(loop, (peers.HOST, port), "publisher", "bench.stored")
        self._sessions, self._rate, self._begun = sessions, rate, time.monotonic()
        self._sent = self._stored = 0

    def message(self, subject: bytes, headers: bytes, payload: bytes) -> None:
        if b'"seq"' not in payload:
            raise LoadError(f"a message was not stored: {(headers + payload).decode(errors='replace')}")
        self._stored += 1

    def go_on(self) -> None:
        """Send what is due by now."""
        due = int((time.monotonic() - self._begun) * self._rate)
        numbers = range(self._sent, min(due, self._stored + MOST_UNSTORED))
        self.send(b"".join(map(self._frame, numbers)))
        self._sent += len(numbers)

    def _frame(self, number: int) -> bytes:
        headers = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:%032x\r\n\r\n" % number
        subject = b"$MQTT.msgs.bench.positions.%06d.set" % (number % self._sessions)
        sizes = len(headers), len(headers) + len(PAYLOAD)
        return b"HPUB %b bench.stored %d %d\r\n%b%b\r\n" % (subject, *sizes, headers, PAYLOAD)


class Counting(NatsRequester):
    """Counts writes of positions and their bytes."""

    def __init__(self, loop: Loop, port: int) -> None:
        super().__init__(loop, (peers.HOST, port), "counter", f"{PREFIX}>")
        self.records = self.bytes = 0

    def message(self, subject: bytes, headers: bytes, payload: bytes) -> None:
        self.records += 1
        self.bytes += len(subject) + len(headers) + len(payload)


class _Point(NamedTuple):
    """Counters at one time."""

    at: float
    arrived: int
    last: int
    """Sequence of the last position: each write has one, though the stream keeps one record of each session."""
    gateway: float
    servers: tuple[float, ...]
    """CPU seconds of each nats-server, as of the gateway."""
    generator: float


class _Load:
    """Sessions that get messages while :meth:`serve` runs."""

    def __init__(self, broker: peers.Running, loop: Loop, sessions: int, rate: float) -> None:
        self._broker, self._loop = broker, loop
        self._lost: list[int] = []
        clients = [
            Client(f"positions{number:06}", f"bench/positions/{number:06}/+", 1, clean=False)
            for number in range(sessions)
        ]
        greetings = connect_all(loop, (peers.HOST, broker.port), clients, timeout=CROWD_TIMEOUT)
        self._readers = [Reader(one, number, self._lost) for number, one in enumerate(greetings)]
        self._storing = Storing(loop, broker.nats_port, sessions, sessions * rate)

    def serve(self, seconds: float) -> None:
        """Let messages come and be acknowledged."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._storing.go_on()
            self._loop.turn(TURN_S)
            if self._lost:
                raise LoadError(f"{len(self._lost)} sessions have lost their connections")

    def look(self) -> _Point:
        """Read all counters."""
        asking = Asking(self._broker.nats_port)
        try:
            asking.send(asking.ask(f"STREAM.INFO.{POSITIONS}"))
            last = int(asking.answer()["state"]["last_seq"])
        finally:
            asking.close()
        gateway, servers = (
            tuple(proc.cpu_seconds(pid) for label, pid in self._broker.processes.items() if label.startswith(program))
            for program in ("gateway", "nats-server")
        )
        arrived = sum(one.got for one in self._readers)
        return _Point(time.monotonic(), arrived, last, sum(gateway), servers, time.process_time())


def _command(ours: str, positions: str) -> str:
    return f"{ours} --session-positions {positions} {shlex.join(UNLIMITED)}"


def measure(
    sessions: int, rate: float, seconds: float, servers: int = 1, positions: str = "records",
    ours: str = peers.OURS_COMMAND,
) -> Row:  # fmt: skip
    """Measure one row.

    Args:
        rate: messages for each session in each second.
        positions: `session_positions` of the gateway.
        ours: the command that starts our gateway.
    """
    with peers.running("ours", _command(ours, positions), servers=servers) as broker:
        loop = Loop()
        try:
            load = _Load(broker, loop, sessions, rate)
            load.serve(SETTLE_S)
            begun = load.look()
            load.serve(seconds)
            ended = load.look()
            counting = Counting(loop, broker.nats_port)
            load.serve(COUNTED_S)
        finally:
            loop.close()
    took, arrived = ended.at - begun.at, ended.arrived - begun.arrived
    gateway, generator = ended.gateway - begun.gateway, ended.generator - begun.generator
    used = [now - then for now, then in zip(ended.servers, begun.servers, strict=True)]
    return Row(
        servers,
        sessions,
        rate,
        arrived / took,
        (ended.last - begun.last) / took,
        counting.bytes / counting.records if counting.records else math.nan,
        (gateway / arrived, sum(used) / arrived) if arrived else (math.nan, math.nan),
        (gateway / took, max(used) / took, generator / took),
    )


def document(rows: Sequence[Row], command: str, ours: str = peers.OURS_COMMAND) -> str:
    """Return the part of the page; ``ours`` is the command that starts our gateway."""
    lines = table(
        [
            ["servers", "sessions", "messages/s for each", "arrived/s", "positions/s", "bytes of each", "bytes/s",
             "CPU of a message: gateway, nats-servers", "busy: gateway, busiest nats-server, generator"],
            *(
                [
                    str(row.servers),
                    f"{row.sessions:,}",
                    f"{row.rate:g}",
                    f"{row.arrived:,.0f}",
                    f"{row.records:,.0f}",
                    f"{row.size:,.0f}",
                    f"{row.records * row.size:,.0f}",
                    f"{row.effort[0] * 1e6:,.0f} µs, {row.effort[1] * 1e6:,.0f} µs",
                    ", ".join(f"{part:.0%}" for part in row.busy),
                ]
                for row in rows
            ),
        ]
    )  # fmt: skip
    about = f"{machine(['ours', 'nats'], ours)}  \n`{command}`"
    return "\n".join(["## Positions of busy sessions", "", about, "", *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.positions", description=__doc__)
    parser.add_argument("--sessions", default="1000,5000", metavar="N[,N]", help="rows (%(default)s)")
    parser.add_argument("--rate", type=float, default=1.0, metavar="R", help="messages/s for each (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="that are measured (%(default)s)")
    parser.add_argument("--servers", type=int, default=1, metavar="N", help="nats-servers of a cluster (%(default)s)")
    parser.add_argument("--positions", default="records", help="`session_positions` (%(default)s)")
    parser.add_argument("--ours", default=peers.OURS_COMMAND, metavar="COMMAND", help="default: %(default)s")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as a part of this page")
    options = parser.parse_args(arguments)
    rows = []
    for number in map(int, options.sessions.split(",")):
        rows.append(measure(number, options.rate, options.seconds, options.servers, options.positions, options.ours))
        print(rows[-1], flush=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = shlex.join(["python", "-m", "benchmarks.positions", *given]).replace(str(Path.cwd()), "$PWD")
    text = document(rows, command, options.ours)
    print("\n" + text)
    if options.report:
        page.put(options.report, "How cost grows", "growth positions", text)


if __name__ == "__main__":
    main()
