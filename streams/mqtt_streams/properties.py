# SPDX-License-Identifier: Apache-2.0
"""Properties of a message as header lines: what gateways write, and whoever publishes as they do.

User properties are headers of the same name where all of a message's are safe as such; otherwise all of them are
percent-encoded in `Nmqtt-User`. A header that belongs to NATS or to the gateways is never written from a user
property: it could have JetStream drop another client's message.
"""

from binascii import b2a_base64
from typing import Final, TypedDict
from urllib.parse import quote

from mqtt_streams.headers import percent_encode


class Properties(TypedDict, total=False):
    """The properties that travel with a message, as the names of MQTT 5.0 have them."""

    payload_format_indicator: int
    message_expiry_interval: int
    content_type: str
    response_topic: str
    correlation_data: bytes
    user_property: list[tuple[str, str]]


STAY: Final = 3600
"""Seconds for which a message stays in the stream after its expiry: what was sent before may have to be sent again."""

RESERVED: Final = ("nats-", "nmqtt-", "status", "content-type")
"""Beginnings, in small letters, of the names that are no user property's."""

SERVICE_ERROR: Final = frozenset(("nats-service-error", "nats-service-error-code"))
"""Of these names, those with which a micro service of NATS says that it has failed: readers show them all the same."""

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
"""Control characters and what Unicode keeps free: receivers may end the connection over these (section 1.5.4)."""

_BREAKS: Final = DISTURBING | {"\u2028", "\u2029"}
"""Also the other characters at which a client library may end a line."""

_PLAIN: Final = "/!\"$&'()*,:;<=>?@[\\]^`{|}"
"""What stays readable in `Nmqtt-Reply`, beside letters, digits and `_.-~`."""

NAMES_MOST: Final = 4096
NAME_MOST: Final = 64
"""Names of user properties that are kept, when they are this short (characters)."""

_to_header: dict[str, str] = {}
"""Name of a user property -> its header with the colon, empty when it is not safe as one."""


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
    safe = name and _TOKEN.issuperset(name) and not name.lower().startswith(RESERVED)
    start = f"{name}:" if safe else ""
    if len(name) <= NAME_MOST:
        if len(_to_header) >= NAMES_MOST:
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
