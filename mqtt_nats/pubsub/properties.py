# SPDX-License-Identifier: Apache-2.0
"""Properties of a PUBLISH packet as NATS headers, and headers as properties.

User properties are headers of the same name where all of a message's are safe as such; otherwise all of them are
percent-encoded in ``Nmqtt-User``. A header that belongs to NATS or to the gateways is never written from, nor
shown as, a user property: it could have JetStream drop another client's message.
See docs/internals/rules.md#properties-as-headers.
"""

from __future__ import annotations

from binascii import Error, a2b_base64, b2a_base64
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from mqtt_nats.codec import Properties
from mqtt_streams import headers as names
from mqtt_streams.headers import percent_encode

STRING_MOST: Final = 65_535
"""Bytes of an MQTT string."""

SHOWN_MOST: Final = 1024
"""User properties that are made from the headers of one message; more than a gateway takes from its own clients."""

FORMAT: Final = b"\x01"
CONTENT_TYPE: Final = b"\x03"
RESPONSE_TOPIC: Final = b"\x08"
CORRELATION: Final = b"\x09"
USER: Final = b"\x26"

_RESERVED: Final = ("nats-", "nmqtt-", "status", "content-type")
"""Beginnings, in small letters, of the names that are no user property's."""

_TOKEN: Final = frozenset("!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_DISTURBING: Final = frozenset(
    chr(code)
    for code in (
        *range(0x20),
        *range(0x7F, 0xA0),
        *range(0xFDD0, 0xFDF0),
        *(plane << 16 | last for plane in range(17) for last in (0xFFFE, 0xFFFF)),
    )
)
"""Control characters and what Unicode keeps free: receivers may end the connection over these (section 1.5.4)."""

_BREAKS: Final = _DISTURBING | {"\u2028", "\u2029"}
"""Also the other characters at which a client library may end a line."""

_PLAIN: Final = "/!\"$&'()*,:;<=>?@[\\]^`{|}"
"""What stays readable in ``Nmqtt-Reply``, beside letters, digits and ``_.-~``."""

_NAMES_MOST: Final = 4096
_NAME_MOST: Final = 64
"""Names of user properties that are kept, when they are this short (bytes)."""

_NOTHING: Final = (b"", -1)

_to_header: dict[str, str] = {}
"""Name of a user property -> its header with the colon, empty when it is not safe as one."""
_to_property: dict[bytes, bytes] = {}
"""Name of a header -> what a user property of that name begins with, empty when it is not shown."""

_SINGLE: Final = {
    names.FORMAT.encode(): 1,
    names.CONTENT_TYPE.encode(): 2,
    names.CONTENT_TYPE_ENCODED.encode(): 3,
    names.REPLY.encode(): 4,
    names.CORRELATION.encode(): 5,
    names.EXPIRY.encode(): 6,
    names.USER.encode(): 7,
}

_NO_SINGLE: Final[list[bytes | None]] = [None] * 7


def header_lines(properties: Properties) -> bytes:
    """The header lines of a message with these properties, empty for none.

    Left out is what does not travel with a message: topic alias, subscription identifiers, will delay. The expiry is
    the first line.
    """
    lines = ""
    if "message_expiry_interval" in properties:
        lines = f"Nmqtt-Expiry:{properties['message_expiry_interval']}\r\n"
    if "payload_format_indicator" in properties:
        lines += f"Nmqtt-Format:{properties['payload_format_indicator']}\r\n"
    if "content_type" in properties:
        kind = properties["content_type"]
        lines += f"Content-Type:{kind}\r\n" if _safe(kind) else f"Nmqtt-Content-Type:{percent_encode(kind)}\r\n"
    if "response_topic" in properties:
        lines += f"Nmqtt-Reply:{quote(properties['response_topic'], _PLAIN)}\r\n"
    if "correlation_data" in properties:
        lines += f"Nmqtt-Correlation:{b2a_base64(properties['correlation_data'], newline=False).decode()}\r\n"
    if "user_property" in properties:
        lines += _user_lines(properties["user_property"])
    return lines.encode()


def _user_lines(pairs: list[tuple[str, str]]) -> str:
    lines = ""
    for name, value in pairs:
        start = _to_header.get(name)
        if start is None:
            start = _header(name)
        if not start or not _safe(value):
            return "".join([f"Nmqtt-User:{percent_encode(a)}={percent_encode(b)}\r\n" for a, b in pairs])
        lines += f"{start}{value}\r\n"
    return lines


def _header(name: str) -> str:
    """The beginning of the header line of a user property, empty when it is not safe as a header."""
    safe = name and _TOKEN.issuperset(name) and not name.lower().startswith(_RESERVED)
    start = f"{name}:" if safe else ""
    if len(name) <= _NAME_MOST:
        if len(_to_header) >= _NAMES_MOST:
            _to_header.clear()
        _to_header[name] = start
    return start


def _safe(value: str) -> bool:
    """Whether a header with this value is read back as it is."""
    return (value.isprintable() or _BREAKS.isdisjoint(value)) and value == value.strip()


def ttl_line(properties: Properties) -> bytes:
    """The header line for copies that are stored: they go when the message expires, at the soonest after a second."""
    expiry = properties.get("message_expiry_interval")
    return b"" if expiry is None else b"Nats-TTL:%ds\r\n" % (expiry or 1)


def body(properties: Properties) -> bytes:
    """The properties of a message as they stand in a PUBLISH packet, without their length.

    Left out are expiry, topic alias and subscription identifiers, which are each subscriber's own. User
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


def from_headers(headers: bytes) -> tuple[bytes, int]:
    """The properties of a message that came with this raw block of headers.

    Every header that is not reserved is a user property, in order, up to SHOWN_MOST. What would not be legal in a
    packet is left out, and so are headers of NATS clients with control characters, over which some MQTT clients end
    their connection; of a header that can be there once, the first counts.

    Returns:
        What :func:`body` makes of the same properties, and the expiry interval in seconds, -1 = none.
    """
    lines = headers.split(b"\r\n")
    size = len(lines)
    at = 1
    if size > 3 and lines[1].startswith(b"Nmqtt-Pub:"):  # what most messages of gateways have, and nothing else
        at = 2
        if lines[2].startswith(b"Nmqtt-Id:"):
            at = 3
            if lines[3].startswith(b"Nmqtt-Client:"):
                at = 4
    if size == at + 2 and not lines[at]:
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
    """What a user property of a header's name begins with, empty for a header that is not shown."""
    plain = name.strip().lower().decode("latin-1")
    shown = plain and not plain.startswith(_RESERVED) and _clean(name)
    start = USER + _string(name) if shown else b""
    if len(name) <= _NAME_MOST:
        if len(_to_property) >= _NAMES_MOST:
            _to_property.clear()
        _to_property[name] = start
    return start


def _singles(values: list[bytes | None]) -> bytes:
    """The properties before the user properties, from the values of their headers by the numbers of ``_SINGLE``."""
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
    """An expiry interval; -1 when there is none, or it is no number of four bytes."""
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
    """Whether these bytes may be an MQTT string that no receiver objects to."""
    if len(raw) > STRING_MOST:
        return False
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return False
    return text.isprintable() or _DISTURBING.isdisjoint(text)
