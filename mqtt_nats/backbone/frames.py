# SPDX-License-Identifier: Apache-2.0
"""What is read of the frames that are sent to nats-server, and of its refusals."""

from __future__ import annotations

import json
import re
from typing import Final

import orjson

from mqtt_streams import messages, qos2, retained
from mqtt_streams.api import ApiError
from mqtt_streams.consumers import parse_ack

MESSAGE_ID: Final = b"\r\nNats-Msg-Id:"

MESSAGES: Final = messages.STREAM.encode()
RETAINED: Final = retained.STREAM.encode()
HELD: Final = qos2.STREAM.encode()

_STORED: Final = b"$MQTT."

_DENIED: Final = re.compile(rb'permissions violation for (publish|subscription) to ("(?:[^"\\]|\\.)*")', re.IGNORECASE)


def message_id(frame: bytes) -> bytes:
    """The id of a message that has one."""
    start = frame.index(MESSAGE_ID) + len(MESSAGE_ID)
    return frame[start : frame.index(b"\r\n", start)].strip()


def size_of(frame: bytes) -> int:
    """Bytes of headers and payload of a PUB or HPUB."""
    return int(frame[: frame.index(b"\r\n")].rpartition(b" ")[2])


def subject_of(frame: bytes) -> str:
    """The subject of a PUB or HPUB, for people to read: no more of it than fits into a line."""
    return _subject(frame)[:200].decode(errors="replace")


def stream_of(frame: bytes) -> bytes:
    """The stream that a store, an acknowledgement or a request to one is for; empty: none of those that we know."""
    subject = _subject(frame)
    if subject.startswith(_STORED):
        name = subject.split(b".", 2)[1]
        return HELD if name == b"qos2" else b"$MQTT_" + name
    if b".STREAM." in subject:
        return subject.rpartition(b".")[2]
    ack = parse_ack(subject)
    return ack.stream.encode() if ack is not None else b""


def group_of(stream: bytes) -> bytes:
    """The streams to which nothing is sent while one of them stores nothing, by the name of one of them.

    What is retained and what goes to subscribers are two copies of one message: neither is to be ahead of the other.
    """
    return MESSAGES if stream == RETAINED else stream


def _subject(frame: bytes) -> bytes:
    start = frame.index(b" ") + 1
    return frame[start : frame.index(b" ", start)]  # not a split: what comes behind may be large


def error_of(payload: bytes) -> ApiError | None:
    """The error of a PubAck; None when no JetStream server answered (status 503)."""
    if not payload:
        return None
    try:
        error = orjson.loads(payload)["error"]
        return ApiError(int(error["code"]), int(error.get("err_code", 0)), str(error.get("description", "")))
    except (ValueError, KeyError, TypeError):
        return ApiError(500, 0, "PubAck that cannot be read")


def denied(line: bytes) -> tuple[bool, bytes] | None:
    """What an `-ERR` does not permit: whether it is a publish (else a subscription), and the subject."""
    found = _DENIED.search(line)
    return None if found is None else (found[1].lower() == b"publish", _unquoted(found[2]))


def _unquoted(text: bytes) -> bytes:
    """A subject as nats-server quotes it in its errors."""
    try:
        subject: str = json.loads(text)
    except ValueError:  # an escape that JSON does not have: such a subject is not looked for
        return text
    return subject.encode()
