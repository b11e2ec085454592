# SPDX-License-Identifier: Apache-2.0
"""Work for CONNECTs that is bounded: so much at the same time, so many that wait, one source after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from mqtt_nats.authenticators.turns import AuthenticationQueue, source_of
from mqtt_nats.codec import MqttError, ReasonCode

T = TypeVar("T")

WAITING_MOST: Final = 1000
"""CONNECTs that wait for one authenticator."""

WAIT: Final = 5.0
"""Seconds for which one waits: about as long as clients do."""


class Crowd:
    """Lets so many work at the same time.

    Args:
        concurrency: how many.
    """

    def __init__(self, concurrency: int, waiting: int = WAITING_MOST) -> None:
        self._free = concurrency
        self._turns: AuthenticationQueue[asyncio.Future[None]] = AuthenticationQueue(waiting)

    async def run(self, host: str, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work of a client at ``host`` when its turn comes.

        Raises:
            MqttError: too many wait already.
        """
        await self._enter(source_of(host))
        try:
            task = asyncio.ensure_future(work())
        except RuntimeError:  # the threads have been ended
            self._next()
            raise
        task.add_done_callback(self._leave)
        # What has begun in a thread goes on when nobody waits for it any more, and counts until it has ended.
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
            async with asyncio.timeout(WAIT):
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
            task.exception()  # it has been seen, also where nobody waits for it any more
        self._next()

    def _next(self) -> None:
        """A place has become free."""
        while (turn := self._turns.next()) is not None:
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def _busy() -> MqttError:
    return MqttError("too many clients are being authenticated", ReasonCode.SERVER_BUSY)
