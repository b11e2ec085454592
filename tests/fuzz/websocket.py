# SPDX-License-Identifier: Apache-2.0
"""Mutated requests for MQTT over WebSocket, and the frames behind them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Callable
from functools import partial
from typing import Final, cast

import mqtt_nats.transport.websocket
from mqtt_nats.base.admission import ADMITTED, Admission
from mqtt_nats.transport.connection import Connection
from mqtt_nats.transport.listener_settings import PATHS
from mqtt_nats.transport.websocket import HEAD_MOST, SUBPROTOCOLS, WebSocket
from tests.fuzz.engine import Input, Target, Unexpected, expect
from tests.fuzz.mutation import of_pieces
from tests.transport import web
from tests.transport.web import CLOSE, CONTINUATION, PING, PONG, TEXT

ORIGIN: Final = "https://example.org"
ORIGINS: Final = ((), (ORIGIN,))
"""Variants: any page may ask; pages of one origin may."""

_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_REFUSALS: Final = (b"400", b"403", b"404", b"405", b"426", b"431", b"505")
_TURNS: Final = 200

# With nothing random, so that a run can be repeated.
frame = partial(web.frame, key=b"mask")
request = partial(web.request, Sec_WebSocket_Key=base64.b64encode(b"sixteen bytes...").decode())

_PIECES: Final = (
    *(b"\r\n", b"\r\n\r\n", b"\n", b"\r", b": ", b" ", b"\0", b"GET /mqtt HTTP/1.1\r\n", b"GET /mqtt HTTP/1.0\r\n"),
    *(
        b"Host: a\r\n",
        b"Upgrade: websocket\r\n",
        b"Connection: Upgrade\r\n",
        b"Connection: close\r\n",
        b"Origin: null\r\n",
    ),
    *(b"Sec-WebSocket-Version: 13\r\n", b"Sec-WebSocket-Version: 8\r\n", b"Sec-WebSocket-Protocol: mqtt\r\n"),
    *(b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n", b"Content-Length: 4\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Sec-WebSocket-Extensions: permessage-deflate\r\n", f"Origin: {ORIGIN}\r\n".encode(), b"Origin: http://x\r\n"),
    *(b"\xff", b"\xc3\xa9", b" folded", b"mqtt", b"MQTT", b"?a=b", b"%2fmqtt", b"//", b"POST", b"x" * 1000),
    *(
        frame(b"ab"),
        frame(b"", PING),
        frame(b"\x03\xe8", CLOSE),
        frame(b"x", TEXT),
        b"\x82\xff",
        b"\x82\x7f" + b"\xff" * 8,
    ),
)


def seeds() -> list[Input]:
    """Requests that are right or nearly, and frames behind one."""
    frames = (
        frame(b"a" * 10),
        frame(b"a", fin=False) + frame(b"b", CONTINUATION) + frame(b"c" * 200),
        frame(b"", PING) + frame(b"", PONG) + frame(b""),
        frame(b"\x03\xe8bye", CLOSE),
        frame(b"text", TEXT),
        frame(b"a", mask=False),
        frame(b"a", bits=0x40),
        frame(b"a", 3),
    )
    heads = (
        request(),
        request("/mqtt?a=b"),
        request("/"),
        request(method="POST"),
        request(version="HTTP/1.0"),
        request(Origin=ORIGIN),
        request(Origin="https://example.com"),
        request(Sec_WebSocket_Protocol=None),
        request(Sec_WebSocket_Version="8"),
        request(Sec_WebSocket_Key="short"),
        request(Connection="close"),
        request(Upgrade=None),
        request(Host="xn--" + "a" * 2000),
    )
    return [
        *((variant, head) for variant in range(len(ORIGINS)) for head in heads),
        *((0, request() + one) for one in (*frames, b"".join(frames[:3]))),
    ]


class _Socket:
    """The socket."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        expect(not self.closing, "it writes into a closed socket")
        self.written += data

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        expect(not self.closing, "it pauses a closed socket")

    resume_reading = pause_reading

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


class _Reader:
    """In place of a connection: collects what comes."""

    def __init__(self) -> None:
        self.on_end: Callable[[], None] | None = None
        self.admission = ADMITTED
        self.got = b""
        self.made = self.lost = 0

    def count(self, on_end: Callable[[], None] | None, admission: Admission) -> None:
        self.on_end, self.admission = on_end, admission

    def connection_made(self, transport: WebSocket) -> None:
        self.made += 1

    def data_received(self, data: bytes) -> None:
        expect(data, "it hands on nothing")
        self.got += data

    def connection_lost(self, error: Exception | None) -> None:
        self.lost += 1


