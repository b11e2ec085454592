# SPDX-License-Identifier: Apache-2.0
"""Packets that a client has had wait are handed on in turns too, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import cast

import pytest

from mqtt_nats.codec import Connect, Limits, MqttError, Packet, ProtocolError, Publish, PublishRun, encode
from mqtt_nats.config.settings import Settings
from mqtt_nats.transport.connection import Clock, Connection, Hold
from mqtt_nats.transport.rate_limited import PacedConnection
from mqtt_nats.transport.turns import PACKETS, SLICE_S
from mqtt_nats.transport.write_buffer import FlushRound
from tests.harness.waiting import aeventually

LIMITS = Limits(
    max_packet_size=4096, connect_packet_size=1024, max_topic_levels=8, max_filters=8, max_user_properties=0
)
MANY = 5 * PACKETS


class Socket:
    """A socket from which nothing is written."""

    def __init__(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        """It is what it is."""

    def write(self, data: bytes) -> None:
        raise AssertionError("nothing is to be written")

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Client:
    """Has the first messages wait, and takes its time for what is handed on again."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.waits = True
        self.waiting: list[Packet] = []
        self.found: list[bytes] = []
        self.errors: list[MqttError] = []
        self.ends = 0

    def packets(self, packets: list[Packet]) -> None:
        packets = [one for one in packets if not isinstance(one, Connect)]
        if self.waits:
            self.waiting += packets
            return
        if packets:
            begun = monotonic()
            while monotonic() < begun + SLICE_S:
                pass
        for one in packets:
            assert isinstance(one, Publish | PublishRun)
            self.found += one.payloads() if isinstance(one, PublishRun) else [one.payload]

    def broken(self, error: MqttError) -> None:
        self.errors.append(error)

    def lost(self) -> None:
        self.ends += 1

    def go(self, way: Client | None = None, error: MqttError | None = None) -> None:
        """What was before them has taken effect."""
        self.waits = False
        packets, self.waiting = self.waiting, []
        self.connection.handle_again(packets, way, error)


def opened(kind: type[Connection] = Connection, **given: float) -> tuple[Connection, Client, list[Callable[[], None]]]:
    turns: list[Callable[[], None]] = []
    connection = kind(LIMITS, FlushRound(turns.append), Settings.model_validate(given), Clock(monotonic()), Client)
    connection.connection_made(cast(asyncio.Transport, Socket()))
    client = connection.inner(cast(Client, None))
    assert isinstance(client, Client)
    connection.data_received(encode(Connect(4, "client", True, 10), 4))
    return connection, client, turns


def settle(turns: list[Callable[[], None]]) -> None:
    """Turns end until nothing waits for one."""
    while turns:
        turns.pop(0)()


def numbered(first: int, count: int) -> tuple[bytes, list[bytes]]:
    """Messages, no two in a row alike in their topic, and their payloads."""
    payloads = [b"%06d" % number for number in range(first, first + count)]
    keys = (b"\0\1a", b"\0\1b")
    return b"".join(encode(Publish(0, False, False, keys[i % 2], 0, p), 4) for i, p in enumerate(payloads)), payloads


def test_in_turns_and_before_what_came_later() -> None:
    connection, client, turns = opened()
    first, expected = numbered(0, MANY)
    connection.data_received(first)
    settle(turns)
    client.go()
    assert len(client.found) == PACKETS, "others have a turn after so many"
    assert connection.keeps
    assert connection.holds
    more, later = numbered(MANY, MANY)
    connection.data_received(more)
    ends = 0
    while turns:
        before = len(client.found)
        turns.pop(0)()
        assert len(client.found) - before <= 2 * PACKETS
        ends += 1
    assert ends > MANY // PACKETS
    assert client.found == [*expected, *later]
    assert (connection.keeps, connection.holds) == (False, 0)


def test_what_is_handed_back_while_some_still_wait_comes_before_those() -> None:
    connection, client, turns = opened()
    first, expected = numbered(0, MANY)
    connection.data_received(first)
    settle(turns)
    client.go()
    done = len(client.found)
    assert 0 < done < MANY
    connection.handle_again([Publish(0, False, False, b"\0\1a", 0, b"back")], None, None)
    settle(turns)
    assert client.found == [*expected[:done], b"back", *expected[done:]]
    assert (connection.keeps, connection.holds) == (False, 0)


def test_the_end_comes_behind_them() -> None:
    """Also where the socket is closed, and the client has been told, before they may be handled."""
    for told in (True, False):
        connection, client, turns = opened()
        first, expected = numbered(0, MANY)
        connection.data_received(first)
        settle(turns)
        if told:
            connection.connection_lost(None)
            assert client.ends == 1
            client.go(client)
        else:
            client.go()
            connection.connection_lost(None)
        assert client.ends == told
        while turns:
            assert client.ends == told
            turns.pop(0)()
        assert client.found == expected
        assert client.ends == 1 + told


def test_a_violation_comes_behind_them_and_nothing_after_it() -> None:
    connection, client, turns = opened()
    first, expected = numbered(0, MANY)
    connection.data_received(first)
    settle(turns)
    error = ProtocolError("wrong")
    client.go(error=error)
    connection.data_received(numbered(MANY, 1)[0])
    while turns:
        assert not client.errors or client.found == expected
        turns.pop(0)()
    assert set(client.errors) == {error}
    assert client.found == expected


def test_nothing_of_them_is_handled_while_the_session_may_be_somebody_elses() -> None:
    connection, client, turns = opened()
    first, expected = numbered(0, MANY)
    connection.data_received(first)
    settle(turns)
    connection.hold(Hold.LEASE)
    client.go()
    settle(turns)
    assert not client.found
    connection.release(Hold.LEASE)
    settle(turns)
    assert client.found == expected


@pytest.mark.anyio
async def test_nothing_of_them_is_handled_once_the_gateway_ends_the_connection() -> None:
    connection, client, turns = opened()
    connection.data_received(numbered(0, MANY)[0])
    settle(turns)
    client.go()
    connection.connection_lost(None)
    connection.close()
    settle(turns)
    assert len(client.found) == PACKETS
    await aeventually(lambda: client.ends == 1)


@pytest.mark.anyio
async def test_a_rate_counts_them_once() -> None:
    connection, client, turns = opened(PacedConnection, message_rate=1.0, rate_burst=float(MANY + 1))
    first, expected = numbered(0, MANY)
    connection.data_received(first)
    settle(turns)
    client.go()
    settle(turns)
    assert client.found == expected
    assert not connection.holds
