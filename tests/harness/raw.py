# SPDX-License-Identifier: Apache-2.0
"""MQTT by hand: bytes that no client library would send, over a plain socket."""

import socket
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

CONNECT, CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = 1, 2, 3, 4, 5, 6, 7
SUBSCRIBE, SUBACK, UNSUBSCRIBE, UNSUBACK, PINGREQ, PINGRESP, DISCONNECT = 8, 9, 10, 11, 12, 13, 14

_PATIENCE = 30.0  # seconds


def remaining_length(size: int) -> bytes:
    """A remaining length, in as few bytes as possible."""
    out = bytearray()
    while True:
        size, low = divmod(size, 128)
        out.append(low | (128 if size else 0))
        if not size:
            return bytes(out)


def packet(first: int, body: bytes = b"") -> bytes:
    """A packet with the right length; ``first`` is its whole first byte."""
    return bytes((first,)) + remaining_length(len(body)) + body


def field(value: bytes | str) -> bytes:
    """A string or binary field: two length bytes and the data."""
    data = value.encode() if isinstance(value, str) else value
    return len(data).to_bytes(2, "big") + data


def connect(
    client_id: bytes | str = "",
    *,
    clean: bool = True,
    keepalive: int = 60,
    name: bytes = b"MQTT",
    level: int = 4,
    flags: int | None = None,
    tail: Iterable[bytes | str] = (),
) -> bytes:
    """A CONNECT packet; ``tail`` are the fields after the client id, ``flags`` names them."""
    flags = (2 if clean else 0) if flags is None else flags
    body = field(name) + bytes((level, flags)) + keepalive.to_bytes(2, "big") + field(client_id)
    return packet(0x10, body + b"".join(map(field, tail)))


def publish(topic: bytes | str, payload: bytes = b"", *, qos: int = 0, id: int = 1, flags: int = 0) -> bytes:
    """A PUBLISH packet; ``flags`` are DUP (8) and RETAIN (1)."""
    identifier = id.to_bytes(2, "big") if qos else b""
    return packet(0x30 | qos << 1 | flags, field(topic) + identifier + payload)


def subscribe(*filters: tuple[bytes | str, int], id: int = 1) -> bytes:
    """A SUBSCRIBE packet."""
    return packet(0x82, id.to_bytes(2, "big") + b"".join(field(text) + bytes((qos,)) for text, qos in filters))


def unsubscribe(*filters: bytes | str, id: int = 1) -> bytes:
    """An UNSUBSCRIBE packet."""
    return packet(0xA2, id.to_bytes(2, "big") + b"".join(map(field, filters)))


def ack(kind: int, id: int) -> bytes:
    """PUBACK, PUBREC, PUBREL or PUBCOMP."""
    return packet(kind << 4 | (2 if kind == PUBREL else 0), id.to_bytes(2, "big"))


class Received:
    """One packet of the gateway's."""

    def __init__(self, first: int, body: bytes) -> None:
        self.first = first
        self.kind = first >> 4
        self.body = body

    def __repr__(self) -> str:
        return f"<{self.first:#04x} {self.body[:60]!r}>"

    @property
    def qos(self) -> int:
        """QoS of a PUBLISH."""
        return self.first >> 1 & 3

    @property
    def topic(self) -> str:
        """Topic of a PUBLISH."""
        return self.body[2 : 2 + int.from_bytes(self.body[:2], "big")].decode()

    @property
    def id(self) -> int:
        """Packet id; 0 for a PUBLISH at QoS 0."""
        start = 0
        if self.kind == PUBLISH:
            if not self.qos:
                return 0
            start = 2 + int.from_bytes(self.body[:2], "big")
        return int.from_bytes(self.body[start : start + 2], "big")

    @property
    def payload(self) -> bytes:
        """Payload of a PUBLISH."""
        return self.body[2 + int.from_bytes(self.body[:2], "big") + (2 if self.qos else 0) :]


class Closed(AssertionError):
    """The gateway has closed the connection while something was expected of it."""


