# SPDX-License-Identifier: Apache-2.0
"""Byte streams to a server: TCP, TLS, WebSocket, and WebSocket over TLS."""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from mqtt_nats.mqtt_clients.errors import ClientError

if TYPE_CHECKING:
    import ssl

    from wsproto.events import Event

SEND_WAIT_S: Final = 30.0
"""Seconds in which the server must read what is sent."""

READ_BYTES: Final = 64 * 1024

SUBPROTOCOL: Final = "mqtt"
"""[MQTT-6.0.0-3] (3.1.1, 5.0)"""


@dataclass(frozen=True)
class Tls:
    """Options of TLS: certificates of authorities (None: those of the system), and the client's own certificate."""

    cafile: Path | None = None
    capath: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True)
class Server:
    """Address of a server. ``path``: of a WebSocket; None: MQTT directly on the connection."""

    host: str
    port: int
    tls: Tls | None = None
    path: str | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Stream(Protocol):
    """A connected byte stream."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when bytes arrive."""
        ...

    def send(self, data: bytes) -> None:
        """Send all bytes. ClientError when the connection is lost, or the server does not read."""
        ...

    def receive(self) -> bytes | None:
        """Return bytes that have arrived, ``b""`` at the end, None when nothing complete is there. Never waits."""
        ...

    def pending(self) -> bool:
        """Whether `receive` has bytes although the descriptor is not readable."""
        ...

    def close(self) -> None:
        """Close the socket."""
        ...


class SocketStream:
    """TCP or TLS."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._pending = getattr(sock, "pending", None)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send all bytes within `SEND_WAIT_S`."""
        self._socket.settimeout(SEND_WAIT_S)
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise ClientError(f"the server has not read for {SEND_WAIT_S:.0f} s") from None
        except OSError as error:
            raise ClientError(f"connection lost: {_text(error)}") from None

    def receive(self) -> bytes | None:
        """Return bytes that have arrived."""
        self._socket.settimeout(0)
        try:
            return self._socket.recv(READ_BYTES)
        except OSError as error:
            if isinstance(error, BlockingIOError) or type(error).__name__ in ("SSLWantReadError", "SSLWantWriteError"):
                return None
            raise ClientError(f"connection lost: {_text(error)}") from None

    def pending(self) -> bool:
        """Whether TLS has decrypted more than was read."""
        return self._pending is not None and self._pending() > 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class WebSocketStream:
    """MQTT in binary frames of a WebSocket (RFC 6455). The layout of the frames means nothing. [MQTT-6.0.0-2]"""

    def __init__(self, inner: SocketStream, server: Server, deadline: float) -> None:
        from wsproto import ConnectionType, WSConnection  # plain connections do not need it
        from wsproto.events import Request

        self._inner = inner
        self._frames = WSConnection(ConnectionType.CLIENT)
        self._received = bytearray()
        self._ended = False
        self._open = False
        inner.send(self._frames.send(Request(str(server), server.path or "/", subprotocols=[SUBPROTOCOL])))
        while not self._open:
            left = deadline - time.monotonic()
            if left <= 0 or not (inner.pending() or select.select([inner], [], [], left)[0]):
                raise ClientError(f"{server} has not answered the WebSocket request in time")
            self._read()
            if self._ended:
                raise ClientError(f"{server} has ended the connection instead of opening a WebSocket")

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._inner.fileno()

    def send(self, data: bytes) -> None:
        """Send bytes as one frame."""
        from wsproto.events import BytesMessage

        self._inner.send(self._frames.send(BytesMessage(data)))

    def receive(self) -> bytes | None:
        """Return the content of frames that have arrived."""
        if not self._received and not self._ended:
            self._read()
        data = bytes(self._received)
        self._received.clear()
        return data or (b"" if self._ended else None)

    def pending(self) -> bool:
        """Whether content of frames was not read yet."""
        return bool(self._received) or self._inner.pending()

    def close(self) -> None:
        """Close the socket."""
        self._inner.close()

    def _read(self) -> None:
        from wsproto.utilities import RemoteProtocolError

        data = self._inner.receive()
        if data is None:
            return
        try:
            self._frames.receive_data(data or None)
            for event in self._frames.events():
                self._handle(event)
        except RemoteProtocolError as error:
            raise ClientError(f"the server does not speak WebSocket: {error}") from None
        self._ended = self._ended or not data

    def _handle(self, event: Event) -> None:
        from wsproto import events

        if isinstance(event, events.BytesMessage):
            self._received += event.data
        elif isinstance(event, events.AcceptConnection):
            if event.subprotocol != SUBPROTOCOL:
                raise ClientError(f"the WebSocket has not the subprotocol {SUBPROTOCOL!r}")
            self._open = True
        elif isinstance(event, events.RejectConnection):
            raise ClientError(f"WebSocket refused: HTTP status {event.status_code}")
        elif isinstance(event, events.Ping):
            self._inner.send(self._frames.send(event.response()))
        elif isinstance(event, events.CloseConnection):
            self._ended = True


def open_stream(server: Server, deadline: float) -> Stream:
    """Connect to a server until ``deadline`` (of `time.monotonic`). ClientError when that is not possible."""
    try:
        sock = socket.create_connection((server.host, server.port), max(0.001, deadline - time.monotonic()))
    except TimeoutError:
        raise ClientError(f"cannot connect to {server}: no answer in time") from None
    except OSError as error:
        raise ClientError(f"cannot connect to {server}: {_text(error)}") from None
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if server.tls is not None:
            sock = _secured(sock, server, server.tls)
        stream = SocketStream(sock)
        return stream if server.path is None else WebSocketStream(stream, server, deadline)
    except BaseException:
        sock.close()
        raise


def _secured(sock: socket.socket, server: Server, options: Tls) -> socket.socket:
    import ssl  # plain connections do not need it

    context = _context(options)
    try:
        return context.wrap_socket(sock, server_hostname=server.host)
    except ssl.SSLCertVerificationError as error:
        raise ClientError(f"the certificate of {server} is not valid: {error.verify_message}") from None
    except TimeoutError:
        raise ClientError(f"TLS with {server} failed: no answer in time") from None
    except OSError as error:
        raise ClientError(f"TLS with {server} failed: {_text(error)}") from None


def _context(options: Tls) -> ssl.SSLContext:
    import ssl

    try:
        context = ssl.create_default_context(cafile=options.cafile, capath=options.capath)
        if options.cert is not None:
            context.load_cert_chain(options.cert, options.key)
    except ssl.SSLError as error:
        raise ClientError(f"a file of --cafile, --cert or --key is not usable: {_text(error)}") from None
    return context


def _text(error: OSError) -> str:
    """Return the text of an error without its number."""
    return getattr(error, "reason", None) or error.strerror or str(error) or type(error).__name__
