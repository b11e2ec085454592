# SPDX-License-Identifier: Apache-2.0
"""A blocking connection to NATS: one socket, no threads, one task at a time.

Requests are answered here. Who reads many messages subscribes with `send` and parses what `receive` brings.
"""

import random
import secrets
import select
import socket
import ssl
import time
from types import TracebackType
from typing import Any, Final, Self

import orjson

from mqtt_streams import headers as header_block
from mqtt_streams.api import Reply
from pyspark_mqtt_nats.errors import AccessError, ApiError, ConnectError, RequestTimeout, SourceError
from pyspark_mqtt_nats.nats import login, protocol, tls
from pyspark_mqtt_nats.nats.access import Access, Server

INBOX_SID: Final = b"R"
"""Subscription of our own answers: callers use other ids."""

_CHUNK: Final = 1 << 20
_RETRY: Final = 0.25  # seconds between two rounds over the servers
_LEAST_ATTEMPT: Final = 1.0  # seconds for one server, however many there are
_WAITS: Final = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class _Refused(ConnectError):
    """Trying again cannot help."""


class Connection:
    """A connection to one of the servers of `access`.

    Raises ConnectError, which names the option to change: at once when a login or a certificate is refused, otherwise
    after the servers have been tried for `access.connect_timeout` seconds.
    """

    info: dict[str, Any]
    """The server's INFO, the latest."""

    inbox: bytes
    """Subjects below it are this connection's own; `inbox.<number>` is used for answers."""

    server: Server
    """Where we are connected."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.info = {}
        self.inbox = f"{access.inbox_prefix}.{secrets.token_hex(11)}".encode()
        self._tls: ssl.SSLContext | None = None
        self._token = 0
        self._error = ""
        self._last = b""
        self._partial = b""
        self._foreign: list[bytes] = []
        self._socket = self._connect()
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.send(b"SUB %b.* %b\r\n" % (self.inbox, INBOX_SID))

    @property
    def max_payload(self) -> int:
        """Largest message that the server takes, headers included, in bytes."""
        return int(self.info.get("max_payload", 1 << 20))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection. What was sent and has not been answered may be lost."""
        self._socket.close()

    # -- bytes ------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send raw protocol bytes; raises ConnectError when the server takes none for the request timeout."""
        view = memoryview(data)
        deadline = 0.0
        while view:
            try:
                view = view[self._socket.send(view) :]
            except _WAITS as wait:
                deadline = deadline or time.monotonic() + self.access.request_timeout
                if not self._wait(wait, select.POLLOUT, deadline):
                    raise self._lost("it takes no data; requestTimeout is the limit") from None
            except OSError as error:
                raise self._lost(error.strerror or "") from None

    def receive(self, timeout: float) -> bytes:
        """The next bytes as they come, b"" after `timeout` seconds; raises ConnectError when there is no connection.

        The caller parses the frames, and answers PING. Frames that came during a request come first.
        """
        if self._foreign or self._partial:
            data = b"".join((*self._foreign, self._partial))
            self._foreign.clear()
            self._partial = b""
            return data
        return self._receive(timeout)

    def unread(self, data: bytes) -> None:
        """Give back the beginning of a frame that `receive` has brought: before a request, which needs whole frames."""
        self._partial = data + self._partial

    def _receive(self, timeout: float) -> bytes:
        deadline = 0.0
        while True:
            try:
                data = self._socket.recv(_CHUNK)
            except _WAITS as wait:
                deadline = deadline or time.monotonic() + timeout
                if not self._wait(wait, select.POLLIN, deadline):
                    return b""
                continue
            except OSError as error:
                raise self._lost(error.strerror or "") from None
            if not data:
                raise self._lost()
            self._last = data
            return data

    def _wait(self, why: Exception, direction: int, deadline: float) -> bool:
        """Wait until the socket may be used again, False at the deadline (seconds of the monotonic clock)."""
        if isinstance(why, ssl.SSLWantReadError):
            direction = select.POLLIN
        elif isinstance(why, ssl.SSLWantWriteError):
            direction = select.POLLOUT
        self._poll.modify(self._socket, direction)
        return bool(self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def _lost(self, reason: str = "") -> ConnectError:
        """The error of a connection that has ended; a last -ERR says why."""
        at = self._last.rfind(b"-ERR ")
        if at >= 0:
            self._error = _error_text(self._last[at:].partition(b"\r\n")[0])
        reason = self._error or reason or "closed by the server"
        return ConnectError(f"the connection to {self.server} was lost: {reason} (option servers)", "servers")

    # -- requests ---------------------------------------------------------------------------------

    def token(self) -> int:
        """A number for the next answer, never used before: its reply subject is `inbox.<number>`."""
        self._token += 1
        return self._token

    def request(self, subject: str, body: bytes = b"", headers: bytes = b"", timeout: float = 5.0) -> Reply:
        """Send a message and return the first answer.

        Raises ApiError (code 503) when nobody listens, AccessError, RequestTimeout, ConnectError. `headers` is a raw
        block. Frames of the caller's subscriptions that come meanwhile are kept for `receive`.
        """
        if len(headers) + len(body) > self.max_payload:
            raise SourceError(f"a request of {len(headers) + len(body)} bytes is more than the server's max_payload")
        token = self.token()
        self.send(protocol.publish(subject.encode(), body, headers, b"%b.%d" % (self.inbox, token)))
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            for got, reply in self.replies(left):
                if got != token:
                    continue
                if not reply.payload and header_block.status(reply.headers) == 503:
                    raise ApiError(f"nobody answers on {subject}", "servers", 503)
                return reply
        raise RequestTimeout(f"no answer on {subject} within {timeout:g} s (option requestTimeout)", "requestTimeout")

    def replies(self, timeout: float) -> list[tuple[int, Reply]]:
        """Answers that have come, by their numbers, maybe none; waits for data for at most `timeout` seconds.

        Raises AccessError when the server has refused a subject since.
        """
        data = self._receive(timeout)
        buffer = self._partial + data if self._partial else data
        found: list[tuple[int, Reply]] = []
        refused: AccessError | None = None
        at = 0
        try:
            for frame in protocol.frames(buffer):
                if frame.sid == INBOX_SID:
                    number = frame.subject.rpartition(b".")[2]
                    reply = Reply(frame.subject.decode(), frame.headers, frame.payload, frame.reply.decode())
                    found.append((int(number) if number.isdigit() else 0, reply))
                elif frame.sid:
                    self._foreign.append(buffer[at : frame.end])
                else:
                    refused = self.control(frame.line) or refused
                at = frame.end
        except protocol.ProtocolError:
            raise self._lost("it sent what is not NATS protocol") from None
        self._partial = buffer[at:]
        if refused is not None:
            raise refused
        return found

    def control(self, line: bytes) -> AccessError | None:
        """Obey a line that is no message: PING is answered; what has to be raised, for a subject that was refused."""
        if line == protocol.PING:
            self.send(protocol.PONG_LINE)
        elif line.startswith(b"INFO "):
            self.info |= orjson.loads(line[5:])
        elif line.startswith(b"-ERR"):
            self._error = _error_text(line)
            if self._error.lower().startswith("permissions violation"):
                return self._denied(self._error)
        return None

    def _denied(self, error: str) -> AccessError:
        option = self.access.login or "user"
        if "subscription" in error.lower():
            hint = f"let the user subscribe to {self.access.inbox_prefix}.>, or set inboxPrefix"
            return AccessError(f"{self.server}: {error}; {hint}", "inboxPrefix")
        return AccessError(f"{self.server}: {error}; let the user publish there, or change {option}", option)

    # -- connecting -------------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        """Try the servers in random order, so that many tasks are spread over them, again and again."""
        deadline = time.monotonic() + self.access.connect_timeout
        waiting = random.sample(self.access.servers, len(self.access.servers))
        failures: dict[Server, ConnectError] = {}
        while waiting:
            for index, server in enumerate(waiting):
                left = deadline - time.monotonic()
                share = max(left / (len(waiting) - index), min(left, _LEAST_ATTEMPT))
                if share <= 0:
                    failures.setdefault(server, _failure(server, "there was no time to try it", "connectTimeout"))
                    continue
                try:
                    return self._attempt(server, time.monotonic() + share)
                except ConnectError as error:
                    failures[server] = error
            waiting = [server for server in waiting if not isinstance(failures[server], _Refused)]
            if time.monotonic() + _RETRY > deadline:
                break
            if waiting:
                time.sleep(_RETRY)
        # What cannot change by itself comes first: its option is the one to change.
        errors = sorted(failures.values(), key=lambda error: not isinstance(error, _Refused))
        text = "; ".join(dict.fromkeys(map(str, errors)))
        raise ConnectError(text, errors[0].option)

    def _attempt(self, server: Server, deadline: float) -> socket.socket:
        try:
            plain = socket.create_connection((server.host, server.port), _left(deadline))
        except socket.gaierror as error:
            raise _failure(server, f"its name cannot be resolved ({error.strerror}); change servers") from None
        except TimeoutError:
            raise _failure(server, "it does not answer; change servers or connectTimeout") from None
        except OSError as error:
            raise _failure(server, f"{(error.strerror or str(error)).lower()}; change servers") from None
        wire = plain
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire = self._greet(plain, server, deadline)
            self.server = server
            return wire
        except BaseException:
            wire.close()
            plain.close()
            raise

    def _greet(self, plain: socket.socket, server: Server, deadline: float) -> socket.socket:
        """INFO, TLS, CONNECT, PING and PONG; the socket to go on with."""
        wire = self._secure(plain, server, deadline) if self.access.tls_first else plain
        self.info = self._read_info(wire, server, deadline)
        if wire is plain and (server.tls or self._wants_tls or self.info.get("tls_required")):
            if not (self.info.get("tls_required") or self.info.get("tls_available")):
                raise _failure(server, "it offers no TLS; use nats:// in servers, without tls options", final=True)
            wire = self._secure(plain, server, deadline)
        try:
            wire.settimeout(_left(deadline))
            wire.sendall(login.connect_line(self.access, server, self.info) + b"PING\r\n")
            self._read_pong(wire, server, deadline)
        except TimeoutError:
            raise _failure(server, "it does not go on after CONNECT; change servers or connectTimeout") from None
        except ssl.SSLError as error:
            wire.close()
            raise _failure(server, *tls.explain(error, self.access), final=True) from None
        except OSError as error:
            raise _failure(server, f"{error.strerror or 'connection lost'} after CONNECT") from None
        return wire

    @property
    def _wants_tls(self) -> bool:
        access = self.access
        return access.tls_ca is not None or access.tls_cert is not None or access.tls_hostname is not None

    def _secure(self, plain: socket.socket, server: Server, deadline: float) -> socket.socket:
        self._tls = self._tls or tls.context(self.access)
        try:
            plain.settimeout(_left(deadline))
            return self._tls.wrap_socket(plain, server_hostname=self.access.tls_hostname or server.host)
        except TimeoutError:
            raise _failure(server, "the TLS handshake takes too long; change servers or connectTimeout") from None
        except (ssl.SSLError, ValueError) as error:
            if isinstance(error, ValueError) and not isinstance(error, OSError):
                raise _failure(server, f"{error}; change tlsHostname", "tlsHostname", final=True) from None
            raise _failure(server, *tls.explain(error, self.access), final=True) from None
        except OSError as error:
            raise _failure(server, f"{error.strerror or 'connection closed'} in the TLS handshake") from None

    def _read_info(self, wire: socket.socket, server: Server, deadline: float) -> dict[str, Any]:
        data = b""
        try:
            while b"\r\n" not in data:
                wire.settimeout(_left(deadline))
                more = wire.recv(65_536)
                data += more
                if not more or not (data.startswith(b"INFO ") or b"INFO ".startswith(data)):
                    break
                if len(data) > protocol.MAX_LINE:
                    break
        except TimeoutError:
            text = "it sends nothing: is it a NATS server? Change servers, or set tlsFirst where TLS comes first"
            raise _failure(server, text) from None
        except OSError as error:
            raise _failure(server, f"{error.strerror or 'connection lost'} before INFO") from None
        line, end, rest = data.partition(b"\r\n")
        if not data:
            raise _failure(server, "it closes the connection at once: is it a NATS server? Change servers")
        # What came unencrypted after INFO would be taken for something said under TLS.
        if not line.startswith(b"INFO ") or not end or rest:
            raise _failure(server, "it is not a NATS server; change servers", final=True)
        try:
            info = orjson.loads(line[5:])
        except orjson.JSONDecodeError:
            info = None
        if not isinstance(info, dict):
            raise _failure(server, "it is not a NATS server; change servers", final=True)
        return info

    def _read_pong(self, wire: socket.socket, server: Server, deadline: float) -> None:
        buffer = b""
        while True:
            wire.settimeout(_left(deadline))
            more = wire.recv(65_536)
            buffer += more
            at = 0
            for frame in protocol.frames(buffer):
                at = frame.end
                if frame.line == b"PONG":
                    self._partial = buffer[at:]
                    return
                if frame.line.startswith(b"-ERR"):
                    text = _error_text(frame.line)
                    what, option = login.refusal(text, self.access)
                    raise _failure(server, what, option, final=not login.is_passing(text))
                self._control_at_start(wire, frame.line)
            buffer = buffer[at:]
            if not more:
                raise _failure(server, "it closed the connection after CONNECT; change servers")

    def _control_at_start(self, wire: socket.socket, line: bytes) -> None:
        if line == protocol.PING:
            wire.sendall(protocol.PONG_LINE)
        elif line.startswith(b"INFO "):
            self.info |= orjson.loads(line[5:])


def _failure(server: Server, text: str, option: str = "servers", *, final: bool = False) -> ConnectError:
    kind = _Refused if final else ConnectError
    return kind(f"cannot connect to {server}: {text}", option)


def _left(deadline: float) -> float:
    """Seconds until a deadline, at least a moment: 0 would mean not to block."""
    return max(0.001, deadline - time.monotonic())


def _error_text(line: bytes) -> str:
    return line[4:].decode(errors="replace").strip(" '\r\n")
