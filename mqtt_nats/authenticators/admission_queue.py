# SPDX-License-Identifier: Apache-2.0
"""Bounded authentication work: limits of concurrent and waiting CONNECTs, and a fair order of their sources."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from mqtt_nats.authenticators.authentication_queue import AuthenticationQueue, source_of
from mqtt_nats.codec import MqttError, ReasonCode

T = TypeVar("T")

CONNECTS_WAITING_MOST: Final = 5000
"""Most CONNECTs that wait for one authenticator. Each is a connection that the limits before authentication admit."""

CONNECT_WAIT_MOST_S: Final = 30.0
"""Most seconds for which a CONNECT waits. MQTT.js and the Java client of Paho wait as long for CONNACK."""


class Crowd:
    """Limit of the concurrent work of one authenticator.

    Args:
        concurrency: most jobs at the same time.
        waiting: most jobs that wait.
    """

    def __init__(self, concurrency: int, waiting: int = CONNECTS_WAITING_MOST) -> None:
        self._free = concurrency
        self._turns: AuthenticationQueue[asyncio.Future[None]] = AuthenticationQueue(waiting)

    async def run(self, host: str, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work of a client at ``host`` when the client is the first of the queue, and return the result.

        Raises:
            MqttError: too many CONNECTs wait, or this one has waited for `CONNECT_WAIT_MOST_S`.
        """
        await self._enter(source_of(host))
        try:
            task = asyncio.ensure_future(work())
        except RuntimeError:  # the thread pool has been shut down
            self._next()
            raise
        task.add_done_callback(self._leave)
        # Work in a thread cannot be cancelled: it goes on when its client has left, and counts until it has ended.
        return await asyncio.shield(task)

    async def _enter(self, source: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        dropped = self._turns.add(source, turn)
        if dropped is not None and not dropped.done():
            dropped.set_exception(_busy())
        try:
            async with asyncio.timeout(CONNECT_WAIT_MOST_S):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            self._turns.remove(source, turn)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._next()
            if isinstance(error, TimeoutError):
                raise _busy() from None
            raise

    def _leave(self, task: asyncio.Future[T]) -> None:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio logs nothing where the client has left
        self._next()

    def _next(self) -> None:
        """Give a free place to the next waiting CONNECT."""
        while (turn := self._turns.next()) is not None:
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def _busy() -> MqttError:
    return MqttError("too many clients are being authenticated", ReasonCode.SERVER_BUSY)
