# SPDX-License-Identifier: Apache-2.0
"""Types of the columns of an archive that is there, compared with those of the rows that are to be added.

Files of two types for one column make it unreadable: Spark, delta-rs and other readers end with an error for the
whole archive. So a run is refused before it writes.
"""

from collections.abc import Callable, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from pyspark_mqtt_nats.jobs import JobError


def _itself(kind: DataType) -> DataType:
    return kind


def _never(old: DataType, new: DataType) -> bool:
    return False


def nullable(kind: DataType, stored: Callable[[DataType], DataType] = _itself) -> DataType:
    """Return a type all of whose parts may be null; `stored` gives the type that a format has for a simple one."""
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, nullable(field.dataType, stored)) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(nullable(kind.elementType, stored))
    if isinstance(kind, MapType):
        return MapType(nullable(kind.keyType, stored), nullable(kind.valueType, stored))
    return stored(kind)


def compare(
    where: str,
    there: pa.Schema,
    wanted: pa.Schema,
    *,
    stored: Callable[[DataType], DataType] = _itself,
    wider: Callable[[DataType, DataType], bool] = _never,
    place: str = "--output and --checkpoint",
) -> bool:
    """Return whether a column becomes wider; raises JobError for any other change of a column.

    Args:
        where: the option that names the archive, with its value.
        there: columns of the archive; those that it lacks may be added.
        wanted: columns of the rows that are to be added.
        stored: gives the type that the format has for a simple type.
        wider: whether the format reads values of one type as those of another, which then is the column's.
        place: options that give the rows an archive of their own.
    """
    known = {field.name.lower(): field for field in there} | {field.name: field for field in there}
    widened = False
    for field in wanted:
        before = known.get(field.name, known.get(field.name.lower()))
        if before is None:
            continue
        if before.name != field.name:
            text = f"has the name {before.name!r} there; give it the same name"
            raise JobError(f"{where}: column {field.name!r} {text}, or another {place}")
        old, new = (nullable(from_arrow_type(one.type), stored) for one in (before, field))
        if old == new:
            continue
        if not wider(old, new):
            given = from_arrow_type(field.type).simpleString()
            text = f"is {old.simpleString()} there, and would be {given}; give it the same type, or another name"
            raise JobError(f"{where}: column {field.name!r} {text}, or another {place}")
        widened = True
    return widened


def read(spark: SparkSession, paths: Sequence[str], columns: StructType | None) -> DataFrame:
    """Return files of Parquet with these columns, None for those of all files, which must have one type for each."""
    reader = spark.read.option("mergeSchema", "true") if columns is None else spark.read.schema(columns)
    return reader.parquet(*paths)
