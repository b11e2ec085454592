# SPDX-License-Identifier: Apache-2.0
"""Absent durable sessions by `session_positions`, and their return: ``python -m benchmarks.absent``.

Each row begins with a fresh gateway and fresh nats-servers. Each session has one filter at QoS 1. All times are wall
times: other work on the machine makes them longer; CPU times are those of the processes alone. With ``--servers 3``
streams have three replicas, and the figures of nats-server are those of one of the three, on average. While many return
at once, another client publishes to itself at QoS 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import nats

from benchmarks import bystander, crowd, page, peers, proc
from benchmarks.durable_sessions import UNLIMITED, make_absent
from benchmarks.generator import packets
from benchmarks.generator.answers import packet_at
from benchmarks.generator.clients import Client, Connection, Greeting, LoadError, Loop, connect_all
from benchmarks.generator.packets import Layout
from benchmarks.job import CROWD_TIMEOUT
from benchmarks.report import table
from benchmarks.runner import machine
from benchmarks.sizing import Sender
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.positions import STREAM as POSITIONS
from mqtt_streams.sessions import STREAM as SESSIONS

IDLE: Final = 10.0
"""Seconds in which the idle processes are watched."""

SETTLE: Final = 3.0
"""Seconds in which positions are written, and consumers that are not needed removed."""

MISSED: Final = 10
"""Messages that each session misses."""

ALONE: Final = 20
"""Sessions that return one after the other."""

TOPIC: Final = "bench/absent/000000/set"
"""Of messages; the digits are the session."""


class Back(NamedTuple):
    """Figures of sessions that return at once."""

    sessions: int
    took: float
    """Seconds until all have had their messages."""
    again: int
    """How often one of them had to connect again, as JetStream had not answered in time."""
    effort: tuple[float, float]
    """CPU time of the gateway and nats-server for each of them, in seconds."""
    before: bystander.Delay
    """Messages of another client before they return."""
    meanwhile: bystander.Delay
    """The same while they return."""


class Row(NamedTuple):
    """Figures of one row."""

    servers: int
    """nats-servers."""
    sessions: int
    positions: str
    made: float
    """Sessions made in each second: CONNECT, SUBSCRIBE, SUBACK, DISCONNECT."""
    effort: tuple[float, float]
    """CPU time of the gateway and nats-server for each of them, in seconds."""
    memory: float
    """Bytes of nats-server's memory for each session."""
    disk: float
    """Bytes that the file system takes for each session."""
    records: float
    """Bytes of both records of each session, as JetStream counts them."""
    consumers: int
    """Consumers of all streams while all are absent."""
    idle: tuple[float, float]
    """Part of a core that the gateway and nats-server take while all are absent."""
    restart: tuple[float, float]
    """Wall time and CPU time until the first nats-server serves again, with all replicas current, in seconds."""
    alone: float
    """Seconds from connect() to CONNACK of one that returns, and has missed nothing: the median."""
    back: Back


class Reader(Connection):
    """Acknowledges messages at QoS 1, and counts them.

    Args:
        number: of the session; appended to `lost` when the connection is lost.
        got: messages that earlier connections of the session have had.
    """

    def __init__(self, greeting: Greeting, number: int, lost: list[int], got: int = 0) -> None:
        super().__init__(greeting.loop, greeting.sock, greeting.name)
        self.rest, self.number, self.got, self._lost = greeting.rest, number, got, lost
        self.loop.add(self)
        if self.rest:  # messages that came in one read with CONNACK
            self.loop.buffer[: len(self.rest)] = self.rest
            self._take(len(self.rest))

    def readable(self) -> None:
        try:
            self._take(self.fill())
        except LoadError:  # the gateway has closed it, as NATS did not answer in time
            self._lost.append(self.number)
            self.loop.epoll.unregister(self.fd)
            del self.loop.connections[self.fd]
            self.sock.close()

    def _take(self, end: int) -> None:
        start, acks = 0, bytearray()
        while (found := packet_at(self.loop.view, start, end)) is not None:
            kind, body, start = found
            if kind & 0xF0 != packets.PUBLISH:
                raise packets.DeliveryError(f"{self.name}: unexpected packet 0x{kind:02x}")
            at = 2 + int.from_bytes(body[:2])
            acks += b"\x40\x02" + body[at : at + 2]
            self.got += 1
        self.keep(start, end)
        if acks:
            self.send(acks)


