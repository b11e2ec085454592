# SPDX-License-Identifier: Apache-2.0
"""One range of a stream as Arrow record batches: reads it, goes on after an outage, checks that nothing is missing."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import pyarrow as pa

from pyspark_mqtt_nats.errors import ApiError, ConnectError, RequestTimeout, SourceError
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading import direct, pull
from pyspark_mqtt_nats.reading.batches import Batches
from pyspark_mqtt_nats.reading.completeness import Watch
from pyspark_mqtt_nats.reading.ranges import Range, Snapshot, log, reads_directly
from pyspark_mqtt_nats.reading.rows import Bounds, Interrupted
from pyspark_mqtt_nats.reading.selection import visible

OUTAGE: Final = 60.0
"""Seconds without a message, an outage included, after which a read gives up."""

LOOK: Final = 2.0
"""Seconds between two looks at the stream while reading."""

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
        # Direct gets always bring payloads. A record of a retained message is in its payload.
        directly = reads_directly(options, snapshot)
        self._headers_only = not directly and options.mode == "messages" and "payload" not in columns
        self._way = direct.read if directly else partial(pull.read, headers_only=self._headers_only)
        self._bounds = Bounds(options.batch_size)
        prefix = options.subject_prefix
        self._batches = Batches(columns, prefix, visible(options.subjects, prefix), options.mode == "retained")

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
        end = self._part.end
        stream = self._snapshot.stream
        for rows in self._way(connection, stream, self._options.asked, self._next, end, self._bounds):
            if self._headers_only:
                rows = rows._replace(headers=pa.array(map(_without_size, rows.headers.to_pylist()), pa.binary()))
            self._watch.rows(rows.sequences)
            batch = self._batches.batch(*rows)
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
