# SPDX-License-Identifier: Apache-2.0
"""Parsers for frames that are sent to nats-server, and for its refusals."""

from __future__ import annotations

import json
import re
from typing import Final

import orjson

from mqtt_streams import messages, qos2, retained
from mqtt_streams.api import ApiError
from mqtt_streams.consumers import parse_ack
from mqtt_streams.repeats import search_key

MESSAGE_ID: Final = b"\r\nNats-Msg-Id:"

MESSAGES: Final = messages.STREAM.encode()
RETAINED: Final = retained.STREAM.encode()
HELD: Final = qos2.STREAM.encode()

STORE: Final = b"HPUB "
"""First bytes of frames of messages to be stored."""

MESSAGE: Final = b"HPUB $MQTT.msgs."
"""First bytes of frames of messages, for which their stream can be searched."""

RETAINED_COPY: Final = b"HPUB $MQTT.rmsgs."
"""First bytes of frames of retained copies."""

COMMON: Final = (b"q2-", b"will-")
"""First bytes of ids under which other gateways store, too: the release of a held publish, and a will."""

REQUEST: Final = re.compile(rb"PUB \S+\.STREAM\.")
"""Requests to a stream: removals."""

ACKNOWLEDGEMENT: Final = b"PUB $JS.ACK."
"""First bytes of acknowledgements of consumer deliveries."""

_STORED: Final = b"$MQTT."

_DENIED: Final = re.compile(rb'permissions violation for (publish|subscription) to ("(?:[^"\\]|\\.)*")', re.IGNORECASE)


def _block(frame: bytes) -> bytes:
    """Return the header block of an HPUB frame."""
    end = frame.index(b"\r\n")
    return frame[end + 2 : end + 2 + int(frame[:end].split(b" ")[-2])]


def has_id(frame: bytes) -> bool:
    """Return whether the stream recognises a repetition of the message of an HPUB frame, for some time."""
    return MESSAGE_ID in _block(frame)


def message_key(frame: bytes) -> bytes:
    """Return the key by which the message of an HPUB frame is found in its stream; empty = it has none."""
    return search_key(_block(frame), _subject(frame))


def size_of(frame: bytes) -> int:
    """Return the number of bytes of headers and payload in a PUB or HPUB frame."""
    return int(frame[: frame.index(b"\r\n")].rpartition(b" ")[2])


def subject_of(frame: bytes) -> str:
    """Return the subject of a PUB or HPUB frame for logs, at most 200 bytes."""
    return _subject(frame)[:200].decode(errors="replace")


def stream_of(frame: bytes) -> bytes:
    """Return the stream of a store, an acknowledgement or a stream request; empty: no known stream."""
    subject = _subject(frame)
    if subject.startswith(_STORED):
        name = subject.split(b".", 2)[1]
        return HELD if name == b"qos2" else b"$MQTT_" + name
    if b".STREAM." in subject:
        return subject.rpartition(b".")[2]
    ack = parse_ack(subject)
    return ack.stream.encode() if ack is not None else b""


def group_of(stream: bytes) -> bytes:
    """Return the name of a stream's group: while one stream of the group does not store, nothing is sent to the group.

    The retained copy of a message and the copy for subscribers form a group: neither copy may be ahead of the other.
    """
    return MESSAGES if stream == RETAINED else stream


def frame_group(frame: bytes) -> bytes:
    """Return the group of the stream of a frame."""
    return group_of(stream_of(frame))


def _subject(frame: bytes) -> bytes:
    start = frame.index(b" ") + 1
    return frame[start : frame.index(b" ", start)]  # no split: the data behind the subject may be large


def error_of(payload: bytes) -> ApiError | None:
    """Return the error of a PubAck; None when no JetStream server answered (status 503)."""
    if not payload:
        return None
    try:
        error = orjson.loads(payload)["error"]
        return ApiError(int(error["code"]), int(error.get("err_code", 0)), str(error.get("description", "")))
    except (ValueError, KeyError, TypeError):
        return ApiError(500, 0, "PubAck that cannot be read")


def denied(line: bytes) -> tuple[bool, bytes] | None:
    """Return what an `-ERR` does not permit: True for a publish, False for a subscription, and the subject."""
    found = _DENIED.search(line)
    return None if found is None else (found[1].lower() == b"publish", _unquoted(found[2]))


def _unquoted(text: bytes) -> bytes:
    """Return a subject without nats-server's quoting."""
    try:
        subject: str = json.loads(text)
    except ValueError:  # an escape that JSON does not have: the subject stays as it is and matches none
        return text
    return subject.encode()
