# SPDX-License-Identifier: Apache-2.0
"""Costs of moves of durable consumers in nats-server: ``python -m benchmarks.consumer_moves``.

Each consumer stands for an absent session, with a filter of its own; nobody listens to it. A move sets it to one of the
messages of its filter: by ``CONSUMER.RESET`` (nats-server 2.14), or by its deletion and a creation with that start
sequence. A position far before the end of the stream costs more (``--messages``, ``--among``). Each row begins with
fresh nats-servers; with three, the stream and the consumers have three replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import nats
import nats.js.errors

from benchmarks import page, peers, proc
from benchmarks.generator.clients import Loop
from benchmarks.generator.packets import DeliveryError
from benchmarks.natsclients import NatsRequester
from benchmarks.report import table
from benchmarks.runner import machine
from benchmarks.storing import WINDOW, Connection, NobodyListens, message
from mqtt_streams.consumers import ConsumerRef

STREAM: Final = "moved"

AT_ONCE: Final = 64
"""Moves under way while as many as possible are made; before that, one."""

SETTLE_S: Final = 2.0
"""Seconds after the creation of the consumers, before anything is measured."""

IDLE_S: Final = 3.0
"""Seconds in which idle nats-servers are watched: replicas of consumers take CPU time without any move."""

MOST: Final = 200
"""Moves under way at a fixed rate; more are late from then on."""

PATIENCE_S: Final = 20.0
"""Seconds until a stream can be made, the last moves of a phase are answered, or a consumer says where it is."""

KEEPS_UP: Final = 0.95
"""Part of the moves of a fixed rate that are done in the time, if nats-server keeps up."""

CHECKED: Final = 50
"""Consumers of which it is asked in the end where they are."""

Requests = Iterator[tuple[str, dict[str, object]]]
"""Requests to the JetStream API, each with its body; each is sent when the one before is answered."""


class Pace(NamedTuple):
    """How moves of one phase went."""

    rate: float
    """Moves in each second."""
    effort: float
    """CPU seconds of all nats-servers for each move, without what they take while idle."""
    median: float
    """Seconds from when a move was due until it was done."""
    p99: float


class Row(NamedTuple):
    """Figures of one way to move consumers."""

    servers: int
    way: str
    idle: float
    """Part of a core that all nats-servers take without moves."""
    alone: Pace
    """With one move under way."""
    many: Pace
    """With `AT_ONCE` moves under way."""
    wanted: float
    """Moves in each second of the phase with a fixed rate."""
    steady: Pace
    failures: str
    """Answers that were no success, each with its number; empty: none."""

    @property
    def keeps_up(self) -> bool:
        """Whether nats-server does as many moves as are wanted."""
        return self.steady.rate >= KEEPS_UP * self.wanted


class Sizes(NamedTuple):
    """How much there is of everything."""

    consumers: int
    messages: int
    """Stored messages of each consumer's filter; the stream has them in turn."""
    among: int
    """Consumers are moved to one of so many last messages of their filters."""
    seconds: float
    """Of each of three phases."""
    rate: float
    """Moves in each second of the third phase."""


def _create(number: int, sequence: int) -> Requests:
    one = ConsumerRef(f"c{number}", f"bench.deliver.{number}", f"{STREAM}.{number}.set", 1024, start_seq=sequence)
    body: dict[str, object] = {"stream_name": STREAM, "config": one.to_config(), "action": "create"}
    yield f"CONSUMER.DURABLE.CREATE.{STREAM}.c{number}", body


def _reset(number: int, sequence: int) -> Requests:
    yield f"CONSUMER.RESET.{STREAM}.c{number}", {"seq": sequence}


def _recreate(number: int, sequence: int) -> Requests:
    yield f"CONSUMER.DELETE.{STREAM}.c{number}", {}
    yield from _create(number, sequence)


WAYS: Final[dict[str, Callable[[int, int], Requests]]] = {"reset": _reset, "delete and create": _recreate}


class _Move:
    """A move that is under way."""

    __slots__ = ("due", "failed", "number", "requests", "sequence")

    def __init__(self, number: int, sequence: int, requests: Requests, due: float) -> None:
        self.number, self.sequence, self.requests, self.due = number, sequence, requests, due
        self.failed = False


