#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# PySpark 4.3.0: `CREATE TABLE ... USING source OPTIONS (address 'a')` of a Python data source is accepted, and the source gets
# none of the options when the table is read: it sees an empty dict, and reads whatever its defaults say. `CREATE TEMPORARY
# VIEW` with the same clause passes them. Needs Java 17 or later.
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


class Echo(DataSource):
    """A row with the options that the source has got."""

    @classmethod
    def name(cls):
        return "echo"

    def schema(self):
        return "options STRING"

    def reader(self, schema):
        return Reader(str(dict(self.options)))


class Reader(DataSourceReader):
    def __init__(self, options):
        self.options = options

    def read(self, partition):
        yield (self.options,)


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


spark = session()
try:
    spark.dataSource.register(Echo)
    spark.sql("CREATE TABLE kept USING echo OPTIONS (address 'a')")
    spark.sql("CREATE TEMPORARY VIEW view USING echo OPTIONS (address 'a')")
    table = spark.sql("SELECT options FROM kept").first()[0]
    view = spark.sql("SELECT options FROM view").first()[0]
finally:
    end(spark)
print(f"PySpark 4.3.0: options of the table {table}, of the view {view}")
if (table, view) != ("{}", "{'address': 'a'}"):
    sys.exit("the behaviour has changed")
PYTHON
