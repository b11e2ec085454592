# SPDX-License-Identifier: Apache-2.0
"""What the system knows of a connection: who is on the other side, and its state (`tcp_info` of Linux)."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any, Final

ESTABLISHED: Final = b"\x01"
"""The state, in Linux's words, of a TCP connection that neither side has closed."""

LAST_DATA_RECEIVED: Final = 52
"""Where Linux's `tcp_info` has the milliseconds since the last data came (4 bytes)."""


def address(transport: asyncio.Transport | None) -> tuple[Any, ...] | None:
    """Address and port of the other side; None: it has none."""
    name: Any = transport.get_extra_info("peername") if transport is not None else None
    return name if isinstance(name, tuple) and len(name) > 1 else None


def is_closed(transport: asyncio.Transport) -> bool:
    """Whether the other side has closed the connection, as far as the system says."""
    state = _tcp_info(transport, 1)
    return state is not None and state != ESTABLISHED


def silence(transport: asyncio.Transport) -> float | None:
    """Seconds since the last bytes came, read or not; None: the system does not say."""
    info = _tcp_info(transport, LAST_DATA_RECEIVED + 4)
    return int.from_bytes(info[LAST_DATA_RECEIVED:], sys.byteorder) / 1000 if info else None


def _tcp_info(transport: asyncio.Transport, size: int) -> bytes | None:
    """The beginning of `tcp_info`; None: the system has none, empty: the socket is closed."""
    raw: Any = transport.get_extra_info("socket")
    if raw is None or raw.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        found: bytes = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except OSError:
        return b""
    return found
