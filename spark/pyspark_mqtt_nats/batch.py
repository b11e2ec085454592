# SPDX-License-Identifier: Apache-2.0
"""Batch reads: a pinned range of the stream, in parts that are read at the same time."""

import os
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from pyspark_mqtt_nats import pushdown
from pyspark_mqtt_nats.hints import Projection
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading.ranges import Range, Snapshot, log, split
from pyspark_mqtt_nats.reading.read import read_range


class Part(InputPartition):
    """What one task reads."""

    def __init__(self, snapshot: Snapshot, part: Range) -> None:
        self.snapshot = snapshot
        self.part = part


def parts(options: Options, snapshot: Snapshot) -> list[Part]:
    """The range of a snapshot as what tasks read; empty when there is nothing to read."""
    number = options.num_partitions or os.cpu_count() or 1
    return [Part(snapshot, part) for part in split(snapshot, number)]


def read(options: Options, projection: Projection, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """What one task does. Spark makes a partition of its own when a batch read has none: nothing is in it."""
    if isinstance(partition, Part):
        batches = read_range(options, partition.snapshot, partition.part, projection.stored)
        yield from projection.apply(batches)


class Reader(DataSourceReader):
    """Reads what is in a snapshot."""

    def __init__(self, options: Options, snapshot: Snapshot, projection: Projection) -> None:
        self.options = options
        self.snapshot = snapshot
        self.projection = projection

    def partitions(self) -> Sequence[InputPartition]:
        """Ranges of sequences."""
        return parts(self.options, self.snapshot)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Record batches of one range."""
        return read(self.options, self.projection, partition)


class FilteringReader(Reader):
    """Reads only what filters of the query leave. Spark plans no reads with it unless it is told to push filters."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        """Narrow down what is read; Spark applies all filters but those that always hold itself."""
        wanted = pushdown.Wanted.of(filters)
        log.warning(pushdown.WARNING)
        self.options, self.snapshot = wanted.narrow(self.options, self.snapshot)
        return wanted.left
