# SPDX-License-Identifier: Apache-2.0
"""NATS message headers: names of headers, the raw header block, and encodings of header values."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

PUB: Final = "Nmqtt-Pub"
ID: Final = "Nmqtt-Id"
CLIENT: Final = "Nmqtt-Client"
RETAIN: Final = "Nmqtt-Retain"
FOR: Final = "Nmqtt-For"
"""Client id of a durable session for which a message is; such a message may have several, and is for no others."""
EXPIRY: Final = "Nmqtt-Expiry"
FORMAT: Final = "Nmqtt-Format"
CONTENT_TYPE: Final = "Content-Type"
CONTENT_TYPE_ENCODED: Final = "Nmqtt-Content-Type"
"""Percent-encoded content type, instead of `CONTENT_TYPE` where the content type is not safe as a header value."""
REPLY: Final = "Nmqtt-Reply"
ANSWER: Final = "Nmqtt-Answer"
"""Held publishes, wills, scheduled messages: `1` = the publisher may be answered on the topic in `REPLY`."""
CORRELATION: Final = "Nmqtt-Correlation"
USER: Final = "Nmqtt-User"
"""`name=value` of one user property, percent-encoded: all user properties of a message are, in order, or none is."""
EPOCH: Final = "Nmqtt-Epoch"
"""`$MQTT_sess` sequence of the write that claimed the session."""
SUBJECT: Final = "Nmqtt-Subject"
"""Held QoS 2 publishes: the subject to release to."""
DELAY: Final = "Nmqtt-Delay"
"""Stored wills: will delay interval in seconds."""
PUBREL: Final = "Nmqtt-PubRel"
"""Owed PUBRELs: the packet identifier."""
SEQ: Final = "Nmqtt-Seq"
"""Owed PUBRELs: `$MQTT_msgs` sequence of the message."""
R_TOPIC: Final = "Nmqtt-RTopic"
R_FLAGS: Final = "Nmqtt-RFlags"
"""Retained messages: flags nibble of the PUBLISH as hex, -1 = tombstone."""
R_ORIGIN: Final = "Nmqtt-ROrigin"
R_SOURCE: Final = "Nmqtt-RSource"

MSG_ID: Final = "Nats-Msg-Id"
TTL: Final = "Nats-TTL"
EXPECTED_LAST_SUBJECT_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"
ROLLUP: Final = "Nats-Rollup"
MARKER_REASON: Final = "Nats-Marker-Reason"
STREAM_SUBJECT: Final = "Nats-Subject"
STREAM_SEQUENCE: Final = "Nats-Sequence"
STREAM_TIME: Final = "Nats-Time-Stamp"
NUM_PENDING: Final = "Nats-Num-Pending"
SCHEDULE: Final = "Nats-Schedule"
SCHEDULE_TARGET: Final = "Nats-Schedule-Target"

START: Final = b"NATS/1.0\r\n"
END: Final = b"\r\n"
REPLACES: Final = b"Nats-Rollup:sub\r\n"
"""Header line of a write that replaces the record of its subject.

nats-server then deletes the former record itself, on the disk too. A record that is removed because of
`max_msgs_per_subject` is not deleted on the disk: it is back after a kill of nats-server, once the record that has
replaced it is removed.
"""
REPLACING: Final = START + REPLACES + END
"""Header block of such a write that has no other headers."""
PUB_LINES: Final = (b"Nmqtt-Pub:0\r\n", b"Nmqtt-Pub:1\r\n", b"Nmqtt-Pub:2\r\n")
"""Header line `PUB` by QoS, for frames that are built without `build`."""
PUB_BLOCKS: Final = tuple(START + line + END for line in PUB_LINES)
"""Header block by QoS that contains only the header `PUB`."""

_UNRESERVED: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~")
"""Characters that `percent_encode` leaves as they are."""


def parse(block: bytes) -> list[tuple[str, str]]:
    """Return the headers of a raw block, in order, repetitions included, values stripped; no UTF-8 becomes U+FFFD."""
    pairs = []
    for line in block.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            pairs.append((name.decode(errors="replace"), value.decode(errors="replace").strip(" \t")))
    return pairs


@lru_cache(maxsize=256)
def _key(name: str) -> bytes:
    """Return the bytes in front of a header's value in a block."""
    return b"\r\n" + name.encode() + b":"


def get(block: bytes, name: str, errors: str = "replace") -> str | None:
    """Return the first header called `name` (exact case, as nats-server compares) without parsing the block."""
    key = _key(name)
    at = block.find(key)
    if at < 0:
        return None
    start = at + len(key)
    end = block.find(b"\r\n", start)
    return block[start : end if end >= 0 else len(block)].decode(errors=errors).strip(" \t")


def get_last(block: bytes, name: str, errors: str = "replace") -> str | None:
    """Return the last header called `name`: nats-server appends its headers behind those of the publisher."""
    at = block.rfind(_key(name))
    return None if at < 0 else get(block[at:], name, errors)


def get_int(block: bytes, name: str) -> int | None:
    """Return the first header called `name` as a number, None unless its value is 1 to 19 ASCII digits."""
    value = get(block, name)
    if value is None or not value.isascii() or not value.isdecimal() or len(value) > 19:
        return None
    return int(value)


def status(block: bytes) -> int | None:
    """Return the inline status of a block (`NATS/1.0 404 No Messages`), None for a block without a status."""
    digits = block[9:12]
    return int(digits) if block.startswith(b"NATS/1.0 ") and len(digits) == 3 and digits.isdigit() else None


def build(pairs: Iterable[tuple[str, str]]) -> bytes:
    """Return a raw block; raises ValueError for a name or value that contains a line end, and for a wrong name."""
    lines = [START]
    for name, value in pairs:
        if not name or ":" in name or "\r" in name or "\n" in name or "\r" in value or "\n" in value:
            raise ValueError(f"not a header: {name!r}")
        lines.append(f"{name}:{value}\r\n".encode())
    lines.append(END)
    return b"".join(lines)


def message_id(time_us: int, gateway48: int, counter16: int) -> str:
    """Return 32 hex digits: 64-bit time in microseconds, 48-bit gateway and connection, 16-bit counter; all wrap."""
    return f"{time_us & 0xFFFFFFFFFFFFFFFF:016x}{gateway48 & 0xFFFFFFFFFFFF:012x}{counter16 & 0xFFFF:04x}"


def percent_encode(text: str) -> str:
    """Encode any text as a header value: every character except `A-Za-z0-9_.-~` is percent-encoded."""
    return text if _UNRESERVED.issuperset(text) else quote(text, safe="")


def for_some(headers: bytes) -> bool:
    """Return whether a message with these headers is for some durable sessions only."""
    return b"\r\nNmqtt-For:" in headers


def for_line(client_id: str) -> bytes:
    """Return the header line that names one of the sessions for which a message is."""
    return f"{FOR}:{percent_encode(client_id)}\r\n".encode()


def percent_decode(value: str) -> str:
    """Decode a value of `percent_encode`; bytes that are no UTF-8 become U+FFFD."""
    return unquote(value, errors="replace")