def _clients(numbers: range) -> Iterator[Client]:
    for number in numbers:
        yield Client(f"absent{number:06}", f"bench/absent/{number:06}/+", 1, clean=False)


def _make(broker: peers.Running, numbers: range) -> float:
    return make_absent([broker.port], _clients(numbers))


def _publish(broker: peers.Running, sessions: int) -> None:
    """Publish `MISSED` messages for each of the first sessions."""
    layout = Layout(TOPIC, 128, 1, None)
    digits = layout.template.index(b"000000")
    loop = Loop()
    try:
        (greeting,) = connect_all(loop, (peers.HOST, broker.port), [Client("sender")], timeout=CROWD_TIMEOUT)
        sender, template, sent = Sender(greeting), bytearray(layout.template), 0
        until, total = time.monotonic() + CROWD_TIMEOUT, sessions * MISSED
        while sender.acked < total:
            while sent < min(total, sender.acked + 50):
                template[digits : digits + 6] = b"%06d" % (sent % sessions)
                template[layout.packet_id : layout.packet_id + 2] = (sent % packets.PID_PERIOD + 1).to_bytes(2)
                sender.send(bytes(template))
                sent += 1
            loop.turn(0.1)
            if time.monotonic() > until:
                raise TimeoutError(f"only {sender.acked:,} messages were acknowledged")
    finally:
        loop.close()


def _return_alone(broker: peers.Running, numbers: range) -> float:
    """Return the median of the seconds until CONNACK."""
    took = []
    for client in _clients(numbers):
        loop, begun = Loop(), time.monotonic()
        connect_all(loop, (peers.HOST, broker.port), [replace(client, topic_filter="")], timeout=CROWD_TIMEOUT)
        took.append(time.monotonic() - begun)
        loop.close()
    return statistics.median(took)


def _return_all(broker: peers.Running, sessions: int) -> int:
    """Let sessions return at once until all have had their messages; return how often one had to connect again."""
    loop, until, again = Loop(), time.monotonic() + CROWD_TIMEOUT, 0
    address, lost = (peers.HOST, broker.port), list[int]()
    try:
        clients = [replace(one, topic_filter="") for one in _clients(range(sessions))]
        greetings = connect_all(loop, address, clients, timeout=CROWD_TIMEOUT, at_once=sessions)
        if not all(one.present for one in greetings):
            raise packets.DeliveryError("a session was lost")
        readers = [Reader(one, number, lost) for number, one in enumerate(greetings)]
        served = 0
        while served < sessions:
            loop.turn(0.1)
            while lost:
                number = lost.pop()
                (greeting,) = connect_all(loop, address, [clients[number]], timeout=CROWD_TIMEOUT)
                again, readers[number] = again + 1, Reader(greeting, number, lost, readers[number].got)
            while served < sessions and readers[served].got >= MISSED:  # each is looked at once, not at every turn
                served += 1
            if time.monotonic() > until:
                late = sum(one.got < MISSED for one in readers)
                raise TimeoutError(f"{late} of {sessions} sessions have not had their messages")
        if not again and any(one.got > MISSED for one in readers):
            raise packets.DeliveryError("a message came twice")
        return again
    finally:
        loop.close()


def _returning(broker: peers.Running, sessions: int) -> Back:
    """Measure the return of the first sessions, each with messages that it has missed."""
    _publish(broker, sessions)
    with bystander.bystander(broker.port) as client:
        time.sleep(bystander.QUIET_S)
        begun, spent = time.monotonic(), _cpu(broker)
        again = _return_all(broker, sessions)
        took, effort = time.monotonic() - begun, _less(_cpu(broker), spent, sessions)
        trips = client.trips()
    before = bystander.delay(trips, begun - bystander.QUIET_S, begun)
    return Back(sessions, took, again, effort, before, bystander.delay(trips, begun))


