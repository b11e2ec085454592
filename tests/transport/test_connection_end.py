# SPDX-License-Identifier: Apache-2.0
"""The end of a connection, on real sockets."""

import asyncio
import socket
from typing import cast

import pytest

from mqtt_nats.codec import Limits, MqttError, Packet
from mqtt_nats.config.settings import Settings
from mqtt_nats.transport import connection as module
from mqtt_nats.transport.connection import WRITE_HIGH_WATER, Clock, Connection
from mqtt_nats.transport.write_buffer import FlushRound
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio

LIMITS = Limits(
    max_packet_size=1024, connect_packet_size=1024, max_topic_levels=8, max_filters=8, max_user_properties=0
)
SETTINGS = Settings.model_validate({"max_outbound_bytes": 64 * 1024})


class Recorder:
    """What a connection has reported."""

    def __init__(self) -> None:
        self.ends = 0

    def packets(self, packets: list[Packet]) -> None:
        raise AssertionError(packets)

    def broken(self, error: MqttError) -> None:
        raise AssertionError(error)

    def lost(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("size", [1024, 128 * 1024, WRITE_HIGH_WATER + 1024 * 1024])
async def test_a_client_that_does_not_read_cannot_stay(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(module, "CLOSE_LINGER_S", 0.1)
    loop = asyncio.get_running_loop()
    recorder = Recorder()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection = Connection(LIMITS, FlushRound(loop.call_soon), SETTINGS, Clock(loop.time()), lambda _: recorder)
        await loop.create_connection(lambda: cast(asyncio.Protocol, connection), sock=ours)
        connection.write_buffer.write(b"x" * size)
        await asyncio.sleep(0)  # the turn ends
        connection.close()
        assert await aeventually(lambda: recorder.ends == 1)


async def test_a_client_that_reads_gets_everything() -> None:
    loop = asyncio.get_running_loop()
    recorder = Recorder()
    ours, theirs = socket.socketpair()
    with ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection = Connection(LIMITS, FlushRound(loop.call_soon), SETTINGS, Clock(loop.time()), lambda _: recorder)
        await loop.create_connection(lambda: cast(asyncio.Protocol, connection), sock=ours)
        connection.write_buffer.write(b"x" * 128 * 1024)
        connection.close()
        reader, writer = await asyncio.open_connection(sock=theirs)
        assert await reader.read() == b"x" * 128 * 1024
        writer.close()
        assert await aeventually(lambda: recorder.ends == 1)
