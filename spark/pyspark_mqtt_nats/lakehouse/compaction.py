# SPDX-License-Identifier: Apache-2.0
"""Small files of finished days as fewer large ones, in whatever names the files that count."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from pyspark_mqtt_nats.jobs.storage import Place
from pyspark_mqtt_nats.lakehouse.columns import read


@dataclass(frozen=True)
class Group:
    """Files of one day and root: `paths` as Spark reads them, and their bytes together."""

    paths: tuple[str, ...]
    size: int

    def files(self, size: int) -> int:
        """Return the number of files of about `size` bytes."""
        return max(1, math.ceil(self.size / size))


class Compactable(Protocol):
    """A table, or a log of files, that can be compacted; each method raises JobError.

    `of_directories`: columns that Spark takes from the names of directories, and that are not in the files.
    """

    of_directories: tuple[str, ...]

    def columns(self) -> StructType | None:
        """Return the columns with which Spark has to read the files, None for those that the files have."""
        ...

    def groups(self, before: str) -> list[Group]:
        """Return the files of days before a date (ISO 8601)."""
        ...

    def replace(self, group: Group, place: Place, directory: str) -> int:
        """Have the files of a directory count in place of a group, at once; return how many there are."""
        ...


def compact(spark: SparkSession, place: Place, table: Compactable, before: str, size: int) -> tuple[int, int]:
    """Make files of about `size` bytes; return how many files went and came.

    Rows keep the order of their sequences. Files that count no more stay: a reader may be at them.
    """
    gone = come = 0
    for group in table.groups(before):
        number = group.files(size)
        if len(group.paths) <= number:
            continue
        directory = f"_compact-{secrets.token_hex(8)}"
        rows = read(spark, group.paths, table.columns()).drop(*table.of_directories)
        ordered = rows.repartitionByRange(number, "sequence").sortWithinPartitions("sequence")
        try:
            ordered.write.parquet(place.child(directory))
            come += table.replace(group, place, directory)
            gone += len(group.paths)
        finally:
            place.remove(directory)
    return gone, come


def parquet_names(place: Place, directory: str) -> Sequence[tuple[str, int, int]]:
    """Return the files of Parquet in a directory: name, bytes, time in milliseconds since 1970."""
    return [one for one in place.files(directory) if one[0].endswith(".parquet")]
