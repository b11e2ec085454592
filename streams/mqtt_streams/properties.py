# SPDX-License-Identifier: Apache-2.0
"""Properties of a message as header lines, in the form that gateways write.

User properties are headers of the same name if every user property of the message is safe as a header; otherwise all
are percent-encoded in `Nmqtt-User`. A user property never becomes a header of NATS or of the gateways: JetStream could
drop another client's message because of it.
"""

from binascii import b2a_base64
from typing import Final, TypedDict
from urllib.parse import quote

from mqtt_streams.headers import percent_encode


class Properties(TypedDict, total=False):
    """Properties that are forwarded with a message, under their names in MQTT 5.0."""

    payload_format_indicator: int
    message_expiry_interval: int
    content_type: str
    response_topic: str
    correlation_data: bytes
    user_property: list[tuple[str, str]]


STAY: Final = 3600
"""Seconds for which a message stays in the stream after its expiry: an in-flight message may have to be resent."""

RESERVED: Final = ("nats-", "nmqtt-", "status", "content-type")
"""Beginnings, in lower case, of header names that no user property may have."""

SERVICE_ERROR: Final = frozenset(("nats-service-error", "nats-service-error-code"))
"""Reserved header names of errors of NATS micro services; gateways show them as user properties nevertheless."""

_TOKEN: Final = frozenset("!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
DISTURBING: Final = frozenset(
    chr(code)
    for code in (
        *range(0x20),
        *range(0x7F, 0xA0),
        *range(0xFDD0, 0xFDF0),
        *(plane << 16 | last for plane in range(17) for last in (0xFFFE, 0xFFFF)),
    )
)
"""Control characters and Unicode non-characters: a receiver may end the connection over them (section 1.5.4)."""

_BREAKS: Final = DISTURBING | {"\u2028", "\u2029"}
"""`DISTURBING`, and the other characters at which a client library may end a line."""

_PLAIN: Final = "/!\"$&'()*,:;<=>?@[\\]^`{|}"
"""Characters that are not percent-encoded in `Nmqtt-Reply`, beside letters, digits and `_.-~`."""

NAMES_MOST: Final = 4096
"""Most names of user properties in the cache `_to_header`."""
NAME_MOST: Final = 64
"""Characters of the longest name of a user property that is cached."""

_to_header: dict[str, str] = {}
"""Cache: name of a user property -> its header with the colon, empty when the name is not safe as a header."""


def header_lines(properties: Properties) -> bytes:
    """Return the header lines of a message with these properties, empty without properties.

    Topic alias, subscription identifiers and will delay interval are no properties of the forwarded message and are
    left out. The message expiry interval is the first line.
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
    """Return the header name and colon of a user property, empty when its name is not safe as a header."""
    safe = name and _TOKEN.issuperset(name) and not name.lower().startswith(RESERVED)
    start = f"{name}:" if safe else ""
    if len(name) <= NAME_MOST:
        if len(_to_header) >= NAMES_MOST:
            _to_header.clear()
        _to_header[name] = start
    return start


def _safe(value: str) -> bool:
    """Whether a header with this value is read back unchanged."""
    return (value.isprintable() or _BREAKS.isdisjoint(value)) and value == value.strip()


def ttl_line(properties: Properties) -> bytes:
    """Return the TTL line of stored copies: the message expiry interval, at least a second; empty without one."""
    expiry = properties.get("message_expiry_interval")
    return b"" if expiry is None else b"Nats-TTL:%ds\r\n" % (expiry or 1)
