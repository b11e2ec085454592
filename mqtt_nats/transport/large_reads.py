# SPDX-License-Identifier: Apache-2.0
"""Large reads: each large QoS 0 message is read into a buffer of its own, and sent on from that buffer.

Otherwise the event loop copies the data out of its own buffer, and the decoder joins the parts of a packet. A
`Bulk` replaces the connection as the protocol of its socket, from a large PUBLISH of which a part has arrived
until another kind of packet arrives.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.codec.decoder import OPENING

if TYPE_CHECKING:
    from mqtt_nats.codec import PublishRun
    from mqtt_nats.transport.connection import Connection

PART: Final = 4
"""A packet gets a buffer when one in so many of its bytes has arrived, so that few bytes cause little memory."""


def begin(connection: Connection) -> None:
    """Read the rest of a partly received large PUBLISH, and similar messages after it, without a copy.

    Only for plain sockets of uvloop: TLS and WebSocket pass on data that they have decoded.
    """
    transport: Any = connection.transport
    if (
        transport is None
        or transport.is_closing()
        or isinstance(transport, asyncio.Transport)
        or transport.get_extra_info("sslcontext") is not None
    ):
        return
    found = connection.decoder.surrender(PART)
    if found is not None:
        run, parts = found
        Bulk(connection, run, b"".join(parts))


class Bulk(asyncio.BufferedProtocol):
    """Protocol of a socket on which one large message follows another."""

    __slots__ = ("_buffer", "_connection", "_filled", "_run", "_size", "_view")

    def __init__(self, connection: Connection, run: PublishRun, start: bytes) -> None:
        self._connection = connection
        self._run: PublishRun | None = run
        """Message being read; None until its first bytes were parsed."""
        self._size = run.step
        """Size of the buffer in bytes: the next packet is expected to be as large as the last one."""
        self._filled = len(start)
        self._buffer: bytearray | None = None
        self._view = self._buffered()
        self._view[: len(start)] = start
        connection.read_by(self)

    def _buffered(self) -> memoryview:
        if self._buffer is None:
            self._buffer = bytearray(self._size)
            self._view = memoryview(self._buffer)
        return self._view

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next read."""
        return self._buffered()[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Handle ``nbytes`` new bytes in the buffer."""
        connection = self._connection
        connection.heard()
        self._filled += nbytes
        run = self._run
        if run is None:
            run = self._run = connection.decoder.opening(bytes(self._view[: min(self._filled, OPENING)]))
            if run is None or self._filled * PART < run.step:
                self._leave(self._filled)
                return
            if run.step > self._size:
                self._grow(run.step)
        if self._filled < run.step:
            return
        buffer, filled = self._buffer, self._filled
        assert buffer is not None
        if filled == self._size == run.step:
            self._buffer, self._filled, self._run = None, 0, None
            run.fill(buffer)
            connection.large(run)
        else:  # the packet is smaller than the last one, and others follow
            self._leave(filled)

    def _grow(self, size: int) -> None:
        start = self._view[: self._filled]
        self._buffer, self._size = None, size
        self._buffered()[: self._filled] = start

    def _leave(self, filled: int) -> None:
        """Let the connection read by itself again: another kind of packet has arrived."""
        data = bytes(self._view[:filled])
        self._buffer, self._filled = None, 0
        self._connection.read_by(None)
        self._connection.data_received(data)

    def eof_received(self) -> bool:
        """Close a half-closed connection: it is of no use."""
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        """Tell the connection that the client does not read."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Tell the connection that the client reads again."""
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the connection that the socket is closed."""
        self._connection.connection_lost(exc)
