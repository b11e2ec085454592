# SPDX-License-Identifier: Apache-2.0
"""Requests that are made for one session at the same time."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from mqtt_nats.backbone.batch import BATCH_REQUESTS_MOST, SharedRequest, in_turn

pytestmark = pytest.mark.anyio


class Server:
    """Answers requests in the order that it is told."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._enough = asyncio.Event()
        self._wanted = 0
        self.answers: dict[int, asyncio.Future[int]] = {}

    async def ask(self, number: int) -> int:
        self.asked.append(number)
        if len(self.asked) >= self._wanted:
            self._enough.set()
        self.answers[number] = asyncio.get_running_loop().create_future()
        return await self.answers[number]

    def begin(self, count: int) -> asyncio.Task[list[int]]:
        """Ask so much."""
        return asyncio.ensure_future(in_turn([partial(self.ask, number) for number in range(count)]))

    async def wait(self, count: int) -> None:
        """Until so much was asked."""
        self._wanted = count
        if len(self.asked) < count:
            self._enough.clear()
            await self._enough.wait()


async def test_the_next_follows_an_answer() -> None:
    server = Server()
    task = server.begin(2 * BATCH_REQUESTS_MOST)
    await server.wait(BATCH_REQUESTS_MOST)
    for _ in range(5):
        await asyncio.sleep(0)
    assert server.asked == list(range(BATCH_REQUESTS_MOST))
    server.answers[BATCH_REQUESTS_MOST - 1].set_result(-1)
    await server.wait(BATCH_REQUESTS_MOST + 1)
    while not task.done():
        for number, answer in list(server.answers.items()):
            if not answer.done():
                answer.set_result(number)
        await asyncio.sleep(0)
    assert task.result() == [
        -1 if number == BATCH_REQUESTS_MOST - 1 else number for number in range(2 * BATCH_REQUESTS_MOST)
    ]


async def test_nothing() -> None:
    assert await in_turn([]) == []


async def test_an_error_ends_it() -> None:
    """Nothing more is asked, and what was asked is done when the error is raised."""
    server = Server()
    task = server.begin(2 * BATCH_REQUESTS_MOST)
    await server.wait(BATCH_REQUESTS_MOST)
    server.answers[3].set_exception(ValueError("no"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    for answer in list(server.answers.values()):
        if not answer.done():
            answer.set_result(0)
    with pytest.raises(ValueError, match="no"):
        await task
    assert server.asked == list(range(BATCH_REQUESTS_MOST))


async def test_who_is_cancelled_asks_no_more() -> None:
    server = Server()
    task = server.begin(2 * BATCH_REQUESTS_MOST)
    await server.wait(BATCH_REQUESTS_MOST)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(answer.cancelled() for answer in server.answers.values())
    assert server.asked == list(range(BATCH_REQUESTS_MOST))


async def test_a_request_is_shared_by_those_that_come_while_another_one_is_under_way() -> None:
    """Their answer is later than their question; after an error the next one asks."""
    asked: list[asyncio.Future[int]] = []

    async def ask() -> int:
        asked.append(asyncio.get_running_loop().create_future())
        return await asked[-1]

    shared = SharedRequest(ask)
    first = asyncio.create_task(shared.answer())
    await asyncio.sleep(0)
    others = [asyncio.create_task(shared.answer()) for _ in range(5)]
    await asyncio.sleep(0)
    assert len(asked) == 1
    asked[0].set_result(1)
    assert await first == 1
    await asyncio.sleep(0)
    assert not any(one.done() for one in others)
    asked[1].set_exception(ValueError("refused"))
    await asyncio.wait(others[:1])
    assert isinstance(others[0].exception(), ValueError)
    await asyncio.sleep(0)
    asked[2].set_result(3)
    assert await asyncio.gather(*others[1:]) == [3] * 4
    assert len(asked) == 3
