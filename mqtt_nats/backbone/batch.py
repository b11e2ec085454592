# SPDX-License-Identifier: Apache-2.0
"""Batches of concurrent requests for one session, and requests that sessions share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, TypeVar

T = TypeVar("T")

BATCH_REQUESTS_MOST: Final = 32
"""Maximum number of concurrent requests for one session."""


def parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Return the items in slices of at most `BATCH_REQUESTS_MOST`, each for one batch of concurrent requests."""
    return (items[start : start + BATCH_REQUESTS_MOST] for start in range(0, len(items), BATCH_REQUESTS_MOST))


async def all_done(requests: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results when all requests are done; raise the first error, if there is one."""
    found = await asyncio.gather(*requests, return_exceptions=True)
    results: list[T] = []
    for one in found:
        if isinstance(one, BaseException):
            raise one
        results.append(one)
    return results


async def in_turn(requests: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Make requests, the next one as soon as one is answered; return their results in order.

    Requests of other sessions to the same nats-server wait behind few of these requests, not behind all. After an
    error no further request is made; the first error is raised when the requests under way are done.
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

    await all_done([work() for _ in range(min(BATCH_REQUESTS_MOST, len(requests)))])
    return [results[place] for place in range(len(requests))]


class SharedRequest(Generic[T]):
    """Request whose answer is shared by those that want it at the same time.

    Args:
        ask: makes the request.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._lock = asyncio.Lock()
        self._begun = 0
        self._ended = 0
        self._answers: list[T] = []
        """The last answer; empty before the first one."""

    async def answer(self) -> T:
        """Return the answer to a request that is made after the call; errors are those of ``ask``."""
        wanted = self._begun + 1
        while self._ended < wanted:
            async with self._lock:
                if self._ended < wanted:
                    self._begun += 1
                    turn = self._begun
                    self._answers = [await self._ask()]
                    self._ended = turn
        return self._answers[0]
