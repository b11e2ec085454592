# SPDX-License-Identifier: Apache-2.0
"""Retained messages as a table: one row per topic, as the topic is while it is being read.

NATS keeps only the last message of a topic. So a message that was retained when the DataFrame was made may be gone, and
no range can be pinned. A topic that is retained anew moves to the end of the stream, maybe past the reader. So the
reader goes on to the new end of the stream, and then asks for each topic that it has still not met. One task does all
of it, because it has to know all topics.

A topic may have former messages too: nats-server was killed before it removed them. The reader asks for such a
topic, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from mqtt_streams.stored import StoredMessage, records_in
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import get_message, stream_info
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.projection import Projection
from pyspark_mqtt_nats.pushdown import WARNING, Wanted
from pyspark_mqtt_nats.reading.batches import Batches
from pyspark_mqtt_nats.reading.ranges import Range, Snapshot, bounds, log
from pyspark_mqtt_nats.reading.read import read_range
from pyspark_mqtt_nats.reading.selection import visible

ROUNDS: Final = 4
"""Times that the reader reads up to the new end of the stream before it asks for single topics."""


class Everything(InputPartition):
    """Partition of a read in one task."""

    def __init__(self) -> None:
        super().__init__(None)


class Reader(DataSourceReader):
    """Spark reader of the retained message of each topic."""

    def __init__(self, options: Options, snapshot: Snapshot, projection: Projection) -> None:
        self.options = options
        self.snapshot = snapshot
        self.projection = projection

    def partitions(self) -> Sequence[InputPartition]:
        """Return the only partition."""
        return [Everything()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the record batches of the table, which have each topic once."""
        names = self.projection.stored
        added = () if "subject" in names else ("subject",)
        batches = last_messages(self.options, self.snapshot, (*names, *added))
        yield from self.projection.apply(batch.select(names) for batch in batches)


class FilteringReader(Reader):
    """Reader of the topics that the query's filters can match."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        """Narrow the topic filters; return the filters that Spark must evaluate too."""
        wanted = Wanted.of(filters)
        log.warning(WARNING)
        found = wanted.filters(self.options.filters)
        if found:
            self.options = replace(self.options, filters=found)
        return wanted.left


def last_messages(options: Options, snapshot: Snapshot, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Yield batches with the last message of each subject; `columns` has `subject`, and no subject comes twice.

    No connection is open while Spark has a batch: that may take minutes, and nats-server ends a connection that does
    not answer its PINGs.
    """
    several = _several(options)
    met = set(several)
    start, end = snapshot.start, _end(options)
    for _ in range(ROUNDS):
        part = replace(snapshot, start=start, end=end)
        for batch in read_range(options, part, Range(start, end), columns):
            yield _unmet(batch, met)
        start, end = end, _end(options)
        if start == end:
            wanted = several
            break
    else:
        wanted = several | (_counts(options).keys() - met)
    shown = visible(options.subjects, options.subject_prefix, evaluated=bool(options.asked))
    left = [subject for subject in wanted if shown is None or shown(subject)]
    batches = Batches(columns, options.subject_prefix, retained=options.mode == "retained")
    for at in range(0, len(left), options.batch_size):
        found = _last(options, left[at : at + options.batch_size])
        if found:
            yield batches.batch(
                pa.array([message.seq for message in found], pa.int64()),
                pa.array([message.time_ns for message in found], pa.int64()),
                pa.array([message.subject.encode() for message in found], pa.binary()),
                pa.array([message.headers for message in found], pa.binary()),
                pa.array([message.payload for message in found], pa.binary()),
            )


def _end(options: Options) -> int:
    with Connection(options.access) as connection:
        return bounds(stream_info(connection, options.stream))[1] + 1


def _last(options: Options, subjects: list[str]) -> list[StoredMessage]:
    """Return the last message of each subject (without the prefix) that has one."""
    with Connection(options.access) as connection:
        found = (
            get_message(connection, options.stream, last_by_subj=options.subject_prefix + subject)
            for subject in subjects
        )
        return [message for message in found if message is not None]


def _unmet(batch: pa.RecordBatch, met: set[str]) -> pa.RecordBatch:
    """Return the rows whose subjects are not in `met`, and add their subjects to `met`."""
    subjects = batch.column("subject").to_pylist()
    known = [subject in met for subject in subjects]
    met.update(subjects)
    return batch.filter(pa.array([not one for one in known], pa.bool_())) if any(known) else batch


def _several(options: Options) -> set[str]:
    """Return the subjects (without the prefix) that match the topic filters and have several messages."""
    with Connection(options.access) as connection:
        state = stream_info(connection, options.stream)["state"]
    if state["messages"] == records_in(state):
        return set()
    return {subject for subject, count in _counts(options).items() if count > 1}


def _counts(options: Options) -> dict[str, int]:
    """Return the number of messages of each subject (without the prefix) that matches the topic filters."""
    found: dict[str, int] = {}
    with Connection(options.access) as connection:
        for asked in options.asked or (">",):
            offset, total = 0, 1
            while offset < total:
                info = stream_info(connection, options.stream, subjects_filter=asked, offset=offset)
                page = info["state"].get("subjects") or {}
                found |= {subject.removeprefix(options.subject_prefix): int(count) for subject, count in page.items()}
                offset, total = offset + len(page), int(info.get("total", 0)) if page else 0
    return found
