# SPDX-License-Identifier: Apache-2.0
"""Many clients share a turn, and what one of them has caused leaves within it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import cast

import pytest

from mqtt_nats.codec import Packet
from mqtt_nats.transport import connection as connections
from mqtt_nats.transport import turns as all_turns
from mqtt_nats.transport.connection import Clock, Connection
from mqtt_nats.transport.turns import SLICE_S, Turns
from mqtt_nats.transport.write_buffer import FlushRound
from tests.harness import raw
from tests.harness.doubles import stands_for
from tests.harness.waiting import aeventually
from tests.transport import slow_handlers
from tests.transport.slow_handlers import (
    Pulse,
    Slow,
    Witness,
    greeted,
    handled,
    messages,
    pair,
    waits_beside,
)

pytestmark = pytest.mark.anyio

TICK_S = 1e-5


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time goes on by looking at it only, and not while the machine does something else."""
    now = monotonic()

    def look() -> float:
        nonlocal now
        now += TICK_S
        return now

    for module in (connections, all_turns, slow_handlers):
        monkeypatch.setattr(module, "monotonic", look)


@pytest.mark.sources
@pytest.mark.usefixtures("steady")
async def test_who_sends_little_comes_before_many_who_send_some() -> None:
    """Sixty clients of which each sends less than is handled at once, again and again."""
    waited = await waits_beside(60, SLICE_S / 50, packets=20, rounds=10)
    assert sorted(waited[3:])[3] <= 60 * 20 // 2, waited


@stands_for(Connection)
class Waiting:
    """Notes when it has its slice of a turn, which takes a millisecond."""

    def __init__(self, served: list[Waiting]) -> None:
        self._served = served

    def go_on(self, until: float) -> None:
        self._served.append(self)
        begun = monotonic()
        while monotonic() < begun + 0.001:
            pass


@pytest.mark.sources
def test_clients_that_connect_do_not_delay_the_others() -> None:
    """Hundreds connect in the same moment; a client that was there before is served in the turn of its message."""
    scheduled: list[Callable[[], None]] = []
    turns, served = Turns(scheduled.append), list[Waiting]()
    new, old = [Waiting(served) for _ in range(200)], Waiting(served)
    for one in new:
        turns.wait(as_connection(one), True, new=True)
    scheduled.pop()()
    assert 0 < len(served) < 20, "each turn has a slice for them"
    turns.wait(as_connection(old), True)
    scheduled.pop()()
    assert served.index(old) < 20
    while scheduled:
        scheduled.pop()()
    assert [one for one in served if one is not old] == new
    assert not turns.waiting


def as_connection(one: Waiting) -> Connection:
    """The double, as what it stands for."""
    return cast(Connection, one)


class Answerer(Witness):
    """Answers each message."""

    def packets(self, packets: list[Packet]) -> None:
        super().packets(packets)
        if self.connection is not None:
            self.connection.write_buffer.write(b"answer")


async def test_what_a_client_has_caused_leaves_before_waiting_packets_are_handled() -> None:
    """To NATS, and to few clients."""
    loop = asyncio.get_running_loop()
    busy = Slow(0.001)
    light = Answerer([busy])
    to_nats: list[int] = []
    to_client: list[int] = []
    round_, clock = FlushRound(loop.call_soon, lambda: to_nats.append(len(busy.found))), Clock(loop.time())
    with pair() as (ours, theirs), pair() as (other_ours, other_theirs):
        connection = await greeted(ours, theirs, busy, round_, clock)
        answering = await greeted(other_ours, other_theirs, light, round_, clock)
        answering.write_buffer.send_by(lambda data: to_client.append(len(busy.found)))
        pulse = Pulse(clock)
        theirs.send(messages(2000, "single")[0])
        await aeventually(lambda: len(busy.found) > 0)
        for number in range(1, 10):
            other_theirs.send(raw.publish("a", b"now"))
            await aeventually(partial(handled, [light], number))
            await aeventually(lambda: len(to_client) == len(light.counts))
        assert len(busy.found) < 2000
        pulse.stop()
        connection.abort()
        answering.abort()
        await aeventually(lambda: busy.ends == light.ends == 1)
    at_once = [one for one, other in zip(light.counts, to_client, strict=True) if one == other and one in to_nats]
    assert len(at_once) >= 5, (light.counts, to_client, to_nats)  # a turn that ends meanwhile has the rest wait


class Work:
    """Work of a job in steps, each of which takes a fifth of a slice."""

    def __init__(self, count: int, fails: bool = False) -> None:
        self.done = 0
        self._count = count
        self._fails = fails

    def steps(self) -> Iterator[None]:
        for at in range(self._count):
            if at:
                yield
            begun = monotonic()
            while monotonic() < begun + SLICE_S / 5:
                pass
            self.done += 1
        if self._fails:
            raise ValueError("it is not to be")


async def test_long_work_of_many_jobs_has_one_slice_of_each_turn() -> None:
    turns = Turns(asyncio.get_running_loop().call_soon)
    works = [Work(20) for _ in range(20)]
    jobs = [asyncio.ensure_future(turns.run(work.steps())) for work in works]
    most = last = 0
    while not all(job.done() for job in jobs):
        await asyncio.sleep(0)
        done = sum(work.done for work in works)
        most, last = max(most, done - last), done
        some = [work.done for work in works]
        assert max(some) <= min(some) + 2, "all have their share"
    assert last == 20 * 20
    assert 2 <= most <= 6


async def test_short_work_is_done_at_once() -> None:
    scheduled: list[object] = []
    turns = Turns(scheduled.append)
    work = Work(1)
    await turns.run(work.steps())
    assert work.done == 1
    assert not scheduled


async def test_work_that_fails_or_is_cancelled_leaves_the_others_their_turns() -> None:
    turns = Turns(asyncio.get_running_loop().call_soon)
    failing, cancelled, other = Work(3, fails=True), Work(50), Work(10)
    jobs = [asyncio.ensure_future(turns.run(work.steps())) for work in (failing, cancelled, other)]
    await aeventually(lambda: cancelled.done > 1)
    jobs[1].cancel()
    with pytest.raises(ValueError, match="it is not to be"):
        await jobs[0]
    await jobs[2]
    await asyncio.gather(*jobs, return_exceptions=True)
    assert other.done == 10
    assert cancelled.done < 50


@pytest.mark.parametrize("fails", [False, True])
async def test_a_step_that_cancels_its_own_job(fails: bool) -> None:
    """As the end of a connection cancels the jobs of its client; the turns of others go on."""
    turns = Turns(asyncio.get_running_loop().call_soon)
    other = Work(10)

    def steps() -> Iterator[None]:
        yield
        jobs[0].cancel()
        if fails:
            raise ValueError("its client has gone")

    jobs = [asyncio.ensure_future(turns.run(each)) for each in (steps(), other.steps())]
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    await asyncio.gather(*jobs, return_exceptions=True)
    assert jobs[0].cancelled()
    assert other.done == 10
    assert not errors
