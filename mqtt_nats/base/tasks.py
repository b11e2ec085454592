# SPDX-License-Identifier: Apache-2.0
"""Tasks of a gateway in one account; the root coroutines of all tasks of the compiled build.

This module is not compiled. See docs/compiled.md#tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger("mqtt_nats.broker")


async def rooted(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` below a coroutine that is not compiled.

    A suspended coroutine of CPython keeps its handled exception (``sys.exc_info``) to itself. A coroutine compiled by
    mypyc leaves that exception to the task that runs next, which would raise it again.
    """
    return await work


async def rooted_call(begin: Callable[[], Awaitable[T]]) -> T:
    """Run the awaitable of ``begin`` as :func:`rooted`; a task that is cancelled before its start makes none."""
    return await begin()


class Tasks:
    """Tasks of one account, in the gateway's task group.

    Args:
        group: the gateway's task group.
    """

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._spawned: set[asyncio.Task[None]] = set()
        self._farewells: set[asyncio.Task[None]] = set()
        """Last jobs of clients that have left; the gateway waits for them before it ends."""
        self._ended = False
        """Whether no task is started any more."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` with its exceptions logged; start nothing after :meth:`cancel`."""
        if self._ended:
            work.close()
            return asyncio.get_running_loop().create_task(_nothing(), name=name)
        task = self._begin(_guard(work), work, name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    def spawn_safe(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work``, which lets no exception out; :meth:`cancel` does not concern it."""
        return self._begin(rooted(work), work, name)

    def _begin(self, root: Coroutine[Any, Any, None], work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``root``, which awaits ``work``; run neither when the group ends because of an error."""
        try:
            task = self._group.create_task(root, name=name)
        except RuntimeError:
            root.close()
            work.close()
            return asyncio.get_running_loop().create_task(_nothing(), name=name)
        task.add_done_callback(lambda _: work.close())  # `root` may be cancelled before it awaits `work`
        return task

    def await_at_end(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Have the end of the gateway wait for the last job of a client."""
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)
        return task

    async def last_jobs(self) -> None:
        """Wait for the last jobs of clients that have left."""
        await asyncio.gather(*self._farewells)

    def cancel(self) -> None:
        """Cancel the tasks that :meth:`spawn` has started, and start no more."""
        self._ended = True
        for task in self._spawned:
            task.cancel()


async def _nothing() -> None:
    """Do nothing, in place of work that is not started any more."""


async def _guard(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except asyncio.CancelledError:
        raise
    except Exception:
        log.exception("a task of the gateway failed")
