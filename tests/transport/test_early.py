# SPDX-License-Identifier: Apache-2.0
"""What a client sends with its CONNECT, before that is answered, and what it takes while nothing is read from it."""

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

import pytest

from mqtt_nats.codec import Connect, Limits, MqttError, Packet, Publish, PublishRun, encode
from mqtt_nats.config.settings import Settings
from mqtt_nats.transport.connection import EARLY_MOST, Clock, Connection, Hold
from mqtt_nats.transport.rate_limited import PacedConnection
from mqtt_nats.transport.write_buffer import FlushRound

LIMITS = Limits(
    max_packet_size=1 << 20, connect_packet_size=65_536, max_topic_levels=8, max_filters=8, max_user_properties=0
)
CONNECT = encode(Connect(4, "client", True, 10), 4)


class Transport:
    """A socket that takes what it is made to take."""

    def __init__(self) -> None:
        self.unsent = 0
        self.reading = True
        self.turns: list[Callable[[], None]] = []
        """What is done at the end of a turn."""

    def settle(self) -> None:
        """Turns end until nothing waits for one."""
        while self.turns:
            self.turns.pop(0)()

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        """It is what it is."""

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write(self, data: bytes) -> None:
        self.unsent += len(data)


class Recorder:
    """What a connection has reported; CONNECT is answered when the test says so."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.found: list[Packet] = []
        self.error: MqttError | None = None

    def packets(self, packets: list[Packet]) -> None:
        if isinstance(packets[0], Connect):
            self.connection.hold(Hold.HANDSHAKE)
        self.found += packets

    def broken(self, error: MqttError) -> None:
        self.error = error

    def lost(self) -> None:
        raise AssertionError("it is not closed")

    @property
    def payloads(self) -> list[bytes]:
        """Of all messages, in order."""
        return [payload for one in self.found for payload in _payloads(one)]


def _payloads(packet: Packet) -> Iterable[bytes]:
    if isinstance(packet, PublishRun):
        return packet.payloads()
    return [packet.payload] if isinstance(packet, Publish) else []


def opened(kind: type[Connection] = Connection, **given: float) -> tuple[Connection, Recorder, Transport, Clock]:
    clock, transport = Clock(0.0), Transport()
    settings = Settings.model_validate(given)
    connection = kind(LIMITS, FlushRound(transport.turns.append), settings, clock, Recorder)
    connection.connection_made(cast(asyncio.Transport, transport))
    return connection, cast(Recorder, connection.handler), transport, clock


def tiny(count: int) -> tuple[bytes, list[bytes]]:
    """Many small messages, no two in a row alike in their topic, and their payloads."""
    payloads = [b"%06d" % number for number in range(count)]
    topics = ("a", "b")
    return b"".join(
        encode(Publish(0, False, False, _key(topics[i % 2]), 0, p), 4) for i, p in enumerate(payloads)
    ), payloads


def _key(topic: str) -> bytes:
    return len(topic).to_bytes(2) + topic.encode()


@pytest.mark.parametrize("size", [1, 700, 4096, 5000, 1 << 20])
async def test_what_comes_with_connect_waits_as_it_is(size: int) -> None:
    """Thousands of packets would take far more memory than their bytes, and a stranger has sent them."""
    connection, recorder, transport, _ = opened()
    data, payloads = tiny(20_000)
    whole = CONNECT + data
    connection.data_received(whole[:size])
    rest = whole[size:]
    if size > len(CONNECT):
        assert not transport.reading
        assert len(recorder.found) <= EARLY_MOST // 5
    else:
        connection.data_received(rest)
        rest = b""
    connection.release(Hold.HANDSHAKE)
    for start in range(0, len(rest), 65_536):
        connection.data_received(rest[start : start + 65_536])
    transport.settle()
    assert recorder.error is None
    assert recorder.payloads == payloads


async def test_what_waits_is_as_wrong_as_it_was() -> None:
    connection, recorder, transport, _ = opened()
    data, payloads = tiny(1000)
    connection.data_received(CONNECT + data + CONNECT)
    assert len(recorder.payloads) < len(payloads)
    connection.release(Hold.HANDSHAKE)
    transport.settle()
    assert isinstance(recorder.error, MqttError)
    assert recorder.payloads == payloads


async def test_a_connect_that_is_longer_than_what_is_looked_at() -> None:
    connection, recorder, transport, _ = opened()
    connect = encode(Connect(4, "client", True, 10, "user", bytes(20_000)), 4)
    connection.data_received(connect + tiny(3)[0])
    (found, *_) = recorder.found
    assert isinstance(found, Connect)
    assert found.password == bytes(20_000)
    connection.release(Hold.HANDSHAKE)
    transport.settle()
    assert recorder.payloads == tiny(3)[1]


async def test_a_rate_counts_what_waits_once() -> None:
    connection, recorder, transport, _ = opened(PacedConnection, byte_rate=100_000, rate_burst=1)
    data, payloads = tiny(8000)
    connection.data_received(CONNECT + data)
    connection.release(Hold.HANDSHAKE)
    transport.settle()
    assert isinstance(connection, PacedConnection)
    assert len(recorder.found) > 1
    assert recorder.payloads == payloads
    assert transport.reading, "it is less than what may come in a second"


def test_a_slow_client_is_there_as_long_as_it_takes_something() -> None:
    """Nothing is read from it, so its PINGREQ are not seen."""
    connection, _, transport, _ = opened()
    connection.data_received(CONNECT)
    connection.release(Hold.HANDSHAKE)
    connection.keepalive = 2.0
    transport.unsent = 1000
    connection.hold(Hold.OUTBOUND)
    for second in range(1, 20):
        transport.unsent -= 10
        assert not connection.expired(float(second), 10.0)
    transport.unsent += 500
    assert not connection.expired(22.0, 10.0)
    assert connection.expired(23.0, 10.0), "what is to be sent has only grown"
