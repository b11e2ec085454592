# SPDX-License-Identifier: Apache-2.0
"""What one client sends at once is handled in turns: others, and the rest of the gateway, have theirs between."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from time import monotonic, process_time
from typing import cast

import pytest

from mqtt_nats.base.admission import ADMITTED
from mqtt_nats.codec import PublishRun, ReasonCode
from mqtt_nats.config.settings import Settings
from mqtt_nats.transport.connection import Clock, Connection, Hold
from mqtt_nats.transport.rate_limited import PacedConnection
from mqtt_nats.transport.turns import PACKETS, SLICE_S, TURN_S, Turns
from mqtt_nats.transport.write_buffer import FlushRound
from tests.harness import raw
from tests.harness.waiting import aeventually
from tests.transport.slow_handlers import LIMITS, Pulse, Slow, greeted, messages, pair, waits_beside

pytestmark = pytest.mark.anyio

LONG = 0.25
"""Seconds of processor time of a turn at most: far less than what is sent takes."""


@pytest.mark.parametrize("kind", ["run", "single"])
async def test_turns_are_short(kind: str) -> None:
    loop = asyncio.get_running_loop()
    slow, round_, clock = Slow(0.002), FlushRound(loop.call_soon), Clock(loop.time())
    data, payloads = messages(600, kind)
    with pair() as (ours, theirs):
        connection = await greeted(ours, theirs, slow, round_, clock)
        pulse = Pulse(clock)
        theirs.send(data)
        await aeventually(lambda: len(slow.found) == 600, 60)
        pulse.stop()
        assert slow.found == payloads
        assert pulse.longest < LONG
        assert pulse.turns > 5
        await aeventually(lambda: not connection.holds)
        theirs.send(raw.publish("a", b"on"))
        await aeventually(lambda: slow.found[-1] == b"on")
        connection.abort()
        await aeventually(lambda: slow.ends == 1)


async def test_who_sends_little_comes_first() -> None:
    """Twenty clients that each send for half a second: one message of another does not wait for them."""
    loop = asyncio.get_running_loop()
    round_, clock = FlushRound(loop.call_soon), Clock(loop.time())
    data, payloads = messages(300, "single")
    with contextlib.ExitStack() as stack:
        crowd = []
        for _ in range(20):
            ours, theirs = stack.enter_context(pair())
            slow = Slow(0.002)
            crowd.append((await greeted(ours, theirs, slow, round_, clock), theirs, slow))
        ours, theirs = stack.enter_context(pair())
        light = Slow(0.0)
        connection = await greeted(ours, theirs, light, round_, clock)
        pulse = Pulse(clock)
        for _, other, _ in crowd:
            other.send(data)
        await aeventually(lambda: all(slow.found for _, _, slow in crowd), 30)
        begun = process_time()
        theirs.send(raw.publish("a", b"soon"))
        await aeventually(lambda: bool(light.found))
        waited = process_time() - begun
        assert sum(len(slow.found) for _, _, slow in crowd) < 20 * 300 // 2
        assert waited < 2 * LONG
        some = [len(slow.found) for _, _, slow in crowd]
        assert max(some) < min(some) + 100, "all have their share"
        await aeventually(lambda: all(len(slow.found) == 300 for _, _, slow in crowd), 60)
        pulse.stop()
        assert all(slow.found == payloads for _, _, slow in crowd)
        for one, _, _ in crowd:
            one.abort()
        connection.abort()
        await aeventually(lambda: all(slow.ends for _, _, slow in crowd) and light.ends == 1)


async def test_who_sends_much_once_is_not_busy() -> None:
    """It may have been the machine that took so long; nobody's time is less since others had theirs."""
    loop = asyncio.get_running_loop()
    turns, clock = Turns(loop.call_soon), Clock(loop.time())
    one, other = (Connection(LIMITS, FlushRound(loop.call_soon), Settings(), clock, lambda _: None) for _ in range(2))
    now = monotonic()
    assert turns.until(now, one) == now + SLICE_S
    late = now + TURN_S * 0.99
    assert turns.until(late, one) == late + SLICE_S
    assert not turns.until(now + TURN_S, one)

    async def served(connection: Connection, seconds: float = 0.0) -> bool:
        """Whether its packets would be handled in a turn that begins now, or later."""
        await asyncio.sleep(0)  # the former turn is over
        return turns.until(monotonic() + seconds, connection) > 0

    turns.exceeded(one)
    assert await served(one)
    turns.exceeded(one)
    turns.exceeded(one)
    assert not await served(one)
    assert await served(other)
    for _ in range(20):
        turns.exceeded(one)
    assert not await served(one, 2)
    assert await served(one, 10), "it has made up for it"
    assert not turns._busy, "nothing is kept of it"


