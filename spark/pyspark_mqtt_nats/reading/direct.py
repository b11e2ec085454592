# SPDX-License-Identifier: Apache-2.0
"""Read by direct gets in batches: no consumer is made, so nothing of the stream's retention is touched.

One filter per request is all that the server takes, so several filters are read side by side and merged. Any replica
may answer, also one that lags: that nothing more comes is only a claim, which the leader has to confirm.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from mqtt_streams import headers
from pyspark_mqtt_nats.errors import ConnectError, SourceError
from pyspark_mqtt_nats.nats import protocol
from pyspark_mqtt_nats.nats.bulk import Block
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.frames import Frames
from pyspark_mqtt_nats.reading.rows import SILENCE, Bounds, Interrupted, Rows, anything_between
from pyspark_mqtt_nats.reading.selection import without_covered

SID: Final = b"D"
_LEAST_ROWS: Final = 100
_LEAST_BYTES: Final = 64 << 10
_ADDED: Final = b"Nats-Stream: "
"""What the server adds to a message's headers begins with this; it comes last, whatever the publisher put there."""
_LINES: Final = 7
"""Those are stream, subject, sequence, time, messages pending, sequence before, and an empty line."""
_VALUE: Final = 100
"""More than the length of such a line that is a number or a time."""


class _Cursor:
    """The messages of one filter that have come and are not handed over; `next` is where to go on."""

    __slots__ = ("filter", "next", "rows")

    def __init__(self, subject: str | None, start: int) -> None:
        self.filter = subject
        self.rows: Rows | None = None
        self.next = start


def read(
    connection: Connection, stream: str, subjects: tuple[str, ...], start: int, end: int, bounds: Bounds
) -> Iterator[Rows]:
    """The messages from `start` on, before `end`.

    Between two of the results the connection may be used for requests. Raises Interrupted, and what requests raise.
    """
    filters: list[str | None] = [*without_covered(subjects)] or [None]
    cursors = [_Cursor(one, start) for one in filters]
    gets = _Gets(connection, stream, len(cursors), bounds, end)
    try:
        while needed := [cursor for cursor in cursors if cursor.rows is None and cursor.next < end]:
            for cursor in needed:
                gets.ask(cursor)
                gets.collect(cursor)
            rows = _merged(cursors)
            # The server is busy with the next page while we are with this one.
            following = next((cursor for cursor in cursors if cursor.rows is None and cursor.next < end), None)
            if following is not None:
                gets.ask(following)
            if rows is not None:
                count = len(rows.subjects)
                yield from (_cut(rows, first, first + bounds.rows) for first in range(0, count, bounds.rows))
    finally:
        gets.stop()


def _merged(cursors: list[_Cursor]) -> Rows | None:
    """Messages that can be handed over, in order and once: up to the sequence that every filter has reached."""
    safe = min(cursor.next for cursor in cursors)
    parts = []
    for cursor in cursors:
        if cursor.rows is None:
            continue
        count = len(cursor.rows.subjects)
        ready = pc.sum(pc.less(cursor.rows.sequences, safe)).as_py()
        if ready:
            parts.append(_cut(cursor.rows, 0, ready))
        cursor.rows = _cut(cursor.rows, ready, count) if ready < count else None
    if len(parts) < 2:
        return parts[0] if parts else None
    sequences = pa.concat_arrays([part.sequences for part in parts])
    places = {sequence: place for place, sequence in enumerate(sequences.to_pylist())}
    order = [places[sequence] for sequence in sorted(places)]
    rows = pa.array(order, pa.int64())
    times = pa.concat_arrays([part.times for part in parts])
    others = (pa.concat_arrays([part[index] for part in parts]).take(rows) for index in range(2, len(Rows._fields)))
    return Rows(sequences.take(rows), times.take(rows), *others)


def _cut(rows: Rows, start: int, end: int) -> Rows:
    return Rows(*(part[start:end] for part in rows))


