# SPDX-License-Identifier: Apache-2.0
"""Values that the message path reads from the raw headers of a NATS message."""

from __future__ import annotations

from urllib.parse import unquote


def publish_qos(headers: bytes) -> int:
    """Return the QoS in the ``Nmqtt-Pub`` header; 0 when the header is absent or not a QoS."""
    start = headers.find(b"\r\nNmqtt-Pub:")
    if start < 0:
        return 0
    start += 12
    digit = headers[start] if start < len(headers) else 0
    if digit == 0x20 or digit == 0x09:
        digit = headers[start + 1] if start + 1 < len(headers) else 0
    return 1 if digit == 0x31 else 2 if digit == 0x32 else 0


def header(headers: bytes, name: bytes) -> bytes:
    """Return the first value of a header; empty = no such header. ``name`` includes the colon."""
    start = headers.find(b"\r\n" + name)
    if start < 0:
        return b""
    start += 2 + len(name)
    end = headers.find(b"\r\n", start)
    return headers[start : end if end >= 0 else len(headers)].strip()


def identity(headers: bytes) -> bytes:
    """Return the id by which a message is recognised: the release id of a QoS 2 message or will, else `Nmqtt-Id`."""
    start = headers.find(b"\r\nNats-Msg-Id:")
    if start >= 0 and headers.startswith((b"q2-", b"will-", b" q2-", b" will-"), start + 14):
        return header(headers, b"Nats-Msg-Id:")
    return header(headers, b"Nmqtt-Id:")


def is_retained(headers: bytes) -> bool:
    """Return whether a message was published with RETAIN."""
    return b"\r\nNmqtt-Retain:" in headers


def moved(headers: bytes, line: bytes) -> bool:
    """Return whether the headers name another subject than the one on which the message came.

    Args:
        line: the header line ``Nmqtt-Subject`` for the subject on which it came.
    """
    start = headers.find(b"\r\nNmqtt-Subject:")
    if start < 0 or headers.startswith(line, start + 2):
        return False
    return header(headers, b"Nmqtt-Subject:") != line[14:-2]  # a relay may have put a space behind the colon


def publisher(headers: bytes) -> str:
    """Return the publisher's client id; empty where the headers do not name it."""
    value = header(headers, b"Nmqtt-Client:")
    if not value:
        return ""
    return unquote(value.decode("latin-1"))


def is_status(headers: bytes) -> bool:
    """Whether the headers are a status of NATS itself (``NATS/1.0 503``: no responders), not of a message."""
    return headers[8:9] == b" "
