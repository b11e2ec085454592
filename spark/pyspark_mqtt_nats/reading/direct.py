# SPDX-License-Identifier: Apache-2.0
"""Read by direct gets in batches: no consumer is made, so nothing of the stream's retention is touched.

One filter per request is all that the server takes, so several filters are read side by side and merged. Any replica
may answer, also one that lags: that nothing more comes is only a claim, which the leader has to confirm.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import orjson
import pyarrow as pa

from mqtt_streams import headers
from pyspark_mqtt_nats.errors import ConnectError, SourceError
from pyspark_mqtt_nats.nats import protocol
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.reading.frames import Frames, Loose
from pyspark_mqtt_nats.reading.rows import SILENCE, Bounds, Interrupted, Rows, anything_between
from pyspark_mqtt_nats.reading.selection import without_covered

SID: Final = b"D"
_LEAST_ROWS: Final = 100
_LEAST_BYTES: Final = 64 << 10
_ADDED: Final = b"Nats-Stream: "
"""What the server adds to a message's headers begins with this; it comes last, whatever the publisher put there."""
_EMPTY: Final = b"NATS/1.0\r\n"


class _Found(NamedTuple):
    sequence: int
    time: str
    subject: bytes
    headers: bytes
    payload: bytes


class _Cursor:
    """The messages of one filter that have come and are not handed over; `next` is where to go on."""

    __slots__ = ("filter", "found", "next")

    def __init__(self, subject: str | None, start: int) -> None:
        self.filter = subject
        self.found: list[_Found] = []
        self.next = start


def read(
    connection: Connection, stream: str, subjects: tuple[str, ...], start: int, end: int, bounds: Bounds
) -> Iterator[Rows]:
    """The messages from `start` on, before `end`.

    Between two of the results the connection may be used for requests. Raises Interrupted, and what requests raise.
    """
    filters: list[str | None] = [*without_covered(subjects)] or [None]
    cursors = [_Cursor(one, start) for one in filters]
    gets = _Gets(connection, stream, len(cursors), bounds)
    try:
        while True:
            for cursor in cursors:
                if not cursor.found and cursor.next < end:
                    gets.page(cursor, end)
            found = _merged(cursors)
            if found:
                yield _rows(found)
            elif all(cursor.next >= end for cursor in cursors):
                return
    finally:
        gets.stop()


def _merged(cursors: list[_Cursor]) -> list[_Found]:
    """What can be handed over, in order and once: up to where every filter has been read."""
    safe = min(cursor.next for cursor in cursors)
    if len(cursors) == 1:
        found, cursors[0].found = cursors[0].found, []
        return found
    merged: dict[int, _Found] = {}
    for cursor in cursors:
        keep = len(cursor.found)
        while keep and cursor.found[keep - 1].sequence >= safe:
            keep -= 1
        merged.update((one.sequence, one) for one in cursor.found[:keep])
        del cursor.found[:keep]
    return [merged[sequence] for sequence in sorted(merged)]


def _rows(found: list[_Found]) -> Rows:
    sequences, times, subjects, blocks, payloads = zip(*found, strict=True)
    return Rows(
        pa.array(sequences, pa.int64()),
        pa.array(times, pa.string()).cast(pa.timestamp("ns", "UTC")).cast(pa.int64()),
        list(subjects),
        list(blocks),
        list(payloads),
    )


class _Gets:
    """Asks for pages, one at a time."""

    def __init__(self, connection: Connection, stream: str, filters: int, bounds: Bounds) -> None:
        self._connection = connection
        self._stream = stream
        self._subject = f"{connection.access.api_prefix}.DIRECT.GET.{stream}".encode()
        self._inbox = connection.inbox + b".d."
        self._rows = max(_LEAST_ROWS, bounds.rows // filters)
        self._bytes = max(_LEAST_BYTES, bounds.bytes // filters)
        self._asked = 0
        connection.send(b"SUB %b* %b\r\n" % (self._inbox, SID))

    def stop(self) -> None:
        """Nothing more is wanted; the connection can be used for requests again."""
        with contextlib.suppress(ConnectError):
            self._connection.send(b"UNSUB %b\r\n" % SID)

    def page(self, cursor: _Cursor, end: int) -> None:
        """Get the next messages of a filter; `cursor.next` is `end` when the leader has none left before it."""
        body: dict[str, Any] = {
            "seq": cursor.next,
            "batch": min(self._rows, end - cursor.next),
            "max_bytes": self._bytes,
        }
        if cursor.filter is not None:
            body["next_by_subj"] = cursor.filter
        self._asked += 1
        target = self._inbox + b"%d" % self._asked
        self._connection.send(protocol.publish(self._subject, orjson.dumps(body), reply=target))
        found, last = self._answers(target)
        if found:
            cursor.next = found[-1].sequence + 1
        if last or not found:
            subjects = () if cursor.filter is None else (cursor.filter,)
            if cursor.next >= end or not anything_between(self._connection, self._stream, subjects, cursor.next, end):
                cursor.next = end
            elif not found:
                raise Interrupted(f"the replica of {self._stream} that answers is behind (option servers)", "servers")
        cursor.found = [one for one in found if one.sequence < end]

    def _answers(self, target: bytes) -> tuple[list[_Found], bool]:
        """The messages of one answer, and whether it claims to be the last."""
        frames = Frames(SID)
        found: list[_Found] = []
        deadline = time.monotonic() + 2 * SILENCE
        while True:
            data = self._connection.receive(max(0.0, deadline - time.monotonic()))
            if not data:
                raise Interrupted("NATS has stopped answering (option servers)", "servers")
            answer = frames.feed(data)
            if answer:
                self._connection.send(answer)
            came, frames.loose = frames.loose, []
            for one in came:
                if one.subject != target:
                    continue
                deadline = time.monotonic() + 2 * SILENCE
                at = one.headers.rfind(_ADDED)
                if at >= 0:
                    found.append(_found(one, at))
                else:
                    self._connection.unread(frames.rest())
                    return found, self._ended(one)

    def _ended(self, end: Loose) -> bool:
        code = headers.status(end.headers)
        if code == 204:
            return headers.get(end.headers, headers.NUM_PENDING) == "0"
        if code == 404:
            return True
        line = end.headers[9:].partition(b"\r")[0].decode(errors="replace")
        if code == 503:
            raise Interrupted(f"nobody answers direct gets of stream {self._stream} (set readMode to pull)", "readMode")
        raise SourceError(
            f"stream {self._stream}: direct get: {line or 'unexpected answer'}; set readMode to pull", "readMode"
        )


def _found(one: Loose, at: int) -> _Found:
    """A message, without what the server has added to its headers from `at` on."""
    block = one.headers[:at]
    added = one.headers[at:].split(b"\r\n")
    if len(added) < 5 or not added[4].startswith(b"Nats-Num-Pending: "):
        raise SourceError("direct gets in batches need nats-server 2.11: set readMode to pull", "readMode")
    # What does not end as a block does lost its last bytes; it is unreadable either way.
    block = b"" if block == _EMPTY else block + b"\r\n" if block.endswith(b"\r\n") else block
    return _Found(int(added[2][15:]), added[3][17:].decode(), added[1][14:], block, one.payload)
