# SPDX-License-Identifier: Apache-2.0
"""Socket of a client: the peer's address, `tcp_info` of Linux, and the listener that counts the socket."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any, Final

from mqtt_nats.base.admission import ADMITTED, Admission

ESTABLISHED: Final = b"\x01"
"""State of a TCP connection that neither side has closed, in Linux's `tcp_info`."""

LAST_DATA_RECEIVED: Final = 52
"""Offset of the milliseconds since the last received data (4 bytes) in Linux's `tcp_info`."""


def address(transport: asyncio.Transport | None) -> tuple[Any, ...] | None:
    """Return the peer's address and port; None: the peer has no address."""
    name: Any = transport.get_extra_info("peername") if transport is not None else None
    return name if isinstance(name, tuple) and len(name) > 1 else None


def is_closed(transport: asyncio.Transport) -> bool:
    """Return whether the peer has closed the connection; False if the system does not tell."""
    state = _tcp_info(transport, 1)
    return state is not None and state != ESTABLISHED


def silence(transport: asyncio.Transport) -> float | None:
    """Return the seconds since the last bytes arrived, read or not; None: the system does not tell."""
    info = _tcp_info(transport, LAST_DATA_RECEIVED + 4)
    return int.from_bytes(info[LAST_DATA_RECEIVED:], sys.byteorder) / 1000 if info else None


def _tcp_info(transport: asyncio.Transport, size: int) -> bytes | None:
    """Return the beginning of `tcp_info`; None: the system has none, empty: the socket is closed."""
    raw: Any = transport.get_extra_info("socket")
    if raw is None or raw.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        found: bytes = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except OSError:
        return b""
    return found


class ClientSocket:
    """The socket of a client, and what its listener has noted about it."""

    __slots__ = ("_host", "admission", "on_end", "source", "transport")

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.on_end: Callable[[], None] | None = None
        """Function called once when the socket is closed; None = no listener counts the socket."""
        self.source: tuple[str, int] | None = None
        """Address and port that a proxy has named for the client; None = the socket's peer."""
        self._host: str | None = None
        self.admission = ADMITTED
        """Decision of the listener, with the monotonic time in seconds at which CONNECT is handled."""

    def count(self, on_end: Callable[[], None] | None, admission: Admission) -> None:
        """Note that a listener counts the connection; see :class:`mqtt_nats.transport.listener.Counted`."""
        self.on_end, self.admission = on_end, admission

    def uncount(self) -> None:
        """Tell the listener, once, that the connection is gone."""
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()

    def name_source(self, source: tuple[str, int]) -> None:
        """Note the address and port of the client that a proxy has named."""
        self.source = source

    @property
    def hung_up(self) -> bool:
        """Whether the client has closed its connection; asyncio does not report that while reading is paused."""
        return self.transport is None or is_closed(self.transport)

    @property
    def host(self) -> str:
        """IP address of the client; empty if the client has none."""
        if self.source is not None:
            return self.source[0]
        if self._host is None:
            name = address(self.transport)
            if name is None:
                return ""
            self._host = str(name[0])  # kept, since each request is a system call
        return self._host

    @property
    def peer(self) -> str:
        """Address and port of the client, for logs."""
        name = self.source or address(self.transport)
        return self.host or "unknown" if name is None else f"{name[0]}:{name[1]}"
