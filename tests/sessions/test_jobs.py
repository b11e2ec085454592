# SPDX-License-Identifier: Apache-2.0
"""Jobs of a client one after the other, and what their failures mean."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from mqtt_nats.codec import MqttError, NotAuthorized, ProtocolError, ReasonCode
from mqtt_nats.sessions.jobs import JOBS_LOW, JOBS_MOST
from mqtt_nats.sessions.session import State
from mqtt_nats.transport.connection import Connection, Handler, Hold
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from tests.sessions.fakes import FakeClientConnection, FakeServices, PlainSession, as_services

pytestmark = pytest.mark.sources


class Worker(PlainSession):
    """A session that writes down what happens to it."""

    def __init__(self, state: State = State.LIVE) -> None:
        self.fake_connection = FakeClientConnection()
        self.fake_services = FakeServices()
        super().__init__(cast("Connection", self.fake_connection), as_services(self.fake_services))
        self.name("client")
        self.state = state
        self.fake_log: list[object] = []
        """What has happened, in order."""

    @property
    def fake_idle(self) -> bool | None:
        """Whether the running job waits for NATS."""
        return self._jobs.idle if self._jobs is not None else None

    def lost(self) -> None:
        self.fake_log.append("lost")
        self.state = State.ENDED
        assert self._jobs is not None
        self._jobs.stop_idle()

    def taken_over(self) -> None:
        self.state = State.ENDED
        assert self._jobs is not None
        self._jobs.stop()

    def leave(self) -> None:
        self.fake_log.append("left")

    def end_connection(self, error: MqttError) -> None:
        self.fake_log.append(error)
        self.state = State.ENDED

    def __str__(self) -> str:
        return "client 'client'"


async def note(worker: Worker, word: str, error: BaseException | None = None) -> None:
    """A job that waits for something, and may fail."""
    await asyncio.sleep(0)
    worker.fake_log.append(word)
    if error is not None:
        raise error


async def test_jobs_run_one_after_the_other() -> None:
    worker = Worker()
    busy = [worker.busy]
    worker.do(note(worker, "one"))
    worker.do(note(worker, "two"))
    busy.append(worker.busy)
    await worker.fake_services.tasks.fake_settle()
    assert worker.fake_log == ["one", "two"]
    assert [*busy, worker.busy] == [False, True, False]
    worker.do(note(worker, "three"))
    assert len(worker.fake_services.tasks.fake_spawned) == 1
    assert worker.fake_services.tasks.fake_spawned[0].get_name() == "client"
    await worker.fake_services.tasks.fake_settle()
    assert worker.fake_log == ["one", "two", "three"]


async def test_a_client_that_has_ended_has_no_jobs() -> None:
    """A coroutine that is never awaited would be a warning, which fails this test."""
    worker = Worker(State.ENDED)
    worker.do(note(worker, "never"))
    assert (worker.busy, worker.fake_log) == (False, [])


async def test_a_client_with_many_jobs_is_not_read_from() -> None:
    worker = Worker()
    left: list[int] = []

    async def look() -> None:
        left.append(worker.fake_connection.holds)

    for _ in range(JOBS_MOST):
        worker.do(look())
    assert worker.fake_connection.holds == 0
    worker.do(look())
    assert worker.fake_connection.holds == Hold.JOBS
    await worker.fake_services.tasks.fake_settle()
    assert left.count(0) == JOBS_LOW - 1, "it is read from when few jobs wait"
    assert left[0] == Hold.JOBS
    assert left[-1] == 0


async def test_jobs_wait_for_nats() -> None:
    worker = Worker()
    online = worker.services.nats.online
    online.clear()
    worker.do(note(worker, "one"))
    await asyncio.sleep(0)
    assert (worker.fake_log, worker.fake_idle) == ([], True)
    online.set()
    await worker.fake_services.tasks.fake_settle()
    assert worker.fake_log == ["one"]


async def test_a_client_whose_socket_closes_while_nats_is_away_ends() -> None:
    worker = Worker()
    worker.services.nats.online.clear()
    worker.order.leave(cast("Handler", worker))
    worker.do(note(worker, "never"))
    await asyncio.gather(*worker.fake_services.tasks.fake_spawned, return_exceptions=True)
    assert worker.fake_log == ["lost", "left"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotAuthorized("a test"), ReasonCode.NOT_AUTHORIZED),
        (ApiError(503, 10023, "a test"), ReasonCode.SERVER_UNAVAILABLE),
        (RequestTimeout("a test"), ReasonCode.SERVER_UNAVAILABLE),
        (NoResponders("a test"), ReasonCode.SERVER_UNAVAILABLE),
        (TimeoutError("a test"), ReasonCode.SERVER_UNAVAILABLE),
        (ValueError("a test"), ReasonCode.UNSPECIFIED_ERROR),
        (asyncio.CancelledError(), ReasonCode.UNSPECIFIED_ERROR),
    ],
)
async def test_a_job_that_fails_ends_the_client(
    error: BaseException, reason: ReasonCode, caplog: pytest.LogCaptureFixture
) -> None:
    """The jobs behind it are dropped; the log tells only of what nobody expects, and a client gets no details of it."""
    worker = Worker()
    worker.do(note(worker, "one", error))
    worker.do(note(worker, "never"))
    await worker.fake_services.tasks.fake_settle()
    word, ended, left = worker.fake_log
    assert (word, left) == ("one", "left")
    assert isinstance(ended, MqttError)
    assert ended.reason == reason
    internal = reason is ReasonCode.UNSPECIFIED_ERROR
    assert ("client 'client': a job failed" in caplog.text) is internal
    assert ("a test" in str(ended)) is not internal


async def test_what_fails_after_the_end_is_not_said() -> None:
    worker = Worker()

    async def end() -> None:
        worker.end_connection(ProtocolError("a test"))
        raise ValueError("later")

    worker.do(end())
    await worker.fake_services.tasks.fake_settle()
    assert [str(one) for one in worker.fake_log] == ["a test", "left"]


async def test_a_cancelled_client_leaves() -> None:
    worker = Worker()
    begun = asyncio.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    worker.do(wait())
    worker.do(note(worker, "never"))
    (task,) = worker.fake_services.tasks.fake_spawned
    await begun.wait()
    worker.state = State.ENDED
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
    assert worker.fake_log == ["left"]
    assert not worker.busy


@pytest.mark.parametrize("begun", [False, True])
async def test_a_takeover_cancels_the_running_job(begun: bool) -> None:
    """A task that has not begun is not cancelled: it closes the jobs, and leaves the session."""
    worker = Worker()
    worker.do(asyncio.sleep(60))
    worker.do(note(worker, "never"))
    (task,) = worker.fake_services.tasks.fake_spawned
    if begun:
        await asyncio.sleep(0)
    worker.taken_over()
    await asyncio.gather(task, return_exceptions=True)
    assert (task.cancelled(), worker.fake_log, worker.busy) == (begun, ["left"], False)


async def test_a_job_that_hears_of_a_takeover_goes_on_to_its_end() -> None:
    worker = Worker()

    async def hear() -> None:
        worker.taken_over()
        await note(worker, "one")

    worker.do(hear())
    worker.do(note(worker, "never"))
    await worker.fake_services.tasks.fake_settle()
    assert worker.fake_log == ["one", "left"]


async def test_who_is_no_job_waits_without_them() -> None:
    worker = Worker()
    await worker.idle(asyncio.sleep(0))
    worker.do(note(worker, "one"))
    await worker.idle(asyncio.sleep(0))
    assert worker.fake_idle is False, "it is not the running job that waits"
    await worker.fake_services.tasks.fake_settle()
