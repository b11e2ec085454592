# SPDX-License-Identifier: Apache-2.0
"""Write buffers of clients, and the round that flushes them.

Bytes for clients are collected per client during one turn of the event loop and written
once, when the turn ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic
from typing import Final

from mqtt_nats.transport.turns import Turns

# Bytes given at a time to a client that reads again: enough to fill its socket's buffer again.
PIECE: Final = 256 * 1024 + 1

# Average bytes per chunk from which a write for each chunk costs less than joining the chunks.
SEPARATE_CHUNK_BYTES: Final = 128 * 1024

# Number of write buffers up to which clients are written to before NATS: that write takes CPU time from clients.
CLIENTS_FIRST_MOST: Final = 16


class WriteBuffer:
    """Write buffer of one connection.

    The message path may append to ``chunks`` directly; if the buffer is not ``dirty``, it then calls :meth:`schedule`
    or :meth:`join`. All other code calls :meth:`write`. While ``clogged`` (the client
    does not read) chunks stay here and :meth:`offer` bounds them.
    """

    __slots__ = ("_handed", "chunks", "clogged", "dirty", "dropped", "held", "limit", "round", "send", "since")

    def __init__(self, round_: FlushRound, limit: int) -> None:
        self.round = round_
        self.limit = limit
        self.chunks: list[bytes] = []
        self.dirty = False
        self.clogged = False
        self.since = 0.0
        """Time when the client was last seen to read, system's monotonic clock in seconds; only while clogged."""
        self.held = 0
        """Unsent bytes, here and in the last write to the socket; 0 unless clogged."""
        self.dropped = 0
        self.send: Callable[[bytes | bytearray], None] | None = None
        self._handed = 0
        """Bytes of the last write to the socket, as part of `held`."""

    def write(self, data: bytes) -> None:
        """Send ``data`` at the end of the turn."""
        self.chunks.append(data)
        if self.clogged:
            self.hold(len(data))
        elif not self.dirty:
            self.schedule()

    def schedule(self) -> None:
        """Have the collected data written at the end of the turn."""
        self.dirty = True
        self.round.add(self)

    def join(self, dirty: list[WriteBuffer]) -> None:
        """Have the collected data written with ``dirty``, of the round that the caller then starts."""
        self.dirty = True
        dirty.append(self)

    def send_by(self, send: Callable[[bytes | bytearray], None] | None) -> None:
        """Write to the socket by a function; None: nothing is written any more."""
        self.send = send

    def hold(self, size: int) -> None:
        """Count bytes that were appended while the client does not read."""
        self.held += size
        self.round.hold(size)

    def offer(self, data: bytes, count: int) -> None:
        """Send ``count`` QoS 0 messages to a client, or drop and count them if the buffer is full."""
        if self.held + len(data) > self.limit:
            self._lose(data, count)
        else:
            self.write(data)

    def _lose(self, data: bytes, count: int) -> None:
        self.dropped += count
        self.round.drop(count)
        if self.round.lost is not None:
            self.round.lost(self, data)

    def hand(self, data: bytearray) -> None:
        """Send one large QoS 0 message at once, after the collected data; if the client does not read, `offer` it."""
        self.flush()
        if self.clogged:
            self.offer(bytes(data), 1)
        elif self.send is not None:
            self._handed = len(data)
            self.send(data)
            if not self.clogged:
                self._handed = 0

    def flush(self) -> None:
        """Write the collected data to the transport."""
        self.dirty = False
        chunks = self.chunks
        if not chunks or self.clogged:
            return
        if (
            len(chunks) == 1
            or len(chunks[0]) < SEPARATE_CHUNK_BYTES
            or sum(map(len, chunks)) < len(chunks) * SEPARATE_CHUNK_BYTES
        ):
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            chunks.clear()
            self._handed = len(data)
            if self.send is not None:
                self.send(data)
        else:
            while chunks and self.send is not None and not self.clogged:
                data = chunks.pop(0)
                self._handed += len(data)
                self.send(data)
        if not self.clogged:
            self._handed = 0

    def clog(self) -> None:
        """Keep further data here: the transport's buffer is full, including the data being flushed.

        Nothing is kept for a connection that is closed: nobody would call :meth:`unclog`.
        """
        if self.send is None:
            return
        self.clogged = True
        self.round.clogged.add(self)
        self.since = monotonic()
        self._held(self._handed + sum(map(len, self.chunks)))

    def unclog(self) -> None:
        """Write the kept data until the transport's buffer is full again: the client reads again."""
        self.clogged = False
        chunks, self.chunks = self.chunks, []
        left = self.held - self._handed
        end = 0
        while end < len(chunks) and not self.clogged and self.send is not None:
            start, size = end, 0
            while end < len(chunks) and size < PIECE:
                size += len(chunks[end])
                end += 1
            self.send(b"".join(chunks[start:end]))
            self._handed = size
            left -= size
        self.chunks = chunks[end:]
        if self.clogged:
            self._held(left + self._handed)
        else:
            self.round.clogged.discard(self)
            self._handed = 0
            self._held(0)

    def sift(self, keep: Callable[[bytes], bool]) -> None:
        """Keep only the chunks for which ``keep`` is true; called while the write buffer is clogged."""
        self.chunks[:] = filter(keep, self.chunks)
        self._held(sum(map(len, self.chunks)) + self._handed)

    def lose(self) -> None:
        """Drop and count the QoS 0 messages that wait here; called while the write buffer is clogged."""

        def keep(data: bytes) -> bool:
            if data[0] & 0xF6 != 0x30:
                return True
            self._lose(data, _packets(data))
            return False

        self.sift(keep)

    def _held(self, size: int) -> None:
        self.round.count_held(size - self.held)
        self.held = size

    def move(self, round_: FlushRound) -> None:
        """Flush in another round from now on; collected data leaves with the former round."""
        self.round.count_held(-self.held)
        round_.count_held(self.held)
        if self.clogged:
            self.round.clogged.discard(self)
            round_.clogged.add(self)
        self.round = round_

    def shut(self) -> None:
        """Drop all data: the connection is gone."""
        self.send = None
        self.clogged = False
        self.round.clogged.discard(self)
        self.chunks.clear()
        self._handed = 0
        self._held(0)


