# SPDX-License-Identifier: Apache-2.0
"""Queries of `mqtt-nats spark sql`: for each, the messages and bytes that nats-server sent, and the seconds it took.

    python -m benchmarks.spark_queries

Messages are those of `benchmarks.spark`. A query is run once to warm up, and once for its row of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.peers import HOST, _free_ports
from benchmarks.spark import TOPICS, fill, session

_START: Final = 20.0  # seconds


class Server(NamedTuple):
    """A nats-server, and where it says what it has sent."""

    url: str
    monitoring: str

    def sent(self) -> tuple[int, int]:
        """Messages and bytes that it has sent to clients."""
        with urllib.request.urlopen(f"{self.monitoring}/varz", timeout=10) as answer:
            found = json.load(answer)
        return found["out_msgs"], found["out_bytes"]


@contextmanager
def nats_server(directory: Path) -> Iterator[Server]:
    """A nats-server with JetStream and monitoring."""
    from mqtt_nats.gateway.embedded import find_binary

    port, monitor = _free_ports(2)
    command = [str(find_binary()), "-a", HOST, "-p", str(port), "-m", str(monitor), "-js", "-sd", str(directory)]
    server = Server(f"nats://{HOST}:{port}", f"http://{HOST}:{monitor}")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START
        while True:
            try:
                server.sent()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(20)


def queries(begun: datetime, seconds: float) -> dict[str, str]:
    """The queries by what they are to show; the messages were stored from `begun` on, for so many seconds."""
    late = begun + timedelta(seconds=seconds * 0.9)
    after = f"timestamp > '{late:%Y-%m-%d %H:%M:%S.%f}'"
    return {
        "`SELECT * ...` to a sink": "SELECT * FROM messages",
        "`count(*)`": "SELECT count(*) FROM messages",
        "`topic, count(*)` by topic": "SELECT topic, count(*) FROM messages GROUP BY topic",
        "`sequence, payload` to a sink": "SELECT sequence, payload FROM messages",
        "`LIMIT 10`": "SELECT sequence, payload FROM messages LIMIT 10",
        "`topic = ...` of one topic in 1,000": f"SELECT * FROM messages WHERE topic = 'site/{TOPICS // 2}/temperature'",
        "`timestamp > ...` of the last tenth": f"SELECT * FROM messages WHERE {after}",
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spark_queries", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--messages", type=int, default=1_000_000, help="stored messages (%(default)s)")
    parser.add_argument("--payload", type=int, default=128, help="bytes (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-spark-") as directory, nats_server(Path(directory)) as server:
        begun = datetime.now(UTC)
        began = time.perf_counter()
        fill(server.url, options.messages, options.payload)
        seconds = time.perf_counter() - began
        print(f"{options.messages:,} messages stored in {seconds:.0f} s", file=sys.stderr)
        spark = session(os.cpu_count() or 2)
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        from pyspark_mqtt_nats.queries.views import Views, make_views

        views = Views(spark, make_views({"servers": server.url}, {}).values())
        print("| query | messages sent | MB sent | seconds |\n|---|---|---|---|")
        for name, text in queries(begun, seconds).items():
            for warm in (False, True):
                messages, size = server.sent()
                started = time.perf_counter()
                frame = views.query(text)
                if "LIMIT" in text:
                    frame.collect()
                else:
                    frame.write.format("noop").mode("overwrite").save()
                took = time.perf_counter() - started
                if warm:
                    after, grown = server.sent()
                    print(f"| {name} | {after - messages:,} | {(grown - size) / 1e6:,.1f} | {took:.1f} |", flush=True)
        spark.stop()


if __name__ == "__main__":
    main()
