# SPDX-License-Identifier: Apache-2.0
"""Connections within this machine, where there is no network that could be congested."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any, Final

PACED: Final = (b"bbr",)
"""What the names of congestion controls begin with that let a timer decide when a packet leaves."""

UNPACED: Final = b"reno"
"""Every Linux has it, and lets everybody use it."""


def unpace(one: Any, host: str) -> None:
    """Have packets within this machine leave at once, where the system's congestion control would pace them.

    Args:
        one: a socket; what it accepts, if it listens, is like it.
        host: the address that it listens on, or is connected to. Nothing is changed where that is not of the loopback.
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
