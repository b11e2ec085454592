# SPDX-License-Identifier: Apache-2.0
"""What the message path reads out of the raw headers of a NATS message."""

from __future__ import annotations

from urllib.parse import unquote


def publish_qos(headers: bytes) -> int:
    """The QoS in the ``Nmqtt-Pub`` header; 0 when absent or not a QoS."""
    start = headers.find(b"\r\nNmqtt-Pub:")
    if start < 0:
        return 0
    start += 12
    digit = headers[start] if start < len(headers) else 0
    if digit == 0x20 or digit == 0x09:
        digit = headers[start + 1] if start + 1 < len(headers) else 0
    return 1 if digit == 0x31 else 2 if digit == 0x32 else 0


def header(headers: bytes, name: bytes) -> bytes:
    """The first value of a header, or empty; ``name`` includes the colon."""
    start = headers.find(b"\r\n" + name)
    if start < 0:
        return b""
    start += 2 + len(name)
    end = headers.find(b"\r\n", start)
    return headers[start : end if end >= 0 else len(headers)].strip()


def identity(headers: bytes) -> bytes:
    """What tells a message from every other: the release id of a QoS 2 message or a will, else its own id."""
    start = headers.find(b"\r\nNats-Msg-Id:")
    if start >= 0 and headers.startswith((b"q2-", b"will-", b" q2-", b" will-"), start + 14):
        return header(headers, b"Nats-Msg-Id:")
    return header(headers, b"Nmqtt-Id:")


def publisher(headers: bytes) -> str:
    """The publisher's client id, where the headers name it."""
    value = header(headers, b"Nmqtt-Client:")
    if not value:
        return ""
    return unquote(value.decode("latin-1"))


def is_status(headers: bytes) -> bool:
    """Whether the block is a word of NATS itself (``NATS/1.0 503``: nobody listens), and no message of anybody's."""
    return headers[8:9] == b" "
