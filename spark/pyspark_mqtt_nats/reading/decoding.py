# SPDX-License-Identifier: Apache-2.0
"""What the subject and the header block of one stored message say, by the rules of docs/nats.md.

Nothing here fails: what cannot be read is None. Results depend on the bytes alone, so each different subject and block
is decoded once (see `dictionaries`).
"""

from binascii import Error, a2b_base64
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from mqtt_streams import headers as names
from mqtt_streams.properties import DISTURBING, RESERVED, SERVICE_ERROR
from mqtt_streams.subjects import subject_to_topic

SHOWN_MOST: Final = 1024
"""User properties shown of one message, as gateways do."""

_STRING_MOST: Final = 65_535
"""Bytes of an MQTT string."""

_CRLF: Final = b"\r\n"
_HEX: Final = frozenset("0123456789abcdef")
_START: Final = b"NATS/1.0"
_VARYING: Final = tuple(f"\r\n{name}:".encode() for name in (names.ID, names.MSG_ID))
"""Lines that differ in each message; they are in the columns `headers` and `message_id` only."""

_PUB: Final = names.PUB.encode()
_RETAIN: Final = names.RETAIN.encode()
_CLIENT: Final = names.CLIENT.encode()
_FORMAT: Final = names.FORMAT.encode()
_CONTENT_TYPE: Final = names.CONTENT_TYPE.encode()
_CONTENT_TYPE_ENCODED: Final = names.CONTENT_TYPE_ENCODED.encode()
_REPLY: Final = names.REPLY.encode()
_CORRELATION: Final = names.CORRELATION.encode()
_EXPIRY: Final = names.EXPIRY.encode()
_USER: Final = names.USER.encode()
_RESERVED: Final = tuple(beginning.encode() for beginning in RESERVED)
_SERVICE_ERROR: Final = frozenset(name.encode() for name in SERVICE_ERROR)


class Topic(NamedTuple):
    """The columns that a subject gives."""

    subject: str
    topic: str
    topic_levels: list[str]


class Decoded(NamedTuple):
    """The columns that a header block gives."""

    qos: int | None
    retain: bool | None
    publisher: str | None
    content_type: str | None
    payload_format: int | None
    response_topic: str | None
    correlation_data: bytes | None
    message_expiry: int | None
    user_properties: list[tuple[str, str]] | None


_NOTHING: Final = Decoded(None, False, None, None, None, None, None, None, [])
_UNREADABLE: Final = Decoded(None, None, None, None, None, None, None, None, None)


def decode_subject(subject: bytes, prefix: bytes) -> Topic:
    """A subject of the stream; `prefix` is taken off where it is there."""
    text = subject.removeprefix(prefix).decode(errors="replace")
    topic = subject_to_topic(text)
    return Topic(text, topic, topic.split("/"))


def readable(block: bytes) -> bool:
    """Whether this is a block: it ends with an empty line, whose own end a direct get does not keep as it was."""
    return block.startswith(_START) and block[-4:-2] == _CRLF


def without_varying(block: bytes) -> bytes:
    """A block without the first of each line that differs in each message; one that does not end as usual is kept."""
    if not block.endswith(b"\r\n\r\n"):
        return block
    for start in _VARYING:
        at = block.find(start)
        if at >= 0:
            end = block.find(_CRLF, at + 2)
            if end >= 0:
                block = block[:at] + block[end:]
    return block


def decode_headers(block: bytes) -> Decoded:
    """A raw header block, b"" for none; what is no header block at all gives None in every column."""
    if not block:
        return _NOTHING
    if not readable(block):
        return _UNREADABLE
    single: dict[bytes, bytes] = {}
    users: list[tuple[str, str]] = []
    for line in block[:-2].split(_CRLF)[1:]:
        name, colon, value = line.partition(b":")
        if not colon:
            continue
        value = value.strip(b" \t")
        if name == _USER:
            left, _, right = value.partition(b"=")
            pair = _legal(unquote_to_bytes(left)), _legal(unquote_to_bytes(right))
        else:
            plain = name.strip().lower()
            if not plain or (plain.startswith(_RESERVED) and plain not in _SERVICE_ERROR):
                single.setdefault(_CONTENT_TYPE if name.lower() == b"content-type" else name, value)
                continue
            pair = _clean(name), _clean(value)
        if pair[0] is not None and pair[1] is not None and len(users) < SHOWN_MOST:
            users.append((pair[0], pair[1]))
    return _columns(single, users)


def _columns(single: dict[bytes, bytes], users: list[tuple[str, str]]) -> Decoded:
    client = single.get(_CLIENT)
    indicator = single.get(_FORMAT)
    kind = single.get(_CONTENT_TYPE)
    encoded = single.get(_CONTENT_TYPE_ENCODED)
    content_type = None
    if kind is not None:
        content_type = _clean(kind)
    elif encoded is not None:
        content_type = _legal(unquote_to_bytes(encoded))
    reply = single.get(_REPLY)
    response = _legal(unquote_to_bytes(reply)) if reply else None
    if response is not None and (not response or "+" in response or "#" in response):
        response = None
    return Decoded(
        _qos(single.get(_PUB, b"")[:1]),
        _RETAIN in single,
        unquote_to_bytes(client).decode(errors="replace") if client else None,
        content_type,
        int(indicator) if indicator in (b"0", b"1") else None,
        response,
        _correlation(single.get(_CORRELATION)),
        _number(single.get(_EXPIRY)),
        users,
    )


def _qos(digit: bytes) -> int | None:
    return int(digit) if digit in (b"0", b"1", b"2") else None


def _correlation(value: bytes | None) -> bytes | None:
    if value is None:
        return None
    try:
        raw = a2b_base64(value, strict_mode=True)
    except Error:
        return None
    return raw if len(raw) <= _STRING_MOST else None


def _number(value: bytes | None) -> int | None:
    """An interval in seconds, of four bytes."""
    if value is None or not value.isdigit() or len(value) > 10:
        return None
    number = int(value)
    return number if number <= 0xFFFF_FFFF else None


def _legal(raw: bytes) -> str | None:
    """The MQTT string that these bytes are, None when they are not one."""
    if len(raw) > _STRING_MOST or b"\0" in raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _clean(raw: bytes) -> str | None:
    """The MQTT string that these bytes are, None also where it has control characters."""
    text = _legal(raw)
    if text is not None and (text.isprintable() or DISTURBING.isdisjoint(text)):
        return text
    return None


def message_id(block: bytes) -> str | None:
    """The id that a gateway has given a message; None where there is none, or something else in its place."""
    found = names.get(block, names.ID) if readable(block) else None
    return found if found is not None and len(found) == 32 and _HEX.issuperset(found) else None


def header_pairs(block: bytes) -> list[tuple[str, bytes]] | None:
    """All headers of a block in order, for the column `headers`; None for what is no header block."""
    if not block:
        return []
    if not readable(block):
        return None
    pairs = []
    for line in block[:-2].split(_CRLF)[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            pairs.append((name.decode(errors="replace"), value.strip(b" \t")))
    return pairs
