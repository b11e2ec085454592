# SPDX-License-Identifier: Apache-2.0
"""Notifications for systemd (``Type=notify``): start, end and watchdog; see sd_notify(3)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Final

MANAGER_TIMEOUT: Final = 1.0
"""Seconds that a service manager with a full queue is waited for."""


def notify(state: str) -> None:
    """Send a state such as ``READY=1`` to the socket that the service manager names in NOTIFY_SOCKET, if it does."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name:
        return
    address = "\0" + name[1:] if name.startswith("@") else name
    # A service manager that does not listen any more is no reason to end.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(MANAGER_TIMEOUT)
        sender.sendto(state.encode(), address)


def watchdog_interval() -> float:
    """Return the seconds between two signs of life, a third of WATCHDOG_USEC; 0 = this process has no watchdog."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    text = os.environ.get("WATCHDOG_USEC", "")
    return int(text) / 3e6 if text.isascii() and text.isdecimal() else 0.0


async def keep_alive() -> None:
    """Give signs of life while the event loop runs; return at once without a watchdog."""
    interval = watchdog_interval()
    while interval:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval)
