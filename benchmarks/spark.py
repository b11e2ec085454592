# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.spark``: how fast Spark reads and archives stored messages, beside Parquet and nats-py.

One nats-server, one Spark session of ``local[N]``, the same rows as messages and as Parquet files. The rounds are
interleaved; the tables have medians, ratios, and the CPU time of a row by process.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import random
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import peers, proc

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT = Path(__file__).parents[1]
ALL = "all columns"
FOUR = "four columns"
ARCHIVE = "archive to Parquet"
FOUR_DDL = "sequence BIGINT, timestamp TIMESTAMP, topic STRING, payload BINARY"
PROCESSES = ("nats-server", "JVM", "Python")
CPU = "CPU"
"""Beginning of the names of figures of CPU time."""

TOPICS = 1000
CLIENTS = 100
FETCH = 100_000
"""Messages of the nats-py loop at most, which is timed per message."""


def fill(url: str, count: int, size: int) -> None:
    """Store messages as gateways do for publishers of QoS 1; payloads that cannot be compressed."""
    from pyspark_mqtt_nats.nats.connection import Connection
    from pyspark_mqtt_nats.nats.jetstream import Publish, api, publish_all
    from pyspark_mqtt_nats.options import Options

    source = random.Random(count)

    def messages() -> Iterator[Publish]:
        for number in range(count):
            subject = b"$MQTT.msgs.site.%d.temperature" % (number % TOPICS)
            identity = secrets.token_hex(16).encode()
            headers = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:%b\r\nNmqtt-Client:device-%d\r\n\r\n"
            yield Publish(subject, headers % (identity, number % CLIENTS), source.randbytes(size))

    with Connection(Options.parse({"servers": url}).access) as connection:
        config = {"name": "$MQTT_msgs", "subjects": ["$MQTT.msgs.>"], "storage": "file", "allow_direct": True}
        api(connection, "STREAM.CREATE.$MQTT_msgs", config)
        for outcome in publish_all(connection, messages()):
            if isinstance(outcome, Exception):
                raise outcome


