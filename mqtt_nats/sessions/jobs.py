# SPDX-License-Identifier: Apache-2.0
"""Jobs of a client that wait for NATS, run one after the other.

A client has a task only while it has jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.base.errors import ends_task
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.transport.connection import Hold
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout

if TYPE_CHECKING:
    from mqtt_nats.sessions.session import Session

log = logging.getLogger("mqtt_nats.broker")

JOBS_MOST: Final = 100
"""Waiting jobs (SUBSCRIBE, UNSUBSCRIBE, repairs) of a client; beyond this nothing is read from the client."""

JOBS_LOW: Final = 50


class Jobs:
    """The running job of a client and those behind it; exists from the first job to the end of the last one."""

    __slots__ = ("_queue", "_session", "_task", "idle")

    def __init__(self, session: Session, work: Coroutine[Any, Any, None]) -> None:
        self._session = session
        self._queue = deque((work,))
        self.idle: bool | None = None
        """Whether the task waits for NATS or JetStream; None = the task has not begun and must not be cancelled:
        its cleanup would not run."""
        self._task = session.services.tasks.spawn_safe(self._work(), session.client_id or "a client")

    def add(self, work: Coroutine[Any, Any, None]) -> None:
        """Queue a job; with too many of them nothing is read from the client."""
        self._queue.append(work)
        if len(self._queue) > JOBS_MOST:
            self._session.connection.hold(Hold.JOBS)

    def note_idle(self, idle: bool) -> None:
        """Note whether the running job waits for NATS, JetStream or a place."""
        self.idle = idle

    def stop(self) -> None:
        """Cancel the task, unless the caller is one of its jobs."""
        if self.idle is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def stop_idle(self) -> None:
        """Cancel the task if its job waits for NATS, JetStream or a place."""
        if self.idle:
            self._task.cancel()

    async def wait(self, waiting: Coroutine[Any, Any, object]) -> None:
        """Wait for NATS or JetStream; in a job, the end of the client cancels the wait."""
        if self._task is not asyncio.current_task():
            await waiting
            return
        self.idle = True
        try:
            if self._session.gone:
                self._session.lost()
            await waiting
        finally:
            self.idle = False

    async def _work(self) -> None:
        self.idle, session, jobs = False, self._session, self._queue
        try:
            while jobs and session.alive:
                try:
                    await session.connected()
                    await jobs.popleft()
                except MqttError as error:
                    session.end_connection(error)
                except (ApiError, RequestTimeout, NoResponders, TimeoutError) as error:
                    session.end_connection(MqttError(str(error), ReasonCode.SERVER_UNAVAILABLE))
                except (Exception, asyncio.CancelledError) as failure:
                    if ends_task(failure):
                        raise failure
                    if session.alive:
                        log.exception("%s: a job failed", session)
                        session.end_connection(MqttError("internal error", ReasonCode.UNSPECIFIED_ERROR))
                if len(jobs) < JOBS_LOW:
                    session.connection.release(Hold.JOBS)
        finally:
            for job in jobs:
                job.close()
            session.finish_jobs()