async def test_who_has_sent_much_comes_last_for_a_while() -> None:
    """Also with what it sends next: twenty clients that write again and again keep nobody waiting."""
    waited = await waits_beside(20, SLICE_S / 20, packets=48, rounds=8)
    # At first all are the same. Later on what they have sent waits, and the other's is handled as it is read.
    assert waited[0] > 10 * PACKETS
    assert sorted(waited[1:])[3] <= 4 * PACKETS, waited


@pytest.mark.parametrize("end", ["error", "fin"])
async def test_what_was_sent_before_the_end_is_handled(end: str) -> None:
    loop = asyncio.get_running_loop()
    slow, round_, clock = Slow(0.002), FlushRound(loop.call_soon), Clock(loop.time())
    data, payloads = messages(200, "single")
    with pair() as (ours, theirs):
        connection = await greeted(ours, theirs, slow, round_, clock)
        pulse = Pulse(clock)
        theirs.send(data)
        await aeventually(lambda: bool(slow.found))
        transport = connection.transport
        assert transport is not None
        if end == "error":
            connection.connection_lost(ConnectionResetError())  # as TLS does, and WebSocket
            assert not slow.ends
        else:
            theirs.close()
        await aeventually(lambda: slow.ends == 1, 30)
        pulse.stop()
        transport.abort()
        await asyncio.sleep(0)
        assert slow.found == payloads


class SlowEnd(Slow):
    """A handler whose end takes its time, as of a client with thousands of filters."""

    def lost(self) -> None:
        super().lost()
        begun = monotonic()
        while monotonic() < begun + self.each:
            pass


async def test_many_connections_that_end_at_once() -> None:
    """Each in a turn; what a client has sent before the end of its connection is handled before it."""
    loop = asyncio.get_running_loop()
    round_, clock = FlushRound(loop.call_soon), Clock(loop.time())
    slows = [SlowEnd(0.01) for _ in range(100)]
    with contextlib.ExitStack() as stack:
        for slow in slows:
            ours, theirs = stack.enter_context(pair())
            await greeted(ours, theirs, slow, round_, clock)
            theirs.send(raw.publish("a", b"last"))
        await aeventually(lambda: all(slow.found for slow in slows))
        turns: list[int] = []
        uncounted: list[Slow] = []
        pulse = Pulse(clock)
        for slow in slows:
            assert slow.connection is not None
            assert slow.connection.transport is not None
            slow.connection.count(partial(uncounted.append, slow), ADMITTED)
            slow.connection.transport.abort()
        while sum(slow.ends for slow in slows) < len(slows):
            ended = sum(slow.ends for slow in slows)
            await asyncio.sleep(0)
            turns.append(sum(slow.ends for slow in slows) - ended)
            assert {*uncounted} == {slow for slow in slows if slow.ends}, "what an end has not freed yet still counts"
        pulse.stop()
    assert max(turns) <= 2 * TURN_S / 0.01
    assert all(
        slow.found == [b"last"] and slow.connection is not None and slow.connection.transport is None for slow in slows
    )


async def test_nothing_is_handled_after_the_gateway_has_closed() -> None:
    loop = asyncio.get_running_loop()
    slow, round_, clock = Slow(0.002), FlushRound(loop.call_soon), Clock(loop.time())
    slow.close_at = 20
    with pair() as (ours, theirs):
        await greeted(ours, theirs, slow, round_, clock)
        theirs.send(messages(400, "single")[0] + b"\xff")
        await aeventually(lambda: slow.ends == 1)
        assert len(slow.found) <= 32
        assert not slow.errors


