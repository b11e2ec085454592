# SPDX-License-Identifier: Apache-2.0
"""Chains of callbacks: order of the callbacks, results, and failed callbacks.

A point is either a *decision* (its callbacks pass on a value, which each may replace) or a *notice* (an event has
happened). Callbacks run by priority, highest first; callbacks of the same priority in the order of their addition. Any
callback may stop the chain. A callback that fails or takes too long is counted, logged and skipped; at a strict point,
where skipping it could allow something forbidden, the whole decision fails instead.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

from mqtt_nats.base.errors import describe, ends_task
from mqtt_nats.base.logs import log_failure, once

log = logging.getLogger("mqtt_nats.hooks")

E = TypeVar("E")
V = TypeVar("V")
E_ = TypeVar("E_", contravariant=True)

TIMEOUT: Final = 5.0
"""Default time-out of an async callback in seconds."""

NOTICES_WAITING_MOST: Final = 10_000
"""Most events that wait for the async callbacks of one notice; further events are dropped and counted."""

_KEEP: Final[Any] = object()


@dataclass(frozen=True)
class Continue(Generic[V]):
    """Result of a decision's callback: the next callback gets this value."""

    value: V


@dataclass(frozen=True)
class Stop(Generic[V]):
    """Result of a callback: no further callback runs. A value here replaces the value of the decision."""

    value: V = _KEEP


Decided = Continue[V] | Stop[V] | None
Decider = Callable[[E, V], "Decided[V] | Awaitable[Decided[V]]"]
Noticed = Stop[Any] | None
Observer = Callable[[E], "Noticed | Awaitable[Noticed]"]


class HookFailed(Exception):
    """A callback of a strict point has failed: the action that it decides about must not happen."""


@dataclass(frozen=True, eq=False)
class Decision(Generic[E, V]):
    """A point whose callbacks get an event and a value, and may replace the value.

    Attributes:
        fits: whether a new value may replace the old one; a value that may not counts as a failure of its callback.
        strict: a failed callback fails the decision.
        waits: async callbacks are allowed.
    """

    name: str
    fits: Callable[[V, Any], bool]
    strict: bool = False
    waits: bool = True


@dataclass(frozen=True, eq=False)
class Notice(Generic[E]):
    """A point whose callbacks get an event that has happened."""

    name: str


Point = Decision[Any, Any] | Notice[Any]


class Entry:
    """One callback in a chain, with the numbers of its calls and failures."""

    __slots__ = ("asynchronous", "callback", "calls", "failures", "owner", "point", "priority", "timeout")

    def __init__(self, point: Point, callback: Callable[..., Any], priority: int, timeout: float, owner: str) -> None:
        self.point = point
        self.callback = callback
        self.priority = priority
        self.timeout = timeout
        self.owner = owner
        self.asynchronous = is_async(callback)
        self.calls = 0
        self.failures = 0
        """Number of exceptions, results of a wrong type, and time-outs."""

    def count_call(self) -> None:
        """Count a call."""
        self.calls += 1

    def count_failure(self) -> None:
        """Count a failure."""
        self.failures += 1

    @property
    def name(self) -> str:
        """Name of the callback for logs."""
        return str(getattr(self.callback, "__qualname__", None) or type(self.callback).__name__)


class Account(NamedTuple):
    """Calls and failures of one callback, for display."""

    point: str
    callback: str
    owner: str
    priority: int
    calls: int
    failures: int


def is_async(callback: Callable[..., Any]) -> bool:
    """Whether a callback is a coroutine function, or an object whose ``__call__`` is one."""
    return inspect.iscoroutinefunction(callback) or inspect.iscoroutinefunction(
        getattr(callback, "__call__", None)  # noqa: B004 - not whether it can be called, but how
    )


class Chain:
    """The ordered callbacks of one point."""

    __slots__ = ("entries", "point", "waits")

    def __init__(self, point: Point) -> None:
        self.point = point
        self.entries: tuple[Entry, ...] = ()
        self.waits = False
        """Whether the chain has async callbacks."""

    def add(self, entry: Entry) -> None:
        """Insert a callback by its priority."""
        self._set((*self.entries, entry))

    def remove(self, entry: Entry) -> None:
        """Remove a callback."""
        self._set(tuple(one for one in self.entries if one is not entry))

    def _set(self, entries: tuple[Entry, ...]) -> None:
        self.entries = tuple(sorted(entries, key=lambda entry: -entry.priority))
        self.waits = any(entry.asynchronous for entry in entries)

    def _failed(self, entry: Entry, why: str) -> None:
        entry.count_failure()
        whose = f" of {entry.owner}" if entry.owner else ""
        text = "hook %s%s at %s: %s (%d so far)"
        extra = once(f"hook {entry.name}{whose} at {self.point.name}")
        log_failure(
            log, logging.ERROR, "hook", text, entry.name, whose, self.point.name, why, entry.failures, extra=extra
        )


