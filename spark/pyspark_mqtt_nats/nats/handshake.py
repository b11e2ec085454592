# SPDX-License-Identifier: Apache-2.0
"""From a list of servers to a socket that is logged in to NATS; every failure names the option to change."""

import random
import socket
import ssl
import time
from typing import Any, Final, NamedTuple

import orjson

from pyspark_mqtt_nats.errors import ConnectError
from pyspark_mqtt_nats.nats import login, protocol, tls
from pyspark_mqtt_nats.nats.access import Access, Server

_RETRY: Final = 0.25  # seconds between two rounds over the servers
_LEAST_ATTEMPT: Final = 1.0  # seconds for one server, however many there are
_CHUNK: Final = 65_536


class Connected(NamedTuple):
    """Open connection: its socket, its server, the server's INFO, and the bytes read after the PONG."""

    wire: socket.socket
    server: Server
    info: dict[str, Any]
    rest: bytes


class _Refused(ConnectError):
    """The server refused the connection for a reason that another attempt does not change."""


def connect(access: Access) -> Connected:
    """Try the servers in random order, which spreads many tasks over them, until one accepts the login.

    Raises ConnectError: at once when every server refuses the login or has a certificate that is refused, otherwise
    when `access.connect_timeout` is over.
    """
    deadline = time.monotonic() + access.connect_timeout
    waiting = random.sample(access.servers, len(access.servers))
    failures: dict[Server, ConnectError] = {}
    while waiting:
        for index, server in enumerate(waiting):
            left = deadline - time.monotonic()
            share = max(left / (len(waiting) - index), min(left, _LEAST_ATTEMPT))
            if share <= 0:
                failures.setdefault(server, _failure(server, "no time was left to try it", "connectTimeout"))
                continue
            try:
                return _Attempt(access, server, time.monotonic() + share).run()
            except ConnectError as error:
                failures[server] = error
        waiting = [server for server in waiting if not isinstance(failures[server], _Refused)]
        if time.monotonic() + _RETRY > deadline:
            break
        if waiting:
            time.sleep(_RETRY)
    # Refusals come first: they last until the user changes an option, and the error names that option.
    errors = sorted(failures.values(), key=lambda error: not isinstance(error, _Refused))
    raise ConnectError("; ".join(dict.fromkeys(map(str, errors))), errors[0].option)


def _failure(server: Server, text: str, option: str = "servers") -> ConnectError:
    return ConnectError(f"cannot connect to {server}: {text} (option {option})", option)


def _refused(server: Server, text: str, option: str = "servers") -> ConnectError:
    return _Refused(f"cannot connect to {server}: {text} (option {option})", option)


