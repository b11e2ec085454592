# SPDX-License-Identifier: Apache-2.0
"""Properties of MQTT 5.0 (section 2.2.2): one table drives decoding, encoding and validation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypedDict, cast

from mqtt_nats.codec.errors import (
    EncodeError,
    MalformedPacket,
    MqttError,
    ProtocolError,
    QuotaExceeded,
    TopicAliasInvalid,
)
from mqtt_nats.codec.wire import PacketKind, Reader, put_binary, put_int, put_string, put_varint


class Properties(TypedDict, total=False):
    """Properties of one packet or will by name. Times are in seconds, sizes in bytes.

    A list has the order of the wire. `subscription_identifier` is also in SUBSCRIBE a list, with one element.
    """

    payload_format_indicator: int
    message_expiry_interval: int
    content_type: str
    response_topic: str
    correlation_data: bytes
    subscription_identifier: list[int]
    session_expiry_interval: int
    assigned_client_identifier: str
    server_keep_alive: int
    authentication_method: str
    authentication_data: bytes
    request_problem_information: int
    will_delay_interval: int
    request_response_information: int
    response_information: str
    server_reference: str
    reason_string: str
    receive_maximum: int
    topic_alias_maximum: int
    topic_alias: int
    maximum_qos: int
    retain_available: int
    user_property: list[tuple[str, str]]
    maximum_packet_size: int
    wildcard_subscription_available: int
    subscription_identifier_available: int
    shared_subscription_available: int


class Wire(Enum):
    """Wire type of a property's value."""

    BYTE = 1
    TWO = 2
    FOUR = 4
    VARINT = "varint"
    BINARY = "binary"
    STRING = "string"
    PAIR = "pair"


USER_OVERHEAD: Final = 5
"""Bytes of a user property besides name and value: an identifier and two lengths."""

WILL: Final = 1
"""Bit of the will properties in a mask of places."""


def place(kind: PacketKind) -> int:
    """Return the bit of a packet kind in a mask of places."""
    return 1 << kind


_CONNECT = place(PacketKind.CONNECT)
_CONNACK = place(PacketKind.CONNACK)
_PUBLISH = place(PacketKind.PUBLISH)
_SUBSCRIBE = place(PacketKind.SUBSCRIBE)
_DISCONNECT = place(PacketKind.DISCONNECT)
_AUTH = place(PacketKind.AUTH)
_ACKS = (
    place(PacketKind.PUBACK)
    | place(PacketKind.PUBREC)
    | place(PacketKind.PUBREL)
    | place(PacketKind.PUBCOMP)
    | place(PacketKind.SUBACK)
    | place(PacketKind.UNSUBACK)
)
_ANY = WILL | _CONNECT | _CONNACK | _PUBLISH | _SUBSCRIBE | place(PacketKind.UNSUBSCRIBE) | _ACKS | _DISCONNECT | _AUTH


@dataclass(frozen=True, slots=True)
class Property:
    """Definition of one property: a row of table 2-4."""

    id: int
    name: str
    wire: Wire
    places: int
    """Mask of `WILL` and `place(kind)`: places where the property is allowed."""
    repeats: int = 0
    """Mask of places where the property may be repeated; if not 0, its value is a list in every place."""
    low: int = 0
    """Lowest integer value."""
    high: int = 0xFFFF_FFFF
    """Highest integer value."""
    error: type[MqttError] = ProtocolError
    """Error of a value out of range."""


PROPERTIES: Final = (
    Property(0x01, "payload_format_indicator", Wire.BYTE, WILL | _PUBLISH, high=1),
    Property(0x02, "message_expiry_interval", Wire.FOUR, WILL | _PUBLISH),
    Property(0x03, "content_type", Wire.STRING, WILL | _PUBLISH),
    Property(0x08, "response_topic", Wire.STRING, WILL | _PUBLISH),
    Property(0x09, "correlation_data", Wire.BINARY, WILL | _PUBLISH),
    Property(0x0B, "subscription_identifier", Wire.VARINT, _PUBLISH | _SUBSCRIBE, repeats=_PUBLISH, low=1),
    Property(0x11, "session_expiry_interval", Wire.FOUR, _CONNECT | _CONNACK | _DISCONNECT),
    Property(0x12, "assigned_client_identifier", Wire.STRING, _CONNACK),
    Property(0x13, "server_keep_alive", Wire.TWO, _CONNACK),
    Property(0x15, "authentication_method", Wire.STRING, _CONNECT | _CONNACK | _AUTH),
    Property(0x16, "authentication_data", Wire.BINARY, _CONNECT | _CONNACK | _AUTH),
    Property(0x17, "request_problem_information", Wire.BYTE, _CONNECT, high=1),
    Property(0x18, "will_delay_interval", Wire.FOUR, WILL),
    Property(0x19, "request_response_information", Wire.BYTE, _CONNECT, high=1),
    Property(0x1A, "response_information", Wire.STRING, _CONNACK),
    Property(0x1C, "server_reference", Wire.STRING, _CONNACK | _DISCONNECT),
    Property(0x1F, "reason_string", Wire.STRING, _CONNACK | _ACKS | _DISCONNECT | _AUTH),
    Property(0x21, "receive_maximum", Wire.TWO, _CONNECT | _CONNACK, low=1),
    Property(0x22, "topic_alias_maximum", Wire.TWO, _CONNECT | _CONNACK),
    Property(0x23, "topic_alias", Wire.TWO, _PUBLISH, low=1, error=TopicAliasInvalid),  # [MQTT-3.3.2-8] (5.0)
    Property(0x24, "maximum_qos", Wire.BYTE, _CONNACK, high=1),
    Property(0x25, "retain_available", Wire.BYTE, _CONNACK, high=1),
    Property(0x26, "user_property", Wire.PAIR, _ANY, repeats=_ANY),
    Property(0x27, "maximum_packet_size", Wire.FOUR, _CONNECT | _CONNACK, low=1),
    Property(0x28, "wildcard_subscription_available", Wire.BYTE, _CONNACK, high=1),
    Property(0x29, "subscription_identifier_available", Wire.BYTE, _CONNACK, high=1),
    Property(0x2A, "shared_subscription_available", Wire.BYTE, _CONNACK, high=1),
)
"""Rows of table 2-4 of MQTT 5.0, in the order of the identifiers."""

