#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# PySpark 4.3.0: `commit(end)` of a Python streaming source is called when the next micro-batch is planned, so never for the
# last one: not at the end of `availableNow`, and not when the query starts again without new data (only a query with a
# watermark may plan one more batch, without data); and `stop()` is not called either. What does say that everything before an
# offset is done is `latestOffset(start)`: a source that releases what was read has to do it there. Needs Java 17 or later.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyspark==4.3.0 pyarrow==26.0.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import os, pathlib, sys

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

FOLDER = pathlib.Path(sys.argv[1])
os.chdir(FOLDER)
os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1", SPARK_LOCAL_DIRS=str(FOLDER / "local"))

CALLS, NEWEST = FOLDER / "calls", FOLDER / "newest"


class Growing(DataSource):
    """Numbers up to the one in a file."""

    @classmethod
    def name(cls):
        return "growing"

    def schema(self):
        return "n INT"

    def streamReader(self, schema):
        return Reader(str(CALLS), str(NEWEST))


class Reader(DataSourceStreamReader):
    def __init__(self, calls, newest):
        self.calls, self.newest = calls, newest

    def note(self, call):
        with open(self.calls, "a") as file:
            file.write(f"{call}\n")

    def initialOffset(self):
        return {"n": 0}

    def latestOffset(self, start, limit):
        self.note(f"latest {start['n']}")
        with open(self.newest) as file:
            return {"n": int(file.read())}

    def partitions(self, start, end):
        return [InputPartition((start["n"], end["n"]))]

    def read(self, partition):
        for number in range(*partition.value):
            yield (number,)

    def commit(self, end):
        self.note(f"commit {end['n']}")

    def stop(self):
        self.note("stop")


def session(**settings):
    """A local session that listens on loopback only."""
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    builder = builder.config("spark.sql.warehouse.dir", str(FOLDER / "warehouse"))
    for name, value in settings.items():
        builder = builder.config(name.replace("__", "."), value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def end(spark):
    """Stop the session and wait until its JVM has ended."""
    gateway = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(60)


def noted():
    return CALLS.read_text().splitlines()


def run(spark, newest):
    """Calls but `latestOffset` in one query on the same checkpoint, and the last start that the source got."""
    NEWEST.write_text(str(newest))
    former = len(noted())
    stream = spark.readStream.format("growing").load().writeStream.format("noop")
    query = stream.option("checkpointLocation", str(FOLDER / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination(300)
    calls = noted()[former:]
    starts = [call for call in calls if call.startswith("latest")]
    return [call for call in calls if call not in starts], starts[-1]


CALLS.touch()
spark = session()
try:
    spark.dataSource.register(Growing)
    first, second, idle = run(spark, 3), run(spark, 6), run(spark, 6)
finally:
    end(spark)
print("PySpark 4.3.0: commits, and the start that the source is asked with: numbers up to 3, up to 6, and nothing new")
print(f"  {first}, {second}, {idle}; calls of stop, when Spark has ended: {noted().count('stop')}")
if "stop" in noted() or (first, second, idle) != (([], "latest 0"), (["commit 3"], "latest 3"), ([], "latest 6")):
    sys.exit("the behaviour has changed")
PYTHON
