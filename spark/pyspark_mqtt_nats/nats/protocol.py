# SPDX-License-Identifier: Apache-2.0
"""NATS protocol of requests and their answers. Readers of many messages parse the frames by themselves."""

from collections.abc import Iterator
from typing import Final, NamedTuple

PING: Final = b"PING"
PONG: Final = b"PONG"
MAX_LINE: Final = 1 << 20
"""Longest accepted control line in bytes: INFO lists all servers of a cluster."""


class Frame(NamedTuple):
    """One frame. `sid` is b"" unless it is a message; `line` is the control line, `end` the start of the next frame."""

    end: int
    line: bytes
    sid: bytes = b""
    subject: bytes = b""
    reply: bytes = b""
    headers: bytes = b""
    payload: bytes = b""


class ProtocolError(ValueError):
    """The bytes are not frames of the NATS protocol."""


def frames(buffer: bytes) -> Iterator[Frame]:
    """Yield all complete frames at the beginning of `buffer`; raises ProtocolError."""
    at = 0
    while (eol := buffer.find(b"\r\n", at)) >= 0:
        line = buffer[at:eol]
        start = at = eol + 2
        if line.startswith((b"MSG ", b"HMSG ")):
            fields = line.split()
            with_headers = line.startswith(b"H")
            try:
                size = int(fields[-1])
                head = int(fields[-2]) if with_headers else 0
                subject, sid, *reply = fields[1 : -2 if with_headers else -1]
            except (ValueError, IndexError):
                raise ProtocolError from None
            at += size + 2
            if at > len(buffer):
                return
            payload = buffer[start + head : start + size]
            yield Frame(at, line, sid, subject, reply[0] if reply else b"", buffer[start : start + head], payload)
        else:
            yield Frame(at, line)
    if len(buffer) - at > MAX_LINE and buffer.find(b"\r\n", at) < 0:
        raise ProtocolError


def publish(subject: bytes, payload: bytes, headers: bytes = b"", reply: bytes = b"") -> bytes:
    """Return the PUB or HPUB frame of one message; `headers` is a raw block, b"" for none."""
    if reply:
        subject = b"%b %b" % (subject, reply)
    if headers:
        return b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, len(headers), len(headers) + len(payload), headers, payload)
    return b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload)


def error_text(line: bytes) -> str:
    """Return the text of an -ERR line."""
    return line[4:].decode(errors="replace").strip(" '")
