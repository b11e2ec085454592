# SPDX-License-Identifier: Apache-2.0
"""Micro-batches of a streaming query as commits of a table: for `foreachBatch`."""

import secrets
from collections.abc import Callable
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.jobs.storage import Place
from pyspark_mqtt_nats.lakehouse import PACKAGES, require
from pyspark_mqtt_nats.lakehouse.columns import compare, nullable, read
from pyspark_mqtt_nats.lakehouse.sink_log import LOG
from pyspark_mqtt_nats.lakehouse.tables import COPIES, DATA, PARTITIONS, DataFile, Table, Target, open_table

_SETTINGS: Final = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}
"""Spark's own default is a type that Iceberg does not know."""

_INFERENCE: Final = "spark.sql.sources.partitionColumnTypeInference.enabled"

_TYPED: Final = ("parquet", "orc")
"""Formats of files that have types, which Spark reads of all files."""


def prepare(spark: SparkSession) -> None:
    """Have Spark write what tables can refer to."""
    for name, value in _SETTINGS.items():
        spark.conf.set(name, value)


def arrow_schema(frame: DataFrame) -> pa.Schema:
    """Return the columns of a table for rows of a frame.

    Everything may be null: older rows lack a column, and files that Spark has read and written again say nothing else.
    """
    return _arrow(StructType([StructField(field.name, nullable(field.dataType)) for field in frame.schema.fields]))


def _arrow(columns: StructType) -> pa.Schema:
    found: pa.Schema = to_arrow_schema(columns, timezone="UTC")
    return found


class Batches:
    """Writer of batches. A batch that the table has is left out: a run was killed before Spark had noted it.

    The files of a batch that was not committed stay in the table's directory, and no reader sees them.

    Args:
        arrange: makes the table's rows of the query's, in the partitions that become files.
        keep: the files have the columns of the partitions too, as Iceberg wants it.
    """

    def __init__(
        self, table: Table, place: Place, writer: str, arrange: Callable[[DataFrame], DataFrame], *, keep: bool
    ) -> None:
        self._table = table
        self._place = place
        self._writer = writer
        self._arrange = arrange
        self._keep = keep

    def write(self, rows: DataFrame, number: int) -> None:
        """Write and commit a batch; raises JobError."""
        if number <= self._table.last_batch():
            return
        directory = f"{DATA}/{self._writer}-{number}-{secrets.token_hex(4)}"
        frame, names = self._arrange(rows), list(PARTITIONS)
        if self._keep:
            frame = frame.withColumns({copy: F.col(name) for copy, name in zip(COPIES, PARTITIONS, strict=True)})
            names = list(COPIES)
        frame.write.partitionBy(*names).parquet(self._place.child(directory))
        found = self._place.files(directory)
        files = [
            DataFile.of(f"{directory}/{path}", size, time) for path, size, time in found if path.endswith(".parquet")
        ]
        self._table.add(files, number)


def read_files(spark: SparkSession, path: str, format: str) -> DataFrame:
    """Return an archive in any format as a DataFrame; raises JobError where a table is not there."""
    if format not in PACKAGES:
        return _directories(spark, path, format)
    require(format)
    table = open_table(Target(format, path, flag="--input"))
    files = table.files()
    if not files:
        raise JobError(f"--input {path}: the table has no files")
    return read(spark, files, table.columns())


def _directories(spark: SparkSession, path: str, format: str, **options: str) -> DataFrame:
    """Return an archive of files with `root` as text and `date` as a date.

    Spark would choose types of the names of directories: `root` would be a number where all first levels look like one.
    """
    before = spark.conf.get(_INFERENCE)
    spark.conf.set(_INFERENCE, "false")
    try:
        found = spark.read.format(format).options(**options).load(path)
    finally:
        spark.conf.set(_INFERENCE, str(before))
    day = found.schema["date"].dataType if {"date", "root"}.issubset(found.columns) else None
    return found.withColumn("date", F.try_to_date("date")) if isinstance(day, StringType) else found


def compare_files(spark: SparkSession, place: Place, format: str, wanted: StructType) -> None:
    """Raise JobError where columns that are wanted have another type in the files of an archive, if it has files."""
    if format not in _TYPED or not place.has(LOG):
        return
    try:
        there = _directories(spark, place.path, format, mergeSchema="true").schema
    except Exception as error:  # of PySpark or of py4j
        if "UNABLE_TO_INFER_SCHEMA" in str(error):  # no batch had a message
            return
        if "CANNOT_MERGE" in str(error):
            text = "files there have one column in several types already; give another --output and --checkpoint"
            raise JobError(f"{place.option} {place.path}: {text}") from None
        raise
    compare(f"{place.option} {place.path}", _arrow(there), _arrow(wanted))