async def _stored(broker: peers.Running) -> tuple[int, int]:
    """Return the bytes of the records of all sessions, and the number of consumers of messages."""
    client = await nats.connect(f"nats://{peers.HOST}:{broker.nats_port}")
    try:
        stream = client.jetstream()
        infos = [await stream.stream_info(name) for name in (SESSIONS, POSITIONS)]
        info = await stream.stream_info(MESSAGES)
        return sum(one.state.bytes for one in infos), info.state.consumer_count
    finally:
        await client.close()


async def _current(broker: peers.Running) -> bool:
    """Return whether each stream has a leader, and all of its replicas are where the leader is."""
    client = await nats.connect(f"nats://{peers.HOST}:{broker.nats_port}")
    try:
        for one in await client.jetstream().streams_info():
            replicas = one.cluster.replicas or [] if one.cluster is not None else []
            if one.cluster is not None and not (one.cluster.leader and all(each.current for each in replicas)):
                return False
        return True
    except nats.errors.Error:  # JetStream has no leader yet
        return False
    finally:
        await client.close()


def _of(broker: peers.Running, program: str) -> list[int]:
    """Return the process ids of a program."""
    return [pid for label, pid in broker.processes.items() if label.startswith(program)]


def _look(broker: peers.Running) -> tuple[float, float, int]:
    """Return bytes of a nats-server's memory, of its files, and of records."""
    files = sum(one.stat().st_blocks * 512 for one in broker.data.rglob("*") if one.suffix != ".log")
    servers = _of(broker, "nats-server")
    memory = statistics.mean(map(proc.resident_bytes, servers))
    return memory, files / len(servers), asyncio.run(_stored(broker))[0]


def _cpu(broker: peers.Running) -> tuple[float, float]:
    (gateway,) = _of(broker, "gateway")
    return proc.cpu_seconds(gateway), statistics.mean(map(proc.cpu_seconds, _of(broker, "nats-server")))


def _less(after: tuple[float, float], before: tuple[float, float], count: float) -> tuple[float, float]:
    return (after[0] - before[0]) / count, (after[1] - before[1]) / count


