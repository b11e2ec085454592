# SPDX-License-Identifier: Apache-2.0
"""Streaming reads: micro-batches of consecutive sequences.

Offsets. `next` is the sequence that comes next, `first` the one that the query began with, `created` when the stream
was made, which tells it from a later one of the same name. `time` is when the message before `next` was stored: a
stream that has gone back to an earlier state, and grown again since, has another one there, or one where there was
none. They are in Spark's checkpoint, as JSON. The offset before the first batch says nothing: Spark asks for it twice,
and once more when the query stops before the end of its first batch, and each time the answer would be another one.
What has been found out is in the end of the first batch. That is no place yet while the time to begin with, `since`, is
still to come: what the stream has by then is not known. A sequence to begin with that is still to come is a place.

What is complete. Spark tells with `commit` only when the next batch is planned, so never of the last one. But it asks
for the `latestOffset` after a start only when everything before that start is complete, also after a restart: there it
is released.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from pyspark_mqtt_nats.errors import ApiError, ConnectError, RequestTimeout, SourceError
from pyspark_mqtt_nats.hints import Projection
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import get_message
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading.ranges import Snapshot, log, loss, sequence_at, snapshot
from pyspark_mqtt_nats.reading.read import OUTAGE, passes
from pyspark_mqtt_nats.reading.rows import Interrupted
from pyspark_mqtt_nats.release import Release


class Offset(NamedTuple):
    """A place in a stream; see above. `time`: in ns since 1970, NOTHING where there was no message, 0: not known.

    `turn`: how often the query has begun again, with what the stream had become. `since`: a time that is waited for.
    """

    created: str
    first: int
    next: int
    time: int = 0
    turn: int = 0
    since: int = 0

    @classmethod
    def of(cls, found: dict[str, Any]) -> Self:
        """Read what a checkpoint has."""
        try:
            created, first, then = str(found["created"]), int(found["first"]), int(found["next"])
            # Earlier versions wrote none of these.
            return cls(created, first, then, *(int(found.get(name, 0)) for name in ("time", "turn", "since")))
        except (AttributeError, KeyError, TypeError, ValueError):
            text = f"the checkpoint (option checkpointLocation) is not one of this source: {found!r}"[:300]
            raise SourceError(text, "checkpointLocation") from None

    @property
    def known(self) -> bool:
        """Whether it says where the query is."""
        return bool(self.created)

    @property
    def to_come(self) -> bool:
        """Whether the query begins here, where the stream had not come to."""
        return self.first == self.next and not self.time


NOTHING: Final = -1
BEGINNING: Final = Offset("", 0, 0)
_STARTS: Final = ("starting_sequence", "starting_timestamp", "starting_offsets")
_PAUSE: Final = 0.5  # seconds between two attempts

T = TypeVar("T")


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches on the driver, in a process of its own, and reads their parts in tasks."""

    def __init__(self, options: Options, projection: Projection) -> None:
        self.options = options
        self.projection = projection
        self._anywhere = replace(options, starting_sequence=None, starting_timestamp=None, starting_offsets=None)
        self._connection: Connection | None = None
        self._release = Release()
        self._answered = False
        self._target: int | None = None
        self._last = BEGINNING

    # -- where to begin and to end ----------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """The offset before the first batch."""
        return BEGINNING._asdict()

    def getDefaultReadLimit(self) -> ReadLimit:
        """What `maxMessagesPerTrigger` or `maxBytesPerTrigger` say; when both are given both count."""
        if self.options.max_messages is not None:
            return ReadMaxRows(self.options.max_messages)
        return ReadAllAvailable() if self.options.max_bytes is None else ReadMaxBytes(self.options.max_bytes)

    def prepareForTriggerAvailableNow(self) -> None:
        """Pin the end of this run."""
        self._target = self._ask(self._look).last + 1

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the batch that begins at `start` ends; `start` itself when there is nothing to read."""
        begin = Offset.of(start)
        limits = Limits()
        if not isinstance(limit, ReadAllAvailable):
            limits = Limits(self.options.max_messages, self.options.max_bytes)
        end = self._ask(lambda connection: self._offer(connection, begin, limits))
        return start if end == begin else end._asdict()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The end of the stream, as it was seen last, for the progress of the query."""
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
            offer = begin._replace(next=until, time=_time_before(connection, found, until))
        if until == self._last.next:
            self._last = offer
        return offer

    def _begin(self, connection: Connection, start: Offset, found: Snapshot) -> Offset:
        """Where to go on: at `start`, unless that is not known yet, or not any more."""
        if not start.known:
            return self._first(connection, start, found)
        name = found.stream
        if start.created != found.created:
            text = f"the checkpoint is of a stream made at {start.created}, stream {name} was made at {found.created}"
        elif start.next > found.last + 1 and not start.to_come:
            text = f"stream {name} ends with {found.last}, the checkpoint is at {start.next}: it was restored or purged"
        elif _is_other(connection, found, start):
            text = f"stream {name} has another message at {start.next - 1} than the checkpoint: it was restored"
        else:
            return start
        loss(self.options, text, max(0, found.first - 1), "give a new checkpointLocation, or ")
        return Offset(found.created, found.first, found.first, turn=start.turn + 1)

    def _first(self, connection: Connection, start: Offset, found: Snapshot) -> Offset:
        """Where to begin; what the checkpoint waits for counts, not what the options say now."""
        since = start.since or self.options.starting_timestamp
        if since is not None:
            if since > found.now:
                return BEGINNING._replace(since=since)
            begin = sequence_at(connection, found, since)
        else:
            options = self.options
            if not any(name in options.given for name in _STARTS):
                options = replace(options, starting_offsets="latest")
            begin = snapshot(options, connection).start
        return Offset(found.created, begin, begin)

    def _look(self, connection: Connection) -> Snapshot:
        """The stream as it is now; the starting options mean nothing here."""
        found = snapshot(self._anywhere, connection)
        self._answered = True
        return found

    def _ask(self, question: Callable[[Connection], T]) -> T:
        """The answer to a question, on a connection that is kept.

        As in tasks, an outage is waited for; but not where NATS has never answered.
        """
        began = 0.0
        while True:
            try:
                if self._connection is None:
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
        """What the tasks of a batch read; also of one that was planned before the query was started again."""
        begin, until = Offset.of(start), Offset.of(end)
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
        return batch.parts(self.options, replace(found, start=first, end=until.next, floating=floating))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Record batches of one range."""
        return batch.read(self.options, self.projection, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: see above."""

    def stop(self) -> None:
        """End the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _time_before(connection: Connection, found: Snapshot, sequence: int) -> int:
    """When the message before this sequence was stored, NOTHING where there is none, 0 when it is still to come."""
    if sequence - 1 > found.last:
        return 0
    message = get_message(connection, found.stream, seq=sequence - 1) if sequence > found.first else None
    return NOTHING if message is None else message.time_ns


def _is_other(connection: Connection, found: Snapshot, offset: Offset) -> bool:
    """Whether the message before the offset is not the one that was there: no sequence is ever given twice."""
    if not offset.time:
        return False
    return _time_before(connection, found, offset.next) not in (offset.time, NOTHING, 0)
