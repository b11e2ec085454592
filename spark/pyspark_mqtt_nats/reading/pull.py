# SPDX-License-Identifier: Apache-2.0
"""Read through a pull consumer of our own, which acknowledges nothing and goes away by itself when we do not delete it.

Theory of operation. The server owes us `owed` messages: what was asked for, minus what has come, minus what requests
had left over when they ended. Never more are asked for than the range has sequences left, so without gaps nothing comes
from beyond it. Which of two requests a message answers cannot be known, since they are served in turn; so only the sum
counts. Requests wait (`expires`), none is `no_wait`: a second one of those is answered with 408, which means nothing.

The read is over when the last sequence has come, or when the server says that nothing is pending, at the start, with a
message or after waiting. That is only a claim, which the leader of the stream has to confirm.
"""

import contextlib
import secrets
import time
from collections.abc import Iterator
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from mqtt_streams import headers
from mqtt_streams.error_codes import FILTER_NOT_SUBSET, MAXIMUM_CONSUMERS
from pyspark_mqtt_nats.errors import ApiError, ConnectError, RequestTimeout, SourceError
from pyspark_mqtt_nats.nats import protocol
from pyspark_mqtt_nats.nats.bulk import Block, integers, split
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.frames import Frames, Loose
from pyspark_mqtt_nats.nats.jetstream import create_consumer, delete_consumer
from pyspark_mqtt_nats.reading.rows import SILENCE, Bounds, Interrupted, Rows, anything_between
from pyspark_mqtt_nats.reading.selection import without_covered

SID: Final = b"P"
QUIET: Final = 1.0
"""Seconds without a message after which the leader of the stream is asked whether there are any."""

INACTIVE_NS: Final = 120_000_000_000
"""After this long without a request the server removes the consumer; Spark may be busy with a batch meanwhile."""

_FIRST: Final = 16
"""Messages of the first request where topics are filtered: how many of the range match is not known, and what comes
from beyond its end is for nothing. Each request is twice as large as the one before."""

_LINE: Final = 8192
"""Bytes of a message that are neither headers nor payload, as the server counts them; amply."""

_ENDED: Final = "Nats-Pending-Messages"
_SHORT: Final = 9
"""Words of an acknowledgement subject without a domain; with one there are at least two more before the consumer."""


def read(
    connection: Connection,
    stream: str,
    subjects: tuple[str, ...],
    start: int,
    end: int,
    bounds: Bounds,
    headers_only: bool = False,
) -> Iterator[Rows]:
    """The messages from `start` on, before `end`; `headers_only`: without payloads, their sizes in Nats-Msg-Size.

    Between two of the results the connection may be used for requests. Raises Interrupted, and what requests raise.
    """
    name, pending = _create(connection, stream, subjects, start, headers_only)
    pull = _Pull(connection, stream, subjects, name, start, end, bounds)
    try:
        if pending:
            yield from pull.rows()
        pull.stop()
        if pull.anything_left():
            raise Interrupted(f"the consumer on stream {stream} does not see all messages (option stream)", "stream")
    except (ConnectError, RequestTimeout):
        name = ""  # nobody would answer
        raise
    finally:
        if name:
            with contextlib.suppress(SourceError):
                pull.stop()
                delete_consumer(connection, stream, name)


def count(connection: Connection, stream: str, subjects: tuple[str, ...], start: int) -> int:
    """How many messages there are from `start` on, as the server counts without looking at each."""
    name, pending = _create(connection, stream, subjects, start, True)
    delete_consumer(connection, stream, name)
    return pending


def _create(
    connection: Connection, stream: str, subjects: tuple[str, ...], start: int, headers_only: bool
) -> tuple[str, int]:
    """A consumer's name, and how many messages it has to deliver."""
    name = f"spark_{secrets.token_hex(8)}"
    config: dict[str, Any] = {
        "name": name,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": start,
        "ack_policy": "none",
        "replay_policy": "instant",
        "inactive_threshold": INACTIVE_NS,
        "mem_storage": True,
        "num_replicas": 1,
        "headers_only": headers_only,
    }
    filters = without_covered(subjects)
    if len(filters) == 1:
        config["filter_subject"] = filters[0]
    elif filters:
        config["filter_subjects"] = filters
    try:
        return name, int(create_consumer(connection, stream, config)["num_pending"])
    except ApiError as error:
        if error.err_code == FILTER_NOT_SUBSET:
            raise SourceError(f"stream {stream} has no such subjects: change subjectPrefix", "subjectPrefix") from None
        if error.err_code == MAXIMUM_CONSUMERS:
            text = f"stream {stream} has as many consumers as it may: set readMode to direct, or numPartitions lower"
            raise SourceError(text, "readMode") from None
        raise


