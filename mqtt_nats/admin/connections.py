# SPDX-License-Identifier: Apache-2.0
"""Connections of administrators: who does not say what it wants has to make room for those who do."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from wsproto.events import RejectConnection

MOST_CONNECTIONS: Final = 200
"""Connections at a time; for one more, another goes that has no request under way."""

SPARE: Final = 20
"""Connections beyond that where all of them have requests: so that it can still be seen that the gateway is well."""

HEAD_SECONDS: Final = 10.0
"""Seconds in which the head of a request has to be there."""

GONE: Final = 120
"""Seconds after which a connection ends whose other side is not there any more, or takes nothing."""

OPTIONS: Final = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 60),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 15),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", GONE * 1000),
)


def notice_the_end(listening: socket.socket) -> None:
    """Have the kernel notice when the other side of an accepted connection has vanished, where it can."""
    for level, name, value in OPTIONS:
        if hasattr(socket, name):
            listening.setsockopt(level, getattr(socket, name), value)


class AdminProtocol(H11Protocol):
    """HTTP connection to the admin listener."""

    _late: asyncio.TimerHandle | None = None
    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give a new connection the time for its first request."""
        _make_room(self.connections)
        super().connection_made(transport)
        self._since = self.loop.time()
        if _open(self.connections) > MOST_CONNECTIONS + SPARE:
            transport.abort()
            return
        self._wait()

    def data_received(self, data: bytes) -> None:
        """A part of a request."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait()
        else:
            self._heard()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of a connection that has ended."""
        self._heard()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        cycle: Any = self.cycle  # None until there is a request
        return not self.transport.is_closing() and (cycle is None or cycle.response_complete)

    @property
    def lasting(self) -> bool:
        """Whether an answer has begun and goes on, as that of a trace."""
        cycle: Any = self.cycle
        return cycle is not None and cycle.response_started and not cycle.response_complete

    def _wait(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _heard(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class AdminSocket(WSProtocol):
    """A connection from the request for a WebSocket on."""

    lasting = True

    def data_received(self, data: bytes) -> None:
        """A part of what is sent; header fields that are no text are refused."""
        try:
            super().data_received(data)
        except UnicodeError:
            if self.handshake_complete:
                raise
            refused = RejectConnection(status_code=400, headers=[(b"connection", b"close")])
            self.transport.write(self.conn.send(refused))
            self.transport.close()


def _open(connections: set[Any]) -> int:
    return sum(not one.transport.is_closing() for one in connections)


def _make_room(connections: set[Any]) -> None:
    """End the oldest connection without a request, of the address with the most of these, where there are too many."""
    if _open(connections) < MOST_CONNECTIONS:
        return
    idle = [one for one in connections if isinstance(one, AdminProtocol) and one.idle]
    if idle:
        of = Counter(_host(one) for one in idle)
        max(idle, key=lambda one: (of[_host(one)], -one._since)).transport.abort()


def _host(one: AdminProtocol) -> str:
    return one.client[0] if one.client else ""
