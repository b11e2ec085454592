# SPDX-License-Identifier: Apache-2.0
"""Rates of one client: it is read from later, its keepalive stands still meanwhile, and nobody waits for ever."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import cast

import pytest

from mqtt_nats.codec import Limits, MqttError, Packet, PublishRun, ReasonCode
from mqtt_nats.config.settings import Settings
from mqtt_nats.transport.connection import Clock
from mqtt_nats.transport.rate_limited import PacedConnection
from mqtt_nats.transport.write_buffer import FlushRound
from tests.harness import raw
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio

LIMITS = Limits(
    max_packet_size=1 << 20, connect_packet_size=1024, max_topic_levels=8, max_filters=8, max_user_properties=0
)


class Recorder:
    """What a connection has reported."""

    def __init__(self) -> None:
        self.messages = 0
        self.error: MqttError | None = None
        self.ends = 0

    def packets(self, packets: list[Packet]) -> None:
        self.messages += sum(one.count for one in packets if isinstance(one, PublishRun))

    def broken(self, error: MqttError) -> None:
        self.error = error

    def lost(self) -> None:
        self.ends += 1


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        yield ours, theirs


async def connected(ours: socket.socket, **settings: float) -> tuple[PacedConnection, Recorder, Clock]:
    loop = asyncio.get_running_loop()
    recorder, clock = Recorder(), Clock(loop.time())
    given = Settings.model_validate(settings)
    connection = PacedConnection(LIMITS, FlushRound(loop.call_soon), given, clock, lambda _: recorder)
    await loop.create_connection(lambda: cast(asyncio.Protocol, connection), sock=ours)
    return connection, recorder, clock


@pytest.mark.parametrize("rate", ["message_rate", "byte_rate"])
async def test_a_pause(rate: str) -> None:
    data = raw.publish("a", b"x" * 93)
    assert len(data) == 98
    each = 1 if rate == "message_rate" else len(data)
    with pair() as (ours, theirs):
        connection, recorder, clock = await connected(ours, **{rate: 20 * each}, rate_burst=1)
        theirs.send(raw.connect(keepalive=1))
        await aeventually(lambda: connection.decoder.version == 4)
        connection.keepalive = 1.0
        theirs.send(data * 30)
        await aeventually(lambda: recorder.messages == 30)
        assert connection.holds  # for half a second
        clock.now += 100.0
        assert not connection.expired(clock.now, 1.0)
        theirs.send(data)
        await asyncio.sleep(0.05)
        assert recorder.messages == 30
        await aeventually(lambda: recorder.messages == 31, 30)
        assert connection.alive == clock.now
        assert recorder.error is None
        connection.abort()
        await aeventually(lambda: recorder.ends == 1)


@pytest.mark.parametrize("rate", ["message_rate", "byte_rate"])
async def test_a_pause_that_would_be_too_long(rate: str) -> None:
    with pair() as (ours, theirs):
        connection, recorder, _ = await connected(ours, **{rate: 1.0}, rate_burst=1, rate_pause=2)
        theirs.send(raw.connect() + raw.publish("a") * 100)
        await aeventually(lambda: recorder.error is not None)
        assert recorder.error is not None
        assert recorder.error.reason is ReasonCode.MESSAGE_RATE_TOO_HIGH
        connection.abort()
        await aeventually(lambda: recorder.ends == 1)


async def test_the_end_in_a_pause() -> None:
    """No timer is left that would touch a connection that is gone."""
    with pair() as (ours, theirs):
        connection, recorder, _ = await connected(ours, message_rate=10.0, rate_burst=1)
        theirs.send(raw.connect() + raw.publish("a") * 12)
        await aeventually(lambda: connection.holds)
        connection.abort()
        await aeventually(lambda: recorder.ends == 1)
        assert connection.transport is None
        await asyncio.sleep(0.3)