class _Attempt:
    """Attempt to connect to one server, until `deadline` (seconds of the monotonic clock)."""

    def __init__(self, access: Access, server: Server, deadline: float) -> None:
        self.access = access
        self.server = server
        self.deadline = deadline
        self.info: dict[str, Any] = {}

    def run(self) -> Connected:
        """Open the socket, do the TLS handshake, log in; on ConnectError every socket is closed."""
        wire = self._open()
        try:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire, rest = self._greet(wire)
        except BaseException:
            wire.close()
            raise
        return Connected(wire, self.server, self.info, rest)

    @property
    def _left(self) -> float:
        """Seconds left for the next step, at least 1 ms: a timeout of 0 would make the socket non-blocking."""
        return max(0.001, self.deadline - time.monotonic())

    def _open(self) -> socket.socket:
        try:
            return socket.create_connection((self.server.host, self.server.port), self._left)
        except (socket.gaierror, UnicodeError):
            raise _failure(self.server, "there is no host of this name") from None
        except TimeoutError:
            raise _failure(self.server, "it does not answer") from None
        except OSError as error:
            raise _failure(self.server, (error.strerror or str(error)).lower()) from None

    def _greet(self, plain: socket.socket) -> tuple[socket.socket, bytes]:
        """Do INFO, TLS, CONNECT, PING and PONG; return the socket to use and the bytes that came after the PONG."""
        access = self.access
        if access.tls_first:
            wire = self._secure(plain)
            return wire, self._under_tls(wire)
        rest = self._read_info(plain)
        if not (access.wants_tls or self.info.get("tls_required")):
            return plain, self._log_in(plain, rest)
        if rest.startswith(b"-ERR"):
            raise self._turned_away(rest)
        if rest:
            # Bytes that came unencrypted would be processed as if they had come under TLS.
            raise _refused(self.server, "it sends data between INFO and the TLS handshake")
        if not (self.info.get("tls_required") or self.info.get("tls_available")):
            raise _refused(self.server, "it offers no TLS; use nats:// and no options for TLS")
        if self.info.get("tls_verify") and access.tls_cert is None:
            raise _refused(self.server, "it requires a client certificate", "tlsCert")
        wire = self._secure(plain)
        return wire, self._under_tls(wire)

    def _under_tls(self, wire: socket.socket) -> bytes:
        """Log in over TLS; close the TLS socket on failure, since `run` can close only the plain socket."""
        try:
            return self._log_in(wire, self._read_info(wire) if self.access.tls_first else b"")
        except BaseException:
            wire.close()
            raise

    def _secure(self, plain: socket.socket) -> ssl.SSLSocket:
        access = self.access
        name = access.tls_hostname or self.server.host
        try:
            name.encode("idna")  # raises here: wrap_socket would leave a socket open
            plain.settimeout(self._left)
            return tls.context(access).wrap_socket(plain, server_hostname=name)
        except TimeoutError:
            option = "tlsFirst" if access.tls_first else "servers"
            raise _failure(self.server, "the TLS handshake does not end", option) from None
        except OSError as error:
            raise self._broken(error, "in the TLS handshake") from None
        except ValueError:
            raise _refused(self.server, "its host name cannot be in a certificate", "tlsHostname") from None

    def _broken(self, error: OSError, when: str) -> ConnectError:
        """Return the error for a connection that failed at the step `when`."""
        ended = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError)
        if isinstance(error, ssl.SSLError) and not ended:
            return _refused(self.server, *tls.explain(error, self.access))
        text = "it closed the connection" if ended else (error.strerror or "the connection was lost").lower()
        if self.access.tls_cert is not None and when != "before INFO":
            return _failure(self.server, f"{text} {when}; it may not accept the client certificate", "tlsCert")
        return _failure(self.server, f"{text} {when}")

    def _read_info(self, wire: socket.socket) -> bytes:
        """Read the server's INFO line into `info`; return the bytes that came after it."""
        data = b""
        try:
            while b"\r\n" not in data and len(data) <= protocol.MAX_LINE:
                wire.settimeout(self._left)
                more = wire.recv(_CHUNK)
                data += more
                if not more or not data.startswith((b"INFO "[: len(data)], b"-ERR "[: len(data)])):
                    break
        except TimeoutError:
            text = "it sends nothing: it is no NATS server, or one where TLS comes first; set tlsFirst for that"
            raise _failure(self.server, text) from None
        except OSError as error:
            raise self._broken(error, "before INFO") from None
        if not data:
            raise self._broken(ConnectionResetError(), "before INFO")
        line, end, rest = data.partition(b"\r\n")
        if line.startswith(b"-ERR"):
            raise self._turned_away(line)
        info = _object(line[5:]) if end and line.startswith(b"INFO ") else None
        if info is None:
            raise _refused(self.server, "it is not a NATS server")
        self.info = info
        return rest

    def _log_in(self, wire: socket.socket, rest: bytes) -> bytes:
        """Send CONNECT and PING, read until the PONG; `rest` was read already. Return the bytes after the PONG."""
        try:
            wire.settimeout(self._left)
            wire.sendall(login.connect_line(self.access, self.server, self.info) + b"PING\r\n")
            return self._read_pong(wire, rest)
        except TimeoutError:
            raise _failure(self.server, "it does not continue after CONNECT") from None
        except OSError as error:
            raise self._broken(error, "after CONNECT") from None
        except protocol.ProtocolError:
            raise _refused(self.server, "it is not a NATS server") from None

    def _read_pong(self, wire: socket.socket, buffer: bytes) -> bytes:
        while True:
            at = 0
            for frame in protocol.frames(buffer):
                at = frame.end
                if frame.line == protocol.PONG:
                    return buffer[at:]
                if frame.line == protocol.PING:
                    wire.sendall(protocol.PONG + b"\r\n")
                elif frame.line.startswith(b"INFO "):
                    self.info |= _object(frame.line[5:]) or {}
                elif frame.line.startswith(b"-ERR"):
                    raise self._turned_away(frame.line)
            wire.settimeout(self._left)
            more = wire.recv(_CHUNK)
            if not more:
                raise ConnectionResetError
            buffer = buffer[at:] + more

    def _turned_away(self, line: bytes) -> ConnectError:
        """Return the error for an -ERR that came before the PONG."""
        said = protocol.error_text(line.partition(b"\r\n")[0])
        kind = _failure if login.is_passing(said) else _refused
        return kind(self.server, *login.refusal(said, self.access))


def _object(text: bytes) -> dict[str, Any] | None:
    """Return a JSON object, None for anything else."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
