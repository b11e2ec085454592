# SPDX-License-Identifier: Apache-2.0
"""Command `prepare`: an archive of Spark's Java classes, with which later starts of Spark take less time."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from pyspark_mqtt_nats import java
from pyspark_mqtt_nats.class_archive import make_archive
from pyspark_mqtt_nats.jobs import JobError, flags, require_spark
from pyspark_mqtt_nats.jobs.progress import Progress
from pyspark_mqtt_nats.jobs.runs import STOPPED

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_EXIT_WAIT_S: Final = 300.0
"""Most seconds for a JVM to end, which writes the archive then."""


@click.command(cls=flags.Job)
def prepare() -> None:
    """An archive of Spark's Java classes, with which later starts of Spark take less time.

    It takes the time of some starts of Spark, and is kept in ~/.cache/mqtt-nats (or below XDG_CACHE_HOME). Run it
    again when Java or Spark was upgraded: until then Spark starts without the archive.
    """
    require_spark()
    from pyspark_mqtt_nats.jobs.session import end_start, submitted

    if submitted():
        raise JobError("prepare starts a Spark of its own: run it without spark-submit")
    progress = Progress("prepare")
    progress.show("Spark runs once, and Java writes the archive")
    try:
        with progress.signals(end_start):
            place = make_archive(java.ensure(), os.environ, use_spark)
    except (Exception, KeyboardInterrupt):
        if not progress.stopping:
            raise
        sys.exit(STOPPED)
    finally:
        progress.clear()
    size = sum(file.stat().st_size for file in place.iterdir())
    click.echo(f"archive of Spark's classes in {place}, {size / 2**20:.0f} MiB")


def use_spark() -> None:
    """Start a session, load the classes that reads, SQL, streams and archives need, and end its JVM; raises JobError.

    The session connects to no server.
    """
    from pyspark_mqtt_nats.jobs.session import Setup, session

    with session(Setup("prepare", "local[2]")) as (spark, _), tempfile.TemporaryDirectory() as directory:
        jvm: subprocess.Popen[bytes] = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
        _batch(spark, Path(directory))
        _stream(spark, Path(directory))
    end(jvm)


def end(jvm: "subprocess.Popen[bytes]") -> None:
    """Close the input of a JVM, with which it ends, and wait; raises JobError unless its exit status is 0."""
    assert jvm.stdin is not None
    jvm.stdin.close()
    try:
        status = jvm.wait(_EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        jvm.kill()
        raise JobError(f"Spark's JVM has not ended in {_EXIT_WAIT_S:.0f} seconds") from None
    if status:
        raise JobError(f"Spark's JVM has ended with exit status {status}; is there space in the cache directory?")


def _same(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
    return batches


def _batch(spark: "SparkSession", directory: Path) -> None:
    columns = ("id AS sequence", "timestamp_micros(id) AS timestamp", "concat('site/', id % 10) AS topic")
    made = spark.range(1000).selectExpr(*columns)
    rows = made.mapInArrow(_same, made.schema)
    rows.createOrReplaceTempView("messages")
    rows.collect()
    rows.write.format("noop").mode("overwrite").save()
    by_hour = "SELECT topic, window.start, count(*), avg(sequence) FROM messages"
    spark.sql(f"{by_hour} GROUP BY topic, window(timestamp, '1 hour') ORDER BY topic").collect()
    rows.write.parquet(str(directory / "rows"))
    spark.read.parquet(str(directory / "rows")).where("topic LIKE 'site/%'").collect()


def _stream(spark: "SparkSession", directory: Path) -> None:
    rows: Any = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    files = rows.selectExpr("*", "to_date(timestamp) AS date").writeStream.format("parquet").partitionBy("date")
    files = files.option("path", str(directory / "files"))
    counts = rows.withWatermark("timestamp", "1 minute").groupBy("timestamp").count()
    for name, writer in (("files", files), ("counts", counts.writeStream.format("noop").outputMode("update"))):
        query = writer.option("checkpointLocation", str(directory / f"{name}.checkpoint"))
        query.trigger(availableNow=True).start().awaitTermination()
