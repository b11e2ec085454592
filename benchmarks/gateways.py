# SPDX-License-Identifier: Apache-2.0
"""Idle cost of several gateways without clients: ``python -m benchmarks.gateways``.

Each row has so many gateways on one nats-server: the messages that nats-server sends and receives in a second, and the
processor time of nats-server and of a gateway. With ``--stubs`` all but one of them are `benchmarks.stub_gateways`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import page, peers, proc
from benchmarks.report import table
from benchmarks.runner import machine
from benchmarks.stub_gateways import READY

SETTLE_S: Final = 12.0
"""Seconds after the last start before the measurement: whatever a start causes is over."""

SETTLE_STUBS_S: Final = 75.0
"""The same among stubs: with its second report a gateway stops to read the reports of so many others."""

START_S: Final = 120.0
"""Seconds in which all gateways of a row serve clients."""


class Row(NamedTuple):
    """Figures of one number of gateways."""

    gateways: int
    messages: float
    """Messages in a second, into nats-server and out of it."""
    server: float
    """Share of a processor that nats-server takes."""
    gateway: float
    """Share of a processor that one gateway takes, on average."""


def _messages(monitor: str) -> int:
    with urllib.request.urlopen(f"{monitor}/varz", timeout=10) as answer:
        found = json.load(answer)
    return int(found["in_msgs"]) + int(found["out_msgs"])


def _start(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        command = [sys.executable, "-m", *arguments]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)


def _wait(logs: Sequence[Path], text: str, problem: str) -> None:
    until = time.monotonic() + START_S
    while not all(text in path.read_text() for path in logs):
        if time.monotonic() > until:
            raise peers.PeerError(f"{problem} after {START_S:.0f} s")
        time.sleep(0.2)


@contextmanager
def stubs(number: int, url: str) -> Iterator[None]:
    """So many stubs beside the gateways that run; they are ended when the block ends."""
    if not number:
        yield
        return
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "stubs.log"
        started = _start(["benchmarks.stub_gateways", url, str(number)], log)
        try:
            _wait([log], READY, f"{number} stubs are not connected")
            yield
        finally:
            started.kill()
            started.wait(30)


@contextmanager
def _gateways(number: int, url: str) -> Iterator[list[int]]:
    """Process ids of so many gateways that serve clients; they are ended when the block ends."""
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as name:
        try:
            logs = []
            for one in range(number):
                logs.append(Path(name) / f"gateway{one}.log")
                options = ["serve", "--nats", url, "--listen", f"{peers.HOST}:0"]
                started.append(_start(["mqtt_nats", *options], logs[-1]))
            _wait(logs, "serving: MQTT", f"{number} gateways do not all serve")
            yield [each.pid for each in started]
        finally:
            for each in started:
                each.terminate()
            for each in started:
                each.wait(30)


def measure(number: int, seconds: float, settle: float = SETTLE_S, real: int | None = None) -> Row:
    """Measure so many gateways for ``seconds``; only ``real`` of them are no stubs, or all."""
    real = number if real is None else real
    with (
        peers.monitored_nats_server() as (url, monitor, server),
        _gateways(real, url) as pids,
        stubs(number - real, url),
    ):
        time.sleep(settle)
        before = _messages(monitor), proc.cpu_seconds(server), sum(proc.cpu_seconds(pid) for pid in pids)
        begun = time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - begun
        after = _messages(monitor), proc.cpu_seconds(server), sum(proc.cpu_seconds(pid) for pid in pids)
    messages, of_server, of_gateways = ((now - then) / took for now, then in zip(after, before, strict=True))
    return Row(number, messages, of_server, of_gateways / real)


def document(rows: Sequence[Row], command: str, title: str) -> str:
    """The part of the page."""
    rows_as_text = [
        [
            str(row.gateways),
            f"{row.messages:,.1f}",
            f"{row.messages / row.gateways:.2f}",
            f"{row.server:.1%}",
            f"{row.gateway:.2%}",
        ]
        for row in rows
    ]
    heading = ["gateways", "messages/s", "messages/s for each", "nats-server", "one gateway"]
    lines = table([heading, *rows_as_text])
    about = f"{machine(['nats'])}  \n`{command}`"
    return "\n".join([f"## {title}", "", about, "", *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateways", description=__doc__)
    parser.add_argument("--gateways", default="5,10,20,40", metavar="N[,N]", help="rows (%(default)s)")
    parser.add_argument(
        "--stubs", action="store_true", help="one gateway in each row, and stubs in place of the others"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="measured for each row (%(default)s)")
    parser.add_argument(
        "--settle", type=float, help=f"seconds before that ({SETTLE_S:g}, with stubs {SETTLE_STUBS_S:g})"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as a part of this page")
    options = parser.parse_args(arguments)
    settle = options.settle
    if settle is None:
        settle = SETTLE_STUBS_S if options.stubs else SETTLE_S
    rows = []
    for number in map(int, options.gateways.split(",")):
        rows.append(measure(number, options.seconds, settle, 1 if options.stubs else None))
        print(rows[-1], flush=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    title, part = (
        ("One gateway among stubs", "growth stubs")
        if options.stubs
        else ("Gateways without clients", "growth gateways")
    )
    text = document(rows, " ".join(["python -m benchmarks.gateways", *given]), title)
    print("\n" + text)
    if options.report:
        page.put(options.report, "How cost grows", part, text)


if __name__ == "__main__":
    main()
