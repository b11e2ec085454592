# SPDX-License-Identifier: Apache-2.0
"""Publishes the messages of one partition, in order, many at a time, each until NATS has confirmed it.

What is not confirmed is kept. It is sent again, in its order and before anything new, when JetStream had no leader or
the connection was lost: a stored copy that arrives twice is dropped by the stream, a bare one by the gateways.
"""

import secrets
import time
from collections import deque
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self

import orjson

from mqtt_streams.error_codes import TRANSIENT
from mqtt_streams.headers import status
from mqtt_streams.retained import STREAM as RETAINED
from pyspark_mqtt_nats.errors import ApiError, ConnectError, RequestTimeout
from pyspark_mqtt_nats.nats import protocol
from pyspark_mqtt_nats.nats.access import Access
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.publishing.encoding import Encoder, Frames, Message

SID: Final = b"sink"

WINDOW_BYTES: Final = 16 << 20
"""Bytes that may wait for their confirmation."""

WRITE_BYTES: Final = 64 << 10
"""Bytes that are collected for one write."""

RETRY_TIMEOUTS: Final = 3
"""Times the request timeout for which the oldest message is tried again."""

PROBE_FIRST: Final = 0.1
PROBE_MOST: Final = 2.0

Kind = Literal["core", "stored", "retained", "cleared", "removal"]


class Waiting(NamedTuple):
    """A message that is not confirmed: `bare` is sent before `frame`, but not again while the connection lasts."""

    row: int
    kind: Kind
    bare: bytes
    frame: bytes


