# SPDX-License-Identifier: Apache-2.0
"""Socket state from the operating system: the peer's address, and `tcp_info` of Linux."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any, Final

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
