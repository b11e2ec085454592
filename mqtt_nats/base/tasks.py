# SPDX-License-Identifier: Apache-2.0
"""Root coroutines of all tasks of the compiled build; this module is not compiled. See docs/compiled.md#tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def rooted(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` below a coroutine that is not compiled.

    A suspended coroutine of CPython keeps its handled exception (``sys.exc_info``) to itself. A coroutine compiled by
    mypyc leaves that exception to the task that runs next, which would raise it again.
    """
    return await work


async def rooted_call(begin: Callable[[], Awaitable[T]]) -> T:
    """Run the awaitable of ``begin`` as :func:`rooted`; a task that is cancelled before its start makes none."""
    return await begin()
