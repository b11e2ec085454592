# SPDX-License-Identifier: Apache-2.0
"""What is on its way to one client, and the round in which all clients are written to.

Everything sent to clients during one turn of the event loop is collected per client and written
once, when the turn ends.
"""

from __future__ import annotations

from collections.abc import Callable


class Outlet:
    """The outgoing bytes of one connection.

    ``chunks`` may be appended to directly by the message path, which then sets ``dirty`` and appends
    the outlet to :attr:`Round.dirty`; everybody else calls :meth:`write`. While ``clogged`` (the client
    does not read) chunks stay here and :meth:`offer` bounds what is added.
    """

    __slots__ = ("chunks", "clogged", "dirty", "dropped", "held", "limit", "round", "send")

    def __init__(self, round_: Round, limit: int) -> None:
        self.round = round_
        self.limit = limit
        self.chunks: list[bytes] = []
        self.dirty = False
        self.clogged = False
        self.held = 0
        self.dropped = 0
        self.send: Callable[[bytes], None] | None = None

    def write(self, data: bytes) -> None:
        """Send ``data`` at the end of the turn."""
        self.chunks.append(data)
        if self.clogged:
            self.held += len(data)
        elif not self.dirty:
            self.dirty = True
            self.round.add(self)

    def offer(self, data: bytes, count: int) -> None:
        """Send ``count`` QoS 0 messages to a client that does not keep up, or drop and count them."""
        if self.held + len(data) > self.limit:
            self.dropped += count
            self.round.dropped += count
        else:
            self.write(data)

    def flush(self) -> None:
        """Hand everything collected to the transport."""
        self.dirty = False
        chunks = self.chunks
        if chunks and not self.clogged:
            if self.send is not None:
                self.send(b"".join(chunks) if len(chunks) > 1 else chunks[0])
            chunks.clear()

    def clog(self) -> None:
        """The transport's buffer is full: keep what follows here."""
        self.clogged = True
        self.held = sum(map(len, self.chunks))

    def unclog(self) -> None:
        """The client reads again."""
        self.clogged = False
        self.held = 0
        self.flush()

    def shut(self) -> None:
        """The connection is gone: nothing is sent any more."""
        self.send = None
        self.clogged = False
        self.chunks.clear()


class Round:
    """The outlets that have something to write, flushed once per turn of the event loop."""

    __slots__ = ("_schedule", "_scheduled", "dirty", "dropped")

    def __init__(self, schedule: Callable[[Callable[[], None]], object]) -> None:
        """``schedule`` runs a function at the end of the turn (``loop.call_soon``)."""
        self._schedule = schedule
        self._scheduled = False
        self.dirty: list[Outlet] = []
        self.dropped = 0

    def add(self, outlet: Outlet) -> None:
        """Have ``outlet`` flushed; its ``dirty`` is already set."""
        self.dirty.append(outlet)
        if not self._scheduled:
            self._scheduled = True
            self._schedule(self.flush)

    def start(self) -> None:
        """Schedule the flush after the message path has appended to ``dirty`` by itself."""
        if self.dirty and not self._scheduled:
            self._scheduled = True
            self._schedule(self.flush)

    def flush(self) -> None:
        """Write to every client that has something to get."""
        self._scheduled = False
        dirty, self.dirty = self.dirty, []
        for outlet in dirty:
            outlet.flush()