_BY_ID: Final = {row.id: row for row in PROPERTIES}
_BY_NAME: Final = {row.name: row for row in PROPERTIES}


def read_properties(
    reader: Reader, where: int, max_user_properties: int, max_user_bytes: int = 0xFFFF_FFFF
) -> Properties | None:
    """Read a property list with its length; None for an empty list.

    `where`: bit of the list's place. Raises MalformedPacket for an identifier that is unknown or out of
    place (section 2.2.2.2), ProtocolError for a repetition or a value out of range, QuotaExceeded above
    `max_user_properties`, or above `max_user_bytes` of UTF-8 in the names and values of user properties.
    """
    length = reader.varint()
    if not length:  # [MQTT-2.2.2-1] (5.0)
        return None
    stop = reader.pos + length
    outer = reader.narrow(stop)
    found: dict[str, Any] = {}
    user_bytes = 0
    while reader.pos < stop:
        start = reader.pos
        row = _BY_ID.get(reader.varint())
        if row is None or not row.places & where:
            raise MalformedPacket("property identifier is unknown or not allowed in this packet")
        value = _read_value(reader, row)
        if not row.repeats:
            if row.name in found:
                raise ProtocolError(f"property {row.name} is repeated")
            found[row.name] = value
            continue
        values = found.setdefault(row.name, [])
        if values and not row.repeats & where:
            raise ProtocolError(f"property {row.name} is repeated")
        if row.wire is Wire.PAIR and len(values) >= max_user_properties:
            raise QuotaExceeded(f"more than {max_user_properties} user properties")
        if row.wire is Wire.PAIR:
            user_bytes += reader.pos - start - USER_OVERHEAD
            if user_bytes > max_user_bytes:
                raise QuotaExceeded(f"more than {max_user_bytes} bytes of user properties")
        values.append(value)
    reader.widen(outer)
    if "authentication_data" in found and "authentication_method" not in found:
        raise ProtocolError("authentication data without authentication method")
    topic = found.get("response_topic")
    if topic is not None and (not topic or "+" in topic or "#" in topic):  # [MQTT-3.3.2-14] [MQTT-4.7.3-1] (5.0)
        raise ProtocolError("response topic is empty or contains a wildcard")
    return cast("Properties", found)


def _read_value(reader: Reader, row: Property) -> int | str | bytes | tuple[str, str]:
    wire = row.wire
    if wire is Wire.STRING:
        return reader.string()  # [MQTT-3.3.2-13] [MQTT-3.3.2-19] (5.0)
    if wire is Wire.PAIR:
        return reader.string(), reader.string()  # [MQTT-1.5.7-1] (5.0)
    if wire is Wire.BINARY:
        return reader.binary()
    if wire is Wire.BYTE:
        number = reader.u8()
    elif wire is Wire.TWO:
        number = reader.u16()
    elif wire is Wire.FOUR:
        number = reader.u32()
    else:
        number = reader.varint()
    if number < row.low or number > row.high:
        raise row.error(f"property {row.name} must not be {number}")
    return number


def put_properties(properties: Properties | None, where: int) -> bytes:
    """Encode a property list with its length. EncodeError for an unknown or misplaced name, or an illegal value."""
    if not properties:
        return b"\0"
    parts: list[bytes] = []
    for name, value in cast("dict[str, Any]", properties).items():
        row = _BY_NAME.get(name)
        if row is None or not row.places & where:
            raise EncodeError(f"property {name} is unknown or not allowed in this packet")
        values: Iterable[Any] = value if row.repeats else (value,)
        if row.repeats and len(value) > 1 and not row.repeats & where:
            raise EncodeError(f"property {name} is repeated")
        for one in values:
            parts.append(bytes((row.id,)))
            parts.append(_put_value(row, one))
    body = b"".join(parts)
    return put_varint(len(body)) + body


def _put_value(row: Property, value: Any) -> bytes:
    wire = row.wire
    if wire is Wire.STRING:
        return put_string(value)
    if wire is Wire.PAIR:
        return put_string(value[0]) + put_string(value[1])
    if wire is Wire.BINARY:
        return put_binary(value)
    if value < row.low or value > row.high:
        raise EncodeError(f"property {row.name} must not be {value}")
    if wire is Wire.VARINT:
        return put_varint(value)
    return put_int(value, cast("int", wire.value))
