# SPDX-License-Identifier: Apache-2.0
"""Many clients share a turn, and what one of them has caused leaves within it."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

import pytest

from mqtt_nats.codec import Packet
from mqtt_nats.transport.connection import Clock
from mqtt_nats.transport.turns import SLICE_S
from mqtt_nats.transport.write_buffer import FlushRound
from tests.harness import raw
from tests.harness.waiting import aeventually
from tests.transport.slow_handlers import Pulse, Slow, Witness, greeted, handled, messages, pair

pytestmark = pytest.mark.anyio


async def test_who_sends_little_comes_before_many_who_send_some() -> None:
    """Sixty clients of which each sends less than is handled at once, again and again."""
    loop = asyncio.get_running_loop()
    round_, clock = FlushRound(loop.call_soon), Clock(loop.time())
    data, payloads = messages(20, "single")
    with contextlib.ExitStack() as stack:
        slows = [Slow(SLICE_S / 50) for _ in range(60)]
        crowd, ends = [], []
        for slow in slows:
            ours, theirs = stack.enter_context(pair())
            crowd.append(await greeted(ours, theirs, slow, round_, clock))
            ends.append(theirs)
        ours, theirs = stack.enter_context(pair())
        light = Witness(slows)
        connection = await greeted(ours, theirs, light, round_, clock)
        pulse = Pulse(clock)
        waited: list[int] = []
        for number in range(1, 11):
            before = sum(len(slow.found) for slow in slows)
            for each in ends:
                each.send(data)
            theirs.send(raw.publish("a", b"soon"))  # it is read in the same turn, after theirs
            await aeventually(partial(handled, [light], number))
            waited.append(light.counts[-1] - before)
            await aeventually(partial(handled, slows, number * len(payloads)), 60)
        pulse.stop()
        assert sorted(waited[3:])[3] <= len(slows) * len(payloads) // 3, waited
        for one in crowd:
            one.abort()
        connection.abort()
        await aeventually(lambda: all(slow.ends for slow in slows) and light.ends == 1)


class Answerer(Witness):
    """Answers each message."""

    def packets(self, packets: list[Packet]) -> None:
        super().packets(packets)
        if self.connection is not None:
            self.connection.outlet.write(b"answer")


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
        answering.outlet.send_by(lambda data: to_client.append(len(busy.found)))
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