class _Pull:
    def __init__(
        self,
        connection: Connection,
        stream: str,
        subjects: tuple[str, ...],
        consumer: str,
        start: int,
        end: int,
        bounds: Bounds,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._subjects = subjects
        self._subject = f"{connection.access.api_prefix}.CONSUMER.MSG.NEXT.{stream}.{consumer}".encode()
        self._inbox = connection.inbox + b".p."
        self._frames = Frames(SID)
        self._end = end
        self._bounds = bounds
        self._size = max(bounds.bytes, connection.max_payload + _LINE)
        self._most = min(_FIRST, bounds.rows) if subjects else bounds.rows
        self._owed = 0
        self._asked = 0
        self.seen = start - 1
        """The last stream sequence that has come."""
        self._counted = 0  # of the messages collected, those that were taken off what is owed
        self._delivered = 0  # last number that the consumer gave to a message handed over
        self._done = False

    def rows(self) -> Iterator[Rows]:
        frames = self._frames
        self._connection.collect(frames)
        self._connection.send(b"SUB %b* %b\r\n" % (self._inbox, SID))
        deadline = time.monotonic() + 2 * SILENCE
        while True:
            # Messages may also have come during a request, since the last batch was handed over.
            if len(frames) > self._counted:
                self._count()
                deadline = time.monotonic() + 2 * SILENCE
            self._told()
            if self._batch_is_due():
                rows = self._rows(frames.take(self._bounds.rows))
                self._counted = len(frames)
                if rows is not None:
                    yield rows
                deadline = time.monotonic() + 2 * SILENCE
            elif self._done:
                return
            else:
                self._ask()
                if not self._connection.read(QUIET):
                    self._done = not self.anything_left()
                    if time.monotonic() > deadline:
                        raise Interrupted("the consumer brings no messages (option stream)", "stream")

    def anything_left(self) -> bool:
        """Whether the leader of the stream has more in the range than has come."""
        return self.seen < self._end - 1 and anything_between(
            self._connection, self._stream, self._subjects, self.seen + 1, self._end
        )

    def _batch_is_due(self) -> bool:
        frames, bounds = self._frames, self._bounds
        return len(frames) >= bounds.rows or frames.size >= bounds.bytes or (self._done and len(frames) > 0)

    def stop(self) -> None:
        """Nothing more is wanted."""
        self._connection.send(b"UNSUB %b\r\n" % SID)

    def _ask(self) -> None:
        """Ask for more when at most one request's messages are owed."""
        wanted = min(self._most, self._end - 1 - self.seen - self._owed)
        if self._owed > self._most or wanted <= 0:
            return
        self._most = min(2 * self._most, self._bounds.rows)
        self._asked += 1
        body = orjson.dumps({"batch": wanted, "max_bytes": self._size, "expires": int(SILENCE * 1e9)})
        self._connection.send(
            protocol.publish(self._subject, body, reply=b"%b%d-%d" % (self._inbox, self._asked, wanted))
        )
        self._owed += wanted

    def _count(self) -> None:
        frames = self._frames
        self._owed -= len(frames) - self._counted
        self._counted = len(frames)
        words = frames.last[0].split(b".")
        try:
            place = _place(len(words))
            self.seen, pending = int(words[place]), int(words[place + 3])
        except (ValueError, IndexError):
            raise _no_delivery(frames.last[0]) from None
        self._done = not pending or self.seen >= self._end - 1

    def _told(self) -> None:
        """Handle the status messages of nats-server about requests that have ended."""
        for word in self._frames.loose(SID):
            if not self._done:
                self._ended(word)

    def _ended(self, word: Loose) -> None:
        code = headers.status(word.headers)
        left = headers.get_int(word.headers, _ENDED)
        line = word.headers[9:].partition(b"\r")[0].decode(errors="replace")
        if code == 400:
            raise SourceError(f"JetStream refuses a pull: {line} (set readMode to direct)", "readMode")
        if code not in (404, 408, 409) or left is None:
            raise Interrupted(f"the consumer was deleted: {line or 'unexpected answer'}")
        self._owed -= left
        if "MaxBytes" in line and word.subject.endswith(b"-%d" % left):
            self._size *= 2  # not even one message was small enough
        elif code != 409 and self._owed <= 0:
            self._done = True  # nothing has come for as long as the request waited

    def _rows(self, block: Block) -> Rows | None:
        """The messages of the range in a block; every number that the consumer has given must be there."""
        sequences, numbers, times = _numbers(block.replies)
        count = len(block.replies)
        self._delivered += count
        if numbers[-1].as_py() != self._delivered:
            raise Interrupted("messages were lost between NATS and here (option servers)", "servers")
        keep = count
        if sequences[-1].as_py() >= self._end:
            keep = pc.sum(pc.less(sequences, self._end)).as_py()
        if not keep:
            return None
        return Rows(sequences[:keep], times[:keep], block.subjects[:keep], block.headers[:keep], block.payloads[:keep])


def _place(words: int) -> int:
    """Which word of an acknowledgement subject is the stream sequence."""
    return 5 if words == _SHORT else 7


def _no_delivery(reply: bytes) -> Interrupted:
    return Interrupted(f"not a delivery of JetStream: {reply[:60]!r}")


def _numbers(replies: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Stream sequences, consumer sequences and times (ns) of acknowledgement subjects, in bulk."""
    first = replies[0].as_py()
    count = first.count(b".") + 1
    place = _place(count)
    try:
        sequences, numbers, times = map(integers, split(replies, b".", count, range(place, place + 3)))
    except ValueError:
        raise _no_delivery(first) from None
    if len(sequences) != len(replies):
        raise _no_delivery(first)
    return sequences, numbers, times
