# SPDX-License-Identifier: Apache-2.0
"""A table into which batches of files go, each batch once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql.types import StructType

from pyspark_mqtt_nats.jobs import JobError

PARTITIONS: Final = ("date", "root")
"""Columns by which tables are partitioned."""

COPIES: Final = tuple(f"_{name}" for name in PARTITIONS)
"""Names for PARTITIONS in directories where the files have these columns too."""

DATA: Final = "data"
"""Directory of the files, below that of the table."""


@dataclass(frozen=True)
class DataFile:
    """A file of Parquet: path below the table's directory, bytes, time in ms since 1970, values of PARTITIONS."""

    path: str
    size: int
    time: int
    partition: dict[str, str]

    @classmethod
    def of(cls, path: str, size: int, time: int) -> "DataFile":
        """Return a file that Spark has written; the names of its directories have the values."""
        pairs = (part.partition("=") for part in path.split("/"))
        found = {name.removeprefix("_"): unquote(value) for name, equals, value in pairs if equals}
        return cls(path, size, time, found)


class Table(Protocol):
    """A table at a place. Both kinds raise JobError, one line that names the option."""

    def last_batch(self) -> int:
        """Return the number of the last batch that this writer has committed, -1 for none."""
        ...

    def add(self, files: Sequence[DataFile], batch: int) -> None:
        """Commit a batch: its files and its number in one transaction."""
        ...

    def files(self) -> list[str]:
        """Return the paths of all files that count, as Spark reads them."""
        ...

    def columns(self) -> StructType | None:
        """Return the columns with which Spark has to read the files, None for those that the files have."""
        ...


@dataclass(frozen=True)
class Target:
    """Place of a table, and the flag that names it in errors.

    `catalog` and `name` are for Iceberg; `catalog` None: a file beside the data.
    """

    format: str
    output: str
    catalog: str | None = None
    name: str = "mqtt.messages"
    flag: str = "--output"

    @property
    def uri(self) -> str:
        """The place as delta-rs and PyIceberg take it."""
        if "://" in self.output:
            return self.output.replace("s3a://", "s3://", 1).rstrip("/")
        return str(Path(self.output.removeprefix("file:")).absolute())


def missing(target: Target) -> JobError:
    """Return the error for a place without a table."""
    name = f" {target.name}" if target.format == "iceberg" else ""
    return JobError(f"{target.flag} {target.output}: there is no table{name} of {target.format}")


def exists(target: Target) -> bool:
    """Whether there is a table at a place."""
    if target.format == "delta":
        from pyspark_mqtt_nats.lakehouse import delta

        return delta.exists(target)
    from pyspark_mqtt_nats.lakehouse import iceberg

    return iceberg.exists(target)


def open_table(target: Target, writer: str = "", schema: pa.Schema | None = None) -> Table:
    """Return the table at a place.

    Args:
        writer: names the writer, whose batches are counted.
        schema: makes the table where there is none, and adds the columns that it lacks; None: it has to be there.
    """
    if schema is None and not exists(target):
        raise missing(target)
    if target.format == "delta":
        from pyspark_mqtt_nats.lakehouse import delta

        return delta.DeltaLake(target, writer, schema)
    from pyspark_mqtt_nats.lakehouse import iceberg

    return iceberg.Iceberg(target, writer, schema)
