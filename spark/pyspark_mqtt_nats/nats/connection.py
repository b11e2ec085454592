# SPDX-License-Identifier: Apache-2.0
"""Blocking connection to NATS: one socket, no threads, one task at a time.

`request` and `answers` parse the answers to requests. A caller that reads many messages has `Frames` of its own collect
them, also those that come during a request. A caller that makes no requests may parse what `receive` returns.
"""

import secrets
import select
import ssl
import time
from types import TracebackType
from typing import Final, Self

import orjson

from mqtt_streams import headers as header_block
from mqtt_streams.api import Reply
from pyspark_mqtt_nats.errors import AccessError, ApiError, ConnectError, RequestTimeout
from pyspark_mqtt_nats.nats import protocol
from pyspark_mqtt_nats.nats.access import Access
from pyspark_mqtt_nats.nats.frames import Frames
from pyspark_mqtt_nats.nats.handshake import connect

ANSWERS: Final = b"R"
"""Subscription id of the answers, and the token after the inbox in their subjects; callers must use other ids."""

_CHUNK: Final = 1 << 20  # bytes read at once
_WAITS: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """A connection to one of the servers of `access`; a context manager.

    Raises ConnectError: at once when a login or a certificate is refused, otherwise after the servers have been tried
    for `access.connect_timeout` seconds.

    `server` is the connected server, `info` its latest INFO. Subjects below `inbox` (without a dot at its end) belong
    to this connection; `inbox.R.>` is reserved for answers.
    """

    def __init__(self, access: Access) -> None:
        self.access = access
        self.inbox = f"{access.inbox_prefix}.{secrets.token_hex(11)}".encode()
        self._token = 0
        self._error = ""
        self._last = b""
        self._frames = Frames(b"")
        self._wire, self.server, self.info, self._early = connect(access)
        self._wire.setblocking(False)
        self._secure = isinstance(self._wire, ssl.SSLSocket)
        self._poll = select.poll()
        self._poll.register(self._wire, select.POLLIN)

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
        """Close the connection. Data that was sent and not answered may be lost."""
        self._wire.close()

    # -- bytes ------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send raw protocol bytes; raises ConnectError when the server reads none for `request_timeout` seconds."""
        view = memoryview(data)
        deadline = 0.0
        while view:
            try:
                view = view[self._wire.send(view) :]
                deadline = 0.0
            except _WAITS as wait:
                deadline = deadline or time.monotonic() + self.access.request_timeout
                if not self._wait(wait, select.POLLOUT, deadline):
                    raise self._lost("it takes no more data") from None
            except OSError as error:
                raise self._lost(error.strerror or "") from None

    def collect(self, frames: Frames) -> None:
        """Have `frames` take everything that comes from now on."""
        frames.feed(self._frames.rest())
        self._frames = frames

    def read(self, timeout: float) -> bool:
        """Have the frames take the next bytes; False when none came for `timeout` seconds.

        Raises AccessError when the server has refused a subject, ConnectError when the connection is lost.
        """
        data = self.receive(timeout)
        self._frames.feed(data)
        refused: AccessError | None = None
        for line in self._frames.lines():
            refused = self.control(line) or refused
        if refused is not None:
            raise refused
        return bool(data)

    def receive(self, timeout: float) -> bytes:
        """Return the next bytes, b"" after `timeout` seconds; raises ConnectError when the connection is lost.

        The caller parses the frames and passes lines that are not messages to `control`.
        """
        if self._early:
            data, self._early = self._early, b""
            return data
        deadline = 0.0
        while True:
            try:
                data = self._wire.recv(_CHUNK)
            except _WAITS as wait:
                deadline = deadline or time.monotonic() + timeout
                if not self._wait(wait, select.POLLIN, deadline):
                    return b""
                continue
            except OSError as error:
                raise self._lost(error.strerror or "") from None
            if not data:
                raise self._lost()
            if self._secure:
                data = self._gather(data)
            self._last = data
            return data

    def _gather(self, data: bytes) -> bytes:
        """Return `data` and all bytes readable now: TLS returns at most 16 KiB a call, callers parse large chunks."""
        chunks = [data]
        size = len(data)
        try:
            while size < _CHUNK and (more := self._wire.recv(_CHUNK)):
                chunks.append(more)
                size += len(more)
        except OSError:
            pass  # no more data now; a lost connection shows at the next call
        return b"".join(chunks)

    def _wait(self, why: OSError, direction: int, deadline: float) -> bool:
        """Wait until the socket is ready; False at the deadline (seconds of the monotonic clock)."""
        if isinstance(why, ssl.SSLWantReadError):
            direction = select.POLLIN
        elif isinstance(why, ssl.SSLWantWriteError):
            direction = select.POLLOUT
        self._poll.modify(self._wire, direction)
        return bool(self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def _lost(self, reason: str = "") -> ConnectError:
        """Return the error of a connection that has ended; the server's last -ERR gives the reason."""
        try:
            while data := self._wire.recv(_CHUNK):
                self._last = data
        except OSError:
            pass
        at = self._last.rfind(b"-ERR ")
        if at >= 0:
            self._error = protocol.error_text(self._last[at:].partition(b"\r\n")[0])
        reason = self._error or reason.lower() or "it was closed"
        return ConnectError(f"the connection to {self.server} was lost: {reason} (option servers)", "servers")

    # -- requests ---------------------------------------------------------------------------------

    def expect(self) -> tuple[int, bytes]:
        """Return the number of the next answer (as `answers` returns it) and the reply subject for the request."""
        if not self._token:
            self.send(b"SUB %b.%b.* %b\r\n" % (self.inbox, ANSWERS, ANSWERS))
        self._token += 1
        return self._token, b"%b.%b.%d" % (self.inbox, ANSWERS, self._token)

    def request(self, subject: str, body: bytes = b"", headers: bytes = b"", timeout: float = 5.0) -> Reply:
        """Send a message and return the first answer.

        Raises ApiError (code 503) when the subject has no subscriber, AccessError, RequestTimeout, ConnectError.
        `headers` is a raw block.
        """
        self.check_size(len(headers) + len(body))
        number, reply_subject = self.expect()
        self.send(protocol.publish(subject.encode(), body, headers, reply_subject))
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            for got, reply in self.answers(left):
                if got == number:
                    if not reply.payload and header_block.status(reply.headers) == 503:
                        raise ApiError(f"no server answers on {subject}", "servers", 503)
                    return reply
        text = f"no answer on {subject} within {timeout:g} s (option requestTimeout)"
        raise RequestTimeout(text, "requestTimeout")

    def check_size(self, size: int) -> None:
        """Raise ApiError when a message of `size` bytes, headers included, exceeds the server's max_payload."""
        if size > self.max_payload:
            text = f"{size} bytes are more than the max_payload of {self.server}, {self.max_payload} (option servers)"
            raise ApiError(text, "servers", 400)

    def answers(self, timeout: float) -> list[tuple[int, Reply]]:
        """Return the answers that have come, with their numbers, maybe none; waits at most `timeout` seconds for data.

        Raises AccessError when the server has refused a subject, ConnectError when the connection is lost.
        """
        self.read(timeout)
        try:
            return [
                (int(one.subject.rpartition(b".")[2]), Reply(one.subject.decode(), one.headers, one.payload))
                for one in self._frames.loose(ANSWERS)
            ]
        except ValueError:
            raise self._lost("it sent data that is not the NATS protocol") from None

    def control(self, line: bytes) -> AccessError | None:
        """Process a line that is not a message (PING, INFO, -ERR); return the error to raise for a refused subject."""
        if line == protocol.PING:
            self.send(protocol.PONG + b"\r\n")
        elif line.startswith(b"INFO "):
            self.info |= orjson.loads(line[5:])
        elif line.startswith(b"-ERR"):
            self._error = protocol.error_text(line)
            if self._error.lower().startswith("permissions violation"):
                return self._denied(self._error)
        return None

    def _denied(self, error: str) -> AccessError:
        option = self.access.login or "user"
        hint = "let the user publish there"
        if "subscription" in error.lower():
            inbox = f"{self.access.inbox_prefix}."
            option = "inboxPrefix" if f'"{inbox}' in error else option
            hint = f"let the user subscribe to {inbox}>"
        return AccessError(f"{self.server}: {error}; {hint} (option {option})", option)
