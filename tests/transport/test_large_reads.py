# SPDX-License-Identifier: Apache-2.0
"""Large messages that are read into buffers of their own: the same packets, in the same order, however they come."""

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import cast

import pytest
from pydantic import ByteSize

from mqtt_nats.codec import Connect, Limits, MqttError, Packet, PublishRun, encode, encode_publish
from mqtt_nats.config.settings import Settings
from mqtt_nats.transport.connection import Clock, Connection, Hold
from mqtt_nats.transport.large_reads import Bulk
from mqtt_nats.transport.rate_limited import PacedConnection
from mqtt_nats.transport.write_buffer import FlushRound
from tests.codec.support import flatten, key

pytestmark = pytest.mark.anyio

MOST = 600_000
LIMITS = Limits(
    max_packet_size=MOST, connect_packet_size=65_536, max_topic_levels=8, max_filters=8, max_user_properties=8
)
READ = 256 * 1024
"""Bytes that the event loop reads at a time, where it brings the buffer."""

each_version = pytest.mark.parametrize("version", [4, 5])


class Socket:
    """What libuv and uvloop make of a socket: it hands on what there is, to whoever is its protocol."""

    def __init__(self, secure: bool = False) -> None:
        self.protocol: object = None
        self.reading = True
        self.closing = False
        self.waiting = b""
        self.buffered = 0
        """How often something was read into a buffer of the protocol's."""
        self.secure = secure
        self.turns: list[Callable[[], None]] = []
        """What is done at the end of a turn."""

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        """They are what they are."""

    def get_extra_info(self, name: str) -> object:
        return self if name == "sslcontext" and self.secure else None

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_protocol(self, protocol: object) -> None:
        assert not self.reading, "uvloop goes on as it has begun to read"
        self.protocol = protocol

    def read_by(self, connection: Connection) -> bool:
        """Whether the connection reads by itself."""
        return self.protocol is connection

    def write(self, data: bytes) -> None:
        """Nobody reads it."""

    def abort(self) -> None:
        self.closing = True

    def end_turn(self) -> None:
        """What waits for the end of the turn is done."""
        if self.turns:
            self.turns.pop(0)()

    def come(self, data: bytes, most: int = READ) -> None:
        """The former turn ends; data arrives, and is read."""
        self.waiting += data
        self.end_turn()
        while self.waiting and self.reading and not self.closing:
            if isinstance(self.protocol, asyncio.BufferedProtocol):
                with cast(memoryview, self.protocol.get_buffer(-1)) as buffer:
                    size = min(len(buffer), most, len(self.waiting))
                    assert size
                    buffer[:size] = self.waiting[:size]
                self.waiting = self.waiting[size:]
                self.buffered += 1
                self.protocol.buffer_updated(size)
            else:
                assert isinstance(self.protocol, Connection)
                data, self.waiting = self.waiting[: min(most, READ)], self.waiting[min(most, READ) :]
                self.protocol.data_received(data)


class Recorder:
    """What a connection has reported."""

    def __init__(self) -> None:
        self.found: list[Packet] = []
        self.error: MqttError | None = None

    def packets(self, packets: list[Packet]) -> None:
        self.found += packets

    def broken(self, error: MqttError) -> None:
        self.error = error

    def lost(self) -> None:
        """It is no matter here."""

    @property
    def flat(self) -> list[Packet]:
        """All packets but CONNECT, each by itself."""
        return list(flatten(self.found[1:]))


def connected(
    version: int, socket: Socket | None = None, settings: Settings | None = None
) -> tuple[Connection, Socket, Recorder]:
    """A client's connection, after CONNECT."""
    socket = socket or Socket()
    recorder = Recorder()
    settings = settings or Settings()
    kind = PacedConnection if settings.byte_rate else Connection
    connection = kind(LIMITS, FlushRound(socket.turns.append), settings, Clock(0.0), lambda _: recorder)
    socket.protocol = connection
    connection.connection_made(cast(asyncio.Transport, socket))
    socket.come(encode(Connect(version, "client", True, 0), version))
    return connection, socket, recorder