async def _serve(data: bytes, portion: int, origins: tuple[str, ...]) -> tuple[_Socket, _Reader]:
    """Feed the bytes in portions, and end the connection."""
    reader, wire = _Reader(), _Socket()
    counted = 0

    def leave() -> None:
        nonlocal counted
        counted -= 1

    def enter(web: WebSocket) -> bool:
        nonlocal counted
        counted += 1
        web.on_end = leave
        return True

    web = WebSocket(cast(Connection, reader), enter, 60.0, origins)
    web.connection_made(cast(asyncio.Transport, wire))
    for at in range(0, len(data), portion):
        if wire.closing:
            break
        web.data_received(data[at : at + portion])
        expect(len(web._head) < HEAD_MOST + portion, f"{len(web._head)} bytes of the request are kept")
    for _ in range(_TURNS):
        if not web._busy:
            break
        await asyncio.sleep(0)
    expect(not web._busy, "it does not come to an end")
    web.connection_lost(None)
    if reader.on_end is not None:
        reader.on_end()
    expect(counted == 0, f"the connection counts {counted} times when it is over")
    expect(reader.made == reader.lost <= 1, f"the connection begins {reader.made} times and ends {reader.lost} times")
    return wire, reader


def check(one: Input, number: int) -> tuple[int, bool]:
    """Any bytes are the beginning of a request, a request that is answered by 101, or a request that is refused.

    The answer and the bytes that are handed on do not depend on how the bytes were cut into reads. The bytes that
    are kept of a request are at most its largest size and one read. Only a GET of HTTP/1.1 for the path, with
    version 13, from a page of a permitted origin or from no page, is answered by 101. The answer 101 has the value
    for the key, and a subprotocol. A refused connection is closed, and none of its bytes is handed on. Each
    connection is counted once, and its count ends once.
    """
    variant, data = one
    origins = ORIGINS[variant]
    portion = 1 + number % 50
    try:
        wire, reader = _run(data, len(data), origins)
        other, parts = _run(data, portion, origins)
    except Unexpected:
        raise
    except Exception as error:
        raise Unexpected(f"{type(error).__name__}: {error}") from error
    head, _, frames = wire.written.partition(b"\r\n\r\n")
    expect(other.written.startswith(head), f"in reads of {portion} bytes the answer is {other.written!r}")
    expect(parts.got == reader.got, f"in reads of {portion} bytes it hands on {parts.got!r}")
    status = head[9:12]
    if status == b"101":
        _accepted(data, head, origins)
        expect(reader.made == 1, "the connection does not begin")
        return 1, wire.closing
    expect(not reader.made and not reader.got, "it is not open, and hands something on")
    size = re.search(rb"(?im)^content-length: *(\d+)\r?$", head)
    expect(not frames or (size is not None and int(size[1]) == len(frames)), f"the body of the answer is {frames!r}")
    expect(status in _REFUSALS or not head, f"the answer is {head!r}")
    expect(wire.closing == bool(head), "what is refused is not closed")
    expect(bool(head) or (len(data) < HEAD_MOST and b"\r\n\r\n" not in data), "there is no answer")
    return 0, bool(head)


def _run(data: bytes, portion: int, origins: tuple[str, ...]) -> tuple[_Socket, _Reader]:
    return _loop().run_until_complete(_serve(data, max(portion, 1), origins))


_loops: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """One loop for all inputs."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0]


def _accepted(data: bytes, answer: bytes, origins: tuple[str, ...]) -> None:
    """That the request is one for MQTT, read by other means than the code under test."""
    first, *lines = data.partition(b"\r\n\r\n")[0].replace(b"\r\n", b"\n").split(b"\n")
    words = first.split(b" ")
    expect(words[0] == b"GET" and words[-1] == b"HTTP/1.1", f"101 to {first!r}")
    expect(words[1].partition(b"?")[0].decode("latin-1") in (*PATHS, "/mqtt/"), f"101 for the path {words[1]!r}")
    fields: dict[bytes, list[bytes]] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        fields.setdefault(name.lower(), []).append(value.strip())
    expect(b"13" in fields.get(b"sec-websocket-version", []), "101 for another version")
    expect(any(b"mqtt" in one for one in fields.get(b"sec-websocket-protocol", [])), "101 without the subprotocol")
    nonces = fields.get(b"sec-websocket-key", [])
    expect(len(nonces) == 1 and len(base64.b64decode(nonces[0])) == 16, f"101 for the key {nonces!r}")
    given = dict(line.lower().split(b": ", 1)[:1] + line.split(b": ", 1)[1:] for line in answer.split(b"\r\n")[1:])
    accept = base64.b64encode(hashlib.sha1(nonces[0] + _GUID).digest())
    expect(given[b"sec-websocket-accept"] == accept, f"the key is answered by {answer!r}")
    expect(given[b"sec-websocket-protocol"].decode() in SUBPROTOCOLS, f"the subprotocol is {answer!r}")
    if origins:
        named = {one.lower().rstrip(b"/") for one in fields.get(b"origin", [])}
        expect(named <= {one.encode() for one in origins} | {f"{ORIGIN}:443".encode()}, f"101 to a page of {named}")


TARGET: Final = Target(
    "websocket",
    (mqtt_nats.transport.websocket,),
    seeds,
    check,
    variants=len(ORIGINS),
    mutate=of_pieces(*_PIECES),
    followed=10,
)
