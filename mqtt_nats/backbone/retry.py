# SPDX-License-Identifier: Apache-2.0
"""Retries of requests until NATS answers, however long NATS is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

from mqtt_nats.backbone.pending_stores import TRANSIENT
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout

log = logging.getLogger("mqtt_nats.broker")

T = TypeVar("T")

RETRY_PAUSE_S: Final = 0.25
"""Seconds between two attempts."""

ELECTION_MOST_S: Final = 30.0
"""Maximum seconds until a stream that is new, or has lost its leader, has a leader."""

UNANSWERED_PLACE_MOST_S: Final = 5.0
"""Maximum seconds for which an unanswered request keeps its place among concurrent requests."""


class Asker(Protocol):
    """The session that a request is for."""

    @property
    def here(self) -> bool:
        """True while the connection is alive and has the session."""

    async def connected(self) -> None:
        """Wait until NATS is connected."""


async def retry_until_answered(client: Asker, attempt: Callable[[], Awaitable[T]]) -> T:
    """Call ``attempt`` until it is answered; repeated calls must do no harm.

    Raises:
        RequestTimeout, NoResponders, TimeoutError: not answered, and the client has no session here (yet).
        ApiError: refused, and not only because JetStream has no leader at the moment.
    """
    while True:
        try:
            return await attempt()
        except (ApiError, RequestTimeout, NoResponders, TimeoutError) as error:
            if isinstance(error, ApiError) and error.err_code not in TRANSIENT:
                raise
            if not client.here:
                raise
            log.debug("%s waits for NATS: %s", client, error)
        await asyncio.sleep(RETRY_PAUSE_S)
        await client.connected()


class TimedPermit:
    """Place among a limited number of concurrent jobs, taken for `UNANSWERED_PLACE_MOST_S` at most.

    After that time the job's stream or consumer may be without a leader for ever. So the job goes on without its place,
    which serves jobs for other streams and consumers.
    """

    __slots__ = ("_limit", "_timer")

    def __init__(self, limit: asyncio.Semaphore) -> None:
        self._limit = limit
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._limit.acquire()
        self._timer = asyncio.get_running_loop().call_later(UNANSWERED_PLACE_MOST_S, self.leave)

    async def __aexit__(self, *failure: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Give the place to another job, if it is not given yet: this job goes on without it."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            self._limit.release()


async def retry_in_background(online: asyncio.Event, attempt: Callable[[], Awaitable[T]]) -> T:
    """Call ``attempt`` until it is answered, in work that outlives its client; repeated calls must do no harm.

    Args:
        online: set while NATS is connected.
        attempt: the request.

    Raises:
        ApiError: refused, and not only because JetStream has no leader at the moment.
    """
    pause = RETRY_PAUSE_S
    while True:
        await online.wait()
        try:
            return await attempt()
        except (ApiError, RequestTimeout, NoResponders, TimeoutError) as error:
            if isinstance(error, ApiError) and error.err_code not in TRANSIENT:
                raise
            log.debug("the gateway tries again: %s", error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, ELECTION_MOST_S)


async def ask_once_for_all(attempt: Callable[[], Awaitable[T]]) -> T:
    """Call ``attempt`` until it is answered, as a gateway starts and no client waits for it.

    At the start of a gateway streams may be so new that they have no leader.

    Raises:
        RequestTimeout, NoResponders: not answered in `ELECTION_MOST_S`.
        ApiError: refused.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ELECTION_MOST_S
    while True:
        try:
            return await attempt()
        except (NoResponders, RequestTimeout) as error:
            if loop.time() > deadline:
                raise
            log.debug("the gateway waits for JetStream: %s", error)
        await asyncio.sleep(RETRY_PAUSE_S)
