# SPDX-License-Identifier: Apache-2.0
"""The job ``replay``: publishes an archive again, in its order, as fast as it was recorded or at another speed.

Order and pace need one publisher, so it is the driver that publishes: Spark reads and sorts, and hands over one record
batch after the other.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType

from pyspark_mqtt_nats.errors import OptionError, SourceError
from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.jobs.progress import Progress, count, duration, plural, rate
from pyspark_mqtt_nats.jobs.queries import watch
from pyspark_mqtt_nats.lakehouse.batches import read_files
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.publishing import columns
from pyspark_mqtt_nats.publishing.encoding import Encoder, Identities, Refused
from pyspark_mqtt_nats.publishing.publisher import Publisher
from pyspark_mqtt_nats.topics import pattern

# What the driver holds of the archive at a time, about: messages, and bytes of payloads. The next part is on its way
# meanwhile, and the JVM has several copies of each.
_PART: Final = 50_000
_PART_BYTES: Final = 16 << 20
_LOOK: Final = 0.2  # seconds between two looks at the connection and the wish to stop
_TICK: Final = 0.002  # seconds by which a message may be early
_SHOWN: Final = 100  # messages between two updates of the progress line
_NEEDED: Final = ("sequence", "timestamp", "topic", "payload")
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True)
class Replay:
    """Messages to publish, and their rate.

    `sink`: options of the sink. `speed`: multiple of the recorded speed, 0 for as fast as possible; `rate`: messages a
    second instead. `filters`: MQTT topic filters. `start` and `end`: sequences, the end included; `since` and `until`:
    when NATS stored a message, in nanoseconds, the end not included.
    """

    input: str
    sink: Mapping[str, str]
    format: str = "parquet"
    speed: float = 1.0
    rate: float | None = None
    prefix: str = ""
    retain: bool = True
    filters: tuple[str, ...] = ("#",)
    start: int | None = None
    end: int | None = None
    since: int | None = None
    until: int | None = None


@dataclass(frozen=True)
class Replayed:
    """Number of messages published, of `total`. `last`: sequence of the last one, 0 for none; `late` in seconds."""

    job: Replay
    messages: int
    total: int
    last: int
    duplicates: int
    late: float
    seconds: float

    def text(self) -> str:
        """The summary."""
        job = self.job
        speed = f"{duration(self.seconds)}, {rate(self.messages, self.seconds)}"
        lines = [f"{plural(self.messages, 'message')} of {job.input} published in {speed}"]
        if job.prefix:
            lines.append(f"  on topics that begin with {job.prefix}")
        if self.duplicates:
            lines.append(f"  the stream had {count(self.duplicates)} of them from an earlier run with this queryId")
        if self.late >= 1:
            lines.append(f"  {duration(self.late)} behind the pace at the end: publishing is not faster")
        if self.messages < self.total:
            more = f"; --starting-sequence {self.last + 1} goes on" if self.last else ""
            lines.append(f"  stopped, {count(self.total - self.messages)} are left{more}")
        return "\n".join(lines)


def run(spark: SparkSession, job: Replay, progress: Progress) -> Replayed:
    """Publish everything, or until the user stops it; raises JobError, OptionError, SourceError."""
    options = Options.parse(job.sink)
    messages = selected(read_files(spark, job.input, job.format), job)
    total, size = watch(spark, progress, "counting", lambda: measured(messages))
    return publish(job, options, in_order(messages, total, size), total, progress)


def measured(messages: DataFrame) -> tuple[int, int]:
    """How many messages there are, and how many bytes of payloads."""
    row = messages.agg(F.count(F.lit(1)), F.sum(F.length("payload"))).collect()[0]
    return row[0], row[1] or 0


def selected(archive: DataFrame, job: Replay) -> DataFrame:
    """The messages of an archive that are to be published: `sequence`, `timestamp`, and what can be written."""
    names = [name for name in archive.columns if name in columns.COLUMNS or name in _NEEDED]
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise JobError(f"--input {job.input} is no archive of messages: it has no column {missing[0]!r}")
    try:
        kept = archive.select(*names).drop("sequence", "timestamp").schema
        columns.check(kept, False)
    except OptionError as error:
        raise JobError(f"--input {job.input}: {error}") from None
    if not isinstance(kept["payload"].dataType, BinaryType):
        raise JobError(
            f"--input {job.input}: payloads are text; --format has to be one that keeps bytes, as parquet does"
        )
    if not job.retain:
        names = [name for name in names if name != "retain"]
    # What a NATS client has stored on a subject that is no topic cannot be published on one.
    found = archive.select(*names).where(F.col("topic").isNotNull())
    if "#" not in job.filters:
        found = found.where(F.col("topic").rlike("|".join(f"(?:{pattern(item)})" for item in job.filters)))
    if job.start is not None:
        found = found.where(F.col("sequence") >= job.start)
    if job.end is not None:
        found = found.where(F.col("sequence") <= job.end)
    if job.since is not None:
        found = found.where(F.col("timestamp") >= F.lit(_moment(job.since)))
    if job.until is not None:
        found = found.where(F.col("timestamp") < F.lit(_moment(job.until)))
    return found


def _moment(nanoseconds: int) -> datetime:
    """As exact as what is stored; a fraction of a microsecond belongs to the next one."""
    return _EPOCH + timedelta(microseconds=-(-nanoseconds // 1000))


def in_order(messages: DataFrame, total: int, size: int) -> Iterator[pa.RecordBatch]:
    """The messages by sequence, as record batches, of which the driver holds a few at a time; `size`: of payloads."""
    number = max(1, -(-total // _PART), -(-size // _PART_BYTES))
    parts = messages.repartitionByRange(number, "sequence").sortWithinPartitions("sequence")
    for row in parts.mapInArrow(_packed, "batch BINARY").toLocalIterator(prefetchPartitions=True):
        with pa.ipc.open_stream(row[0]) as reader:
            yield from reader


def _packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Each batch as one value: rows that come to the driver one by one would take their time."""
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.record_batch([pa.array([sink.getvalue().to_pybytes()], pa.binary())], names=["batch"])


