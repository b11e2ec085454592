# SPDX-License-Identifier: Apache-2.0
"""Tasks of an account: an error ends one task only, and nothing begins after the end."""

from __future__ import annotations

import asyncio
import gc

import pytest

from mqtt_nats.base.tasks import Tasks


async def fail() -> None:
    raise ValueError("a defect")


async def test_an_error_is_logged_and_the_other_tasks_go_on(caplog: pytest.LogCaptureFixture) -> None:
    done = asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0)
        done.set()

    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group)
        tasks.spawn(work(), "work")
        tasks.spawn(fail(), "fail")
    assert done.is_set()
    assert "a task of the gateway failed" in caplog.text
    assert "a defect" in caplog.text


async def test_after_the_end_nothing_begins() -> None:
    begun: list[str] = []
    runs = asyncio.Event()

    async def work(name: str) -> None:
        begun.append(name)
        runs.set()
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group)
        first = tasks.spawn(work("first"), "first")
        await runs.wait()
        tasks.cancel()
        await tasks.spawn(work("second"), "second")
    assert (begun, first.cancelled()) == (["first"], True)


async def test_the_end_waits_for_last_jobs_of_clients() -> None:
    stored: list[str] = []

    async def last_job() -> None:
        await asyncio.sleep(0)
        stored.append("position")

    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group)
        tasks.await_at_end(tasks.spawn_safe(last_job(), "last job"))
        await tasks.last_jobs()
        assert stored == ["position"]


@pytest.mark.filterwarnings("error")
async def test_in_a_group_that_ends_because_of_an_error_nothing_begins_and_nothing_is_reported() -> None:
    begun: list[str] = []

    async def work(name: str) -> None:
        begun.append(name)

    async def at_end(tasks: Tasks) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            tasks.spawn(work("spawned"), "spawned")
            tasks.spawn_safe(work("last job"), "last job")

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = Tasks(group)
            group.create_task(at_end(tasks))
            await asyncio.sleep(0)
            tasks.spawn(work("cancelled before its start"), "early")
            tasks.spawn_safe(work("cancelled before its start"), "early, too")
            raise ValueError("an error")

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    assert [type(one) for one in caught.value.exceptions] == [ValueError]
    gc.collect()
    assert begun == []
