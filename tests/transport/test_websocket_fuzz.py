# SPDX-License-Identifier: Apache-2.0
"""Bytes that are nearly right: whatever they are, WebSocket answers or closes, and no exception gets out."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from mqtt_nats.base.admission import Admission
from mqtt_nats.transport.connection import Connection
from mqtt_nats.transport.websocket import WebSocket
from tests.harness import raw
from tests.transport.web import CLOSE, CONTINUATION, PING, PONG, TEXT, frame, request

ROUNDS = 4000
PLAIN = raw.connect("fuzz") + raw.publish("a", b"x" * 50)


class Wire:
    """The socket."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.written += data

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        assert not self.closing

    resume_reading = pause_reading

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


class Reader:
    """In place of a connection: takes what comes, stops now and then, and may end it."""

    def __init__(self, chance: random.Random) -> None:
        self.on_end: Callable[[], None] | None = None
        self.got = b""
        self.held = False
        self.lost = 0
        self._chance = chance
        self._transport: WebSocket | None = None

    def count(self, on_end: Callable[[], None] | None, admission: Admission) -> None:
        self.on_end = on_end

    def connection_made(self, transport: WebSocket) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert not self.held
        assert data
        self.got += data
        transport = self._transport
        assert transport is not None
        what = self._chance.random()
        if what < 0.2:
            transport.write(b"answer")
        elif what < 0.3:
            self.held = True
            transport.pause_reading()
        elif what < 0.33:
            transport.write(b"farewell")
            transport.close()
            assert transport.is_closing()
        elif what < 0.35:
            transport.abort()

    def release(self) -> None:
        """Read on."""
        if self.held and self._transport is not None and not self._transport.is_closing():
            self.held = False
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost += 1
        if self.on_end is not None:
            self.on_end()


def make(chance: random.Random) -> bytes:
    """An upgrade and frames, with a few bytes changed, left out or put in."""
    wire = [request()]
    for _ in range(chance.randrange(8)):
        size = chance.choice((0, 1, 10, 125, 126, 300))
        kind = chance.choice((2, 2, 2, CONTINUATION, TEXT, PING, PONG, CLOSE))
        payload = b"\x03\xe8" if kind == CLOSE and chance.random() < 0.7 else PLAIN[:size]
        wire.append(frame(payload, kind, fin=chance.random() < 0.9, mask=chance.random() < 0.98))
    head, tail = bytearray(wire[0]), bytearray(b"".join(wire[1:]))
    for part, chances in ((head, 0.3), (tail, 0.5)):
        while part and chance.random() < chances:
            at = chance.randrange(len(part))
            match chance.randrange(3):
                case 0:
                    part[at] = chance.randrange(256)
                case 1:
                    del part[at]
                case _:
                    part.insert(at, chance.randrange(256))
    return bytes(head + tail)


@pytest.mark.anyio
async def test_nearly_right() -> None:
    chance = random.Random(20)
    opened = refused = closed = 0
    for _ in range(ROUNDS):
        counted = 0

        def leave() -> None:
            nonlocal counted
            counted -= 1

        def enter(connection: Any, leave: Callable[[], None] = leave) -> bool:
            nonlocal counted
            counted += 1
            connection.on_end = leave
            return True

        reader, wire = Reader(chance), Wire()
        web = WebSocket(cast(Connection, reader), enter, 60.0)
        web.connection_made(cast(asyncio.Transport, wire))
        data = make(chance)
        while data and not wire.closing:
            size = chance.choice((1, 7, 50, len(data)))
            web.data_received(data[:size])
            data = data[size:]
            if chance.random() < 0.5:
                reader.release()
            if chance.random() < 0.05:
                await asyncio.sleep(0)
        if chance.random() < 0.5 and not wire.closing and web.eof_received():
            assert reader.held
            for _ in range(10):
                reader.release()
                await asyncio.sleep(0)
            assert web.is_closing()
        web.connection_lost(None)
        await asyncio.sleep(0)
        answer = wire.written[9:12]
        assert answer in (b"", b"101", b"400", b"404", b"426", b"431", b"505"), wire.written
        assert reader.lost == (answer == b"101")
        assert counted == 0
        opened += answer == b"101"
        refused += answer not in (b"", b"101")
        closed += wire.closing
    assert min(opened, refused, closed) > ROUNDS // 20, (opened, refused, closed)


class Holding(Reader):
    """Stops after everything that it gets."""

    def data_received(self, data: bytes) -> None:
        assert not self.held
        self.got += data + b"|"
        self.held = True
        assert self._transport is not None
        self._transport.pause_reading()


@pytest.mark.anyio
async def test_the_end_comes_while_nothing_is_read() -> None:
    """What came before it is handed on when something is read again, and then it ends."""
    reader, wire = Holding(random.Random()), Wire()

    def enter(connection: Any) -> bool:
        connection.on_end = lambda: None
        return True

    web = WebSocket(cast(Connection, reader), enter, 60.0)
    web.connection_made(cast(asyncio.Transport, wire))
    web.data_received(request())
    for part in (b"a", b"b", b"c"):
        web.data_received(frame(part))
    assert reader.got == b"a|"
    assert web.eof_received()
    assert not wire.is_closing()
    reader.release()
    await asyncio.sleep(0)
    assert reader.got == b"a|bc|"
    assert wire.is_closing()
    web.connection_lost(None)
    assert reader.lost == 1


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["Host", "host", "HOST"])
async def test_a_long_international_host_costs_little(name: str) -> None:
    """Decoding a long one takes tens of milliseconds of the event loop, before anybody has said who it is."""
    data = request(Host=None).replace(b"\r\n", f"\r\n{name}:xn--{'a' * 7_000}\r\n".encode(), 1)

    def enter(web: WebSocket) -> bool:
        web.on_end = lambda: None
        return True

    begin = time.process_time()
    for _ in range(10):
        reader, wire = Reader(random.Random()), Wire()
        web = WebSocket(cast(Connection, reader), enter, 60.0)
        web.connection_made(cast(asyncio.Transport, wire))
        web.data_received(data)
        assert wire.written.startswith(b"HTTP/1.1 400"), wire.written
        web.connection_lost(None)
    assert time.process_time() - begin < 0.3
