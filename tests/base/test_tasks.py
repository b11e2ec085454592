# SPDX-License-Identifier: Apache-2.0
"""Tasks of an account: an error ends one task only, and nothing begins after the end."""

from __future__ import annotations

import asyncio

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