class Raw:
    """A TCP connection to a gateway. Every wait ends after ``patience`` seconds with an AssertionError."""

    def __init__(
        self, port: int, *, patience: float = _PATIENCE, receive_buffer: int = 0, source: str = "127.0.0.1"
    ) -> None:
        self.patience = patience
        self.socket = socket.socket()
        if source != "127.0.0.1":
            self.socket.bind((source, 0))
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(patience)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self._start = 0
        self._early: list[Received] = []

    @classmethod
    def connected(cls, port: int, client_id: str = "", *, clean: bool = True, keepalive: int = 60, **more: Any) -> Self:
        """A connection whose CONNECT was accepted."""
        raw = cls(port, **more)
        try:
            raw.send(connect(client_id, clean=clean, keepalive=keepalive))
            answer = raw.expect(CONNACK)
            assert answer.body[1] == 0, answer
        except AssertionError:
            raw.close()
            raise
        return raw

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the connection as a crash would: without DISCONNECT."""
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send all of ``data``; a gateway that closes meanwhile is no error here."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def receive(self, patience: float | None = None) -> Received | None:
        """The next packet; None once the gateway has closed. TimeoutError when nothing comes."""
        if self._early:
            return self._early.pop(0)
        deadline = time.monotonic() + (self.patience if patience is None else patience)
        while True:
            found = self._cut()
            if found is not None:
                return found
            del self._buffer[: self._start]
            self._start = 0
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nothing more came; so far {bytes(self._buffer[:100])!r}")
            self.socket.settimeout(left)
            try:
                data = self.socket.recv(262_144)
            except ConnectionResetError:
                data = b""
            finally:
                self.socket.settimeout(self.patience)
            if not data:
                assert not self._buffer, f"closed in the middle of a packet: {bytes(self._buffer[:100])!r}"
                return None
            self._buffer += data

    def _cut(self) -> Received | None:
        buffer, start = self._buffer, self._start
        size = shift = 0
        for index in range(start + 1, min(start + 5, len(buffer))):
            byte = buffer[index]
            size |= (byte & 127) << shift
            shift += 7
            if not byte & 128:
                end = index + 1 + size
                if len(buffer) < end:
                    return None
                self._start = end
                return Received(buffer[start], bytes(buffer[index + 1 : end]))
        return None

    def expect(self, kind: int, patience: float | None = None) -> Received:
        """The next packet, which must be of ``kind``."""
        try:
            found = self.receive(patience)
        except TimeoutError as error:
            raise AssertionError(f"no packet of type {kind}: {error}") from None
        if found is None:
            raise Closed(f"the gateway closed instead of sending a packet of type {kind}")
        assert found.kind == kind, found
        return found

    def expect_closed(self, patience: float | None = None) -> list[Received]:
        """Wait until the gateway closes; what it sent before that."""
        found: list[Received] = []
        deadline = time.monotonic() + (self.patience if patience is None else patience)
        while True:
            try:
                one = self.receive(max(deadline - time.monotonic(), 0.001))
            except TimeoutError:
                raise AssertionError(f"the connection stays open; it sent {found}") from None
            if one is None:
                return found
            found.append(one)

    def ping(self) -> list[Received]:
        """A PINGREQ round trip: what came before its PINGRESP. The connection must be open."""
        self.send(b"\xc0\x00")
        found: list[Received] = []
        while True:
            one = self.receive()
            if one is None:
                raise Closed(f"the gateway closed instead of answering PINGREQ; it sent {found}")
            if one.kind == PINGRESP:
                return found
            found.append(one)

    def subscribe(self, *filters: tuple[bytes | str, int], id: int = 1) -> list[int]:
        """Subscribe; the codes of SUBACK. Messages that come before it, as they may, are received later."""
        self.send(subscribe(*filters, id=id))
        early: list[Received] = []
        while (answer := self.receive()) is not None and answer.kind == PUBLISH:
            early.append(answer)
        assert answer is not None, "the gateway closed instead of answering SUBSCRIBE"
        assert (answer.kind, answer.id) == (SUBACK, id), answer
        self._early = early + self._early
        return list(answer.body[2:])
