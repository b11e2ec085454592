# SPDX-License-Identifier: Apache-2.0
"""Fired timers that cannot be handled at the moment, and who waits for timers."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, cast

import pytest

from mqtt_nats.lifecycle import timers
from mqtt_nats.lifecycle.will import Wills
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.timers import EXPIRY, FiredTimer, TimerStore
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeServices

pytestmark = pytest.mark.anyio

TIMER = FiredTimer(EXPIRY, "key", 1, 2, b"", b"", "$JS.ACK.$MQTT_timers.gateways.1.2.3.4.5")


@stands_for(Wills)
class FakeWills:
    """Stands for `Wills`: what timers of other kinds need."""

    def __init__(self) -> None:
        self.services = FakeServices()


@pytest.mark.parametrize(
    ("error", "soon"),
    [
        (None, False),
        (NoResponders("no leader"), True),
        (RequestTimeout("no answer"), True),
        (ApiError(503, 10008, "no quorum"), True),
        (ApiError(400, 10077, "a refusal"), False),
    ],
    ids=str,
)
async def test_a_timer_without_an_answer_comes_again_soon(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, soon: bool
) -> None:
    """Not after the AckWait of half a minute: a leader that is missing may be there in a moment.

    What JetStream refuses would be refused four times a second.
    """
    wills = FakeWills()
    done: list[FiredTimer] = []

    async def expire(*_: object) -> None:
        if error is not None:
            raise error

    async def settle(timer: FiredTimer) -> bool:
        done.append(timer)
        return True

    monkeypatch.setattr(timers, "expire", expire)
    monkeypatch.setattr(wills.services.streams.timers, "done", settle)
    await timers._handle_all(cast(Wills, wills), [TIMER])
    assert done == ([] if error else [TIMER])
    assert wills.services.fake_link.out == (
        [b'PUB %b 24\r\n-NAK {"delay":250000000}\r\n' % TIMER.ack.encode()] if soon else []
    )


@pytest.mark.parametrize(
    ("number", "listed"), [(timers.EXPIRIES_TOGETHER_LEAST - 1, 0), (timers.EXPIRIES_TOGETHER_LEAST, 1)]
)
async def test_exchanges_are_listed_for_many_sessions(
    monkeypatch: pytest.MonkeyPatch, number: int, listed: int
) -> None:
    """The list may have 100,000 subjects, of which one session has few."""
    wills = FakeWills()
    lists: list[object] = []

    async def expire(*_: object) -> None:
        return

    async def list_exchanges(services: object) -> None:
        lists.append(services)

    async def settle(timer: FiredTimer) -> bool:
        return True

    monkeypatch.setattr(timers, "expire", expire)
    monkeypatch.setattr(timers, "list_exchanges", list_exchanges)
    monkeypatch.setattr(wills.services.streams.timers, "done", settle)
    await timers._handle_all(cast(Wills, wills), [TIMER] * number)
    assert len(lists) == listed


@stands_for(TimerStore)
class FakeTimerStore:
    """Stands for `TimerStore`: its answers to `fetch`, one after the other."""

    def __init__(self, answers: list[list[FiredTimer]]) -> None:
        self.fake_answers = answers

    async def ensure_consumer(self) -> None:
        """The consumer is there."""

    async def fetch(self, wait: float, most: int) -> list[FiredTimer]:
        return self.fake_answers.pop(0)  # IndexError ends the test

    async def done(self, timer: FiredTimer) -> bool:
        return True


def taking(store: object, watches: Callable[[float], bool]) -> Coroutine[Any, Any, None]:
    """A gateway that takes timers from a store."""
    wills = FakeWills()
    wills.services.streams.timers = cast(TimerStore, store)
    return timers.take_timers(cast(Wills, wills), watches)


async def test_a_gateway_that_gets_no_timer_chooses_whether_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that got some asks for more at once."""
    seen: list[object] = []
    choices = [True, False, False, True]

    async def expire(*_: object) -> None:
        seen.append("timer")

    async def sleep(seconds: float) -> None:
        seen.append(seconds)

    def watches(gateways: float) -> bool:
        assert gateways == timers.TIMER_TAKERS
        seen.append(choices[0])
        return choices.pop(0)

    monkeypatch.setattr(timers, "expire", expire)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(IndexError):
        await taking(FakeTimerStore([[TIMER], [], [], [TIMER]]), watches)
    assert seen == ["timer", True, False, timers.TAKERS_CHOICE_S, False, timers.TAKERS_CHOICE_S, True, "timer"]