class DecisionChain(Chain, Generic[E, V]):
    """Chain of the callbacks of a decision."""

    __slots__ = ()

    point: Decision[E, V]

    def decide(self, event: E, value: V) -> V:
        """Run every callback of a chain without async callbacks, and return the value.

        Raises:
            HookFailed: a callback of a strict point has failed.
        """
        for entry in self.entries:
            entry.count_call()
            try:
                result = entry.callback(event, value)
            except (Exception, asyncio.CancelledError) as error:  # a callback may read a cancelled task's result
                self._fail(entry, describe(error))
                continue
            if result is not None:
                value, stop = self._taken(entry, value, result)
                if stop:
                    break
        return value

    async def decide_later(self, event: E, value: V) -> V:
        """Run every callback, await the async ones, and return the value.

        Raises:
            HookFailed: a callback of a strict point has failed or took too long.
        """
        for entry in self.entries:
            entry.count_call()
            try:
                result = entry.callback(event, value)
                if entry.asynchronous:
                    async with asyncio.timeout(entry.timeout):
                        result = await result
            except TimeoutError:
                self._fail(entry, f"no answer in {entry.timeout:g} seconds")
                continue
            except (Exception, asyncio.CancelledError) as error:
                if ends_task(error):
                    raise
                self._fail(entry, describe(error))
                continue
            if result is not None:
                value, stop = self._taken(entry, value, result)
                if stop:
                    break
        return value

    def _taken(self, entry: Entry, value: V, result: Any) -> tuple[V, bool]:
        """Return the value after a callback, and whether the chain ends."""
        if isinstance(result, Continue | Stop):
            new = result.value
            stop = isinstance(result, Stop)
            if new is _KEEP:
                return value, stop
            if self.point.fits(value, new):
                return cast("V", new), stop
            self._fail(entry, f"a value that does not fit: {type(new).__name__}")
            return value, False
        _discard(result)
        self._fail(entry, f"returned {type(result).__name__}, not Continue, Stop or None")
        return value, False

    def _fail(self, entry: Entry, why: str) -> None:
        self._failed(entry, why)
        if self.point.strict:
            raise HookFailed(f"a hook at {self.point.name} has failed")


class NoticeChain(Chain, Generic[E]):
    """Chain of the callbacks of a notice.

    With async callbacks, events wait in a queue, so that each callback gets them in order.
    """

    __slots__ = ("_queue", "_spawn", "_working", "lost")

    point: Notice[E]

    def __init__(self, point: Notice[E], spawn: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        super().__init__(point)
        self._spawn = spawn
        self._queue: deque[E] = deque()
        self._working = False
        self.lost = 0
        """Number of events dropped because too many were waiting."""

    def emit(self, event: E) -> None:
        """Pass an event to every callback; never raises."""
        if not self.waits and not self._working:
            self._tell(event)
            return
        if len(self._queue) >= NOTICES_WAITING_MOST:
            self.lost += 1
            text = "hooks at %s are too slow: %d events lost so far"
            log_failure(log, logging.ERROR, "slow_hook", text, self.point.name, self.lost, extra=once(self.point.name))
            return
        self._queue.append(event)
        if not self._working:
            self._working = True
            self._spawn(self._work(), f"hooks at {self.point.name}")

    def _tell(self, event: E) -> None:
        for entry in self.entries:
            entry.count_call()
            try:
                result = entry.callback(event)
            except (Exception, asyncio.CancelledError) as error:
                self._failed(entry, describe(error))
                continue
            if result is not None and self._stops(entry, result):
                return

    async def _work(self) -> None:
        try:
            while self._queue:
                await self._tell_later(self._queue.popleft())
        finally:
            self._working = False

    async def _tell_later(self, event: E) -> None:
        for entry in self.entries:
            entry.count_call()
            try:
                result = entry.callback(event)
                if entry.asynchronous:
                    async with asyncio.timeout(entry.timeout):
                        result = await result
            except TimeoutError:
                self._failed(entry, f"no answer in {entry.timeout:g} seconds")
                continue
            except (Exception, asyncio.CancelledError) as error:
                if ends_task(error):
                    raise
                self._failed(entry, describe(error))
                continue
            if result is not None and self._stops(entry, result):
                return

    def _stops(self, entry: Entry, result: Any) -> bool:
        if isinstance(result, Stop):
            return True
        _discard(result)
        self._failed(entry, f"returned {type(result).__name__}, not Stop or None")
        return False


def _discard(result: Any) -> None:
    """Close a coroutine that is not awaited, so that Python logs no warning."""
    if inspect.iscoroutine(result):
        result.close()