class Mover(NatsRequester):
    """Moves consumers, or makes them."""

    def __init__(self, loop: Loop, port: int) -> None:
        super().__init__(loop, (peers.HOST, port), "mover", "bench.answer.*")
        self.busy: set[int] = set()
        """Consumers whose moves are under way."""
        self.given_up: set[int] = set()
        """Consumers that had a move without an answer: it may be made at any time."""
        self.took: list[float] = []
        """Seconds of moves that are done."""
        self.last = 0.0
        """When the last of them was done (`time.monotonic`)."""
        self.reached: dict[int, int] = {}
        """Sequences to which consumers were moved."""
        self.failures: Counter[str] = Counter()
        self._asked: dict[int, _Move] = {}
        self._requests = 0

    def begin(self, number: int, sequence: int, requests: Requests, due: float) -> None:
        """Move a consumer; ``due``: when that should have begun (`time.monotonic`)."""
        self.busy.add(number)
        self.reached.pop(number, None)
        self._go_on(_Move(number, sequence, requests, due))

    def _go_on(self, move: _Move) -> None:
        following = next(move.requests, None)
        if following is not None:
            subject, body = following
            data = json.dumps(body).encode()
            self._requests += 1
            self._asked[self._requests] = move
            head = f"PUB $JS.API.{subject} bench.answer.{self._requests} {len(data)}\r\n"
            self.send(head.encode() + data + b"\r\n")
            return
        self.busy.discard(move.number)
        if not move.failed:
            self.last = time.monotonic()
            self.took.append(self.last - move.due)
            self.reached[move.number] = move.sequence

    def message(self, subject: bytes, headers: bytes, payload: bytes) -> None:
        move = self._asked.pop(int(subject.rpartition(b".")[2]), None)
        if move is None:  # given up
            return
        answer = json.loads(payload) if payload else {"error": {"description": "no responders"}}
        if "error" in answer:
            self.failures[answer["error"]["description"]] += 1
            move.failed = True
        self._go_on(move)

    def finish(self) -> None:
        """Wait for all moves that are under way, and give up those that are not answered."""
        until = time.monotonic() + PATIENCE_S
        while self.busy and time.monotonic() < until:
            self.loop.turn(0.1)
        if self.busy:
            self.failures["no answer"] += len(self.busy)
            self.given_up |= self.busy
            self.busy.clear()
            self._asked.clear()


class _Moves:
    """Moves of all consumers in turn, each to the next message of its filter."""

    def __init__(self, mover: Mover, pids: Sequence[int], way: str, sizes: Sizes) -> None:
        self._mover, self._pids, self._way = mover, pids, WAYS[way]
        self._sizes, self._begun, self.idle = sizes, 0, 0.0

    def _cpu(self) -> float:
        return sum(map(proc.cpu_seconds, self._pids))

    def rest(self) -> None:
        """Find out what nats-servers take while idle."""
        begun, spent = time.monotonic(), self._cpu()
        time.sleep(IDLE_S)
        self.idle = (self._cpu() - spent) / (time.monotonic() - begun)

    def _begin(self, due: float) -> bool:
        sizes = self._sizes
        turn, number = divmod(self._begun, sizes.consumers)
        if number in self._mover.busy:
            return False
        before = sizes.messages - sizes.among + (turn + 1) % sizes.among
        sequence = before * sizes.consumers + number + 1
        self._mover.begin(number, sequence, self._way(number, sequence), due)
        self._begun += 1
        return True

    def pace(self, seconds: float, *, at_once: int = 0, rate: float = 0.0) -> Pace:
        """Keep ``at_once`` moves under way, or begin moves at a fixed rate, as far as `MOST` are enough."""
        mover, sent = self._mover, 0
        mover.took.clear()
        spent, begun = self._cpu(), time.monotonic()
        while (now := time.monotonic()) < begun + seconds:
            if rate:
                while sent < (now - begun) * rate and len(mover.busy) < MOST and self._begin(begun + sent / rate):
                    sent += 1
            else:
                while len(mover.busy) < at_once and self._begin(now):
                    pass
            mover.loop.turn(0.001)
        mover.finish()
        took = sorted(mover.took)
        if not took:
            return Pace(0.0, math.nan, math.nan, math.nan)
        used = self._cpu() - spent - self.idle * (time.monotonic() - begun)
        p99 = took[math.ceil(len(took) * 0.99) - 1]
        lasted = max(seconds, mover.last - begun)
        return Pace(len(took) / lasted, used / len(took), statistics.median(took), p99)


async def _make_stream(port: int, replicas: int) -> None:
    """Make the stream, as soon as a cluster has a leader."""
    client, until = await nats.connect(f"nats://{peers.HOST}:{port}"), time.monotonic() + PATIENCE_S
    try:
        while True:
            try:
                await client.jetstream().add_stream(
                    name=STREAM, subjects=[f"{STREAM}.>"], num_replicas=replicas, max_consumers=-1, allow_direct=True
                )
                return
            except nats.errors.Error:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.2)
    finally:
        await client.close()


def _publish(port: int, consumers: int, messages: int) -> None:
    """Store so many messages for each filter, in turn."""
    connection, total = Connection(port), consumers * messages
    try:
        _publish_first(connection)
        for start in range(1, total, WINDOW):
            some = range(start, min(total, start + WINDOW))
            connection.send(b"".join(message(f"{STREAM}.{one % consumers}.set", "answer.stored") for one in some))
            for one in some:
                if connection.answer()["seq"] != one + 1:
                    raise DeliveryError("messages were stored in another order")
    finally:
        connection.close()


