# SPDX-License-Identifier: Apache-2.0
"""Streaming queries while their driver, their workers and nats-server are killed: every result once.

A user's query that publishes, the job `aggregate`, and the job `rule` with and without a state. `make kill-spark
KIND=rule` is the long form of one of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest

from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import stream_info
from pyspark_mqtt_nats.options import Options
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually
from tests.spark.kills import MASTER, PATIENCE, TOPICS, Job, Stored, kill_often, stored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]

WINDOW = timedelta(seconds=2)
WATERMARK = timedelta(seconds=1)
DUPLICATES_S = 900  # a job is killed, started again, and publishes a batch again: on a busy machine in minutes

COPY = """
from pyspark_mqtt_nats import prepare

prepare()

from pyspark.sql import SparkSession

settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
spark = SparkSession.builder.master("%(master)s").config(map=settings).getOrCreate()
messages = spark.readStream.format("mqtt_nats").option("servers", "%(url)s").option("topics", "%(topics)s")
messages = messages.option("startingOffsets", "earliest").option("numPartitions", "2").load()
copies = messages.selectExpr("concat('copies/', topic) topic", "CAST(sequence AS STRING) payload")
writer = copies.writeStream.format("mqtt_nats").option("servers", "%(url)s").option("duplicateWindow", "%(window)d")
writer.option("checkpointLocation", "%(checkpoint)s").start().awaitTermination()
"""

RULES = """
checkpoint = "state"
duplicate_window = "%(window)d seconds"

[[rules]]
name = "copies"
topics = ["%(topics)s"]
query = "SELECT topic, CAST(sequence AS STRING) AS payload FROM messages"
topic = "copies/{topic}"

[[rules]]
name = "windows"
topics = ["%(topics)s"]
query = '''
SELECT topic, window.start AS start, count(*) AS count, min(sequence) AS min, max(sequence) AS max
FROM messages WATERMARK timestamp DELAY OF INTERVAL 1 SECOND
GROUP BY topic, window(timestamp, '2 seconds')
'''
topic = "windows/{topic}"
"""

Figures = tuple[str, datetime, int, int, int]
"""Topic, start of the window, number of messages, smallest and largest value."""


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
def gateway(server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(server)


@pytest.fixture
def kills(pytestconfig: pytest.Config) -> int:
    found: int = pytestconfig.getoption("--kills")
    return found


@contextmanager
def discarding(job: Job) -> Iterator[Job]:
    try:
        yield job
    finally:
        job.process.discard()


def wait_stored(server: NatsServer, topics: str, number: int) -> None:
    """Wait until so many messages of topics below a first level are stored."""

    def reached() -> bool:
        with Connection(Options.parse({"servers": server.url}).access) as connection:
            info = stream_info(connection, "$MQTT_msgs", subjects_filter=f"$MQTT.msgs.{topics}.>")
        found: int = sum((info["state"].get("subjects") or {}).values())
        return found >= number

    eventually(reached, PATIENCE, what=f"{number} messages below {topics}")


def check_published(rows: Iterable[Stored], published: int) -> None:
    """Check that what publishers had acknowledged is stored."""
    assert {int(row.payload) for row in rows} >= set(range(1, published + 1))


def check_copies(server: NatsServer, rows: Iterable[Stored]) -> None:
    """Check that each message was copied once."""
    copies = Counter((row.topic, int(row.payload)) for row in stored(server, "copies/#"))
    assert copies == Counter((f"copies/{row.topic}", row.sequence) for row in rows)


def start_of_window(time: datetime) -> datetime:
    whole = time.replace(microsecond=0)
    return whole - timedelta(seconds=whole.second % WINDOW.seconds)


def complete_windows(rows: list[Stored], values: dict[int, int]) -> list[Figures]:
    """Return the figures of all windows that the watermark has passed; `values` by sequence."""
    watermark = max(row.timestamp for row in rows) - WATERMARK
    watermark = watermark.replace(microsecond=watermark.microsecond // 1000 * 1000)
    found: dict[tuple[str, datetime], list[int]] = {}
    for row in rows:
        start = start_of_window(row.timestamp)
        if start + WINDOW <= watermark:
            found.setdefault((row.topic, start), []).append(values[row.sequence])
    return sorted((topic, start, len(all), min(all), max(all)) for (topic, start), all in found.items())


def test_a_stream_is_copied_once(server: NatsServer, gateway: Gateway, tmp_path: Path, kills: int) -> None:
    checkpoint = tmp_path / "checkpoint"
    program = tmp_path / "copies.py"
    given = {"master": MASTER, "url": server.url, "topics": TOPICS, "checkpoint": checkpoint, "window": DUPLICATES_S}
    program.write_text(COPY % given, encoding="utf-8")
    with discarding(Job(tmp_path, checkpoint, [str(program)])) as job:
        published = kill_often(job, server, gateway, kills)
        rows = stored(server, TOPICS)
        job.wait()
        wait_stored(server, "copies", len(rows))
    check_published(rows, published)
    check_copies(server, rows)


def test_windows_of_an_aggregate_are_written_once(
    server: NatsServer, gateway: Gateway, tmp_path: Path, spark: "SparkSession", kills: int
) -> None:
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "figures"
    arguments = ["-m", "pyspark_mqtt_nats.jobs", "aggregate", "--servers", server.url, "--master", MASTER]
    arguments += ["--topics", TOPICS, "--window", "2 seconds", "--watermark", "1 second", "--num-partitions", "2"]
    arguments += ["--output", str(output), "--checkpoint", str(checkpoint)]
    with discarding(Job(tmp_path, checkpoint, arguments, "--every", "0.5")) as job:
        published = kill_often(job, server, gateway, kills)
        job.run()
    rows = stored(server, TOPICS)
    check_published(rows, published)
    figures = spark.read.parquet(str(output)).collect()
    found = sorted((row.topic, row.start.astimezone(UTC), row["count"], int(row.min), int(row.max)) for row in figures)
    assert found == complete_windows(rows, {row.sequence: int(row.payload) for row in rows})


def test_rules_publish_each_result_once(server: NatsServer, gateway: Gateway, tmp_path: Path, kills: int) -> None:
    """Of a rule that copies messages, and of one with a state."""
    file = tmp_path / "rules.toml"
    file.write_text(RULES % {"topics": TOPICS, "window": DUPLICATES_S}, encoding="utf-8")
    arguments = ["-m", "pyspark_mqtt_nats.jobs", "rule", str(file), "--servers", server.url, "--master", MASTER]
    arguments += ["--starting-sequence", "1"]
    with discarding(Job(tmp_path, tmp_path / "state" / "copies", arguments)) as job:
        published = kill_often(job, server, gateway, kills)
        rows = stored(server, TOPICS)
        expected = complete_windows(rows, {row.sequence: row.sequence for row in rows})
        job.wait()
        wait_stored(server, "copies", len(rows))
        wait_stored(server, "windows", len(expected))
        job.stop()
    check_published(rows, published)
    check_copies(server, rows)
    found = []
    for row in stored(server, "windows/#"):
        one = orjson.loads(row.payload)
        found.append((one["topic"], datetime.fromisoformat(one["start"]), one["count"], one["min"], one["max"]))
    assert sorted(found) == expected
