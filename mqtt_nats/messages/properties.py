# SPDX-License-Identifier: Apache-2.0
"""Properties of a message as they stand in a PUBLISH packet, encoded from a packet or from the headers of a message.

A header that belongs to NATS or to the gateways is never shown as a user property, except the error of a micro service.
``mqtt_streams.properties`` writes the headers. See docs/internals/messages.md#properties-as-headers.
"""

from __future__ import annotations

from binascii import Error, a2b_base64
from typing import Final
from urllib.parse import unquote_to_bytes

from mqtt_nats.codec import Properties
from mqtt_streams import headers as names
from mqtt_streams.properties import DISTURBING, NAME_MOST, NAMES_MOST, RESERVED, SERVICE_ERROR

STRING_MOST: Final = 65_535
"""Largest size of an MQTT string, in bytes."""

SHOWN_MOST: Final = 1024
"""User properties that are made from the headers of one message, at most; a gateway takes fewer from its clients."""

FORMAT: Final = b"\x01"
CONTENT_TYPE: Final = b"\x03"
RESPONSE_TOPIC: Final = b"\x08"
CORRELATION: Final = b"\x09"
USER: Final = b"\x26"

_NOTHING: Final = (b"", -1)

_to_property: dict[bytes, bytes] = {}
"""Cache: name of a header -> encoded beginning of its user property, empty when the header is not shown."""

_SINGLE: Final = {
    names.FORMAT.encode(): 1,
    names.CONTENT_TYPE.encode(): 2,
    names.CONTENT_TYPE_ENCODED.encode(): 3,
    names.REPLY.encode(): 4,
    names.CORRELATION.encode(): 5,
    names.EXPIRY.encode(): 6,
    names.USER.encode(): 7,
}

_RETAINED: Final = (b"Nmqtt-RTopic:", b"Nmqtt-RFlags:", b"Nmqtt-ROrigin:", b"Nmqtt-Client:")
"""Headers with which the record of a retained message begins; a message without properties has no further ones."""

_NO_SINGLE: Final[list[bytes | None]] = [None] * 7


def body(properties: Properties) -> bytes:
    """Return the properties of a message as they stand in a PUBLISH packet, without their length.

    Expiry, topic alias and subscription identifiers are left out, as they differ between subscribers. User
    properties keep their order [MQTT-3.3.2-17] [MQTT-3.3.2-18] (5.0).
    """
    data = b""
    if "payload_format_indicator" in properties:
        data = b"\x01%c" % properties["payload_format_indicator"]  # [MQTT-3.3.2-4] (5.0)
    if "content_type" in properties:
        data += CONTENT_TYPE + _string(properties["content_type"].encode())  # [MQTT-3.3.2-20] (5.0)
    if "response_topic" in properties:
        data += RESPONSE_TOPIC + _string(properties["response_topic"].encode())  # [MQTT-3.3.2-15] (5.0)
    if "correlation_data" in properties:
        data += CORRELATION + _string(properties["correlation_data"])  # [MQTT-3.3.2-16] (5.0)
    for name, value in properties.get("user_property", ()):
        data += USER + _string(name.encode()) + _string(value.encode())
    return data


def _string(raw: bytes) -> bytes:
    return len(raw).to_bytes(2, "big") + raw


def _own_lines(lines: list[bytes]) -> int:
    """Return how many lines the gateway's own headers are, with the first line; most messages have no others."""
    size = len(lines)
    at = 1
    if size > 3 and lines[1].startswith(b"Nmqtt-Pub:"):
        at = 2
        if lines[2].startswith(b"Nmqtt-Id:"):
            at = 4 if lines[3].startswith(b"Nmqtt-Client:") else 3
        if at < size and lines[at].startswith(b"Nmqtt-Subject:"):
            at += 1
    elif size > 3 and lines[1].startswith(b"Nmqtt-RTopic:"):  # a record of a retained message
        for own in _RETAINED:
            if at < size and lines[at].startswith(own):
                at += 1
    return at


