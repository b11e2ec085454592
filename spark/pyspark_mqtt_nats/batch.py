# SPDX-License-Identifier: Apache-2.0
"""Batch reads: a pinned range of the stream, split into parts that tasks read in parallel."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from pyspark_mqtt_nats import pushdown
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.projection import Projection
from pyspark_mqtt_nats.reading.ranges import Range, Snapshot, log, split
from pyspark_mqtt_nats.reading.read import read_range
from pyspark_mqtt_nats.reading.rows import Bounds


class Part(InputPartition):
    """Partition of a read: the range of sequences that one task reads."""

    def __init__(self, snapshot: Snapshot, part: Range, renewed: Mapping[str, Any] | None = None) -> None:
        self.snapshot = snapshot
        self.part = part
        self.renewed = renewed
        """Credentials by attribute of Options that have changed since the query was started."""


def number_of_parts(options: Options, length: int, size: int) -> int:
    """Return the number of parts of a range of `length` sequences, with messages of `size` bytes on average.

    Without `numPartitions` there are as many as the driver has processors, but a part has at least about as many
    messages as one record batch: a task costs more than to read a few messages.
    """
    if options.num_partitions is not None:
        return options.num_partitions
    full = Bounds()
    return min(os.cpu_count() or 1, max(1, length // full.rows, length * size // full.bytes))


def parts(snapshot: Snapshot, number: int, renewed: Mapping[str, Any] | None = None) -> list[Part]:
    """Return the range of a snapshot as one part per task, at most `number`; empty when the range is empty."""
    return [Part(snapshot, part, renewed) for part in split(snapshot, number)]


def read(options: Options, projection: Projection, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of one task. Spark makes an empty partition itself when `partitions` returns none."""
    if isinstance(partition, Part):
        if partition.renewed:
            options = replace(options, **partition.renewed)
        batches = read_range(options, partition.snapshot, partition.part, projection.stored)
        yield from projection.apply(batches)


class Reader(DataSourceReader):
    """Spark reader of the messages in a snapshot."""

    def __init__(self, options: Options, snapshot: Snapshot, projection: Projection) -> None:
        self.options = options
        self.snapshot = snapshot
        self.projection = projection

    def partitions(self) -> Sequence[InputPartition]:
        """Return the ranges of sequences, one for each task."""
        found = self.snapshot
        return parts(found, number_of_parts(self.options, found.end - found.start, found.size))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the record batches of one range."""
        return read(self.options, self.projection, partition)


class FilteringReader(Reader):
    """Reader of the messages that the query's filters can match. Needs Spark's filter pushdown to be enabled."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        """Narrow the range and the topic filters; return the filters that Spark must evaluate too."""
        wanted = pushdown.Wanted.of(filters)
        log.warning(pushdown.WARNING)
        self.options, self.snapshot = wanted.narrow(self.options, self.snapshot)
        return wanted.left
