# SPDX-License-Identifier: Apache-2.0
"""Listening on all addresses of a machine, IPv4 and IPv6: the host `*`.

One socket for each family. A single IPv6 socket for both would show IPv4 clients as `::ffff:192.0.2.1`.
"""

from __future__ import annotations

import socket
from typing import Final

EVERY: Final = "*"
"""Host that stands for all addresses of the machine."""

_BOTH: Final = ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))

_ATTEMPTS: Final = 10
"""Attempts to find a port that is free for both families."""


def expand(host: str) -> tuple[str, ...]:
    """Return the hosts to bind: for `*` one of each family that the machine has, otherwise the host itself."""
    if host != EVERY:
        return (host,)
    return tuple(address for family, address in _BOTH if _has(family, address))


def _has(family: socket.AddressFamily, address: str) -> bool:
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def listen_everywhere(port: int, backlog: int, shared: bool) -> list[socket.socket]:
    """Return a listening socket for each family that the machine has, all on one port; port 0 takes a free one.

    Raises:
        OSError: the port is in use, or the machine has neither family.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _listen(port, backlog, shared)
        except OSError:
            if port or attempt == _ATTEMPTS:
                raise
    raise AssertionError("the last attempt returns or raises")


def _listen(port: int, backlog: int, shared: bool) -> list[socket.socket]:
    found: list[socket.socket] = []
    try:
        for host in expand(EVERY):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            one = socket.create_server((host, port), family=family, backlog=backlog, reuse_port=shared)
            found.append(one)
            one.setblocking(False)
            port = one.getsockname()[1]
    except OSError:
        for one in found:
            one.close()
        raise
    if not found:
        raise OSError("neither IPv4 nor IPv6 is available")
    return found
