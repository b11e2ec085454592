# SPDX-License-Identifier: Apache-2.0
"""Connections of which each message takes long to handle, for tests of turns."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from time import monotonic, process_time
from typing import cast

from mqtt_nats.codec import Limits, MqttError, Packet, Publish, PublishRun, ReasonCode
from mqtt_nats.config.settings import Settings
from mqtt_nats.transport.connection import Clock, Connection
from mqtt_nats.transport.write_buffer import FlushRound
from tests.harness import raw
from tests.harness.waiting import aeventually

LIMITS = Limits(
    max_packet_size=4096, connect_packet_size=1024, max_topic_levels=8, max_filters=8, max_user_properties=0
)


class Slow:
    """A handler that takes its time for each message, and notes when."""

    def __init__(self, each: float) -> None:
        self.each = each
        self.found: list[bytes] = []
        self.errors: list[ReasonCode] = []
        self.ends = 0
        self.connection: Connection | None = None
        self.close_at = -1

    def packets(self, packets: list[Packet]) -> None:
        for packet in packets:
            if isinstance(packet, Publish | PublishRun):
                for payload in packet.payloads() if isinstance(packet, PublishRun) else [packet.payload]:
                    begun = monotonic()
                    while monotonic() < begun + self.each:
                        pass
                    self.found.append(payload)
                    if len(self.found) == self.close_at and self.connection is not None:
                        self.connection.close()

    def broken(self, error: MqttError) -> None:
        self.errors.append(error.reason)

    def lost(self) -> None:
        assert not self.ends
        self.ends += 1


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:  # the other one is the event loop's, which closes it
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.setblocking(False)
        yield ours, theirs


async def connected(ours: socket.socket, slow: Slow, round_: FlushRound, clock: Clock) -> Connection:
    connection = Connection(LIMITS, round_, Settings(), clock, lambda _: slow)
    await asyncio.get_running_loop().create_connection(lambda: cast(asyncio.Protocol, connection), sock=ours)
    return connection


async def greeted(
    ours: socket.socket, theirs: socket.socket, slow: Slow, round_: FlushRound, clock: Clock
) -> Connection:
    connection = await connected(ours, slow, round_, clock)
    theirs.send(raw.connect())
    await aeventually(lambda: connection.decoder.version == 4)
    slow.connection = connection
    return connection


class Pulse:
    """The longest turn of the event loop, in seconds of this process: other processes do not make it longer."""

    def __init__(self, clock: Clock) -> None:
        self.longest = 0.0
        self.turns = 0
        self._clock = clock
        self._last = process_time()
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._beat)

    def _beat(self) -> None:
        self._clock.read, now = monotonic(), process_time()
        self.longest = max(self.longest, now - self._last)
        self._last = now
        self.turns += 1
        self._handle = self._loop.call_soon(self._beat)

    def stop(self) -> None:
        self._handle.cancel()


def messages(count: int, kind: str) -> tuple[bytes, list[bytes]]:
    """Packets on one topic, as a run, or one by one; and their payloads."""
    payloads = [b"%05d" % number for number in range(count)]
    if kind == "run":
        return b"".join(raw.publish("a", one) for one in payloads), payloads
    topics = ("a", "b")
    return b"".join(raw.publish(topics[at % 2], one, qos=1) for at, one in enumerate(payloads)), payloads


class Witness(Slow):
    """Notes how many messages of others had been handled when its own was."""

    def __init__(self, others: Sequence[Slow]) -> None:
        super().__init__(0.0)
        self.others = others
        self.counts: list[int] = []

    def packets(self, packets: list[Packet]) -> None:
        super().packets(packets)
        self.counts += [sum(len(one.found) for one in self.others)] * (len(self.found) - len(self.counts))


def handled(those: Sequence[Slow], count: int) -> bool:
    """Whether each has had so many messages."""
    return all(len(one.found) == count for one in those)


async def waits_beside(count: int, seconds: float, packets: int, rounds: int) -> list[int]:
    """Packets of others that are handled before a light client's, which are read in the same turn, for each round.

    Args:
        count: clients that send again and again.
        seconds: time for each of their packets.
        packets: packets that each of them sends in a round.
    """
    loop = asyncio.get_running_loop()
    round_, clock = FlushRound(loop.call_soon), Clock(loop.time())
    data, payloads = messages(packets, "single")
    with contextlib.ExitStack() as stack:
        slows = [Slow(seconds) for _ in range(count)]
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
        for number in range(1, rounds + 1):
            before = sum(len(slow.found) for slow in slows)
            for each in ends:
                each.send(data)
            theirs.send(raw.publish("a", b"soon"))
            await aeventually(partial(handled, [light], number))
            waited.append(light.counts[-1] - before)
            await aeventually(partial(handled, slows, number * len(payloads)), 60)
        pulse.stop()
        for one in [*crowd, connection]:
            one.abort()
        await aeventually(lambda: all(slow.ends for slow in slows) and light.ends == 1)
        return waited