def publish(topic: str, size: int, version: int, number: int = 0, qos: int = 0) -> bytes:
    payload = number.to_bytes(4, "big") * (size // 4 + 1)
    return encode_publish(key(topic), payload[:size], qos, False, False, 7 if qos else 0, version)


def bulk_of(socket: Socket) -> Bulk:
    """What reads a large message at the moment."""
    assert isinstance(socket.protocol, Bulk)
    return socket.protocol


async def feed(socket: Socket, data: bytes, sizes: Iterable[int]) -> None:
    """Data arrives in pieces of these sizes."""
    at = 0
    for size in sizes:
        socket.come(data[at : at + size])
        at += size
        await asyncio.sleep(0)  # the client has its next turn
    socket.come(data[at:])
    while socket.waiting or socket.turns:
        await asyncio.sleep(0)
        socket.come(b"")


def expected(version: int, data: bytes) -> list[Packet]:
    """What the decoder alone makes of it."""
    _, socket, recorder = connected(version, Socket(secure=True))
    for at in range(0, len(data), 1000):
        socket.come(data[at : at + 1000])
    while socket.turns:
        socket.come(b"")
    return recorder.flat


@each_version
async def test_messages_of_one_size(version: int) -> None:
    _, socket, recorder = connected(version)
    data = b"".join(publish("camera/1", 300_000, version, number) for number in range(10))
    await feed(socket, data, [])
    assert recorder.flat == expected(version, data)
    runs = [run for run in recorder.found if isinstance(run, PublishRun)]
    assert [isinstance(run.raw, bytearray) for run in runs] == [True] * 10
    assert b"".join(run.raw for run in runs) == data


@each_version
@pytest.mark.parametrize("seed", range(12))
async def test_whatever_comes(version: int, seed: int) -> None:
    """Sizes, topics, levels and pieces of all kinds."""
    dice = random.Random(seed)
    packets = []
    for number in range(40):
        size = dice.choice([0, 10, 5_000, 70_000, 131_050, 150_000, 150_000, 150_000, 260_000, 500_000])
        topic = dice.choice(["camera/1", "camera/2", "t" * 1100])
        packets.append(publish(topic, size, version, number, dice.choice([0, 0, 0, 0, 1])))
        if dice.random() < 0.1:
            packets.append(b"\xc0\0")
    data = b"".join(packets)
    connection, socket, recorder = connected(version)
    sizes: list[int] = []
    while sum(sizes) < len(data):
        sizes.append(dice.choice([1, 100, 5000, 64_000, 200_000, 262_144]))
    await feed(socket, data, sizes)
    assert recorder.error is None
    assert recorder.flat == expected(version, data)
    assert socket.buffered > 5
    assert not connection.holds


async def test_larger_and_smaller_than_the_one_before() -> None:
    _, socket, recorder = connected(4)
    data = b"".join(publish("t", size, 4, size) for size in (200_000, 500_000, 130_000, 131_200, 400_000, 20, 300_000))
    await feed(socket, data, [150_000])
    assert recorder.flat == expected(4, data)


async def test_a_small_packet_ends_it() -> None:
    connection, socket, recorder = connected(4)
    socket.come(publish("t", 300_000, 4))
    await asyncio.sleep(0)
    socket.come(b"")
    bulk_of(socket)
    await asyncio.sleep(0)
    socket.come(b"\xc0\0")
    assert socket.read_by(connection)
    assert len(recorder.flat) == 2


async def test_what_does_not_come_takes_no_memory() -> None:
    """A buffer is there for what has come by a quarter."""
    connection, socket, recorder = connected(4)
    large = publish("t", 500_000, 4)
    socket.come(large[:100_000])
    assert socket.read_by(connection)
    socket.come(large[100_000:150_000])
    bulk_of(socket)
    socket.come(large[150_000:])
    await asyncio.sleep(0)
    socket.come(large[:100_000])
    assert socket.read_by(connection)
    socket.come(large[100_000:])
    await asyncio.sleep(0)
    socket.come(b"")
    assert len(recorder.flat) == 2


async def test_who_sends_one_after_the_other_leaves_turns_to_others() -> None:
    connection, socket, recorder = connected(4)
    socket.come(publish("t", 400_000, 4) * 3)
    await asyncio.sleep(0)
    socket.come(b"")
    assert len(recorder.flat) == 1
    assert connection.holds
    socket.end_turn()
    assert not connection.holds


async def test_it_is_alive_while_a_message_comes() -> None:
    connection, socket, _ = connected(4)
    large = publish("t", 500_000, 4)
    socket.come(large[:200_000])
    await asyncio.sleep(0)
    connection.keepalive = 10
    clock = connection._clock
    for number in range(1, 100):
        clock.now = number * 10.0
        socket.come(large[200_000 + number * 10 : 200_010 + number * 10])
        assert not connection.expired(clock.now, 10)
    assert connection.expired(clock.now + 20, 10)


async def test_what_comes_after_a_standstill_waits() -> None:
    """Whose sessions the clients have may have changed meanwhile: lifecycle.md#standstill."""
    connection, socket, recorder = connected(4)
    large = publish("t", 300_000, 4)
    socket.come(large[:290_000])
    await asyncio.sleep(0)
    connection._clock.stood_still = lambda: connection.hold(Hold.STANDSTILL)
    connection._clock.read -= 10
    socket.come(large[290_000:])
    assert recorder.flat == []
    connection._clock.read += 10
    connection.release(Hold.STANDSTILL)
    assert recorder.flat == expected(4, large)
    await feed(socket, large * 3, [])
    assert recorder.flat == expected(4, large * 4)


async def test_a_packet_above_the_limit_is_refused_as_ever() -> None:
    _, socket, recorder = connected(5)
    await feed(socket, publish("t", 300_000, 5) * 2, [])
    socket.come(publish("t", MOST, 5)[:MOST])  # the rest is not waited for
    await asyncio.sleep(0)
    socket.come(b"")
    assert recorder.error is not None
    assert "more than" in str(recorder.error)


async def test_no_more_after_the_end() -> None:
    connection, socket, recorder = connected(4)
    large = publish("t", 300_000, 4)
    socket.come(large[:290_000])
    await asyncio.sleep(0)
    bulk = bulk_of(socket)
    bulk.connection_lost(None)
    assert connection.transport is None
    socket.come(large[290_000:])
    assert recorder.flat == []
    assert not bulk.eof_received()


async def test_a_handler_that_fails_ends_the_connection() -> None:
    _, socket, recorder = connected(4)

    def fail(packets: list[Packet]) -> None:
        raise ValueError

    recorder.packets = fail  # type: ignore[method-assign]
    await feed(socket, publish("t", 300_000, 4), [])
    assert recorder.error is not None


async def test_who_does_not_read_is_noticed() -> None:
    connection, socket, _ = connected(4)
    socket.come(publish("t", 300_000, 4)[:200_000])
    clogged = []
    for act in (bulk_of(socket).pause_writing, bulk_of(socket).resume_writing):
        act()
        clogged.append(connection.write_buffer.clogged)
    assert clogged == [True, False]


@pytest.mark.parametrize("way", ["TLS", "WebSocket", "rate"])
async def test_who_goes_another_way(way: str) -> None:
    """What comes is made by others, or counted, before the connection has it."""
    socket = Socket(secure=way == "TLS")
    if way == "WebSocket":
        socket = type("Made", (Socket, asyncio.Transport), {})()
    settings = Settings(byte_rate=ByteSize(10**9)) if way == "rate" else None
    connection, socket, recorder = connected(4, socket, settings)
    data = publish("t", 300_000, 4) * 4
    await feed(socket, data, [])
    assert recorder.flat == expected(4, data)
    assert socket.read_by(connection)
    assert socket.buffered == 0