async def test_a_gateway_that_closes_after_the_end() -> None:
    loop = asyncio.get_running_loop()
    slow, round_, clock = Slow(0.002), FlushRound(loop.call_soon), Clock(loop.time())
    with pair() as (ours, theirs):
        connection = await greeted(ours, theirs, slow, round_, clock)
        theirs.send(messages(400, "single")[0])
        await aeventually(lambda: bool(slow.found))
        transport = connection.transport
        assert transport is not None
        connection.connection_lost(None)
        connection.close()
        await aeventually(lambda: slow.ends == 1)
        transport.abort()
        assert len(slow.found) < 400


async def test_a_violation_is_reported_after_what_came_before_it() -> None:
    loop = asyncio.get_running_loop()
    slow, round_, clock = Slow(0.002), FlushRound(loop.call_soon), Clock(loop.time())
    data, payloads = messages(100, "single")
    with pair() as (ours, theirs):
        connection = await greeted(ours, theirs, slow, round_, clock)
        theirs.send(data + b"\xff")
        await aeventually(lambda: bool(slow.errors))
        assert slow.found == payloads
        assert slow.errors == [ReasonCode.MALFORMED_PACKET]
        connection.abort()
        await aeventually(lambda: slow.ends == 1)


@pytest.mark.parametrize("why", [Hold.STANDSTILL, Hold.LEASE])
async def test_a_session_that_may_have_moved(why: int) -> None:
    """What was read before waits, like what comes then."""
    loop = asyncio.get_running_loop()
    slow, round_, clock = Slow(0.002), FlushRound(loop.call_soon), Clock(loop.time())
    data, payloads = messages(200, "single")
    with pair() as (ours, theirs):
        connection = await greeted(ours, theirs, slow, round_, clock)
        theirs.send(data)
        await aeventually(lambda: bool(slow.found))
        connection.hold(why)
        before = len(slow.found)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(slow.found) == before < 200
        connection.release(why)
        await aeventually(lambda: len(slow.found) == 200, 30)
        assert slow.found == payloads
        await aeventually(lambda: not connection.holds)
        connection.abort()
        await aeventually(lambda: slow.ends == 1)


@pytest.mark.parametrize("why", [Hold.STANDSTILL, Hold.LEASE])
async def test_what_comes_while_a_session_may_have_moved(why: int) -> None:
    """A transport may bring bytes that it has read before it was told to read nothing: they wait, also large ones."""
    loop = asyncio.get_running_loop()
    slow, round_, clock = Slow(0.0), FlushRound(loop.call_soon), Clock(loop.time())
    data, payloads = messages(20, "single")
    with pair() as (ours, theirs):
        connection = await greeted(ours, theirs, slow, round_, clock)
        connection.hold(why)
        connection.data_received(data)
        large = raw.publish("a", b"large")
        connection.large(PublishRun(b"\0\1a", bytearray(large), 1, len(large), 5))
        await asyncio.sleep(0)
        assert not slow.found
        connection.release(why)
        await aeventually(lambda: len(slow.found) == 21)
        assert slow.found == [*payloads, b"large"]
        connection.hold(why)
        connection.data_received(data)
        connection.close()  # as it is where the session has moved
        await aeventually(lambda: slow.ends == 1)
        assert len(slow.found) == 21


async def test_a_rate_counts_each_message_once() -> None:
    loop = asyncio.get_running_loop()
    slow, round_, clock = Slow(0.001), FlushRound(loop.call_soon), Clock(loop.time())
    settings = Settings.model_validate({"message_rate": 1000.0, "rate_burst": 1, "byte_rate": "1MiB"})
    with pair() as (ours, theirs):
        connection = PacedConnection(LIMITS, round_, settings, clock, lambda _: slow)
        await loop.create_connection(lambda: cast(asyncio.Protocol, connection), sock=ours)
        theirs.send(raw.connect())
        await aeventually(lambda: connection.decoder.version == 4)
        begun = monotonic()
        theirs.send(messages(1500, "run")[0])
        await aeventually(lambda: len(slow.found) == 1500, 30)
        theirs.send(raw.publish("a", b"next"))
        await aeventually(lambda: len(slow.found) == 1501, 30)
        assert 0.3 < monotonic() - begun < 20
        assert not slow.errors
        connection.abort()
        await aeventually(lambda: slow.ends == 1)


def test_a_turn_is_bounded() -> None:
    assert SLICE_S <= TURN_S <= 0.02
