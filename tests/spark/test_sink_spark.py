# SPDX-License-Identifier: Apache-2.0
"""`df.write` and `df.writeStream`, with tasks that fail once and queries that are started again."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from mqtt_nats.codec import Publish, Subscription
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import stream_info
from pyspark_mqtt_nats.options import Options
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.rawclient import topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import eventually
from tests.spark.sinking import Row, Sinker

pytestmark = [pytest.mark.timeout(360), pytest.mark.usefixtures("small")]

ROWS = 1000
PADDING = "x" * 1000
"""Large enough for rows to be on their way while the task that makes them goes on."""


def stored(url: str, first: str) -> int:
    """How many messages of topics below `first` are stored."""
    with Connection(Options.parse({"servers": url}).access) as connection:
        info = stream_info(connection, "$MQTT_msgs", subjects_filter=f"$MQTT.msgs.{first}.>")
    return sum((info["state"].get("subjects") or {}).values())


class Fails:
    """For mapInArrow: fails at the last rows of a partition, when messages of the first ones are stored.

    So it does in the first attempt at a task, or, `always`, in each. A file in `failures` tells of each time.
    """

    def __init__(self, url: str, topic: str, failures: Path, always: bool = False) -> None:
        self.url = url
        self.topic = topic
        self.failures = failures
        self.always = always

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        fails = self.always or context.attemptNumber() == 0
        done = 0
        for batch in batches:
            for start in range(0, batch.num_rows, 50):
                if fails and done >= 400:
                    eventually(lambda: stored(self.url, self.topic))
                    (self.failures / f"{context.partitionId()}-{context.attemptNumber()}").touch()
                    raise RuntimeError("on purpose")
                yield batch.slice(start, 50)
                done += 50


@pytest.fixture
def small(spark: SparkSession) -> Iterator[None]:
    """Writers get their rows in small batches, so that they begin before all rows are made."""
    setting = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(setting, "50")
    yield
    spark.conf.unset(setting)


def rows(spark: SparkSession, topic: str) -> Any:
    """ROWS rows in two partitions."""
    number = F.col("id").cast("string")
    found = spark.range(0, ROWS, 1, 2)
    return found.select(
        F.concat(F.lit(f"{topic}/"), F.col("id") % 5).alias("topic"),
        F.concat(number, F.lit(" " + PADDING)).alias("payload"),
    )


def test_batch_write_with_a_task_that_is_run_again(
    spark: SparkSession, nats_server: NatsServer, gateway: Gateway, tmp_path: Path
) -> None:
    url = nats_server.url
    frame = rows(spark, "batch")
    failing = frame.mapInArrow(Fails(url, "batch", tmp_path), frame.schema)
    failing.write.format("mqtt_nats").options(servers=url, qos=2).mode("append").save()
    assert {path.name for path in tmp_path.iterdir()} == {"0-0", "1-0"}
    assert stored(url, "batch") == ROWS
    back = spark.read.format("mqtt_nats").options(servers=url, topics="batch/#").load()
    found = back.select(
        "topic", "qos", F.split(F.col("payload").cast("string"), " ")[0].cast("int").alias("n"), "sequence"
    ).collect()
    assert sorted(row.n for row in found) == list(range(ROWS))
    assert {(row.topic, row.qos) for row in found} == {(f"batch/{level}", 2) for level in range(5)}
    for half in (range(500), range(500, ROWS)):  # each partition in its order
        ordered = [row.n for row in sorted(found, key=lambda row: row.sequence) if row.n in half]
        assert ordered == list(half)
    # What was read can be written again, without what only the store knows.
    copied = back.where("topic = 'batch/1'").withColumn("topic", F.lit("copy/1"))
    copied.drop("sequence", "timestamp", "topic_levels", "subject", "publisher", "message_id").write.format(
        "mqtt_nats"
    ).options(servers=url).mode("append").save()
    assert stored(url, "copy") == ROWS // 5
    # Equal rows are as many messages, in whichever partition they are.
    equal = spark.range(0, 6, 1, 2).select(F.lit("equal/1").alias("topic"), F.lit("x").alias("payload"))
    equal.write.format("mqtt_nats").options(servers=url).mode("append").save()
    assert stored(url, "equal") == 6
    for wrong, text in (
        (frame.withColumn("key", F.lit(1)), "column 'key' cannot be written"),
        (frame.withColumn("qos", F.lit(3)), "row 0: column qos: 3 is not 0, 1 or 2"),
    ):
        with pytest.raises(PySparkException, match=text):
            wrong.write.format("mqtt_nats").options(servers=url).mode("append").save()
    with pytest.raises(PySparkException, match="messages cannot be overwritten"):
        frame.write.format("mqtt_nats").options(servers=url).mode("overwrite").save()


def test_stream_write_that_is_started_again(
    spark: SparkSession, nats_server: NatsServer, gateway: Gateway, tmp_path: Path
) -> None:
    """The second run of a micro-batch has the identifiers of the first: they come from the checkpoint."""
    url = nats_server.url
    source = tmp_path / "in"
    failures = tmp_path / "failures"
    failures.mkdir()
    rows(spark, "stream").write.parquet(str(source))
    schema = "topic STRING, payload STRING"

    def run(fails: bool) -> None:
        frame = spark.readStream.schema(schema).parquet(str(source))
        if fails:
            frame = frame.mapInArrow(Fails(url, "stream", failures, always=True), schema)
        writer = frame.writeStream.format("mqtt_nats").option("servers", url)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination()

    with pytest.raises(PySparkException, match="on purpose"):
        run(fails=True)
    assert any(failures.iterdir())
    assert 0 < stored(url, "stream") < ROWS
    run(fails=False)
    assert stored(url, "stream") == ROWS
    # The same rows in another micro-batch are other messages.
    rows(spark, "stream").write.mode("append").parquet(str(source))
    run(fails=False)
    assert stored(url, "stream") == 2 * ROWS


async def test_examples_of_the_page(
    spark: SparkSession, nats_server: NatsServer, gateway: Gateway, tmp_path: Path
) -> None:
    """They are run as they are printed, but for the server, and for an end to the query."""
    page = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    alerts, averages = re.findall(
        r"```python\n(.*?)```", page.partition("\n## Writing\n")[2].partition("\n## ")[0], re.DOTALL
    )
    url = nats_server.url
    readings: list[Row] = [
        {"topic": f"site/{site}/temperature", "payload": payload}
        for site, payload in ((1, b"80.5"), (1, b"82"), (2, b"20"), (2, b"22"))
    ]
    Sinker(url, readings).write()
    scope: dict[str, Any] = {"spark": spark}
    for code in (alerts, averages):
        code = code.replace('.format("mqtt_nats")', f'.format("mqtt_nats").option("servers", "{url}")')
        code = code.replace(".readStream", '.readStream.option("startingOffsets", "earliest")')
        code = code.replace("/var/lib/spark", str(tmp_path)).replace(".start()", ".trigger(availableNow=True).start()")
        exec(compile(code, "docs/spark.md", "exec"), scope)
    scope["query"].awaitTermination()
    async with await RawClient5.connect5(gateway.port, "examples") as client:
        await client.subscribe5(Subscription("site/+/temperature/average", 1))
        found = [await client.expect(Publish) for _ in range(2)]
    assert {(topic_of(one), one.payload, one.retain) for one in found} == {
        ("site/1/temperature/average", b"81.25", True),
        ("site/2/temperature/average", b"21.0", True),
    }
    back = spark.read.format("mqtt_nats").options(servers=url, topics="alerts/#").load().collect()
    assert {(row.topic, row.qos, row.content_type) for row in back} == {
        ("alerts/site/1/temperature", 2, "application/json")
    }
    assert sorted(orjson.loads(row.payload)["celsius"] for row in back) == [80.5, 82.0]