def _packets(data: bytes) -> int:
    """Return the number of packets in ``data``."""
    count = pos = 0
    while pos < len(data):
        size = shift = 0
        while True:
            pos += 1
            size |= (data[pos] & 127) << shift
            shift += 7
            if data[pos] < 128:
                break
        pos += 1 + size
        count += 1
    return count


class FlushRound:
    """Round of write buffers with data to write, flushed once per turn of the event loop."""

    __slots__ = (
        "_schedule",
        "_scheduled",
        "ahead",
        "clogged",
        "dirty",
        "dropped",
        "held",
        "holding",
        "lost",
        "most",
        "overfull",
        "turns",
    )

    def __init__(
        self, schedule: Callable[[Callable[[], None]], object], ahead: Callable[[], None] = lambda: None
    ) -> None:
        """``schedule`` runs a function at the end of the turn (``loop.call_soon``)."""
        self._schedule = schedule
        self._scheduled = False
        self.turns = Turns(schedule, self._leave)
        """Turns in which packets of the round's clients are handled."""
        self.dirty: list[WriteBuffer] = []
        self.clogged: set[WriteBuffer] = set()
        """Outlets whose clients do not read."""
        self.dropped = 0
        self.lost: Callable[[WriteBuffer, bytes], None] | None = None
        """Function called with the write buffer and bytes of dropped packets; None = no such function."""
        self.held = 0
        """Bytes that wait for all clients that do not read."""
        self.holding: Callable[[int], None] = self.hold
        """:meth:`hold` as one object for all clients: a newly bound method takes memory for each."""
        self.most = sys.maxsize
        """Value of ``held`` above which ``overfull`` is called for each added message."""
        self.ahead = ahead
        """Function called before more than `CLIENTS_FIRST_MOST` write buffers are flushed."""
        self.overfull: Callable[[], None] = lambda: None

    def bound(self, most: int, overfull: Callable[[], None]) -> None:
        """Call ``overfull`` for each added message while more than ``most`` bytes wait for clients."""
        self.most, self.overfull = most, overfull

    def call_on_lost(self, lost: Callable[[WriteBuffer, bytes], None] | None) -> None:
        """Call ``lost`` with the write buffer and bytes of dropped packets; None = no more."""
        self.lost = lost

    def hold(self, size: int) -> None:
        """Count bytes that are added for a client that does not read."""
        self.held += size
        if self.held > self.most:
            self.overfull()

    def count_held(self, size: int) -> None:
        """Count ``size`` more bytes, or fewer if it is negative, that wait for clients that do not read."""
        self.held += size

    def drop(self, count: int) -> None:
        """Count dropped messages."""
        self.dropped += count

    def add(self, write_buffer: WriteBuffer) -> None:
        """Schedule the flush of ``write_buffer``, whose ``dirty`` is already set."""
        self.dirty.append(write_buffer)
        if not self._scheduled:
            self._scheduled = True
            self._schedule(self.flush)

    def start(self) -> None:
        """Schedule the flush after the message path has appended to ``dirty`` by itself."""
        if self.dirty and not self._scheduled:
            self._scheduled = True
            self._schedule(self.flush)

    def _leave(self) -> None:
        """Write what is collected for NATS, and for few clients: more work follows in this turn of the event loop."""
        self.ahead()
        if len(self.dirty) <= CLIENTS_FIRST_MOST:  # many would be written to twice in this turn
            self.flush()

    def flush(self) -> None:
        """Write the data of every dirty write buffer."""
        self._scheduled = False
        dirty, self.dirty = self.dirty, []
        if len(dirty) > CLIENTS_FIRST_MOST:
            self.ahead()
        for write_buffer in dirty:
            write_buffer.flush()
