# SPDX-License-Identifier: Apache-2.0
"""What every task begins in, in the compiled build; not compiled itself. See docs/compiled.md#tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def rooted(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` below a coroutine that is not compiled.

    Such a coroutine keeps to itself what is being handled in it while it is suspended. One that is compiled by mypyc
    leaves it to whoever runs next: another task would raise it again.
    """
    return await work


async def rooted_call(begin: Callable[[], Awaitable[T]]) -> T:
    """As :func:`rooted`, of what is made only when the task begins: a task that is cancelled before leaves nothing."""
    return await begin()
