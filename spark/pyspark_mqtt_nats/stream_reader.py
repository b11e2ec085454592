# SPDX-License-Identifier: Apache-2.0
"""Streaming reads: micro-batches of consecutive sequences.

Offsets are in Spark's checkpoint, as JSON. `next` is the next sequence to read, and `first` the sequence with which the
query began. `created` is the time at which the stream was made: another stream of the same name has another time.
`time` is the time at which the message before `next` was stored: a stream that was restored to an earlier state, and
has grown since, has another message there. `stream` and `topics` are those of the query, which must not change.

The offset before the first batch is empty: Spark asks for it twice, and again when the query stops before the end of
its first batch, and each time the stream may have another end. The end of the first batch has what was found. An offset
is no place yet while the time to begin with, `since`, is in the future: the stream's content then is not known. A
sequence to begin with that is in the future is a place.

A batch that is run again has the tasks of the first attempt, because a sink tells messages by their partition. So the
number of them, `parts`, is in the offset: the average size of messages is another one later, and so may be processors.

Spark calls `commit` for a batch only when it plans the next one, so never for the last one. But Spark asks for the
`latestOffset` after a start only when everything before that start is complete, also after a restart. So that is where
an interest stream is told which messages it may remove.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, Final, NamedTuple, Self, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from pyspark_mqtt_nats import batch
from pyspark_mqtt_nats.admission import Limits, admit
from pyspark_mqtt_nats.errors import ApiError, ConnectError, OptionError, RequestTimeout, SourceError
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import get_message
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.projection import Projection
from pyspark_mqtt_nats.reading.ranges import Snapshot, log, loss, sequence_at, snapshot
from pyspark_mqtt_nats.reading.read import OUTAGE, passes
from pyspark_mqtt_nats.reading.rows import Interrupted
from pyspark_mqtt_nats.release import Release


class Offset(NamedTuple):
    """Place in a stream, as the module's documentation says. `time`: ns since 1970; NOTHING: no message; 0: not known.

    `turn`: how often the query has begun again because the stream had become another one. `since`: time in ns since
    1970 at which the query is to begin. `topics`: a hash of the topic filters. `parts`: of the batch that ends here.
    """

    created: str
    first: int
    next: int
    time: int = 0
    turn: int = 0
    since: int = 0
    stream: str = ""
    topics: str = ""
    parts: int = 0

    @classmethod
    def of(cls, found: dict[str, Any]) -> Self:
        """Return the offset of a checkpoint; raises SourceError for what is none of this source."""
        try:
            created, first, then = str(found["created"]), int(found["first"]), int(found["next"])
            time, turn, since, parts = (int(found[name]) for name in ("time", "turn", "since", "parts"))
            stream, topics = str(found["stream"]), str(found["topics"])
            return cls(created, first, then, time, turn, since, stream, topics, parts)
        except (AttributeError, KeyError, TypeError, ValueError):
            text = f"the checkpoint (option checkpointLocation) is not one of this source: {found!r}"[:300]
            raise SourceError(text, "checkpointLocation") from None

    @property
    def known(self) -> bool:
        """Whether the offset is a place in a stream."""
        return bool(self.created)

    @property
    def to_come(self) -> bool:
        """Whether the query begins here, and the stream had not reached this sequence."""
        return self.first == self.next and not self.time


NOTHING: Final = -1
BEGINNING: Final = Offset("", 0, 0)
_STARTS: Final = ("starting_sequence", "starting_timestamp", "starting_offsets")
_PAUSE: Final = 0.5  # seconds between two attempts

T = TypeVar("T")


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark reader that plans micro-batches, in a process beside the driver, and reads their parts in tasks."""

    def __init__(self, options: Options, projection: Projection) -> None:
        self.options = options
        self.projection = projection
        self._given = options
        self._topics = _hash(options)
        self._connection: Connection | None = None
        self._release = Release()
        self._answered = False
        self._target: int | None = None
        self._last = BEGINNING

    # -- where to begin and to end ----------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Return the offset before the first batch."""
        return BEGINNING._asdict()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a batch; when both options are given, both count."""
        if self.options.max_messages is not None:
            return ReadMaxRows(self.options.max_messages)
        return ReadAllAvailable() if self.options.max_bytes is None else ReadMaxBytes(self.options.max_bytes)

    def prepareForTriggerAvailableNow(self) -> None:
        """Pin the end of this run: what comes later is for the next run."""
        self._target = self._ask(self._look).last + 1

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the batch that begins at `start`; `start` itself when there is nothing to read."""
        begin = self._own(start)
        limits = Limits()
        if not isinstance(limit, ReadAllAvailable):
            limits = Limits(self.options.max_messages, self.options.max_bytes)
        end = self._ask(lambda connection: self._offer(connection, begin, limits))
        return start if end == begin else end._asdict()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the end of the stream, as it was seen last, for the progress of the query."""
        return self._last._asdict() if self._last.known else None

    def _offer(self, connection: Connection, start: Offset, limits: Limits) -> Offset:
        found = self._look(connection)
        begin = self._begin(connection, start, found)
        if not begin.known:
            return begin
        if begin == start:
            self._release.until(connection, found, begin.next)
        end = found.last + 1
        self._last = Offset(found.created, begin.first, end)
        if self._target is not None:
            end = min(end, self._target)
        offer, until = begin, begin.next
        if until < end:
            until = admit(connection, self.options, found.between(until, end), limits)
        if until > begin.next or begin != start:
            time_before = _time_before(connection, found, until)
            parts = batch.number_of_parts(self.options, until - begin.next, found.size)
            offer = begin._replace(
                next=until, time=time_before, stream=self.options.stream, topics=self._topics, parts=parts
            )
        if until == self._last.next:
            self._last = offer
        return offer

    def _begin(self, connection: Connection, start: Offset, found: Snapshot) -> Offset:
        """Return the place to go on: `start`, unless it is not known yet or the stream has become another one."""
        if not start.known:
            return self._first(connection, start, found)
        name = found.stream
        if start.created != found.created:
            made = f"stream {name} was made at {found.created}"
            text = f"the checkpoint is of a stream made at {start.created}, {made}, anew or at other servers"
        elif start.next > found.last + 1 and not start.to_come:
            text = f"stream {name} ends with {found.last}, the checkpoint is at {start.next}: it was restored or purged"
        elif _is_other(connection, found, start):
            text = f"stream {name} has another message at {start.next - 1} than the checkpoint: it was restored"
        else:
            return start
        loss(self.options, text, max(0, found.first - 1), "give a new checkpoint (option checkpointLocation), or ")
        return Offset(found.created, found.first, found.first, turn=start.turn + 1)

    def _first(self, connection: Connection, start: Offset, found: Snapshot) -> Offset:
        """Return the place to begin; a time in the checkpoint counts, not the options of now."""
        since = start.since or self.options.starting_timestamp
        if since is not None:
            if since > found.now:
                return BEGINNING._replace(since=since, stream=self.options.stream, topics=self._topics)
            begin = sequence_at(connection, found, since)
        else:
            options = self.options
            if not any(name in options.given for name in _STARTS):
                options = replace(options, starting_offsets="latest")
            begin = snapshot(options, connection).start
        return Offset(found.created, begin, begin)

    def _own(self, place: dict[str, Any]) -> Offset:
        """Return an offset of the checkpoint; raises OptionError when it is of another stream or other topics."""
        found = Offset.of(place)
        anew = "give a new checkpoint (option checkpointLocation) to begin anew"
        if found.stream not in ("", self.options.stream):
            text = f"stream = {self.options.stream!r}: the checkpoint is of stream {found.stream}; {anew}"
            raise OptionError(text, "stream")
        if found.topics not in ("", self._topics):
            text = f"topics: the checkpoint is of a query with other topics or another subjectPrefix; {anew}"
            raise OptionError(text, "topics")
        return found

    def _look(self, connection: Connection) -> Snapshot:
        """Return the stream as it is now; the starting options mean nothing here."""
        options = replace(self.options, starting_sequence=None, starting_timestamp=None, starting_offsets=None)
        found = snapshot(options, connection)
        self._answered = True
        return found

    def _ask(self, question: Callable[[Connection], T]) -> T:
        """Return the answer to a question, over a connection that is kept.

        An outage is waited for, as in tasks, unless NATS has never answered. A new connection reads the files of
        credentials again, which may have been renewed.
        """
        began = 0.0
        while True:
            try:
                if self._connection is None:
                    self.options = self.options.renewed()
                    self._connection = Connection(self.options.access)
                return question(self._connection)
            except (Interrupted, ConnectError, RequestTimeout, ApiError) as error:
                self.stop()
                began = began or time.monotonic()
                if not self._answered or not passes(error) or time.monotonic() - began > OUTAGE:
                    raise
                log.warning("planning waits for NATS: %s", error)
                time.sleep(_PAUSE)

    # -- batches ----------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the ranges of a batch, one for each task, also of a batch that an earlier run has planned."""
        begin, until = self._own(start), self._own(end)
        first = begin.next
        anew = begin.created != until.created or begin.turn != until.turn
        if anew or not until.first <= first <= until.next:
            first = until.first
        if first == until.next:
            return []
        found = self._ask(self._look)
        text = ""
        if found.created != until.created:
            text = (
                f"the batch was planned of a stream made at {until.created}, {found.stream} was made at {found.created}"
            )
        elif self._ask(lambda connection: _is_other(connection, found, until)):
            text = f"stream {found.stream} has another message at {until.next - 1} than when the batch was planned"
        if text:
            loss(self.options, text, until.next - first)
            return []
        # As with a batch read: what was the oldest message may grow too old while it is being read; and when the first
        # batch is read again, what was the oldest message then is not looked for.
        floating = not begin.known and (begin.since > 0 or self.options.starting_sequence is None)
        if floating:
            first = min(max(first, found.first), until.next)
        self.options = self.options.renewed()
        renewed = {name: getattr(self.options, name) for name, _ in self.options.files}
        changed = {name: value for name, value in renewed.items() if value != getattr(self._given, name)}
        number = until.parts or batch.number_of_parts(self.options, until.next - first, found.size)
        return batch.parts(replace(found, start=first, end=until.next, floating=floating), number, changed)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the record batches of one range."""
        return batch.read(self.options, self.projection, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: `latestOffset` tells what is complete."""

    def stop(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _hash(options: Options) -> str:
    """Return a hash of the subjects that a query reads, in whatever order they are given."""
    subjects = "\n".join(sorted(options.subjects) or (f"{options.subject_prefix}>",))
    return sha256(subjects.encode(errors="surrogatepass")).hexdigest()[:16]


def _time_before(connection: Connection, found: Snapshot, sequence: int) -> int:
    """Return the store time of the message before a sequence; NOTHING: there is none; 0: it is in the future."""
    if sequence - 1 > found.last:
        return 0
    message = get_message(connection, found.stream, seq=sequence - 1) if sequence > found.first else None
    return NOTHING if message is None else message.time_ns


def _is_other(connection: Connection, found: Snapshot, offset: Offset) -> bool:
    """Whether the message before the offset is not the one that was there: a stream gives no sequence twice."""
    if not offset.time:
        return False
    return _time_before(connection, found, offset.next) not in (offset.time, NOTHING, 0)
