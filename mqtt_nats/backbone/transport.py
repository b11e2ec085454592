# SPDX-License-Identifier: Apache-2.0
"""The protocol that reads a NATS connection in bulk, in place of nats-py's stream reader."""

from __future__ import annotations

import asyncio
import logging
from time import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mqtt_nats.backbone.link import Link

log = logging.getLogger("mqtt_nats.nats")

# The gateway says this often that it lives (seconds, with a margin): else it has stood still.
STANDSTILL: Final = 1.5


class Wire(asyncio.Protocol):
    """The protocol that replaces nats-py's stream reader on the connected transport."""

    def __init__(self, link: Link, transport: asyncio.Transport, former: asyncio.BaseProtocol) -> None:
        self.link = link
        self.transport = transport
        self.secure = transport.get_extra_info("sslcontext") is not None
        self.former = former
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []
        """What has come of a message, or a line, that is not complete."""
        self._held = 0
        self._need = 0

    def data_received(self, data: bytes) -> None:
        """Parse every complete protocol line and message of one read."""
        start = 0
        if self._parts:
            # A message larger than a read is collected, not joined again at each read; what follows it is not copied.
            missing = self._need - self._held if self._need else len(data)
            self._parts.append(data if len(data) <= missing else data[:missing])
            self._held += len(data)
            if self._held < self._need:
                return
            start = missing
        link = self.link
        link.heard = now = time()
        if now - link.ticked > STANDSTILL:
            link.on_standstill()
        if start:
            whole = b"".join(self._parts)
            self._parts = []
            self._parse(whole, 0)
        if start < len(data):
            self._parse(data, start)

    def _parse(self, data: bytes, pos: int) -> None:
        link = self.link
        handlers = link.handlers
        runs = link.runs
        find = data.find
        end = len(data)
        need = 0
        while pos < end:
            eol = find(b"\r\n", pos)
            if eol < 0:
                break
            first = data[pos]
            if first == 77 or first == 72:  # M(SG), H(MSG)
                begin = pos
                args = data[pos:eol].split(b" ")
                start = eol + 2
                stop = start + int(args[-1])
                if stop + 2 > end:
                    need = stop + 2 - pos
                    break
                pos = stop + 2
                if first == 77:
                    headers = b""
                    reply = args[3] if len(args) == 5 else b""
                    if not reply and args[2] in runs and data.startswith(line := data[begin:start], pos):
                        # Messages that follow each other with one subject and one size have one line in common.
                        step = pos - begin
                        while data.startswith(line, pos) and pos + step <= end:
                            pos += step
                        size = stop - start
                        payloads = [data[at : at + size] for at in range(start, pos, step)]
                        try:
                            runs[args[2]](args[1], payloads)
                        except Exception:
                            log.exception("a handler failed for messages on %r", args[1])
                        continue
                else:
                    body = start + int(args[-2])
                    headers = data[start:body]
                    start = body
                    reply = args[3] if len(args) == 6 else b""
                handler = handlers.get(args[2])
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
        if pos < end:
            self._parts = [data[pos:] if pos else data]
            self._held = end - pos
            self._need = need

    def pause_writing(self) -> None:
        """Stop reading from publishers: NATS does not take what they send."""
        self.link.writable = False
        if self.link.on_writable is not None:
            self.link.on_writable(False)

    def resume_writing(self) -> None:
        """Let publishers go on."""
        self.link.writable = True
        if self.link.on_writable is not None:
            self.link.on_writable(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell nats-py, which reconnects."""
        self.former.connection_lost(exc)
        if self.link.wire is self:
            self.link.wire = None
        if not self.link.writable:
            self.resume_writing()
        if not self.closed.done():
            self.closed.set_result(exc)