def _publish_first(connection: Connection) -> None:
    """Store the first message, as soon as this server knows of the stream."""
    until = time.monotonic() + PATIENCE_S
    while True:
        connection.send(message(f"{STREAM}.0.set", "answer.stored"))
        try:
            if connection.answer()["seq"] != 1:
                raise DeliveryError("the stream is not empty")
            return
        except NobodyListens:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


async def _check(port: int, mover: Mover, consumers: int, messages: int) -> None:
    """Ask consumers whether they have those messages before them that they should have.

    A replica that is no leader yet may answer that there are none: it is asked again.

    Raises:
        DeliveryError: one has others.
    """
    client = await nats.connect(f"nats://{peers.HOST}:{port}")
    known = [number for number in mover.reached if number not in mover.given_up]
    try:
        for number in known[-CHECKED:]:
            expected, until = messages - (mover.reached[number] - 1) // consumers, time.monotonic() + PATIENCE_S
            while (found := (await client.jetstream().consumer_info(STREAM, f"c{number}")).num_pending) != expected:
                if time.monotonic() > until:
                    raise DeliveryError(f"{found} messages wait for consumer c{number}, and not {expected}")
                await asyncio.sleep(0.2)
    finally:
        await client.close()


def measure(servers: int, way: str, sizes: Sizes) -> Row:
    """Measure one row; ``way``: one of `WAYS`."""
    with peers.running("nats", servers=servers) as broker:
        port, loop = broker.nats_port, Loop()
        asyncio.run(_make_stream(port, servers))
        _publish(port, sizes.consumers, sizes.messages)
        try:
            mover = Mover(loop, port)
            for number in range(sizes.consumers):
                mover.begin(number, 1, _create(number, 1), time.monotonic())
                while len(mover.busy) >= AT_ONCE:
                    loop.turn(0.1)
            mover.finish()
            if mover.failures:
                raise DeliveryError(f"consumers were not made: {dict(mover.failures)}")
            time.sleep(SETTLE_S)
            moves = _Moves(mover, [*broker.processes.values()], way, sizes)
            moves.rest()
            alone, many = (moves.pace(sizes.seconds, at_once=number) for number in (1, AT_ONCE))
            steady = moves.pace(sizes.seconds, rate=sizes.rate)
            asyncio.run(_check(port, mover, sizes.consumers, sizes.messages))
        finally:
            loop.close()
    failures = ", ".join(f"{count:,} × {what}" for what, count in mover.failures.items())
    return Row(servers, way, moves.idle, alone, many, sizes.rate, steady, failures)


def document(rows: Sequence[Row], command: str) -> str:
    """Return the part of the page."""
    lines = table(
        [
            ["servers", "way", "nats-servers, idle", f"moves/s: 1, {AT_ONCE} under way", "nats-servers' CPU of a move",
             "moves/s at a fixed rate", "median, p99", "nats-servers' CPU of a move", "other answers"],
            *(
                [
                    str(row.servers),
                    row.way,
                    f"{row.idle:.1%}",
                    f"{row.alone.rate:,.0f}, {row.many.rate:,.0f}",
                    f"{row.alone.effort * 1e6:,.0f} µs, {row.many.effort * 1e6:,.0f} µs",
                    f"{row.steady.rate:,.0f} of {row.wanted:,.0f}: "
                    + ("keeps up" if row.keeps_up else "does not keep up"),
                    f"{row.steady.median * 1000:,.1f} ms, {row.steady.p99 * 1000:,.1f} ms",
                    f"{row.steady.effort * 1e6:,.0f} µs",
                    row.failures or "–",
                ]
                for row in rows
            ),
        ]
    )  # fmt: skip
    return "\n".join(["## Moves of consumers", "", f"{machine(['nats'])}  \n`{command}`", "", *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.consumer_moves", description=__doc__)
    parser.add_argument("--servers", default="1", metavar="N[,N]", help="nats-servers, of rows (%(default)s)")
    parser.add_argument("--consumers", type=int, default=1000, metavar="N", help="each with a filter (%(default)s)")
    parser.add_argument("--messages", type=int, default=10, metavar="N", help="of each filter (%(default)s)")
    parser.add_argument(
        "--among", type=int, default=2, metavar="N", help="move to one of so many last ones of a filter (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of each phase (%(default)s)")
    parser.add_argument("--rate", type=float, default=1000.0, metavar="N", help="moves/s, fixed (%(default)s)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as a part of this page")
    options = parser.parse_args(arguments)
    sizes = Sizes(options.consumers, options.messages, options.among, options.seconds, options.rate)
    if min(sizes) <= 0 or options.among > options.messages:
        parser.error("there has to be a consumer, a time, a rate, and a message, among those that there are")
    rows = []
    for servers in map(int, options.servers.split(",")):
        for way in WAYS:
            rows.append(measure(servers, way, sizes))
            print(rows[-1], flush=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    text = document(rows, shlex.join(["python", "-m", "benchmarks.consumer_moves", *given]))
    print("\n" + text)
    if options.report:
        page.put(options.report, "How cost grows", "growth consumer moves", text)


if __name__ == "__main__":
    main()