class Publisher:
    """A connection that publishes; a context manager.

    `window`: messages that may wait for their confirmation. `where`: begins messages about a row, whose number follows.
    Raises ConnectError.
    """

    def __init__(self, access: Access, window: int, where: str = "row") -> None:
        self.duplicates = 0
        """Messages that the stream had already."""
        self.inbox = f"{access.inbox_prefix}.{secrets.token_hex(11)}.".encode()
        self._access = access
        self._window = window
        self._where = where
        self._token = 0
        self._waiting: dict[int, Waiting] = {}
        self._bytes = 0
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._core: deque[int] = deque()
        """Tokens of what the next PONG but one confirms, oldest first."""
        self._ping = 0
        """Up to which of them PING was sent after; 0 when no PONG is awaited."""
        self._partial = b""
        self._failing = 0.0
        """Since when nothing has been confirmed although it was tried; 0 while all is well."""
        self._passing = ""
        """Why JetStream stores nothing at the moment."""
        self._connection = self._connect()

    @property
    def max_payload(self) -> int:
        """Largest message that the server takes, headers included, in bytes."""
        return self._connection.max_payload

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()

    # -- out --------------------------------------------------------------------------------------

    def publish(self, encoder: Encoder, message: Message, identity: bytes, row: int) -> None:
        """Publish a message, which is checked before; raises Refused, SourceError (perhaps for an earlier one)."""
        self._token = token = self._token + 2
        frames = encoder.frames(message, identity, token)
        retained, bare, stored = frames
        if retained:
            self._wait(token, Waiting(row, "retained" if message.payload else "cleared", b"", retained))
        if stored:
            self._wait(token + 1, Waiting(row, "stored", bare, stored))
        else:
            self._wait(token + 1, Waiting(row, "core", bare, b""))
            self._core.append(token + 1)
        self._append(frames)

    def _append(self, frames: Frames) -> None:
        self._out.extend(frames)
        self._out_bytes += sum(map(len, frames))
        if len(self._waiting) >= self._window or self._bytes >= WINDOW_BYTES:
            self._drain(self._window // 2, WINDOW_BYTES // 2)
        elif self._out_bytes >= WRITE_BYTES:
            self._exchange(0.0)

    def _wait(self, token: int, waiting: Waiting) -> None:
        self._waiting[token] = waiting
        self._bytes += len(waiting.bare) + len(waiting.frame)

    def push(self) -> None:
        """Send what was collected: the next message may be long in coming."""
        self._exchange(0.0)

    def finish(self) -> None:
        """Wait until everything is confirmed; raises SourceError."""
        self._drain(0, 0)

    def _drain(self, most: int, most_bytes: int) -> None:
        while len(self._waiting) > most or self._bytes > most_bytes:
            self._exchange(self._access.request_timeout)

    # -- both ways --------------------------------------------------------------------------------

    def _exchange(self, timeout: float) -> None:
        """Send what was collected and take in what has come; with a timeout, something has to come (seconds)."""
        try:
            self._write()
            if not self._take(timeout) and timeout:
                if not any(waiting.frame for waiting in self._waiting.values()):
                    raise ConnectError(f"{self._connection.server} does not answer (option requestTimeout)", "servers")
                self._passing = f"nothing is acknowledged for {timeout:g} s"
            if self._passing:
                self._probe()
        except ConnectError as error:
            self._again(error)

    def _write(self) -> None:
        if self._core and not self._ping:
            self._ping = self._core[-1]
            self._out.append(b"PING\r\n")
        if self._out:
            data = b"".join(self._out)
            self._out.clear()
            self._out_bytes = 0
            self._connection.send(data)

    def _take(self, timeout: float) -> bool:
        """Take in what has come, for `timeout` seconds at most; whether there was anything."""
        data = self._connection.receive(timeout)
        if not data:
            return False
        buffer = self._partial + data if self._partial else data
        at = 0
        size = len(buffer)
        while (eol := buffer.find(b"\r\n", at)) >= 0:
            start = eol + 2
            fields = buffer[at:eol].split()
            if fields and fields[0] in (b"MSG", b"HMSG"):
                length = int(fields[-1])
                if start + length + 2 > size:
                    break
                head = int(fields[-2]) if fields[0] == b"HMSG" else 0
                if fields[2] == SID:
                    token = int(fields[1].rpartition(b".")[2], 16)
                    self._answer(token, buffer[start : start + head], buffer[start + head : start + length])
                at = start + length + 2
            else:
                self._control(buffer[at:eol])
                at = start
        self._partial = buffer[at:]
        return True

    def _control(self, line: bytes) -> None:
        if line == b"PONG":
            while self._core and self._core[0] <= self._ping:
                self._confirm(self._core.popleft())
            self._ping = 0
        elif (refused := self._connection.control(line)) is not None:
            raise refused

    def _answer(self, token: int, headers: bytes, payload: bytes) -> None:
        waiting = self._waiting.get(token)
        if waiting is None:
            return
        if headers and not payload and status(headers) == 503:
            self._passing = "no stream takes it"
        elif b'"error"' in payload:
            self._refused(token, waiting, payload)
        elif waiting.kind != "removal" and b'"stream"' not in payload:
            text = f"{self._where} {waiting.row}: the answer is not a JetStream acknowledgement (option subjectPrefix)"
            raise ApiError(text, "subjectPrefix")
        else:
            if waiting.kind == "cleared":
                self._remove(waiting.row, payload)
            elif waiting.kind == "stored" and b'"duplicate"' in payload:
                self.duplicates += 1
            self._confirm(token)

    def _refused(self, token: int, waiting: Waiting, payload: bytes) -> None:
        error = orjson.loads(payload)["error"]
        code, number = error.get("code", 500), error.get("err_code", 0)
        description = str(error.get("description", ""))
        if code == 429 or number in TRANSIENT:
            self._passing = description
        elif waiting.kind == "removal":  # it is gone
            self._confirm(token)
        else:
            text = f"{self._where} {waiting.row}: JetStream refuses it: {description} (option stream)"
            raise ApiError(text, "stream", code, number, description)

    def _confirm(self, token: int) -> None:
        waiting = self._waiting.pop(token, None)
        if waiting is not None:
            self._bytes -= len(waiting.bare) + len(waiting.frame)
            self._failing = 0.0

    def _remove(self, row: int, ack: bytes) -> None:
        """Remove our own tombstone: nobody else does."""
        self._token = token = self._token + 2
        subject = f"{self._access.api_prefix}.STREAM.MSG.DELETE.{RETAINED}".encode()
        body = b'{"seq":%d,"no_erase":true}' % orjson.loads(ack)["seq"]
        frame = protocol.publish(subject, body, reply=b"%b%x" % (self.inbox, token))
        self._wait(token, Waiting(row, "removal", b"", frame))
        self._out.append(frame)

    # -- when it does not go on -------------------------------------------------------------------

    def _probe(self) -> None:
        """JetStream stores nothing: try the oldest message until it does, then send all of them again."""
        delay = PROBE_FIRST
        self._fails()
        while (oldest := self._oldest()) is not None:
            if self._fails():
                row = self._waiting[oldest].row
                text = f"{self._where} {row} is not stored: {self._passing} (option stream or requestTimeout)"
                raise RequestTimeout(text, "stream")
            self._listen(oldest, delay)
            if oldest in self._waiting:
                self._connection.send(self._waiting[oldest].frame)
                reason, self._passing = self._passing, ""
                self._listen(oldest, PROBE_MOST)
                if oldest in self._waiting:
                    self._passing = self._passing or reason
                    delay = min(delay * 2, PROBE_MOST)
                    continue
            self._passing = ""
            self._out = [waiting.frame for waiting in self._waiting.values()]
            return
        self._passing = ""

    def _oldest(self) -> int | None:
        return next((token for token, waiting in self._waiting.items() if waiting.frame), None)

    def _listen(self, token: int, seconds: float) -> None:
        """Take in what comes until this one is confirmed or cannot be, for so many seconds at most."""
        before = self._passing
        deadline = time.monotonic() + seconds
        while token in self._waiting and (left := deadline - time.monotonic()) > 0:
            self._take(left)
            if self._passing and not before:
                break

    def _again(self, error: ConnectError) -> None:
        """The connection was lost: what is not confirmed goes out again on another one, bare copies too."""
        while True:
            if self._fails():
                raise error
            self._connection.close()
            try:
                self._connection = self._connect()
            except ConnectError as failure:
                raise ConnectError(f"{error}; {failure}", failure.option) from None
            self._partial = b""
            self._passing = ""
            self._ping = 0
            if not self._waiting:  # nothing that could be confirmed: being connected is all there is
                self._failing = 0.0
            self._out = [part for waiting in self._waiting.values() for part in (waiting.bare, waiting.frame)]
            try:
                self._write()
            except ConnectError as failure:
                error = failure
            else:
                return

    def _fails(self) -> bool:
        """Note that something has failed; whether it has done so for too long."""
        now = time.monotonic()
        self._failing = self._failing or now
        return now - self._failing > RETRY_TIMEOUTS * self._access.request_timeout

    def _connect(self) -> Connection:
        connection = Connection(self._access)
        connection.send(b"SUB %b* %b\r\n" % (self.inbox, SID))
        return connection
