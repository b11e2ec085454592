# SPDX-License-Identifier: Apache-2.0
"""Cost of claims at other gateways to a gateway and nats-server: ``python -m benchmarks.claims``.

Each row has one gateway with so many connected sessions, beside a stub that stores session records as gateways do. The
claims are heard twice: all of them, as a gateway does in the first 30 seconds, and those that may concern it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import nats

from benchmarks import page, peers, proc
from benchmarks.generator.clients import Client, Loop, connect_all
from benchmarks.job import CROWD_TIMEOUT
from benchmarks.report import table
from benchmarks.runner import machine
from mqtt_nats.sessions.takeover import SIGNALS
from mqtt_streams.hashing import NUID_LENGTH, name_hash
from mqtt_streams.sessions import PREFIX, STREAM, V5, SessionRecord, claim_subject

START_S: Final = 60.0
"""Seconds in which the gateway serves clients."""

APART_S: Final = 90.0
"""Seconds after which the gateway hears only claims that concern it: `QUIET_BEFORE_USE_S` twice, and one look."""

IDLE_S: Final = 4.0
"""Seconds for which the gateway is measured without claims."""

RATE: Final = 5_000.0
"""Claims in a second for which the table says what the gateway takes."""

BURST: Final = 50
"""Claims that the stub writes before it looks at the time."""

SERVING: Final = re.compile(rf"serving: MQTT +{re.escape(peers.HOST)}:(\d+)")


class Cost(NamedTuple):
    """Seconds of processor time for one claim."""

    gateway: float
    server: float


class Row(NamedTuple):
    """Figures of one number of sessions at the gateway."""

    sessions: int
    subscriptions: int
    """Subscriptions by which the gateway hears the claims that may concern it."""
    all: Cost
    concerned: Cost


def claim(client_id: str, gateway: str, nonce: str) -> tuple[str, str, dict[str, str], bytes]:
    """Return subject, reply subject, headers and payload of the record that claims a new session for a gateway."""
    record = SessionRecord(client_id, clean=True, v5=V5(kind="regular", expiry=0, user=""))
    record.sign(gateway, nonce)
    key = name_hash(client_id)
    headers = {"Nats-Rollup": "sub", "Nats-Expected-Last-Subject-Sequence": "0"}
    return PREFIX + key, claim_subject(key, gateway, nonce), headers, record.encode()


class Machine:
    """A nats-server, a gateway with sessions, and the processor time that both have taken."""

    def __init__(self, url: str, monitor: str, server: int, gateway: int) -> None:
        self.url, self._monitor, self._pids = url, monitor, (gateway, server)
        self._claims = 0
        """Claims that the stub has written."""

    def subscriptions(self) -> list[str]:
        """Subjects of claims that are subscribed."""
        with urllib.request.urlopen(f"{self._monitor}/connz?subs=1&limit=1000", timeout=10) as answer:
            found = json.load(answer)["connections"]
        subjects = [subject for one in found for subject in one.get("subscriptions_list", [])]
        return [one for one in subjects if one.startswith("$MQTT.JSA.") and ".SP." in one]

    def _taken(self) -> tuple[float, ...]:
        """Return the time, and the processor time of the gateway and of nats-server, in seconds."""
        return time.monotonic(), *(proc.cpu_seconds(pid) for pid in self._pids)

    async def cost(self, count: int) -> Cost:
        """Measure so many claims at another gateway, at most `RATE` in a second."""
        idle = self._taken()
        await asyncio.sleep(IDLE_S)
        begun = self._taken()
        client = await nats.connect(self.url)
        stream = client.jetstream()
        try:
            stored = (await stream.stream_info(STREAM)).state.last_seq + count
            for number in range(count):
                client_id = f"other{self._claims + number:08}"
                subject, reply, headers, payload = claim(client_id, "stub0000", f"{number:0{NUID_LENGTH}}")
                await client.publish(subject, payload, reply, headers)
                if number % BURST == 0:
                    await asyncio.sleep(max(0.0, begun[0] + number / RATE - time.monotonic()))
            await client.flush()
            self._claims += count
            while True:
                info = await stream.stream_info(STREAM)
                if info.state.last_seq >= stored:
                    break
                await asyncio.sleep(0.05)
        finally:
            await client.close()
        ended = self._taken()
        took = (ended[0] - begun[0]) / (begun[0] - idle[0])
        gateway, server = (
            max(0.0, end - middle - (middle - first) * took) / count
            for first, middle, end in zip(idle[1:], begun[1:], ended[1:], strict=True)
        )
        return Cost(gateway, server)


@contextmanager
def gateway(url: str, *options: str) -> Iterator[tuple[int, int]]:
    """Process id and MQTT port of a gateway with more options."""
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "gateway.log"
        command = [sys.executable, "-m", "mqtt_nats", "serve", "--nats", url, "--listen", f"{peers.HOST}:0", *options]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + START_S
            while (found := SERVING.search(log.read_text())) is None:
                if time.monotonic() > until:
                    raise peers.PeerError(f"the gateway does not serve after {START_S:.0f} s")
                time.sleep(0.1)
            yield process.pid, int(found[1])
        finally:
            process.terminate()
            process.wait(30)


async def _measure(machine_: Machine, sessions: int, count: int) -> Row:
    heard = await machine_.cost(count)
    until = time.monotonic() + APART_S
    while SIGNALS.decode() in machine_.subscriptions():
        if time.monotonic() > until:
            raise peers.PeerError(f"the gateway hears all claims after {APART_S:.0f} s")
        await asyncio.sleep(0.5)
    return Row(sessions, len(machine_.subscriptions()), heard, await machine_.cost(count))


def measure(sessions: int, count: int) -> Row:
    """Measure ``count`` claims beside a gateway with so many sessions, heard in both ways."""
    with peers.monitored_nats_server() as (url, monitor, server), gateway(url) as (pid, port):
        loop = Loop()
        try:
            clients = [Client(f"client{number:06}") for number in range(sessions)]
            connect_all(loop, (peers.HOST, port), clients, timeout=CROWD_TIMEOUT, at_once=20)
            one = Machine(url, monitor, server, pid)
            return asyncio.run(_measure(one, sessions, count))
        finally:
            loop.close()


def document(rows: Sequence[Row], command: str) -> str:
    """The part of the page."""

    def cells(row: Row) -> list[str]:
        costs = [f"{cost * 1e6:.1f} µs" for cost in (*row.all, *row.concerned)]
        shares = [f"{cost.gateway * RATE:.1%}" for cost in (row.all, row.concerned)]
        return [f"{row.sessions:,}", f"{row.subscriptions:,}", *costs, *shares]

    kinds = ("all", "concerned")
    costs = [f"{kind}: {process}" for kind in kinds for process in ("gateway", "nats-server")]
    shares = [f"{kind}: gateway at {RATE:,.0f}/s" for kind in kinds]
    lines = table([["sessions", "subscriptions", *costs, *shares], *map(cells, rows)])
    about = f"{machine(['nats'])}  \n`{command}`"
    return "\n".join(["## Claims of sessions at other gateways", "", about, "", *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__)
    parser.add_argument("--sessions", default="0,100,1000,4000", metavar="N[,N]", help="rows (%(default)s)")
    parser.add_argument("--claims", type=int, default=30_000, help="measured twice for each row (%(default)s)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as a part of this page")
    options = parser.parse_args(arguments)
    rows = []
    for number in map(int, options.sessions.split(",")):
        rows.append(measure(number, options.claims))
        print(rows[-1], flush=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    text = document(rows, " ".join(["python -m benchmarks.claims", *given]))
    print("\n" + text)
    if options.report:
        page.put(options.report, "How cost grows", "growth claims", text)


if __name__ == "__main__":
    main()
