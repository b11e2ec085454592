# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of rules do not grow with the number of batches."""

from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from pyspark_mqtt_nats.rules.query_plan import RETAINED_BATCHES, SETTINGS
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

PATIENCE = 400.0  # seconds; Spark looks each minute for files of states that can go


def files(checkpoint: Path) -> Counter[str]:
    """Number of files by directory of the checkpoint, those of states also by kind."""
    found: Counter[str] = Counter()
    for path in checkpoint.rglob("*"):
        if path.is_file() and path.suffix != ".crc":
            top = path.relative_to(checkpoint).parts[0]
            found[f"{top}{path.suffix if top == 'state' else ''}"] += 1
    return found


def batch(query: StreamingQuery) -> int:
    """Number of the last batch that is complete."""
    last = query.lastProgress
    return -1 if last is None else int(last.batchId)


def test_files_of_a_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    """The source is one of Spark's own, whose batches need no worker of Python."""
    session = spark.newSession()
    for name, value in {**SETTINGS, "spark.sql.shuffle.partitions": "1"}.items():
        session.conf.set(name, value)
    source = session.readStream.format("rate-micro-batch").options(rowsPerBatch="3", numPartitions="1").load()
    counted = source.selectExpr("value % 3 AS key").groupBy("key").count()
    writer = counted.writeStream.format("noop").outputMode("update").option("checkpointLocation", str(tmp_path))
    query = writer.start()
    try:
        eventually(lambda: batch(query) > 5 * RETAINED_BATCHES or not query.isActive, PATIENCE)
        most = 3 * RETAINED_BATCHES  # what can go goes in portions

        def few() -> bool:
            found = files(tmp_path)
            return all(0 < found[kind] <= most for kind in ("offsets", "commits", "state.zip", "state.sst"))

        eventually(lambda: few() or not query.isActive, PATIENCE)
        assert query.isActive, query.exception()
    finally:
        query.stop()
