# SPDX-License-Identifier: Apache-2.0
"""Shutdown: ends the process when all work is done, even if a task still waits."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio

from mqtt_nats.config.settings import Settings

T = TypeVar("T")

log = logging.getLogger("mqtt_nats.gateway")

TASKS_END_MOST_S: Final = 5.0
"""Seconds for tasks to end when all work is done. The tasks have been cancelled by then, so they need no time."""


class _Deadline(threading.Timer):
    """Ends the process some seconds later, unless it ends by itself before: the thread keeps no process alive."""

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(seconds, _cut, (loop,))
        self.daemon = True


def run_to_end(work: Callable[[Settings], Awaitable[T]], settings: Settings, seconds: float = TASKS_END_MOST_S) -> T:
    """Run ``work`` on uvloop. If the loop does not end after ``work``, end the process with status 1.

    Raises:
        Exception: what ``work`` raises.
    """
    timers: list[threading.Timer] = []

    async def watched() -> T:
        try:
            return await work(settings)
        finally:
            timer = _Deadline(seconds, asyncio.get_running_loop())
            timer.start()
            timers.append(timer)

    try:
        return anyio.run(watched, backend="asyncio", backend_options={"use_uvloop": True})
    finally:
        for timer in timers:
            timer.cancel()


def _cut(loop: asyncio.AbstractEventLoop) -> None:
    names = sorted(f"{task.get_name()} ({task.get_coro()})" for task in asyncio.all_tasks(loop))
    log.error("the gateway stops without waiting for %s", "; ".join(names))
    logging.shutdown()
    os._exit(1)
