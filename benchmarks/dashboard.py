# SPDX-License-Identifier: Apache-2.0
"""Cost of an open dashboard: ``python -m benchmarks.dashboard``.

One gateway on one nats-server has so many connected durable sessions, each with a subscription at QoS 1, and so many
sessions of absent clients. Each row has the processor time that both take beyond that without a tab, while Chromium
shows a view of the dashboard, and the processor time of Chromium. All rows are measured in turn, several times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks import peers, proc
from benchmarks.report import table
from benchmarks.runner import machine
from mqtt_nats.codec import Connect, Subscribe, Subscription, encode
from mqtt_streams.hashing import name_hash
from mqtt_streams.sessions import PREFIX, STREAM, SessionRecord

START_S: Final = 120.0
"""Seconds in which the gateway serves clients, and in which a view is there."""

SETTLE_S: Final = 10.0
"""Seconds before each measurement, in which the last part of whatever was begun ends."""

AT_ONCE: Final = 100
"""Clients that connect at the same time."""

NO_TAB: Final = "no tab"


class Row(NamedTuple):
    """Shares of a processor during a measurement."""

    view: str
    gateway: float
    server: float
    browser: float
    """Of all processes of Chromium together."""


@contextmanager
def _gateway(url: str, directory: Path) -> Iterator[tuple[int, str, int]]:
    """The port for clients, the URL of the admin listener and the process id of a gateway."""
    address = ["--listen", f"{peers.HOST}:0", "--admin-listen", f"{peers.HOST}:0"]
    command = [sys.executable, "-m", "mqtt_nats", "serve", "--nats", url, *address]
    path = directory / "gateway.log"
    with path.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + START_S
        while "ADMIN" not in (text := path.read_text()) or "MQTT  " not in text:
            if time.monotonic() > until:
                raise peers.PeerError(f"the gateway does not serve after {START_S:.0f} s")
            time.sleep(0.2)
        port = int(text.split(f"MQTT  {peers.HOST}:")[1].split()[0])
        yield port, text.split("ADMIN")[1].split()[0].rstrip("/"), process.pid
    except BaseException as error:  # to remove all files takes minutes: the reason is said before
        ended = f"has ended with {process.returncode}" if process.poll() is not None else "runs"
        print(f"{error!r}; the gateway {ended}; the end of its log:", *path.read_text().splitlines()[-20:], sep="\n")
        raise
    finally:
        process.kill()  # a drain of all clients would take long, and shows nothing
        process.wait()


async def _connected(port: int, count: int) -> list[asyncio.StreamWriter]:
    """Connect clients with durable sessions and a subscription each."""
    found: list[asyncio.StreamWriter] = []

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection(peers.HOST, port)
        writer.write(encode(Connect(5, f"tab-{number:06}", True, 0, properties={"session_expiry_interval": 3600}), 5))
        writer.write(encode(Subscribe(1, (Subscription(f"tab/{number}/+", 1),)), 5))
        for _ in ("CONNACK", "SUBACK"):
            answer = await reader.readexactly((await reader.readexactly(2))[1])
        if answer[-1] != 1:
            raise peers.PeerError(f"subscription {number} was not granted: reason code {answer[-1]:#x}")
        found.append(writer)

    for start in range(0, count, AT_ONCE):
        await asyncio.gather(*(one(number) for number in range(start, min(start + AT_ONCE, count))))
    return found


async def _absent(url: str, count: int) -> None:
    """Store the session records of clients that are not connected."""
    import nats

    client = await nats.connect(url)
    stream = client.jetstream()
    before = (await stream.stream_info(STREAM)).state.messages
    for number in range(count):
        record = SessionRecord(f"absent-{number:06}")
        record.upgrade()
        await client.publish(f"{PREFIX}{name_hash(record.client_id)}", record.encode())
        if not number % 1000:
            await client.flush()
    while (await stream.stream_info(STREAM)).state.messages < before + count:
        await client.flush()
    await client.close()


@contextmanager
def _tab(url: str, view: str) -> Iterator[None]:
    """Show a view of the dashboard in Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page()
        tab.set_default_timeout(START_S * 1000)
        tab.goto(f"{url}/#/{view}")
        tab.wait_for_selector("#state.good")
        tab.wait_for_selector(f"section#{view} .table > *, section#{view} .tile")
        yield
        browser.close()


