#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# PySpark 4.3.0, spark.sql.python.filterPushdown.enabled: a filter that a Python data source has taken (`pushFilters`) stays in
# the DataFrame that it was derived from. After `frame.filter("n = 1").count()` the count of `frame` itself is 1, and a union
# of the two has each row of the filter twice. No error tells it. A new `load()` for each filter is what helps. Needs Java 17
# or later.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyspark==4.3.0 pyarrow==26.0.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import os, pathlib, sys

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, InputPartition, IsNotNull

FOLDER = pathlib.Path(sys.argv[1])
os.chdir(FOLDER)
os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1", SPARK_LOCAL_DIRS=str(FOLDER / "local"))


class Numbers(DataSource):
    """Rows 0, 1 and 2, a partition each."""

    @classmethod
    def name(cls):
        return "numbers"

    def schema(self):
        return "n INT"

    def reader(self, schema):
        return Reader()


class Reader(DataSourceReader):
    only = None

    def pushFilters(self, filters):
        for one in filters:
            if isinstance(one, EqualTo):
                self.only = one.value
            elif not isinstance(one, IsNotNull):
                yield one

    def partitions(self):
        return [InputPartition(number) for number in range(3) if self.only in (None, number)]

    def read(self, partition):
        yield (partition.value,)


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


spark = session(spark__sql__python__filterPushdown__enabled="true")
try:
    spark.dataSource.register(Numbers)
    frame = spark.read.format("numbers").load()
    before = frame.count()
    filtered = frame.filter("n = 1").count()
    after = frame.count()
    union = frame.union(frame.filter("n = 1")).count()
    fresh = spark.read.format("numbers").load().count()
finally:
    end(spark)
print(f"PySpark 4.3.0: {before} rows, {filtered} with the filter, then {after} without it; union {union}; a new load {fresh}")
if (before, filtered, after, union, fresh) != (3, 1, 1, 2, 3):
    sys.exit("the behaviour has changed")
PYTHON
