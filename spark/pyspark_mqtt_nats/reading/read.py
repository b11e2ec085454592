# SPDX-License-Identifier: Apache-2.0
"""Reading of a range of a stream as Arrow record batches, also after an outage; a check that nothing is missing."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from pyspark_mqtt_nats.errors import ApiError, ConnectError, RequestTimeout, SourceError
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import stream_info
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading import direct, pull
from pyspark_mqtt_nats.reading.batches import Batches
from pyspark_mqtt_nats.reading.completeness import Watch
from pyspark_mqtt_nats.reading.ranges import Range, Snapshot, log, reads_directly
from pyspark_mqtt_nats.reading.rows import Bounds, Interrupted, Rows, anything_between
from pyspark_mqtt_nats.reading.selection import visible

OUTAGE: Final = 60.0
"""Seconds without a message, an outage included, after which a read gives up."""

LOOK: Final = 2.0
"""Seconds between two looks at the stream while reading."""

_SEVERAL: Final = 8
"""Most filters that are looked up one by one."""

_SHORT: Final = 1000
"""Sequences of a range that is read by filters without a look whether these match most messages."""

_PAUSES: Final = (0.05, 0.1, 0.25, 0.5, 1.0)
_SIZE: Final = b"Nats-Msg-Size:"
_START: Final = b"NATS/1.0\r\n"
_PASSING: Final = (500, 503)
"""Codes of JetStream errors that are temporary: no leader yet, not ready, busy."""


@dataclass(slots=True)
class ReadReport:
    """Counts of one read of a range.

    `rows`: in the batches. `bytes`: headers and payloads read. `gaps`: sequences of the range without a message, as
    messages expire or are deleted; None where topics are filtered, as those of other topics cannot be told from gaps.
    `lost`: messages that were to be read and are gone, at most. `aged`: those that the stream's own limits removed,
    where the start was not given as a sequence. `interruptions`: how often reading had to begin anew.
    """

    rows: int = 0
    bytes: int = 0
    gaps: int | None = 0
    lost: int = 0
    aged: int = 0
    interruptions: int = 0


def read_range(
    options: Options, snapshot: Snapshot, part: Range, columns: Sequence[str], report: ReadReport | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a range that match the options' topics, in the order of the stream.

    `columns`: names of `schema.COLUMNS`. Batches have at most `options.batch_size` rows and are bounded in bytes. A
    range may end beyond the snapshot: it then ends with what there is. Raises DataLossError (see `completeness`), or
    another SourceError when reading cannot go on; an outage is waited for, at most OUTAGE seconds.
    """
    if part.start >= part.end:
        return
    report = report if report is not None else ReadReport()
    reader = _Reader(options, snapshot, part, columns, report)
    yield from reader.read()


class _Reader:
    def __init__(
        self, options: Options, snapshot: Snapshot, part: Range, columns: Sequence[str], report: ReadReport
    ) -> None:
        self._options = options
        self._snapshot = snapshot
        self._part = part
        self._report = report
        self._next = part.start
        self._watch = Watch(options, snapshot, part)
        self._columns = columns
        self._directly = reads_directly(options, snapshot)
        # Direct gets always bring payloads. A record of a retained message is in its payload.
        self._headers_only = not self._directly and options.mode == "messages" and "payload" not in columns
        self._bounds = Bounds(options.batch_size)

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield batches until the range is read; raises the last error when nothing has come for OUTAGE seconds."""
        quiet_since = time.monotonic()
        failures = 0
        connected = False
        while True:
            before = self._next
            try:
                with Connection(self._options.access) as connection:
                    connected = True
                    yield from self._attempt(connection)
                self._finish()
                return
            except (Interrupted, ConnectError, RequestTimeout, ApiError) as error:
                if self._next > before:
                    quiet_since = time.monotonic()
                    failures = 0
                if not connected or not passes(error):
                    raise
                if time.monotonic() - quiet_since > OUTAGE:
                    raise _given_up(error) from None
                log.warning("reading continues at sequence %d: %s", self._next, error)
            self._report.interruptions += 1
            time.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])
            failures += 1

    def _attempt(self, connection: Connection) -> Iterator[pa.RecordBatch]:
        """Yield batches of the rest of the range, over one connection."""
        if not self._watch.look(connection):
            return
        looked = time.monotonic()
        filters = self._filters(connection)
        options = self._options
        shown = visible(options.subjects, options.subject_prefix, evaluated=bool(filters))
        batches = Batches(self._columns, options.subject_prefix, shown, options.mode == "retained")
        for rows in [] if filters is None else self._rows(connection, filters):
            if self._headers_only:
                rows = rows._replace(headers=pa.array(map(_without_size, rows.headers.to_pylist()), pa.binary()))
            self._watch.rows(rows.sequences)
            batch = batches.batch(*rows)
            self._next = rows.sequences[-1].as_py() + 1
            self._report.rows += batch.num_rows
            self._report.bytes += rows.size
            if batch.num_rows:
                yield batch
            if time.monotonic() - looked > LOOK:
                if not self._watch.look(connection):
                    return
                looked = time.monotonic()
        self._watch.look(connection, done=True)

    def _rows(self, connection: Connection, filters: tuple[str, ...]) -> Iterator[Rows]:
        stream, start, end = self._snapshot.stream, self._next, self._part.end
        if self._directly:
            return direct.read(connection, stream, filters, start, end, self._bounds)
        return pull.read(connection, stream, filters, start, end, self._bounds, self._headers_only)

    def _filters(self, connection: Connection) -> tuple[str, ...] | None:
        """Return the filters that NATS is to evaluate: () for every message, None when nothing in the range matches.

        For a consumer with several filters, or one that matches many subjects, nats-server looks through the subjects
        of a block for each message. That takes 40 to 500 us with 1,000 to 10,000 subjects, and 2 us without a filter.
        So a filter without messages is left out (as a rule `a` of `a/#`), and where at least half of the messages
        match, all are read and selected here.
        """
        asked, stream, start = self._options.asked, self._snapshot.stream, self._next
        if self._directly or not asked:
            return asked
        if 1 < len(asked) <= _SEVERAL:
            asked = tuple(one for one in asked if anything_between(connection, stream, (one,), start, self._part.end))
            if not asked:
                return None
        if self._part.end - start <= _SHORT:
            return asked
        state = stream_info(connection, stream)["state"]
        left = min(state["messages"], state["last_seq"] - start + 1)
        return () if 2 * pull.count(connection, stream, asked, start) >= left else asked

    def _finish(self) -> None:
        watch, report = self._watch, self._report
        report.lost, report.aged = watch.lost, watch.aged
        if watch.aged:
            log.warning("%d messages were removed by the retention of the stream before they were read", watch.aged)
        size = min(self._part.end, self._snapshot.end) - self._part.start
        filtered = bool(self._options.subjects)
        report.gaps = None if filtered else max(0, size - watch.received - watch.lost - watch.aged)


def _without_size(block: bytes) -> bytes:
    """Return a header block without the line that NATS adds for a message without its payload."""
    block = block[: block.rfind(_SIZE)]
    return b"" if block == _START else block + b"\r\n"


def passes(error: SourceError) -> bool:
    """Whether the same request may succeed after a while."""
    return not isinstance(error, ApiError) or error.code in _PASSING


def _given_up(error: SourceError) -> SourceError:
    return ConnectError(f"nothing came for {OUTAGE:g} s: {error}", error.option or "servers")
