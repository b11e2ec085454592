# SPDX-License-Identifier: Apache-2.0
"""Bytes that one more of everything takes, for docs/sizing.md: ``python -m benchmarks.sizing``.

Each row begins with a fresh gateway and nats-server, and divides by how many there were what the processes' memory and
the files have grown. A tenth of them is there before: what the first ones take belongs to the program.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks import page, peers, proc
from benchmarks.durable_sessions import make_absent
from benchmarks.generator import packets
from benchmarks.generator.answers import packet_at
from benchmarks.generator.clients import Client, Connection, Greeting, Loop, connect_all
from benchmarks.generator.packets import Layout
from benchmarks.job import CROWD_TIMEOUT
from benchmarks.report import table
from benchmarks.runner import machine
from benchmarks.scenarios import USER

SETTLE: Final = 1.5
"""Seconds in which what was begun is written and let go of."""

FEW: Final = 20
"""Clients at a time that leave their sessions behind."""

WINDOW: Final = 50
"""Messages at QoS 1 that are not acknowledged."""

TOPIC: Final = "bench/site07/device/000000/temperature"
"""Of messages; the digits are a number."""


@dataclass(frozen=True)
class Row:
    """Row of the table: the thing that is counted, its numbers, and the function that makes some of it."""

    title: str
    count: int
    make: Callable[[peers.Running, Loop, range], None]


class Sender(Connection):
    """Publishes at QoS 1, and counts the acknowledgements."""

    def __init__(self, greeting: Greeting) -> None:
        super().__init__(greeting.loop, greeting.sock, greeting.name)
        self.acked = 0
        self.loop.add(self)

    def readable(self) -> None:
        end, start = self.fill(), 0
        while (found := packet_at(self.loop.view, start, end)) is not None:
            self.acked += 1
            start = found[2]
        self.keep(start, end)


def _clients(broker: peers.Running, loop: Loop, clients: Sequence[Client]) -> list[Greeting]:
    return connect_all(loop, (peers.HOST, broker.port), clients, timeout=CROWD_TIMEOUT, at_once=20)


def _publish(payload: int, topics: int, *, retain: bool, version: int = 4) -> Callable[..., None]:
    """Messages with ``payload`` bytes, over so many topics (0: each has its own)."""
    properties = USER if version == 5 else None
    layout = Layout(TOPIC, payload, 1, properties)
    digits = layout.template.index(b"000000")

    def make(broker: peers.Running, loop: Loop, numbers: range) -> None:
        (greeting,) = _clients(broker, loop, [Client(f"sender{numbers.start}", version=version)])
        sender = Sender(greeting)
        template = bytearray(layout.template)
        template[0] |= retain
        sent = 0
        until = time.monotonic() + CROWD_TIMEOUT
        while sender.acked < len(numbers):
            while sent < min(len(numbers), sender.acked + WINDOW):
                number = numbers[sent]
                template[digits : digits + 6] = b"%06d" % (number % topics if topics else number)
                template[layout.packet_id : layout.packet_id + 2] = (number % packets.PID_PERIOD + 1).to_bytes(2)
                sender.send(bytes(template))
                sent += 1
            loop.turn(0.1)
            if time.monotonic() > until:
                raise TimeoutError(f"only {sender.acked:,} messages were acknowledged")

    return make


def _join(filters: int, qos: int, *, durable: bool, leave: bool = False) -> Callable[..., None]:
    """Clients with none or one subscription, that stay, or leave their sessions behind."""

    def make(broker: peers.Running, loop: Loop, numbers: range) -> None:
        each = Client("", qos=qos, clean=not durable)
        clients = [
            replace(each, client_id=f"client{number:06}", topic_filter=f"bench/{number:06}/+" if filters else "")
            for number in numbers
        ]
        if leave:
            make_absent([broker.port], clients, at_once=FEW)  # or the memory of all their connections would count
        else:
            _clients(broker, loop, clients)

    return make


def rows(small: bool) -> list[Row]:
    """All rows; ``small``: with a twentieth of everything."""
    few = 20 if small else 1
    return [
        Row("message of 128 bytes, 3.1.1, 100 topics", 100_000 // few, _publish(128, 100, retain=False)),
        Row(
            "the same from a 5.0 client, with a user property",
            100_000 // few,
            _publish(128, 100, retain=False, version=5),
        ),
        Row("message of 1,024 bytes, 100 topics", 50_000 // few, _publish(1024, 100, retain=False)),
        Row("message of 128 bytes, each on a topic of its own", 100_000 // few, _publish(128, 0, retain=False)),
        Row("retained message of 128 bytes", 50_000 // few, _publish(128, 0, retain=True)),
        Row("connection", 5_000 // few, _join(0, 0, durable=False)),
        Row("connection with a subscription at QoS 0", 5_000 // few, _join(1, 0, durable=False)),
        Row("connection with a subscription at QoS 1", 5_000 // few, _join(1, 1, durable=False)),
        Row("durable session without a subscription, away", 2_000 // few, _join(0, 0, durable=True, leave=True)),
        Row("durable session with a subscription at QoS 1, away", 2_000 // few, _join(1, 1, durable=True, leave=True)),
        Row("the same, connected", 2_000 // few, _join(1, 1, durable=True)),
    ]


def _look(broker: peers.Running) -> dict[str, int]:
    """Bytes of memory and of files."""
    found = {label: proc.resident_bytes(pid) for label, pid in broker.processes.items()}
    files = sum(path.stat().st_size for path in broker.data.rglob("*") if path.is_file() and path.suffix != ".log")
    return found | {"disk": files}


def measure(row: Row) -> list[str]:
    """The cells of one row."""
    with peers.running("ours") as broker:
        loop = Loop()
        try:
            first = row.count // 10
            row.make(broker, loop, range(first))
            _rest(loop)
            before = _look(broker)
            row.make(broker, loop, range(first, row.count))
            _rest(loop)
            after = _look(broker)
        finally:
            loop.close()
    each = {what: (after[what] - before[what]) / (row.count - first) for what in before}
    cells = [row.title, f"{row.count:,}", *(f"{each[what]:,.0f}" for what in ("gateway", "nats-server", "disk"))]
    print(" | ".join(cells), flush=True)
    return cells


def begin() -> str:
    """Memory of the processes before a client connects."""
    with peers.running("ours") as broker:
        time.sleep(SETTLE)
        found = _look(broker)
    each = (f"{what} {found[what] / 1e6:.0f} MB" for what in ("gateway", "nats-server"))
    return f"Just started: {', '.join(each)} of memory."


def _rest(loop: Loop) -> None:
    until = time.monotonic() + SETTLE
    while time.monotonic() < until:
        loop.turn(0.1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the table where it belongs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizing", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a twentieth of everything")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose titles have it")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as markdown")
    given = parser.parse_args(arguments)
    begun = begin()
    print(begun, flush=True)
    lines = [["one more", "measured with", "gateway, memory", "nats-server, memory", "files"]]
    lines += [measure(row) for row in rows(given.small) if given.only in row.title]
    text = f"{machine(['ours', 'nats'])}. {begun} Bytes each:\n\n" + "\n".join(table(lines))
    print("\n" + text)
    if given.report:
        page.put(given.report, "Sizing", "sizing", text)


if __name__ == "__main__":
    main()
