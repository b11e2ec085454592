# SPDX-License-Identifier: Apache-2.0
"""Cost of ``mqtt-nats ctl sessions list --quick``: ``python -m benchmarks.listing``.

Each row has so many session records, of absent clients with one subscription each, and no gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import nats

from benchmarks import page, peers, proc
from benchmarks.report import table
from benchmarks.runner import machine
from mqtt_streams.hashing import name_hash
from mqtt_streams.sessions import PREFIX, STREAM, V5, SessionRecord

BURST: Final = 500
"""Records that are written before the acknowledgement of the last one is awaited."""

LOOK_S: Final = 0.02
"""Seconds between two looks at the memory of the command."""


class Row(NamedTuple):
    """Figures of one number of sessions."""

    sessions: int
    first: float
    """Seconds from the start of the command to its first lines."""
    took: float
    """Seconds that the command takes."""
    command: float
    """Processor time of the command, in seconds."""
    server: float
    """Processor time of nats-server, in seconds."""
    memory: int
    """Most resident memory of the command, in bytes."""


async def _fill(url: str, sessions: int) -> None:
    client = await nats.connect(url)
    try:
        stream = client.jetstream()
        await stream.add_stream(name=STREAM, subjects=[PREFIX + ">"], max_msgs_per_subject=1, allow_direct=True)
        for name, subject in (("$MQTT_msgs", "$MQTT.msgs.>"), ("$MQTT_timers", "$MQTT.timers.>")):
            await stream.add_stream(name=name, subjects=[subject], allow_direct=True)
        for number in range(sessions):
            name = f"device-{number:08}"
            record = SessionRecord(name, clean=False, v5=V5(kind="durable", expiry=86_400, user=""))
            record.subs[f"devices.{name}.set"] = 1
            subject, body = PREFIX + name_hash(name), record.encode()
            if number % BURST == BURST - 1 or number == sessions - 1:
                await stream.publish(subject, body, timeout=60)
            else:
                await client.publish(subject, body)
    finally:
        await client.close()


def _read(url: str, server: int) -> tuple[float, float, float, float, int]:
    """Return the figures of one run of the command."""
    command = [sys.executable, "-m", "mqtt_nats", "ctl", "--nats", url, "sessions", "list", "--quick"]
    before, begun = proc.cpu_seconds(server), time.monotonic()
    most, used = 0, 0.0
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout
        process.stdout.readline()
        first = time.monotonic() - begun
        reading = threading.Thread(target=lambda: [None for _ in output])
        reading.start()
        while reading.is_alive():
            most, used = max(most, proc.resident_bytes(process.pid)), max(used, proc.cpu_seconds(process.pid))
            reading.join(LOOK_S)
    if process.returncode:
        raise peers.PeerError(f"the command has failed with status {process.returncode}")
    return first, time.monotonic() - begun, used, proc.cpu_seconds(server) - before, most


def measure(sessions: int) -> Row:
    """Measure the list of so many sessions."""
    with peers.monitored_nats_server() as (url, _, server):
        asyncio.run(_fill(url, sessions))
        return Row(sessions, *_read(url, server))


def document(rows: Sequence[Row], command: str) -> str:
    """The part of the page."""
    lines = table(
        [
            ["sessions", "first line", "whole list", "ctl", "nats-server", "memory of ctl"],
            *(
                [
                    f"{row.sessions:,}",
                    f"{row.first:.1f} s",
                    f"{row.took:.1f} s",
                    f"{row.command:.1f} s of CPU",
                    f"{row.server:.1f} s of CPU",
                    f"{row.memory / 2**20:.0f} MB",
                ]
                for row in rows
            ),
        ]
    )
    about = f"{machine(['nats'])}  \n`{command}`"
    return "\n".join(["## Lists of sessions", "", about, "", *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.listing", description=__doc__)
    parser.add_argument("--sessions", default="1000,32000,1000000", metavar="N[,N]", help="rows (%(default)s)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as a part of this page")
    options = parser.parse_args(arguments)
    rows = []
    for number in map(int, options.sessions.split(",")):
        rows.append(measure(number))
        print(rows[-1], flush=True)
    given = sys.argv[1:] if arguments is None else list(arguments)
    text = document(rows, " ".join(["python -m benchmarks.listing", *given]))
    print("\n" + text)
    if options.report:
        page.put(options.report, "How cost grows", "growth listing", text)


if __name__ == "__main__":
    main()
