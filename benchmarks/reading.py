# SPDX-License-Identifier: Apache-2.0
"""Messages that the shared reader of a gateway reads: ``python -m benchmarks.reading``.

Each row has one gateway with so many durable sessions, each with one device topic of its own. A NATS client stores
messages on all topics in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import nats
from nats.aio.client import Client as NatsClient
from nats.js import JetStreamContext

from benchmarks import page, peers, proc
from benchmarks.claims import gateway
from benchmarks.generator.clients import Client, Loop, connect_all
from benchmarks.report import table
from benchmarks.runner import machine
from mqtt_streams.messages import PREFIX, STREAM

TOPICS: Final = 100_000
"""Different topics of messages."""

SITES: Final = 100
"""First levels of the topics."""

CONNECT_S: Final = 300.0
"""Seconds in which all clients connect and subscribe."""

LIVE_S: Final = 120.0
"""Seconds in which the filters of the reader do not change any more."""

SETTLED_S: Final = 10.0
"""Seconds without a change after which they do not."""

OPTIONS: Final = ("--consumer-rate", "1000000")
"""The reader is used at once, and consumers are made as fast as may be."""

BURST: Final = 250
"""Messages that are stored before the acknowledgement of the last one is awaited."""


class Cost(NamedTuple):
    """Seconds of processor time for one stored message."""

    gateway: float
    server: float


class Row(NamedTuple):
    """Figures of one number of sessions."""

    sessions: int
    filters: int
    """Filters of the reader after that."""
    wanted: int
    """Messages for the sessions."""
    delivered: int
    """Messages that the reader was given."""
    stored: int
    cost: Cost


def topic(number: int) -> str:
    """Return the topic of a device."""
    return f"site{number % SITES}/device{number:06}/set"


class Machine:
    """A nats-server and a gateway."""

    def __init__(self, stream: JetStreamContext, client: NatsClient, pids: tuple[int, int]) -> None:
        self._stream, self._client, self._pids = stream, client, pids

    async def reader(self) -> tuple[int, int]:
        """Return the number of filters of the reader, and how many messages it was given; (0, 0) without a reader."""
        offset = 0
        while some := await self._stream.consumers_info(STREAM, offset):
            for one in some:
                if "_reader_" in one.name and one.delivered is not None:
                    filters = one.config.filter_subjects or [one.config.filter_subject or ""]
                    return len(filters), int(one.delivered.consumer_seq)
            offset += len(some)
        return 0, 0

    async def store(self, messages: int) -> Cost:
        """Store so many messages, on a topic of each device in turn."""
        begun = [proc.cpu_seconds(pid) for pid in self._pids]
        headers = {"Nmqtt-Pub": "1"}
        for number in range(messages):
            # Each 7,919th topic: neighbours are not stored one after the other.
            subject = PREFIX + topic(number * 7919 % TOPICS).replace("/", ".")
            if number % BURST == BURST - 1:
                await self._stream.publish(subject, b"x" * 128, headers=headers)
            else:
                await self._client.publish(subject, b"x" * 128, headers=headers)
        await asyncio.sleep(1.0)
        ended = [proc.cpu_seconds(pid) for pid in self._pids]
        return Cost(*((after - before) / messages for before, after in zip(begun, ended, strict=True)))


def _wanted(sessions: int, messages: int) -> int:
    return sum(number * 7919 % TOPICS < sessions for number in range(messages))


async def _measure(url: str, sessions: int, messages: int, pids: tuple[int, int]) -> Row:
    client = await nats.connect(url)
    try:
        one = Machine(client.jetstream(), client, pids)
        begun = changed = time.monotonic()
        before = await one.reader()
        while time.monotonic() < changed + SETTLED_S:
            if time.monotonic() > begun + LIVE_S:
                raise peers.PeerError(f"the reader's filters still change after {LIVE_S:.0f} s")
            await asyncio.sleep(0.5)
            found = await one.reader()
            if found[0] != before[0] or (sessions and not found[0]):
                changed = time.monotonic()
            before = found
        cost = await one.store(messages)
        after = await one.reader()
        return Row(sessions, after[0], _wanted(sessions, messages), after[1] - before[1], messages, cost)
    finally:
        await client.close()


def measure(sessions: int, messages: int) -> Row:
    """Measure so many stored messages beside a gateway with so many sessions."""
    with peers.monitored_nats_server() as (url, _, server), gateway(url, *OPTIONS) as (pid, port):
        loop = Loop()
        try:
            clients = [Client(f"device{one:06}", topic(one), qos=1, clean=False) for one in range(sessions)]
            connect_all(loop, (peers.HOST, port), clients, timeout=CONNECT_S, at_once=20)
            return asyncio.run(_measure(url, sessions, messages, (pid, server)))
        finally:
            loop.close()


def document(rows: Sequence[Row], command: str) -> str:
    """The part of the page."""
    lines = table(
        [
            ["sessions", "filters", "stored", "wanted", "delivered", "gateway", "nats-server"],
            *(
                [
                    *(f"{one:,}" for one in (row.sessions, row.filters, row.stored, row.wanted, row.delivered)),
                    *(f"{cost * 1e6:.1f} µs" for cost in row.cost),
                ]
                for row in rows
            ),
        ]
    )
    about = f"{machine(['nats'])}  \n`{command}`"
    text = f"Processor time for each stored message; messages have {TOPICS:,} topics in turn."
    return "\n".join(["## What a shared reader reads", "", about, "", text, "", *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading", description=__doc__)
    parser.add_argument("--sessions", default="0,100,1000,2000", metavar="N[,N]", help="rows (%(default)s)")
    parser.add_argument("--messages", type=int, default=50_000, help="stored for each row (%(default)s)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as a part of this page")
    options = parser.parse_args(arguments)
    rows = []
    for number in map(int, options.sessions.split(",")):
        rows.append(measure(number, options.messages))
        print(rows[-1], flush=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    text = document(rows, " ".join(["python -m benchmarks.reading", *given]))
    print("\n" + text)
    if options.report:
        page.put(options.report, "How cost grows", "growth reading", text)


if __name__ == "__main__":
    main()
