# SPDX-License-Identifier: Apache-2.0
"""MQTT over plain TCP [MQTT-7.1.1-1] (3.1.1), [MQTT-4.2.0-1] (5.0)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mqtt_nats.config import Settings, parse_address


async def listen(
    settings: Settings, factory: Callable[[], asyncio.Protocol]
) -> tuple[asyncio.Server, list[tuple[str, int]]]:
    """Listen on the address of the settings; returns the server and the addresses that it has.

    Raises:
        OSError: the address is not to be had.
    """
    host, port = parse_address(settings.listen)
    server = await asyncio.get_running_loop().create_server(
        factory, host, port, backlog=settings.backlog, reuse_port=settings.workers > 1 or None
    )
    return server, [socket.getsockname()[:2] for socket in server.sockets]
