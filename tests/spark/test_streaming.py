# SPDX-License-Identifier: Apache-2.0
"""Streaming reads through Spark: checkpoints, limits, triggers, streams that are not what they were."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from mqtt_streams.stored import rfc3339
from pyspark_mqtt_nats.release import CONSUMER
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually
from tests.spark.storing import Store, complaint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.timeout(360)


class Output:
    """A query into Parquet files, with its checkpoint."""

    def __init__(self, spark: "SparkSession", directory: Path) -> None:
        self.spark = spark
        self.files = directory / "files"
        self.checkpoint = directory / "checkpoint"

    def start(self, frame: "DataFrame", **trigger: Any) -> "StreamingQuery":
        """Start, or go on."""
        writer = frame.select("sequence", "topic", "payload").writeStream.format("parquet")
        writer = writer.option("path", str(self.files)).option("checkpointLocation", str(self.checkpoint))
        return writer.trigger(**trigger or {"availableNow": True}).start()

    def run(self, frame: "DataFrame") -> list[int]:
        """Run until all that is available has been read; the rows of each batch that had any."""
        query = self.start(frame)
        query.awaitTermination()
        assert query.exception() is None
        return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]

    def rows(self) -> list[int]:
        """All sequences written, in order."""
        return sorted(row.sequence for row in self.spark.read.parquet(str(self.files)).select("sequence").collect())

    @property
    def offset(self) -> dict[str, Any]:
        """Where the query is, as the checkpoint has it."""
        last = max((self.checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
        found: dict[str, Any] = json.loads(last.read_text().splitlines()[-1])
        return found

    def forget_last_batch(self) -> None:
        """As if Spark had been killed in the last batch: it was planned, and its files count for nothing."""
        for log in (self.checkpoint / "commits", self.files / "_spark_metadata"):
            last = max(log.glob("[0-9]*"), key=lambda path: int(path.name))
            last.unlink()
            (log / f".{last.name}.crc").unlink(missing_ok=True)


def test_a_query_that_is_started_again_reads_what_is_new_and_nothing_else(
    spark: "SparkSession", nats_server: NatsServer, tmp_path: Path
) -> None:
    with Store(nats_server.url) as store:
        store.put(range(1000), lambda one: "a.x" if one % 2 else "b")
        output = Output(spark, tmp_path)
        options = {"startingOffsets": "earliest", "topics": "a/+", "maxMessagesPerTrigger": 200}
        assert output.run(store.load_stream(spark, **options)) == [200, 200, 100]
        assert output.rows() == list(range(2, 1001, 2))
        store.put(range(100), lambda one: "a.x")
        assert output.run(store.load_stream(spark, **options)) == [100]
        assert output.rows() == [*range(2, 1001, 2), *range(1001, 1101)]
        output.forget_last_batch()
        store.put(range(300), lambda one: "a.x")
        # The starting options count only once; the batch that was not completed is read again as it was.
        later = options | {"startingOffsets": "latest", "numPartitions": 3}
        assert output.run(store.load_stream(spark, **later)) == [100, 200, 100]
        expected = [*range(2, 1001, 2), *range(1001, 1401)]
        assert output.rows() == expected
        assert output.run(store.load_stream(spark, **options)) == []
        assert output.rows() == expected
        assert output.offset["next"] == store.state["last_seq"] + 1


def test_a_start_that_is_still_to_come(spark: "SparkSession", nats_server: NatsServer, tmp_path: Path) -> None:
    with Store(nats_server.url) as store:
        store.put(range(10))
        waiting, reading = Output(spark, tmp_path / "waiting"), Output(spark, tmp_path / "reading")
        assert waiting.run(store.load_stream(spark, startingTimestamp="2100-01-01")) == []
        waiting.forget_last_batch()
        store.put(range(10))
        # It is in the checkpoint, so the starting options count only once here, too.
        assert waiting.run(store.load_stream(spark, startingOffsets="earliest")) == []
        assert waiting.offset["since"] == 4_102_444_800_000_000_000
        since = store.time_of(store.put([0])[0]) + 3_000_000_000
        frame = store.load_stream(spark, startingTimestamp=rfc3339(since))
        query = reading.start(frame, processingTime="100 milliseconds")
        try:
            # The second batch may have nothing either: the time has come, and no message yet.
            eventually(lambda: store.put([0]) and (reading.checkpoint / "commits" / "2").exists(), 60)
        finally:
            query.stop()
        assert query.exception() is None
        found = reading.rows()
        wanted = [one for one in range(1, store.state["last_seq"] + 1) if store.time_of(one) >= since]
        assert found
        assert found == wanted[: len(found)]


def test_a_running_query_follows_the_stream_and_releases_what_it_has_written(
    spark: "SparkSession", nats_server: NatsServer, tmp_path: Path
) -> None:
    hold = {"durable_name": CONSUMER, "ack_policy": "explicit"}
    with Store(nats_server.url, retention="interest") as store:
        store.api(f"CONSUMER.CREATE .{CONSUMER}", stream_name=store.stream, config=hold)
        store.put(range(100))
        output = Output(spark, tmp_path)
        query = output.start(store.load_stream(spark), processingTime="100 milliseconds")
        try:
            eventually(lambda: (output.checkpoint / "commits" / "0").exists(), 60)
            for _ in range(3):
                store.put(range(50))
            eventually(lambda: store.state["messages"] == 0, 60)
        finally:
            query.stop()
        assert query.exception() is None
        assert output.rows() == list(range(101, 251))  # what comes from now on is the default
        progress = query.lastProgress
        assert progress is not None
        assert json.loads(progress.sources[0].latestOffset)["next"] == 251


def test_a_stream_that_lost_messages_or_was_made_anew(
    spark: "SparkSession", nats_server: NatsServer, tmp_path: Path
) -> None:
    with Store(nats_server.url) as store:
        store.put(range(100))
        strict, lenient = Output(spark, tmp_path / "strict"), Output(spark, tmp_path / "lenient")
        options = {"startingOffsets": "earliest"}
        forgiving = options | {"failOnDataLoss": "false"}
        assert strict.run(store.load_stream(spark, **options)) == [100]
        assert lenient.run(store.load_stream(spark, **forgiving)) == [100]
        store.put(range(100))
        store.purge_before(151)
        with pytest.raises(StreamingQueryException) as told:
            strict.run(store.load_stream(spark, **options))
        assert "messages 101 to 150" in complaint(told.value)
        assert "failOnDataLoss" in complaint(told.value)
        assert lenient.run(store.load_stream(spark, **forgiving)) == [50]
        assert lenient.rows() == [*range(1, 101), *range(151, 201)]
        store.recreate()
        store.put(range(5))
        with pytest.raises(StreamingQueryException) as told:
            lenient.run(store.load_stream(spark, **options))
        assert "(option checkpointLocation), or set failOnDataLoss to false" in complaint(told.value)
        assert lenient.run(store.load_stream(spark, **forgiving)) == [5]
        assert lenient.rows() == sorted([*range(1, 101), *range(151, 201), *range(1, 6)])