def _browsers() -> list[int]:
    """The first processes of the browsers below this process."""
    found = []
    for pid in proc.tree(os.getpid()):
        with suppress(OSError):  # it has ended meanwhile
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"chrom" in command.split(b"\0")[0] and b"--type=" not in command:
                found.append(pid)
    return found


def _shares(view: str, gateway: int, server: int, seconds: float) -> Row:
    time.sleep(SETTLE_S)
    watched = [[gateway], [server], _browsers()]
    before, begun = [sum(map(proc.cpu_seconds, pids)) for pids in watched], time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - begun
    used = [sum(map(proc.cpu_seconds, pids)) - then for pids, then in zip(watched, before, strict=True)]
    return Row(view, *(one / took for one in used))


def _median(rows: Sequence[Row]) -> Row:
    """The medians of rows of one view."""
    return Row(rows[0].view, *(median(values) for values in list(zip(*rows, strict=True))[1:]))


def _answer(url: str) -> tuple[int, float]:
    """The total in the answer about the sessions in their default order, and the seconds that it took."""
    begun = time.monotonic()
    with urllib.request.urlopen(f"{url}/api/v1/sessions?limit=50&state=disconnected", timeout=START_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return int(found["total"]), time.monotonic() - begun


def measure(sessions: int, absent: int, views: Sequence[str], seconds: float, rounds: int) -> list[Row]:
    """Measure the gateway without a tab and with each view, for ``seconds`` in each round; the medians."""
    with ExitStack() as stack:
        url, _, server = stack.enter_context(peers.monitored_nats_server())
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        port, admin, gateway = stack.enter_context(_gateway(url, Path(directory)))
        loop = stack.enter_context(asyncio.Runner())
        begun = time.monotonic()
        writers = loop.run(_connected(port, sessions))
        print(f"{sessions:,} sessions are connected after {time.monotonic() - begun:.0f} s", flush=True)
        loop.run(_absent(url, absent))
        memory = proc.resident_bytes(gateway)
        total, took = _answer(admin)
        grown = (proc.resident_bytes(gateway) - memory) / 2**20
        print(
            f"50 of {total:,} absent sessions in {took:.2f} s; the gateway's memory grew by {grown:.0f} MiB", flush=True
        )
        found: dict[str, list[Row]] = {view: [] for view in (NO_TAB, *views)}
        for _, view in product(range(rounds), found):
            with nullcontext() if view == NO_TAB else _tab(admin, view):
                found[view].append(_shares(view, gateway, server, seconds))
            print(found[view][-1], flush=True)
        for writer in writers:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.close()
    return [_median(rows) for rows in found.values()]


def document(rows: Sequence[Row], command: str) -> str:
    """Make the table of the rows."""
    idle = rows[0]
    lines = [["view", "gateway", "nats-server", "both, beyond no tab", "Chromium"]]
    for row in rows:
        more = row.gateway + row.server - idle.gateway - idle.server
        beyond = ["", ""] if row is idle else [f"{more:.1%}", f"{row.browser:.1%}"]
        lines.append([row.view, f"{row.gateway:.1%}", f"{row.server:.1%}", *beyond])
    return "\n".join([f"{machine(['nats'])}  \n`{command}`", "", *table(lines)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard", description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000, help="connected durable sessions (%(default)s)")
    parser.add_argument("--absent", type=int, default=0, help="sessions of absent clients (%(default)s)")
    parser.add_argument("--views", default="overview,clients,sessions,subscriptions", help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured for each row of a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="all rows in turn, so many times (%(default)s)")
    options = parser.parse_args(arguments)
    rows = measure(options.sessions, options.absent, options.views.split(","), options.seconds, options.rounds)
    given = sys.argv[1:] if arguments is None else list(arguments)
    print("\n" + document(rows, " ".join(["python -m benchmarks.dashboard", *given])))


if __name__ == "__main__":
    main()
