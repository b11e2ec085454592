# SPDX-License-Identifier: Apache-2.0
"""Slow clients beside one that keeps up: ``python -m benchmarks.slow``.

Each slow client has a durable session with a full window and messages that wait for it, and acknowledges one message a
second. Another client publishes to itself at QoS 1. Each row begins with a fresh gateway and a fresh nats-server.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import nats

from benchmarks import bystander, page, peers, proc
from benchmarks.durable_sessions import UNLIMITED, make_absent
from benchmarks.generator import packets
from benchmarks.generator.answers import packet_at
from benchmarks.generator.clients import Client, Connection, Greeting, Loop, connect_all
from benchmarks.generator.packets import Layout
from benchmarks.job import CROWD_TIMEOUT
from benchmarks.report import table
from benchmarks.runner import machine
from benchmarks.sizing import Sender
from mqtt_streams.messages import STREAM as MESSAGES

WINDOW: Final = 20
"""Messages in flight to a client (`max_inflight`)."""

SETTLE_S = 5.0
"""Seconds until all windows are full, and before that for positions and consumers."""

TOPIC: Final = "bench/slow/000000/set"
"""Of messages; the digits are the session."""


class Row(NamedTuple):
    """Figures of one number of slow clients."""

    clients: int
    served: float
    """Messages for slow clients in each second."""
    before: bystander.Delay
    """Messages of the other client before the slow ones connect."""
    meanwhile: bystander.Delay
    memory: tuple[float, float]
    """Bytes by which the gateway and nats-server have grown for each slow client."""
    cpu: tuple[float, float]
    """Part of a core that the gateway and nats-server take."""
    consumers: int
    """Consumers of the stream of messages."""


class Slow(Connection):
    """Counts messages at QoS 1, and acknowledges them one at a time."""

    def __init__(self, greeting: Greeting) -> None:
        super().__init__(greeting.loop, greeting.sock, greeting.name)
        self.rest, self.got = greeting.rest, 0
        self._unacknowledged: deque[bytes] = deque()
        self.loop.add(self)
        if self.rest:  # messages that came in one read with CONNACK
            self.loop.buffer[: len(self.rest)] = self.rest
            self._take(len(self.rest))

    def readable(self) -> None:
        self._take(self.fill())

    def _take(self, end: int) -> None:
        start = 0
        while (found := packet_at(self.loop.view, start, end)) is not None:
            kind, body, start = found
            if kind & 0xF0 != packets.PUBLISH:
                raise packets.DeliveryError(f"{self.name}: unexpected packet 0x{kind:02x}")
            at = 2 + int.from_bytes(body[:2])
            self._unacknowledged.append(bytes(body[at : at + 2]))
            self.got += 1
        self.keep(start, end)

    def acknowledge(self) -> None:
        """Acknowledge the oldest message."""
        if self._unacknowledged:
            self.send(b"\x40\x02" + self._unacknowledged.popleft())


def _clients(count: int) -> list[Client]:
    return [Client(f"slow{number:06}", f"bench/slow/{number:06}/+", 1, clean=False) for number in range(count)]


def _publish(broker: peers.Running, clients: int, each: int) -> None:
    """Publish so many messages for each session."""
    layout = Layout(TOPIC, 128, 1, None)
    digits = layout.template.index(b"000000")
    loop = Loop()
    try:
        (greeting,) = connect_all(loop, (peers.HOST, broker.port), [Client("sender")], timeout=CROWD_TIMEOUT)
        sender, template, sent = Sender(greeting), bytearray(layout.template), 0
        until, total = time.monotonic() + CROWD_TIMEOUT, clients * each
        while sender.acked < total:
            while sent < min(total, sender.acked + WINDOW):
                template[digits : digits + 6] = b"%06d" % (sent % clients)
                template[layout.packet_id : layout.packet_id + 2] = (sent % packets.PID_PERIOD + 1).to_bytes(2)
                sender.send(bytes(template))
                sent += 1
            loop.turn(0.1)
            if time.monotonic() > until:
                raise TimeoutError(f"only {sender.acked:,} messages were acknowledged")
    finally:
        loop.close()


def _serve(clients: list[Slow], loop: Loop, seconds: float) -> None:
    """Let each client acknowledge one message a second, in turn."""
    begun, done = time.monotonic(), 0
    while (passed := time.monotonic() - begun) < seconds:
        while done < passed * len(clients):
            clients[done % len(clients)].acknowledge()
            done += 1
        loop.turn(0.005)


def _processes(broker: peers.Running) -> tuple[int, int]:
    """Return the process ids of the gateway and of nats-server."""
    found = [
        next(pid for label, pid in broker.processes.items() if label.startswith(name))
        for name in ("gateway", "nats-server")
    ]
    return found[0], found[1]


async def _consumers(broker: peers.Running) -> int:
    client = await nats.connect(f"nats://{peers.HOST}:{broker.nats_port}")
    try:
        return (await client.jetstream().stream_info(MESSAGES)).state.consumer_count
    finally:
        await client.close()


def measure(clients: int, waiting: int, seconds: float, ours: str) -> Row:
    """Measure one row.

    Args:
        waiting: messages that wait for each slow client when it connects.
        ours: the command that starts our gateway.
    """
    command = f"{ours} --max-inflight {WINDOW} {shlex.join(UNLIMITED)}"
    with peers.running("ours", command) as broker:
        make_absent([broker.port], _clients(clients))
        time.sleep(SETTLE_S)
        _publish(broker, clients, waiting)
        pids = _processes(broker)
        loop = Loop()
        try:
            with bystander.bystander(broker.port) as other:
                time.sleep(SETTLE_S)
                memory, quiet = [proc.resident_bytes(pid) for pid in pids], time.monotonic()
                greetings = connect_all(
                    loop,
                    (peers.HOST, broker.port),
                    [Client(one.client_id, clean=False) for one in _clients(clients)],
                    timeout=CROWD_TIMEOUT,
                )
                slow = [Slow(one) for one in greetings]
                until = time.monotonic() + CROWD_TIMEOUT
                while any(one.got < WINDOW for one in slow):
                    loop.turn(0.1)
                    if time.monotonic() > until:
                        raise TimeoutError("not all windows are full")
                _serve(slow, loop, SETTLE_S)
                begun, got = time.monotonic(), sum(one.got for one in slow)
                cpu = [proc.cpu_seconds(pid) for pid in pids]
                _serve(slow, loop, seconds)
                took = time.monotonic() - begun
                used = [(proc.cpu_seconds(pid) - one) / took for pid, one in zip(pids, cpu, strict=True)]
                grown = [(proc.resident_bytes(pid) - one) / clients for pid, one in zip(pids, memory, strict=True)]
                served, count = (sum(one.got for one in slow) - got) / took, asyncio.run(_consumers(broker))
                trips = other.trips()
        finally:
            loop.close()
    before = bystander.delay(trips, quiet - bystander.QUIET_S, quiet)
    meanwhile = bystander.delay(trips, begun, begun + took)
    return Row(clients, served, before, meanwhile, (grown[0], grown[1]), (used[0], used[1]), count)


def document(rows: Sequence[Row], command: str, ours: str) -> str:
    """Return the part of the page; ``ours`` is the command that starts our gateway."""
    lines = table(
        [
            ["slow clients", "messages per second for them", *bystander.HEADS, "memory of each: gateway, nats-server",
             "CPU: gateway, nats-server", "consumers"],
            *(
                [
                    f"{row.clients:,}",
                    f"{row.served:,.0f}",
                    str(row.before),
                    str(row.meanwhile),
                    f"{row.memory[0] / 1024:,.1f} KiB, {row.memory[1] / 1024:,.1f} KiB",
                    f"{row.cpu[0]:.1%}, {row.cpu[1]:.1%}",
                    f"{row.consumers:,}",
                ]
                for row in rows
            ),
        ]
    )  # fmt: skip
    about = f"{machine(['ours', 'nats'], ours)}  \n`{command}`"
    return "\n".join(["## Slow clients", "", about, "", *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow", description=__doc__)
    parser.add_argument("--clients", default="1000,5000", metavar="N[,N]", help="rows (%(default)s)")
    parser.add_argument("--waiting", type=int, default=100, metavar="N", help="messages for each (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="that are measured (%(default)s)")
    parser.add_argument("--ours", default=peers.OURS_COMMAND, metavar="COMMAND", help="default: %(default)s")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as a part of this page")
    options = parser.parse_args(arguments)
    rows = []
    for number in map(int, options.clients.split(",")):
        rows.append(measure(number, options.waiting, options.seconds, options.ours))
        print(rows[-1], flush=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    command = shlex.join(["python", "-m", "benchmarks.slow", *given]).replace(str(Path.cwd()), "$PWD")
    text = document(rows, command, options.ours)
    print("\n" + text)
    if options.report:
        page.put(options.report, "How cost grows", "growth slow", text)


if __name__ == "__main__":
    main()