class Pace:
    """When messages are due, in seconds after the first one."""

    def __init__(self, speed: float, messages_per_second: float | None) -> None:
        self._speed = speed
        self._rate = messages_per_second
        self._first: int | None = None
        self._due = 0.0

    def due(self, number: int, stored: int) -> float:
        """Of a message: its number from 0, and when it was stored, in microseconds."""
        if self._rate is not None:
            return number / self._rate
        if not self._speed:
            return 0.0
        if self._first is None:
            self._first = stored
        self._due = max(self._due, (stored - self._first) / 1e6 / self._speed)
        return self._due


def publish(
    job: Replay, options: Options, batches: Iterable[pa.RecordBatch], total: int, progress: Progress
) -> Replayed:
    """Publish the messages of record batches in their order, each when it is due."""
    pace = Pace(job.speed, job.rate)
    identities = Identities(options.query_id or secrets.token_hex(8), "", 0)
    number = last = 0
    due = begun = 0.0
    with Publisher(options.access, options.max_in_flight, "sequence") as publisher:
        encoder = Encoder(
            options.subject_prefix, publisher.inbox, publisher.max_payload, None, options.qos, options.retain
        )

        def wait() -> bool:
            """Until the next message is due; False when the user stops it."""
            while not progress.stopping and (left := begun + due - time.monotonic()) > _TICK:
                publisher.push()
                time.sleep(min(left, _LOOK))
                show()
            return not progress.stopping

        def show() -> None:
            seconds = time.monotonic() - begun
            progress.show(f"{count(number)} of {count(total)} messages, {rate(number, seconds)}")

        for sequence, stored, row in _rows(batches):
            begun = begun or time.monotonic()
            due = pace.due(number, stored)
            if not wait():
                break
            try:
                message = encoder.message((f"{job.prefix}{row[0]}", *row[1:]))
                identity = identities.of(message, sequence, stored) if message.qos or message.retain else b""
                publisher.publish(encoder, message, identity, sequence)
            except Refused as error:
                raise SourceError(f"sequence {sequence}: {error}", error.column) from None
            number += 1
            last = sequence
            if not number % _SHOWN:
                show()
        publisher.finish()
        seconds = time.monotonic() - begun if begun else 0.0
        late = seconds - due if job.rate or job.speed else 0.0
        return Replayed(job, number, total, last, publisher.duplicates, late, seconds)


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, int, tuple[object, ...]]]:
    """Sequence, time of the store in microseconds, and the values that the encoder takes."""
    for batch in batches:
        names = [name for name in batch.schema.names if name in columns.COLUMNS]
        sequences = batch.column("sequence").to_pylist()
        times = batch.column("timestamp").cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
        done = 0
        try:
            for found in zip(sequences, times, columns.rows(batch.select(names), names), strict=True):
                yield found
                done += 1
        except Refused as error:
            raise SourceError(f"sequence {sequences[done]}: {error}", error.column) from None
