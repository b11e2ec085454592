# SPDX-License-Identifier: Apache-2.0
"""WebSocket by hand: every bit of the upgrade and of frames is up to the test."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import ssl

from tests.harness.raw import Raw
from tests.transport.support import PATIENCE, dial

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

HEADERS = {
    "Host": "gateway.test",
    "Upgrade": "websocket",
    "Connection": "keep-alive, Upgrade",
    "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Protocol": "mqttv3.1, mqtt",
}


def request(path: str = "/mqtt", method: str = "GET", version: str = "HTTP/1.1", **changed: str | None) -> bytes:
    """A request for the upgrade; ``changed`` headers have underscores for dashes, None leaves one out."""
    headers: dict[str, str | None] = {**HEADERS}
    for name, value in changed.items():
        headers[name.replace("_", "-")] = value
    lines = [
        f"{method} {path} {version}",
        *(f"{name}: {value}" for name, value in headers.items() if value is not None),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def frame(
    payload: bytes, opcode: int = BINARY, *, fin: bool = True, mask: bool = True, bits: int = 0, key: bytes = b""
) -> bytes:
    """A frame as clients send it; ``bits`` are the reserved ones, ``key`` is that of the mask (empty: a random one)."""
    first = (0x80 if fin else 0) | bits | opcode
    key = (key or os.urandom(4)) if mask else b""
    masked = bytes(byte ^ key[at % 4] for at, byte in enumerate(payload)) if mask else payload
    return bytes((first,)) + length(len(payload), mask=mask) + key + masked


def length(size: int, *, mask: bool = True) -> bytes:
    """The length of a frame, in as few bytes as possible."""
    flag = 0x80 if mask else 0
    if size < 126:
        return bytes((flag | size,))
    if size < 65_536:
        return bytes((flag | 126,)) + size.to_bytes(2, "big")
    return bytes((flag | 127,)) + size.to_bytes(8, "big")


class Framed:
    """A socket after the upgrade: what is sent and received is payload."""

    def __init__(self, plain: socket.socket) -> None:
        self.plain = plain
        self.buffer = b""
        self.code: int | None = None
        """Of the Close frame that has come; 1005 for none."""
        self.pongs: list[bytes] = []
        self.sizes: list[int] = []
        """Lengths of the frames that have come."""

    def upgrade(self) -> None:
        """Ask for WebSocket, and check the answer."""
        self.plain.sendall(request())
        head = self.read_head()
        lines = head.decode().split("\r\n")
        assert lines[0].split(" ", 2)[1] == "101", head
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        accept = base64.b64encode(hashlib.sha1(HEADERS["Sec-WebSocket-Key"].encode() + _GUID).digest()).decode()
        assert headers["sec-websocket-accept"] == accept
        assert headers["sec-websocket-protocol"] == "mqtt"
        assert "sec-websocket-extensions" not in headers

    def read_head(self) -> bytes:
        """The head of an HTTP response."""
        while b"\r\n\r\n" not in self.buffer:
            data = self.plain.recv(4096)
            assert data, f"closed: {self.buffer!r}"
            self.buffer += data
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        return head + b"\r\n\r\n"

    def sendall(self, data: bytes) -> None:
        """One frame."""
        self.plain.sendall(frame(data))

    def recv(self, _: int) -> bytes:
        """The payload of the next binary frame; nothing once a Close frame has come, or the end."""
        while self.code is None:
            found = self._cut()
            if found is None:
                data = self.plain.recv(262_144)
                if not data:
                    return b""
                self.buffer += data
                continue
            opcode, payload = found
            if opcode == BINARY:
                self.sizes.append(len(payload))
                if payload:
                    return payload
            elif opcode == PONG:
                self.pongs.append(payload)
            else:
                assert opcode == CLOSE, opcode
                self.code = int.from_bytes(payload[:2], "big") if payload else 1005
        return b""

    def _cut(self) -> tuple[int, bytes] | None:
        data = self.buffer
        if len(data) < 2:
            return None
        assert data[0] & 0xF0 == 0x80, "fragmented, or reserved bits"
        assert not data[1] & 0x80, "masked"
        size, start = data[1], 2
        if size == 126:
            size, start = int.from_bytes(data[2:4], "big"), 4
        elif size == 127:
            size, start = int.from_bytes(data[2:10], "big"), 10
        if len(data) < start or len(data) < start + size:
            return None
        self.buffer = data[start + size :]
        return data[0] & 15, data[start : start + size]

    def settimeout(self, seconds: float) -> None:
        """Of the socket."""
        self.plain.settimeout(seconds)

    def close(self) -> None:
        """Of the socket, without a Close frame."""
        self.plain.close()


class Web(Raw):
    """MQTT by hand over WebSocket."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None, *, patience: float = PATIENCE) -> None:
        super().__init__(port, patience=patience)
        if context is not None:
            self.socket.close()
            self.socket = dial(port, context)
        self.framed = Framed(self.socket)
        self.framed.upgrade()
        self.socket = self.framed  # type: ignore[assignment]

    def wire(self, data: bytes) -> None:
        """Send bytes as they are."""
        try:
            self.framed.plain.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def closed(self) -> int:
        """Wait until the gateway says that it ends; the code."""
        self.expect_closed()
        assert self.framed.code is not None
        return self.framed.code

    def gone(self) -> bool:
        """Wait until the gateway has closed the socket."""
        try:
            while self.framed.plain.recv(4096):
                pass
        except ConnectionResetError:
            pass
        return True
