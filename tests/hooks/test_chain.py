# SPDX-License-Identifier: Apache-2.0
"""Chains by themselves: order, decisions, and callbacks that fail."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine
from typing import Any

import pytest

from mqtt_nats.hooks import Continue, Decision, Entry, HookFailed, Hooks, Notice, Stop
from mqtt_nats.hooks import chain as chains
from mqtt_nats.hooks.points import CLIENT_AUTHORIZE, POINTS
from tests.conftest import Logged

pytestmark = pytest.mark.anyio

OPEN = Decision[str, int]("test.open", lambda old, new: isinstance(new, int))
STRICT = Decision[str, int]("test.strict", lambda old, new: isinstance(new, int), strict=True)
TOLD = Notice[int]("test.told")

Returned = Continue[int] | Stop[int] | None


def nothing(work: Coroutine[Any, Any, None], name: str) -> None:
    raise AssertionError("nothing is spawned here")


@pytest.fixture
def hooks() -> Hooks:
    return Hooks(nothing)


def decide(hooks: Hooks, value: int, point: Decision[str, int] = OPEN) -> int:
    chain = hooks.deciding(point)
    assert chain is not None
    assert not chain.waits
    return chain.decide("event", value)


def test_a_point_without_callbacks_has_no_chain(hooks: Hooks) -> None:
    assert hooks.deciding(OPEN) is None
    assert hooks.noticing(TOLD) is None
    entry = hooks.add(OPEN, lambda event, value: None)
    assert hooks.deciding(OPEN) is not None
    assert hooks.remove(entry)
    assert not hooks.remove(entry)
    assert hooks.deciding(OPEN) is None


def test_order_is_by_priority_and_then_by_age(hooks: Hooks) -> None:
    seen: list[str] = []

    def note(name: str, event: str, value: int) -> None:
        seen.append(name)

    for name, priority in (("a", 0), ("b", 5), ("c", -5), ("d", 5), ("e", 0)):
        hooks.add(OPEN, functools.partial(note, name), priority=priority)
    assert decide(hooks, 1) == 1
    assert seen == ["b", "d", "a", "e", "c"]


def test_values_go_on_and_stop_ends_the_chain(hooks: Hooks) -> None:
    seen: list[int] = []

    def note(event: str, value: int) -> None:
        seen.append(value)

    hooks.add(OPEN, lambda event, value: Continue(value + 1), priority=9)
    hooks.add(OPEN, note, priority=8)
    hooks.add(OPEN, lambda event, value: Stop(value * 10) if value > 5 else None, priority=7)
    hooks.add(OPEN, note, priority=6)
    hooks.add(OPEN, lambda event, value: Stop(), priority=5)
    hooks.add(OPEN, lambda event, value: Continue(-1), priority=4)
    assert decide(hooks, 1) == 2
    assert seen == [2, 2]
    assert decide(hooks, 7) == 80
    assert seen == [2, 2, 8]


def broken(event: str, value: int) -> Returned:
    raise RuntimeError("a secret")


def wrong(event: str, value: int) -> Any:
    return value + 1


def unfit(event: str, value: int) -> Any:
    return Continue("text")


def forgotten(event: str, value: int) -> Any:
    async def later() -> Returned:
        return Continue(5)

    return later()


@pytest.mark.parametrize("callback", [broken, wrong, unfit, forgotten])
def test_a_callback_that_fails_is_counted_and_passed_over(hooks: Hooks, callback: Any, logged: Logged) -> None:
    entry = hooks.add(OPEN, callback, priority=1, owner="somebody")
    hooks.add(OPEN, lambda event, value: Continue(value + 1))
    for _ in range(3):
        assert decide(hooks, 1) == 2
    assert (entry.calls, entry.failures) == (3, 3)
    (line,) = logged.messages  # not one for each
    assert callback.__name__ in line
    assert "of somebody at test.open" in line
    assert "secret" not in line


@pytest.mark.parametrize("callback", [broken, wrong, unfit, forgotten])
def test_at_a_strict_point_it_fails_the_decision(hooks: Hooks, callback: Any) -> None:
    entry = hooks.add(STRICT, callback, priority=1)
    after = hooks.add(STRICT, lambda event, value: Continue(value + 1))
    with pytest.raises(HookFailed):
        decide(hooks, 1, STRICT)
    assert (entry.failures, after.calls) == (1, 0)


async def test_async_callbacks_are_awaited_in_their_order(hooks: Hooks) -> None:
    async def later(event: str, value: int) -> Returned:
        await asyncio.sleep(0)
        return Continue(value * 2)

    class Callable:
        async def __call__(self, event: str, value: int) -> Returned:
            return Stop(value + 1)

    hooks.add(OPEN, later, priority=3)
    hooks.add(OPEN, lambda event, value: Continue(value + 1), priority=2)
    hooks.add(OPEN, Callable(), priority=1)
    hooks.add(OPEN, broken)
    chain = hooks.deciding(OPEN)
    assert chain is not None
    assert chain.waits
    assert await chain.decide_later("event", 5) == 12


@pytest.mark.parametrize("point", [OPEN, STRICT])
async def test_an_async_callback_that_takes_too_long_has_failed(hooks: Hooks, point: Decision[str, int]) -> None:
    ended = asyncio.Event()

    async def slow(event: str, value: int) -> Returned:
        try:
            await asyncio.sleep(100)
        finally:
            ended.set()
        return Continue(99)

    entry = hooks.add(point, slow, timeout=0.01)
    chain = hooks.deciding(point)
    assert chain is not None
    if point.strict:
        with pytest.raises(HookFailed):
            await chain.decide_later("event", 1)
    else:
        assert await chain.decide_later("event", 1) == 1
    assert ended.is_set()
    assert entry.failures == 1


async def test_an_async_callback_that_raises(hooks: Hooks) -> None:
    async def raising(event: str, value: int) -> Returned:
        raise RuntimeError

    entry = hooks.add(OPEN, raising)
    chain = hooks.deciding(OPEN)
    assert chain is not None
    assert await chain.decide_later("event", 1) == 1
    assert entry.failures == 1


async def cancelled() -> None:
    """Waits for something that is cancelled meanwhile."""
    inner = asyncio.get_running_loop().create_task(asyncio.sleep(100))
    asyncio.get_running_loop().call_later(0.01, inner.cancel)
    await inner


@pytest.mark.parametrize("point", [OPEN, STRICT])
async def test_an_async_callback_that_is_cancelled_from_within_has_failed(
    hooks: Hooks, point: Decision[str, int]
) -> None:
    """Nobody would be answered otherwise; where the whole task is cancelled, it ends."""

    async def waiting(event: str, value: int) -> Returned:
        await cancelled()
        return None

    entry = hooks.add(point, waiting)
    chain = hooks.deciding(point)
    assert chain is not None
    if point.strict:
        with pytest.raises(HookFailed):
            await chain.decide_later("event", 1)
    else:
        assert await chain.decide_later("event", 1) == 1
    assert entry.failures == 1
    task = asyncio.get_running_loop().create_task(chain.decide_later("event", 1))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert entry.failures == 1


async def test_a_callback_that_asks_a_cancelled_task_has_failed(hooks: Hooks) -> None:
    task = asyncio.get_running_loop().create_task(asyncio.sleep(100))
    task.cancel()
    await asyncio.wait([task])
    asking = hooks.add(OPEN, lambda event, value: task.result())
    noticing = hooks.add(TOLD, lambda event: task.result())
    assert decide(hooks, 1) == 1
    chain = hooks.noticing(TOLD)
    assert chain is not None
    chain.emit(1)
    assert (asking.failures, noticing.failures) == (1, 1)


async def test_notices_go_on_after_one_that_is_cancelled_from_within() -> None:
    tasks: list[asyncio.Task[None]] = []
    hooks = Hooks(lambda work, name: tasks.append(asyncio.get_running_loop().create_task(work)))
    seen: list[int] = []

    async def waiting(event: int) -> None:
        if event == 1:
            await cancelled()

    entry = hooks.add(TOLD, waiting, priority=1)
    hooks.add(TOLD, seen.append)
    chain = hooks.noticing(TOLD)
    assert chain is not None
    for event in (1, 2):
        chain.emit(event)
    await asyncio.wait(tasks)
    assert (seen, entry.failures) == ([1, 2], 1)


def test_who_cannot_wait_takes_no_async_callback(hooks: Hooks) -> None:
    async def later(event: Any, value: bool) -> None:
        raise AssertionError

    for callback in (later, functools.partial(later)):
        with pytest.raises(TypeError, match="cannot be async"):
            hooks.add(CLIENT_AUTHORIZE, callback)
    assert hooks.deciding(CLIENT_AUTHORIZE) is None


def test_what_cannot_be_added(hooks: Hooks) -> None:
    with pytest.raises(ValueError, match="timeout"):
        hooks.add(TOLD, lambda event: None, timeout=0)
    with pytest.raises(TypeError, match="cannot be called"):
        hooks.add(TOLD, 3)  # type: ignore[call-overload]


def test_notices_stop_and_go_on_after_failures(hooks: Hooks) -> None:
    seen: list[Any] = []

    def raising(event: int) -> None:
        raise RuntimeError

    def odd(event: int) -> Any:
        return "odd"

    def stopping(event: int) -> Stop[Any] | None:
        return Stop() if event == 2 else None

    failing = [hooks.add(TOLD, raising, priority=9), hooks.add(TOLD, odd, priority=8)]
    hooks.add(TOLD, stopping, priority=1)
    hooks.add(TOLD, seen.append)
    chain = hooks.noticing(TOLD)
    assert chain is not None
    for event in (1, 2, 3):
        chain.emit(event)
    assert seen == [1, 3]
    assert [entry.failures for entry in failing] == [3, 3]


async def test_async_notices_come_in_order_and_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "NOTICES_WAITING_MOST", 5)
    tasks: list[asyncio.Task[None]] = []
    hooks = Hooks(lambda work, name: tasks.append(asyncio.get_running_loop().create_task(work)))
    seen: list[tuple[str, int]] = []
    gate = asyncio.Event()

    async def slow(event: int) -> Stop[Any] | None:
        await gate.wait()
        seen.append(("slow", event))
        if event == 1:
            await asyncio.sleep(100)
        if event == 2:
            raise RuntimeError
        return Stop() if event == 3 else None

    entry = hooks.add(TOLD, slow, timeout=0.05, priority=1)
    hooks.add(TOLD, lambda event: seen.append(("plain", event)))
    chain = hooks.noticing(TOLD)
    assert chain is not None
    gate.set()
    for event in range(7):
        chain.emit(event)
    assert chain.lost == 2
    assert seen == []
    await asyncio.wait(tasks)
    plain = [("plain", event) for event in (0, 1, 2, 4)]
    assert seen == sorted(
        [*plain, *(("slow", event) for event in range(5))], key=lambda one: (one[1], one[0] != "slow")
    )
    assert entry.failures == 2
    chain.emit(9)
    await asyncio.wait(tasks)
    assert seen[-2:] == [("slow", 9), ("plain", 9)]
    assert len(tasks) == 2


def test_all_of_an_owner_are_removed_and_nobody_else() -> None:
    changes: list[object] = []
    hooks = Hooks(nothing)
    hooks.call_on_change(changes.append)
    hooks.add(OPEN, lambda event, value: Continue(value + 1), owner="one")
    hooks.add(TOLD, lambda event: None, owner="one")
    kept: Entry = hooks.add(OPEN, lambda event, value: Continue(value + 10), owner="two")
    assert [one.owner for one in hooks.accounts()] == ["one", "two", "one"]
    assert hooks.remove_all("one") == 2
    assert hooks.remove_all("one") == 0
    assert decide(hooks, 1) == 11
    assert hooks.noticing(TOLD) is None
    assert [(one.point, one.owner, one.calls) for one in hooks.accounts()] == [("test.open", "two", kept.calls)]
    assert changes == [OPEN, TOLD, OPEN, OPEN, TOLD]


def test_the_names_of_the_points() -> None:
    names = [point.name for point in POINTS]
    assert len(set(names)) == len(names)
    assert {
        "client.connected",
        "client.disconnected",
        "client.subscribe",
        "client.unsubscribe",
        "session.subscribed",
        "session.unsubscribed",
        "message.publish",
        "message.delivered",
        "message.acked",
    } <= set(names)
