#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# PySpark 4.3.0: a Python data source whose reader has `pushFilters` cannot be read at all with Spark's default settings, with
# or without a filter in the query: DATA_SOURCE_PUSHDOWN_DISABLED. The setting is not "do not ask for filters". So a source
# that is to work where spark.sql.python.filterPushdown.enabled is off needs a second class of readers, and an option that
# chooses. Needs Java 17 or later.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyspark==4.3.0 pyarrow==26.0.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import os, pathlib, sys

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader

FOLDER = pathlib.Path(sys.argv[1])
os.chdir(FOLDER)
os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1", SPARK_LOCAL_DIRS=str(FOLDER / "local"))


class Source(DataSource):
    @classmethod
    def name(cls):
        return "source"

    def schema(self):
        return "n INT"

    def reader(self, schema):
        return Filtering() if "filtering" in self.options else Reader()


class Reader(DataSourceReader):
    def read(self, partition):
        yield (1,)


class Filtering(Reader):
    def pushFilters(self, filters):
        return filters


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


DISABLED = "DATA_SOURCE_PUSHDOWN_DISABLED"


def count(spark, *options, where=None):
    frame = spark.read.format("source").options(**dict.fromkeys(options, "")).load()
    try:
        return (frame.filter(where) if where else frame).count()
    except Exception as error:
        return DISABLED if DISABLED in str(error) else str(error)


spark = session()
try:
    spark.dataSource.register(Source)
    plain, filtering, filtered = count(spark), count(spark, "filtering"), count(spark, "filtering", where="n = 1")
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    enabled = count(spark, "filtering")
finally:
    end(spark)
print(f"PySpark 4.3.0: {plain} row without pushFilters, and {enabled} row with it where the setting is on")
print(f"  with it and default settings: {filtering}, and with a filter in the query: {filtered}")
if (plain, filtering, filtered, enabled) != (1, DISABLED, DISABLED, 1):
    sys.exit("the behaviour has changed")
PYTHON