def _restart(broker: peers.Running) -> tuple[subprocess.Popen[bytes], tuple[float, float]]:
    """Start the first nats-server again; the process, which the caller ends, and how long that took."""
    label, former = next(each for each in broker.processes.items() if each[0].startswith("nats-server"))
    os.kill(former, signal.SIGTERM)
    cmdline = Path(f"/proc/{former}/cmdline")
    crowd.wait(lambda: not (cmdline.exists() and cmdline.read_bytes()), "nats-server has not ended")
    begun = time.monotonic()
    program = peers.find("nats-server")
    assert program is not None
    process = subprocess.Popen([program, "-c", broker.data / "nats0.conf"], stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        crowd.wait(lambda: peers.accepts(broker.nats_port), "nats-server does not serve")
        if len(_of(broker, "nats-server")) > 1:
            crowd.wait(lambda: asyncio.run(_current(broker)), "a replica is not current")
        took = time.monotonic() - begun, proc.cpu_seconds(process.pid)
        crowd.wait(lambda: peers.greets(broker.port), "the gateway does not serve")
    except BaseException:
        process.kill()
        process.wait()
        raise
    broker.processes[label] = process.pid
    return process, took


def measure(sessions: int, positions: str, returning: int, servers: int = 1, ours: str = peers.OURS_COMMAND) -> Row:
    """Measure one row; ``ours`` is the command that starts our gateway."""
    command = f"{ours} --session-positions {positions} {shlex.join(UNLIMITED)}"
    with peers.running("ours", command, servers=servers) as broker:
        first = max(sessions // 10, 1)
        _make(broker, range(first))
        time.sleep(SETTLE)
        before, spent = _look(broker), _cpu(broker)
        took = _make(broker, range(first, sessions))
        effort = _less(_cpu(broker), spent, sessions - first)
        time.sleep(SETTLE)
        after, count = _look(broker), asyncio.run(_stored(broker))[1]
        each = [(now - then) / (sessions - first) for now, then in zip(after, before, strict=True)]
        spent = _cpu(broker)
        time.sleep(IDLE)
        idle = _less(_cpu(broker), spent, IDLE)
        process, restart = _restart(broker)
        try:
            alone = _return_alone(broker, range(sessions - min(ALONE, sessions), sessions))
            back = _returning(broker, min(returning, sessions))
        finally:
            process.terminate()
            process.wait(30)
    made = (sessions - first) / took
    return Row(
        servers,
        sessions,
        positions,
        made,
        effort,
        each[0],
        each[1],
        each[2],
        count,
        idle,
        restart,
        alone,
        back,
    )


def document(rows: Sequence[Row], command: str, ours: str = peers.OURS_COMMAND) -> str:
    """The part of the page; ``ours`` is the command that starts our gateway."""
    lines = table(
        [
            [
                "servers", "sessions", "`session_positions`", "made per second", "CPU of each: gateway, nats-server",
                "nats-server's memory", "files", "of these, records", "consumers", "idle: gateway, nats-server",
                "restart of nats-server", "one returns", "many return", "CPU of each", *bystander.HEADS,
            ],
            *(
                [
                    str(row.servers),
                    f"{row.sessions:,}",
                    row.positions,
                    f"{row.made:,.0f}",
                    f"{row.effort[0] * 1e6:,.0f} µs, {row.effort[1] * 1e6:,.0f} µs",
                    f"{row.memory:,.0f} B",
                    f"{row.disk:,.0f} B",
                    f"{row.records:,.0f} B",
                    f"{row.consumers:,}",
                    f"{row.idle[0]:.1%}, {row.idle[1]:.1%}",
                    f"{row.restart[0]:.1f} s, {row.restart[1]:.1f} s of CPU",
                    f"{row.alone * 1000:.0f} ms",
                    f"{row.back.sessions:,} in {row.back.took:.1f} s"
                    + (f", {row.back.again} connected again" if row.back.again else ""),
                    f"{row.back.effort[0] * 1e6:,.0f} µs, {row.back.effort[1] * 1e6:,.0f} µs",
                    str(row.back.before),
                    str(row.back.meanwhile),
                ]
                for row in rows
            ),
        ]
    )  # fmt: skip
    about = f"{machine(['ours', 'nats'], ours)}  \n`{command}`"
    return "\n".join(["## Absent sessions", "", about, "", *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.absent", description=__doc__)
    parser.add_argument("--sessions", default="1000,20000", metavar="N[,N]", help="rows (%(default)s)")
    parser.add_argument("--positions", default="consumers,records", help="of each (%(default)s)")
    parser.add_argument("--returning", type=int, default=1000, metavar="N", help="return at once (%(default)s)")
    parser.add_argument("--ours", default=peers.OURS_COMMAND, metavar="COMMAND", help="default: %(default)s")
    parser.add_argument("--servers", type=int, default=1, metavar="N", help="nats-servers of a cluster (%(default)s)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as a part of this page")
    options = parser.parse_args(arguments)
    rows = []
    for number in map(int, options.sessions.split(",")):
        for positions in options.positions.split(","):
            rows.append(measure(number, positions, options.returning, options.servers, options.ours))
            print(rows[-1], flush=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = shlex.join(["python", "-m", "benchmarks.absent", *given]).replace(str(Path.cwd()), "$PWD")
    text = document(rows, command, options.ours)
    print("\n" + text)
    if options.report:
        page.put(options.report, "How cost grows", "growth absent", text)


if __name__ == "__main__":
    main()
