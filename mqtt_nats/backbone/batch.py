# SPDX-License-Identifier: Apache-2.0
"""Requests that are made for one session at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

AT_ONCE: Final = 32
"""Requests for one session at the same time."""


def parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """What is asked for at the same time."""
    return (items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE))


async def all_done(requests: Iterable[Awaitable[T]]) -> list[T]:
    """What they return, when all are done; then the first of their errors is raised, where there is one."""
    found = await asyncio.gather(*requests, return_exceptions=True)
    results: list[T] = []
    for one in found:
        if isinstance(one, BaseException):
            raise one
        results.append(one)
    return results


async def in_turn(requests: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Make requests, the next one as soon as one is answered; what they return, in their order.

    What others ask of the same nats-server waits behind few of them, not behind all. After an error no further request
    is made; the first error is raised when those that were made are done.
    """
    results: dict[int, T] = {}
    left = iter(range(len(requests)))

    async def work() -> None:
        for place in left:
            try:
                results[place] = await requests[place]()
            except BaseException:
                for _ in left:
                    pass
                raise

    await all_done([work() for _ in range(min(AT_ONCE, len(requests)))])
    return [results[place] for place in range(len(requests))]