@coroutine
def passing(seconds: float) -> Generator[float, None, None]:
    """Let the time of `Gateways` pass."""
    yield seconds


@stands_for(TimerStore)
class FakeWaitingStore:
    """Stands for `TimerStore`: no timer fires."""

    def __init__(self) -> None:
        self.fake_waits = False

    async def ensure_consumer(self) -> None:
        """The consumer is there."""

    async def fetch(self, wait: float, most: int) -> list[FiredTimer]:
        self.fake_waits = True
        await passing(wait)
        self.fake_waits = False
        return []


class Gateways:
    """Many gateways that take timers, in a time of their own."""

    def __init__(self, number: int, choices: random.Random) -> None:
        self.now = 0.0
        self.estimate = number
        """Number of gateways, as each of them takes it."""
        self._choices = choices
        self._due: list[tuple[float, int, FakeWaitingStore, Coroutine[Any, Any, None]]] = []
        for one in range(number):
            store = FakeWaitingStore()
            heapq.heappush(
                self._due, (choices.uniform(0, timers.PULL_WAIT_S), one, store, taking(store, self._watches))
            )

    def _watches(self, gateways: float) -> bool:
        return self._choices.random() * self.estimate < gateways

    @property
    def waiting(self) -> int:
        """Number of gateways that wait for timers."""
        return sum(store.fake_waits for _, _, store, _ in self._due)

    def go_on(self, seconds: float, *, until_one_waits: bool = False) -> None:
        """Let time pass."""
        end = self.now + seconds
        while not (until_one_waits and self.waiting):
            if self._due[0][0] > end:
                self.now = end
                return
            self.now, one, store, gateway = heapq.heappop(self._due)
            heapq.heappush(self._due, (self.now + gateway.send(None), one, store, gateway))

    def kill(self, dies: Callable[[int, bool], bool]) -> None:
        """Let gateways die: ``dies(number, waits)`` of each."""
        for each in list(self._due):
            if dies(each[1], each[2].fake_waits):
                self._due.remove(each)
                each[3].close()
        heapq.heapify(self._due)


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """The choices of gateways, whose time is that of `Gateways`."""
    monkeypatch.setattr(asyncio, "sleep", passing)
    return random.Random(7)


@pytest.mark.parametrize(("number", "least", "most"), [(1, 1, 1), (timers.TIMER_TAKERS, 8, 8), (300, 20, 70)])
async def test_of_many_gateways_some_wait_for_timers(
    choices: random.Random, number: int, least: int, most: int
) -> None:
    """Few gateways all wait, each time again."""
    gateways = Gateways(number, choices)
    gateways.go_on(60)
    for _ in range(30):
        gateways.go_on(10)
        assert least <= gateways.waiting <= most
    gateways.kill(lambda number, waits: True)


@pytest.mark.parametrize("left", [300, 10, 1])
async def test_another_gateway_waits_soon_after_all_that_waited_are_dead(choices: random.Random, left: int) -> None:
    """Within 15 s: two renewals of the lease tell how many gateways are left, and each then chooses in `CHOICE`."""
    longest = 0.0
    for _ in range(3):
        gateways = Gateways(300, choices)
        gateways.go_on(100)
        gateways.kill(lambda number, waits: waits or number >= left)
        died = gateways.now
        gateways.go_on(10, until_one_waits=True)
        gateways.estimate = left
        gateways.go_on(100, until_one_waits=True)
        assert gateways.waiting
        longest = max(longest, gateways.now - died)
        gateways.kill(lambda number, waits: True)
    assert longest <= (timers.TAKERS_CHOICE_S if left == 300 else 15)