def session(cores: int) -> SparkSession:
    """A quiet session on loopback, with the settings of jobs."""
    from pyspark.sql import SparkSession

    from pyspark_mqtt_nats.java import ensure
    from pyspark_mqtt_nats.jobs.session import Setup, settings

    ensure()
    roots = [str(ROOT / name) for name in ("", "streams", "spark")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder
    for name, value in settings(Setup("benchmark", f"local[{cores}]")).items():
        builder = builder.config(name, value)
    found = builder.getOrCreate()
    found.sparkContext.setLogLevel("ERROR")
    return found


class Processes(NamedTuple):
    """Processes that take part in a read, by process id."""

    nats_server: int
    jvm: int

    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds of each process until now."""
        return {
            "nats-server": proc.cpu_seconds_alone(self.nats_server),
            "JVM": proc.cpu_seconds_alone(self.jvm),
            "Python": proc.cpu_seconds_below(self.jvm),
        }


def jvm(spark: SparkSession) -> int:
    """Process id of a session's JVM."""
    return int(spark._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]


def timed(action: Callable[[], object], rows: int, processes: Processes) -> tuple[float, dict[str, float]]:
    """Rows per second of an action over all of them, and the CPU time of a row in us by process."""
    before = processes.cpu_seconds()
    began = time.perf_counter()
    action()
    rate = rows / (time.perf_counter() - began)
    after = processes.cpu_seconds()
    return rate, {name: (after[name] - before[name]) / rows * 1e6 for name in PROCESSES}


def archive(spark: SparkSession, url: str, rows: int) -> None:
    """The job of that name, into a directory that is then removed."""
    from pyspark_mqtt_nats.jobs.archive import Archive, run
    from pyspark_mqtt_nats.jobs.progress import Progress

    with tempfile.TemporaryDirectory(prefix="bench-spark-") as output:
        done = run(spark, Archive(output, {"servers": url}), Progress("archive", io.StringIO()))
    if done.messages != rows:
        raise SystemExit(f"{done.messages} messages were archived of {rows}")


def fetch(url: str, most: int) -> float:
    """Messages per second of a loop over ``fetch`` of nats-py, for so many messages."""

    async def loop() -> float:
        import nats
        from nats.js.api import AckPolicy, ConsumerConfig

        client = await nats.connect(url)
        js = client.jetstream()
        config = ConsumerConfig(ack_policy=AckPolicy.NONE)
        found = await js.pull_subscribe("", stream="$MQTT_msgs", config=config)
        began = time.perf_counter()
        count = 0
        while count < most:
            for message in await found.fetch(min(1000, most - count), 5):
                count += 1 if message.metadata.sequence.stream and message.headers else 0
        rate = count / (time.perf_counter() - began)
        await client.close()
        return rate

    return asyncio.run(loop())


class Memory(threading.Thread):
    """The largest resident memory of the Python workers while something runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[int] = []
        self._done = threading.Event()

    def run(self) -> None:
        """Look five times a second."""
        while not self._done.wait(0.2):
            workers = [pid for pid in proc.tree(os.getpid()) if "pyspark" in _command(pid)]
            if workers:
                self.seen.append(max(_resident(pid) for pid in workers))

    def __enter__(self) -> Memory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


def _command(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return text if "java" not in text.split(" ")[0] else ""


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def measure(url: str, server: int, options: argparse.Namespace, directory: Path) -> dict[str, list[float]]:
    """Every figure of every round; ``server`` is the process id of nats-server."""
    spark = session(options.cores)
    processes = Processes(server, jvm(spark))
    rows = options.messages

    def stored(columns: str) -> DataFrame:
        read = spark.read.format("mqtt_nats").option("servers", url).option("numPartitions", options.cores)
        return (read.schema(FOUR_DDL) if columns == FOUR else read).load()

    parquet = str(directory / "parquet")
    stored(ALL).write.parquet(parquet)
    names = [field.partition(" ")[0] for field in FOUR_DDL.split(", ")]
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)
        print(f"  {name}: {value:,.{2 if name.startswith(CPU) else 0}f}", file=sys.stderr)

    def measured(name: str, action: Callable[[], object]) -> None:
        rate, spent = timed(action, rows, processes)
        note(name, rate)
        for process, value in spent.items():
            note(f"{CPU}, {name}, {process}", value)

    def read(name: str, frame: DataFrame) -> None:
        measured(name, frame.write.format("noop").mode("overwrite").save)

    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        for columns in (ALL, FOUR):
            with Memory() as memory:
                read(f"Spark, stored messages, {columns}", stored(columns))
            half = len(memory.seen) // 2
            if half:
                note(f"MiB of a reader, first half, {columns}", max(memory.seen[:half]) / 2**20)
                note(f"MiB of a reader, second half, {columns}", max(memory.seen[half:]) / 2**20)
            frame = spark.read.parquet(parquet)
            read(f"Spark, Parquet, {columns}", frame.select(*names) if columns == FOUR else frame)
        measured(ARCHIVE, lambda: archive(spark, url, rows))
        note("nats-py, fetch loop", fetch(url, min(FETCH, rows)))
    count = stored(ALL).count()
    if count != rows:
        raise SystemExit(f"{count} rows were read of {rows}")
    spark.stop()
    return found


def table(found: dict[str, list[float]]) -> str:
    """The medians with their spread, and the ratios that matter."""
    middle = {name: statistics.median(values) for name, values in found.items()}
    lines = ["| what | median per second | lowest | highest |", "|---|---|---|---|"]
    for name, values in found.items():
        if not name.startswith(CPU):
            lines.append(f"| {name} | {middle[name]:,.0f} | {min(values):,.0f} | {max(values):,.0f} |")
    lines += ["", "| ratio | |", "|---|---|"]
    for columns in (ALL, FOUR):
        ratio = middle[f"Spark, stored messages, {columns}"] / middle[f"Spark, Parquet, {columns}"]
        lines.append(f"| stored messages / Parquet, {columns} | {ratio:.2f} |")
    ratio = middle[f"Spark, stored messages, {ALL}"] / middle["nats-py, fetch loop"]
    lines.append(f"| stored messages, {ALL} / nats-py | {ratio:.1f} |")
    lines += ["", f"| CPU of a row, us | {' | '.join(PROCESSES)} | together |", "|---|---|---|---|---|"]
    reads = [f"Spark, {source}, {columns}" for source in ("stored messages", "Parquet") for columns in (ALL, FOUR)]
    for name in (*reads, ARCHIVE):
        spent = [middle[f"{CPU}, {name}, {process}"] for process in PROCESSES]
        cells = " | ".join(f"{value:.2f}" for value in (*spent, sum(spent)))
        lines.append(f"| {name.removeprefix('Spark, ')} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000, help="stored messages (%(default)s)")
    parser.add_argument("--payload", type=int, default=128, help="bytes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the table has medians (%(default)s)")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 2, help="tasks at a time (%(default)s)")
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-spark-")))
        url, _, server = stack.enter_context(peers.monitored_nats_server())
        began = time.perf_counter()
        fill(url, options.messages, options.payload)
        print(f"{options.messages:,} messages stored in {time.perf_counter() - began:.0f} s", file=sys.stderr)
        print(table(measure(url, server, options, directory)))


if __name__ == "__main__":
    main()