def from_headers(headers: bytes) -> tuple[bytes, int]:
    """Return the properties of a message that has this raw block of headers.

    Every header that is not reserved is a user property, in order, up to SHOWN_MOST. A value that is not legal in a
    packet is left out, and so is a header of a NATS client with control characters, over which some MQTT clients end
    their connection. Of a header that a message may have once, the first counts.

    Returns:
        The properties as :func:`body` encodes them, and the expiry interval in seconds, -1 = none.
    """
    lines = headers.split(b"\r\n")
    at = _own_lines(lines)
    if len(lines) == at + 2 and not lines[at]:
        return _NOTHING
    single = _NO_SINGLE.copy()
    users: list[bytes] = []
    for line in lines[at:]:
        name, colon, value = line.partition(b":")
        if not colon:
            continue
        value = value.strip(b" \t")
        which = _SINGLE.get(name, 0)
        if not which:
            start = _to_property.get(name)
            if start is None:
                start = _property(name)
            if start:
                if _clean(value) and len(users) < SHOWN_MOST:
                    users.append(start + _string(value))
                continue
            if name.lower() != b"content-type":
                continue
            which = 2
        elif which == 7:
            left, _, right = value.partition(b"=")
            left = unquote_to_bytes(left)
            right = unquote_to_bytes(right)
            if _legal(left) and _legal(right) and len(users) < SHOWN_MOST:
                users.append(USER + _string(left) + _string(right))
            continue
        if single[which] is None:
            single[which] = value
    first = _singles(single) if single != _NO_SINGLE else b""
    return first + b"".join(users), _number(single[6])


def _property(name: bytes) -> bytes:
    """Return the encoded beginning of the user property of a header's name; empty = the header is not shown."""
    plain = name.strip().lower().decode("latin-1")
    shown = plain and (plain in SERVICE_ERROR or not plain.startswith(RESERVED)) and _clean(name)
    start = USER + _string(name) if shown else b""
    if len(name) <= NAME_MOST:
        if len(_to_property) >= NAMES_MOST:
            _to_property.clear()
        _to_property[name] = start
    return start


def _singles(values: list[bytes | None]) -> bytes:
    """Return the encoded properties before the user properties; ``values`` of headers by the numbers of ``_SINGLE``."""
    _, indicator, kind, encoded, reply, correlation, _ = values
    data = b""
    if indicator in (b"0", b"1"):
        data = FORMAT + (b"\1" if indicator == b"1" else b"\0")
    if kind is not None and not _clean(kind):
        kind = None
    elif kind is None and encoded is not None and _legal(encoded := unquote_to_bytes(encoded)):
        kind = encoded
    if kind is not None:
        data += CONTENT_TYPE + _string(kind)
    if reply:
        topic = unquote_to_bytes(reply)
        if topic and _legal(topic) and b"+" not in topic and b"#" not in topic:
            data += RESPONSE_TOPIC + _string(topic)
    if correlation is not None:
        try:
            raw = a2b_base64(correlation, strict_mode=True)
        except Error:
            return data
        if len(raw) <= STRING_MOST:
            data += CORRELATION + _string(raw)
    return data


def _number(value: bytes | None) -> int:
    """Return an expiry interval in seconds; -1 when the header is missing or is no number of four bytes."""
    if value is None or not value.isdigit() or len(value) > 10:
        return -1
    number = int(value)
    return number if number <= 0xFFFF_FFFF else -1


def _legal(raw: bytes) -> bool:
    """Whether these bytes may be an MQTT string [MQTT-1.5.4-1] [MQTT-1.5.4-2] (5.0)."""
    if len(raw) > STRING_MOST or b"\0" in raw:
        return False
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _clean(raw: bytes) -> bool:
    """Whether these bytes may be an MQTT string without the control characters that some clients refuse."""
    if len(raw) > STRING_MOST:
        return False
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return False
    return text.isprintable() or DISTURBING.isdisjoint(text)