class _Gets:
    """Asks for pages, one at a time."""

    def __init__(self, connection: Connection, stream: str, filters: int, bounds: Bounds, end: int) -> None:
        self._connection = connection
        self._stream = stream
        self._subject = f"{connection.access.api_prefix}.DIRECT.GET.{stream}".encode()
        self._inbox = connection.inbox + b".d."
        self._rows = max(_LEAST_ROWS, bounds.rows // filters)
        self._bytes = max(_LEAST_BYTES, bounds.bytes // filters)
        self._end = end
        self._asked: _Cursor | None = None
        self._frames = Frames(SID, bare=True)
        connection.collect(self._frames)
        connection.send(b"SUB %b* %b\r\n" % (self._inbox, SID))

    def stop(self) -> None:
        """Nothing more is wanted."""
        with contextlib.suppress(ConnectError):
            self._connection.send(b"UNSUB %b\r\n" % SID)

    def ask(self, cursor: _Cursor) -> None:
        """Ask for the next messages of a filter, unless that has been done."""
        if self._asked is cursor:
            return
        body: dict[str, Any] = {
            "seq": cursor.next,
            "batch": min(self._rows, self._end - cursor.next),
            "max_bytes": self._bytes,
        }
        if cursor.filter is not None:
            body["next_by_subj"] = cursor.filter
        self._connection.send(protocol.publish(self._subject, orjson.dumps(body), reply=self._inbox + b"1"))
        self._asked = cursor

    def collect(self, cursor: _Cursor) -> None:
        """Take what was asked for; `cursor.next` is the end when the leader has nothing left before it."""
        rows, last = self._answer()
        self._asked = None
        if rows is not None:
            cursor.next = rows.sequences[-1].as_py() + 1
        if last and cursor.next < self._end:
            subjects = () if cursor.filter is None else (cursor.filter,)
            if not anything_between(self._connection, self._stream, subjects, cursor.next, self._end):
                cursor.next = self._end
            elif rows is None:
                raise Interrupted(f"the replica of {self._stream} that answers is behind (option servers)", "servers")
        if rows is not None and cursor.next > self._end:
            ready = pc.sum(pc.less(rows.sequences, self._end)).as_py()
            rows = _cut(rows, 0, ready) if ready else None
        cursor.rows = rows

    def _answer(self) -> tuple[Rows | None, bool]:
        """The messages of one answer, and whether it claims to be the last."""
        frames = self._frames
        deadline = time.monotonic() + 2 * SILENCE
        came = 0
        while True:
            if len(frames) > came:  # also during a request, since the last answer was handed over
                came = len(frames)
                deadline = time.monotonic() + 2 * SILENCE
                block = frames.last[1]
                if block.startswith(b"NATS/1.0 ") and _ADDED not in block:
                    last = self._ended(block)
                    found = frames.take(came)
                    count = came - 1
                    return (_rows(found, count) if count else None), last or not count
            if not self._connection.read(max(0.0, deadline - time.monotonic())):
                raise Interrupted("NATS has stopped answering (option servers)", "servers")

    def _ended(self, block: bytes) -> bool:
        code = headers.status(block)
        if code == 204:
            return headers.get(block, headers.NUM_PENDING) == "0"
        if code == 404:
            return True
        line = block[9:].partition(b"\r")[0].decode(errors="replace")
        if code == 503:
            raise Interrupted(
                f"no server answers direct gets of stream {self._stream} (set readMode to pull)", "readMode"
            )
        raise SourceError(f"stream {self._stream}: direct get: {line}; set readMode to pull", "readMode")


def _rows(found: Block, count: int) -> Rows:
    """The first messages of an answer, their headers without what the server has added."""
    blocks: list[bytes] = []
    added: list[bytes] = []
    for block in found.headers[:count].to_pylist():
        at = block.rfind(_ADDED)
        added.append(block[at:])
        block = block[:at]
        # What does not end as a block does has lost its last bytes; it is unreadable either way.
        blocks.append(block + b"\r\n" if block.endswith(b"\r\n") else block)
    lines = b"".join(added).split(b"\r\n")
    if len(lines) != count * _LINES + 1 or not lines[4].startswith(b"Nats-Num-Pending: "):
        raise SourceError("direct gets in batches need nats-server 2.11: set readMode to pull", "readMode")
    sequences = pc.binary_slice(pa.array(lines[2::_LINES], pa.binary()), len(b"Nats-Sequence: "), _VALUE)
    times = pc.binary_slice(pa.array(lines[3::_LINES], pa.binary()), len(b"Nats-Time-Stamp: "), _VALUE)
    start = len(b"Nats-Subject: ")
    return Rows(
        sequences.cast(pa.string()).cast(pa.int64()),
        times.cast(pa.string()).cast(pa.timestamp("ns", "UTC")).cast(pa.int64()),
        pa.array([line[start:] for line in lines[1::_LINES]], pa.binary()),
        pa.array(blocks, pa.binary()),
        found.payloads[:count],
    )
