# SPDX-License-Identifier: Apache-2.0
"""Protocol that reads a NATS connection in bulk, in place of nats-py's stream reader."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from mqtt_nats.base.server_clock import elapsed

if TYPE_CHECKING:
    from mqtt_nats.backbone.link import NatsConnection

log = logging.getLogger("mqtt_nats.nats")

# Seconds without a sign of the event loop after which the gateway has stood still; its ticks come more often.
STANDSTILL: Final = 1.5

SLICE_S: Final = 0.02
"""Maximum seconds of message handling at once: messages may have many receivers, and new topics.

With 1,000 receivers a message takes some milliseconds, and the writes to their sockets that follow as much again: half
of the rate was lost when only 0.005 s of messages shared these writes.
"""

MESSAGES: Final = 8
"""Number of messages handled between two looks at the clock, and of a run before the first look."""

GROWTH: Final = 4
"""Factor by which the number of messages of a run grows between two looks at the clock."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RunHandler:
    """Handler of a subscription that can also take plain messages in a row; abstract."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Handle one message."""

    @abstractmethod
    def run(self, subject: bytes, payloads: list[bytes]) -> None:
        """Handle consecutive messages without headers and reply, with payloads of one size."""


class NatsTransport(asyncio.Protocol):
    """Protocol that replaces nats-py's stream reader on the connected transport."""

    def __init__(self, link: NatsConnection, transport: asyncio.Transport, former: asyncio.BaseProtocol) -> None:
        self.link = link
        self.transport = transport
        self.secure = transport.get_extra_info("sslcontext") is not None
        self.former = former
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []
        """Parts of an incomplete message or line."""
        self._held = 0
        self._need = 0
        self._waiting: deque[bytes] = deque()
        """Data that waits for the next turn of the event loop, in order."""
        self._until = 0.0
        """End of the present turn, on the system's monotonic clock (seconds)."""

    def data_received(self, data: bytes) -> None:
        """Parse the complete protocol lines and messages of one read; long work goes on in the next turns."""
        if self._waiting:  # with TLS data may arrive although reading is paused
            self._waiting.append(data)
            return
        self._until = monotonic() + SLICE_S
        left = self._take(data)
        if left:
            self._waiting.append(left)
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Parse the waiting data, until the time of this turn is over."""
        waiting = self._waiting
        self._until = monotonic() + SLICE_S
        while waiting:
            left = self._take(waiting.popleft())
            if left:
                waiting.appendleft(left)
            if waiting and monotonic() >= self._until:
                asyncio.get_running_loop().call_soon(self._go_on)
                return
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _take(self, data: bytes) -> bytes:
        """Parse a part of the data; return the rest when the time is over."""
        start = 0
        if self._parts:
            # A message larger than a read is collected, and joined once at its end; the data behind it is not copied.
            missing = self._need - self._held if self._need else len(data)
            self._parts.append(data if len(data) <= missing else data[:missing])
            self._held += len(data)
            if self._held < self._need:
                return b""
            start = missing
        link = self.link
        now = elapsed()
        link.hear(now)
        if now - link.ticked > STANDSTILL:
            link.on_standstill()
        if start:
            whole = b"".join(self._parts)
            self._parts = []
            done = self._parse(whole, 0)
            if done < len(whole):
                return whole[done:] + data[start:]
        if start < len(data):
            return data[self._parse(data, start) :]
        return b""

    def _parse(self, data: bytes, pos: int) -> int:
        """Handle messages until the time is over; return the end of the handled or kept data."""
        link = self.link
        handlers = link.handlers
        find = data.find
        end = len(data)
        unseen = MESSAGES
        while pos < end:
            if not unseen:
                if monotonic() >= self._until:
                    return pos
                unseen = MESSAGES
            unseen -= 1
            eol = find(b"\r\n", pos)
            if eol < 0:
                return self._keep(data, pos, 0)
            first = data[pos]
            if first == 77 or first == 72:  # M(SG), H(MSG)
                begin = pos
                args = data[pos:eol].split(b" ")
                start = eol + 2
                stop = start + int(args[-1])
                if stop + 2 > end:
                    return self._keep(data, pos, stop + 2 - pos)
                pos = stop + 2
                handler = handlers.get(args[2])
                if first == 77:
                    headers = b""
                    reply = args[3] if len(args) == 5 else b""
                    if not reply and isinstance(handler, RunHandler) and data.startswith(data[begin:start], pos):
                        pos, unseen = self._run(handler, data, begin, start, stop - start, args[1]), 0
                        continue
                else:
                    body = start + int(args[-2])
                    headers = data[start:body]
                    start = body
                    reply = args[3] if len(args) == 6 else b""
                if handler is None:
                    link.foreign(int(args[2]), args[1], reply, headers, data[start:stop])
                    continue
                try:
                    handler(args[1], reply, headers, data[start:stop])
                except Exception:
                    log.exception("a handler failed for a message on %r", args[1])
            else:
                link.control(data[pos:eol])
                pos = eol + 2
        return end

    def _keep(self, data: bytes, pos: int, need: int) -> int:
        """Keep the rest of the data for the next read; return its end.

        Args:
            need: bytes of the incomplete message; 0 = not known.
        """
        self._parts = [data[pos:] if pos else data]
        self._held = len(data) - pos
        self._need = need
        return len(data)

    def _run(self, handler: RunHandler, data: bytes, pos: int, start: int, size: int, subject: bytes) -> int:
        """Pass on messages with payloads of one size and identical lines; return the end of the handled data."""
        line = data[pos:start]
        step = len(line) + size + 2
        several = MESSAGES
        while True:
            first = pos
            most = min(len(data), first + several * step)
            while pos + step <= most and data.startswith(line, pos):
                pos += step
            if pos == first:
                return pos
            try:
                handler.run(subject, [data[at : at + size] for at in range(first + len(line), pos, step)])
            except Exception:
                log.exception("a handler failed for messages on %r", subject)
            if pos < first + several * step or monotonic() >= self._until:
                return pos
            several *= GROWTH

    def pause_writing(self) -> None:
        """Stop reading from publishers: NATS does not take their messages fast enough."""
        self.link.take_data(False)

    def resume_writing(self) -> None:
        """Read from publishers again."""
        self.link.take_data(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the data that has arrived, then tell nats-py, which reconnects."""
        self._until = inf
        while self._waiting and self.link.wire in (self, None):
            self._take(self._waiting.popleft())
        self.former.connection_lost(exc)
        self.link.drop_wire(self)
        if not self.link.writable:
            self.resume_writing()
        if not self.closed.done():
            self.closed.set_result(exc)
