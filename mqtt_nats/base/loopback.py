# SPDX-License-Identifier: Apache-2.0
"""TCP settings of connections within this machine, which need no congestion control."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any, Final

PACED: Final = (b"bbr",)
"""Prefixes of the names of congestion controls that delay packets by a timer (pacing)."""

UNPACED: Final = b"reno"
"""Congestion control without pacing; present on every Linux and allowed to every process."""


def unpace(one: Any, host: str) -> None:
    """Set a congestion control without pacing for a loopback socket, so that packets leave at once.

    Args:
        one: a socket; connections that a listening socket accepts inherit the setting.
        host: the address that the socket listens on or is connected to. Nothing is changed for other than loopback.
    """
    if not hasattr(socket, "TCP_CONGESTION") or not _is_loopback(host):
        return
    with contextlib.suppress(OSError):
        if one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(PACED):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
