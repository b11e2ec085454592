# SPDX-License-Identifier: Apache-2.0
"""CONNECT and CONNACK (sections 3.1 and 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from mqtt_nats.codec.errors import (
    EncodeError,
    InvalidClientId,
    MalformedPacket,
    NewerProtocolVersion,
    ProtocolError,
    UnsupportedProtocolVersion,
)
from mqtt_nats.codec.properties import WILL, Properties, place, put_properties, read_properties
from mqtt_nats.codec.reasons import ConnackCode, ReasonCode
from mqtt_nats.codec.topics import check_topic_name
from mqtt_nats.codec.wire import Limits, PacketKind, Reader, put_binary, put_int, put_packet, put_string

_CONNECT = place(PacketKind.CONNECT)
_CONNACK = place(PacketKind.CONNACK)
_BRIDGE = 0x80

_CONNACK_REASONS = frozenset(
    {0x00, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F}
)  # table 3-1


@dataclass(frozen=True, slots=True)
class Will:
    """Will message, published when the connection ends without DISCONNECT."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Connect:
    """CONNECT packet. `keepalive` in seconds, 0 = none. `bridge`: the level was one of mosquitto's bridge levels.

    `protocol_level`: 3 (MQTT 3.1, otherwise in the form of 3.1.1), 4 or 5.
    """

    protocol_level: int
    client_id: str
    clean_start: bool
    keepalive: int
    username: str | None = None
    password: bytes | None = None
    will: Will | None = None
    properties: Properties | None = None
    bridge: bool = False


@dataclass(frozen=True, slots=True)
class Connack:
    """CONNACK packet. `code` is a ConnackCode in 3.1.1, a ReasonCode in 5.0."""

    session_present: bool
    code: int
    properties: Properties | None = None


def read_protocol(reader: Reader) -> tuple[int, bool]:
    """Read protocol name and level: (3, 4 or 5, bridge). [MQTT-3.1.2-1] [MQTT-3.1.2-2] (3.1.1, 5.0)

    Raises:
        UnsupportedProtocolVersion: name and level are of another protocol.

    mosquitto's bridges set bit 7 of the level (0x83: also with the name of 3.1), so as not to get their own messages.
    """
    name = reader.binary()
    level = reader.u8()
    if name == b"MQTT":
        if level in (4, 5):
            return level, False
        if level in (_BRIDGE | 3, _BRIDGE | 4):
            return 4, True
        if level > 5:
            raise NewerProtocolVersion(f"protocol level {level} is neither MQTT 3.1.1 nor MQTT 5.0")
    elif name == b"MQIsdp" and level in (3, _BRIDGE | 3):
        return 3, level != 3
    raise UnsupportedProtocolVersion("protocol is neither MQTT 3.1, 3.1.1 nor 5.0")


def read_connect(reader: Reader, level: int, bridge: bool, limits: Limits) -> Connect:
    """Read the fields after the protocol level, in order. [MQTT-3.1.3-1] [MQTT-3.1.4-1] (3.1.1, 5.0)

    In MQTT 3.1 the reserved bit, and the flags of an absent will, have no meaning; user name and password may be absent
    although their flags are set. Client ids of 3.1 may be longer than its 23 characters, but not empty.
    """
    flags = reader.u8()
    if flags & 1 and level > 3:  # [MQTT-3.1.2-3] (3.1.1, 5.0)
        raise MalformedPacket("reserved bit of the connect flags is set")
    clean_start = bool(flags & 0x02)
    will_qos = flags >> 3 & 3
    if not flags & 0x04:
        if flags & 0x38 and level > 3:  # [MQTT-3.1.2-11] [MQTT-3.1.2-13] (3.1.1, 5.0), [MQTT-3.1.2-15] (3.1.1)
            raise MalformedPacket("will flags without will")
    elif will_qos == 3:  # [MQTT-3.1.2-14] (3.1.1), [MQTT-3.1.2-12] (5.0)
        raise MalformedPacket("will QoS is 3")
    if level < 5 and flags & 0xC0 == 0x40:  # [MQTT-3.1.2-22]
        raise MalformedPacket("password without user name")
    keepalive = reader.u16()
    users = limits.max_user_properties, limits.max_user_property_bytes
    properties = read_properties(reader, _CONNECT, *users) if level == 5 else None
    start = reader.pos + 2
    client_id = reader.string()  # [MQTT-3.1.3-3] [MQTT-3.1.3-4] (3.1.1, 5.0)
    if reader.pos - start > limits.max_client_id_length:  # [MQTT-3.1.3-5] (3.1.1, 5.0) demands 23 of them
        raise InvalidClientId(f"the client identifier has more than {limits.max_client_id_length} bytes")
    if level == 4 and not client_id and not clean_start:  # [MQTT-3.1.3-7] [MQTT-3.1.3-8]
        raise InvalidClientId("an empty client identifier needs a clean session")
    if level == 3 and not client_id:
        raise InvalidClientId("an empty client identifier is for MQTT 3.1.1 and 5.0")
    will = None
    if flags & 0x04:  # [MQTT-3.1.2-9] (3.1.1, 5.0)
        will_properties = read_properties(reader, WILL, *users) if level == 5 else None
        topic = reader.string()  # [MQTT-3.1.3-10] (3.1.1), [MQTT-3.1.3-11] (5.0)
        check_topic_name(topic, limits.max_topic_levels)
        will = Will(topic, reader.binary(), will_qos, bool(flags & 0x20), will_properties)
    # [MQTT-3.1.2-19] [MQTT-3.1.2-21] [MQTT-3.1.3-11] (3.1.1)
    # [MQTT-3.1.2-17] [MQTT-3.1.2-19] [MQTT-3.1.3-12] (5.0)
    username = reader.string() if flags & 0x80 and (level > 3 or reader.pos < reader.end) else None
    password = reader.binary() if flags & 0x40 and (level > 3 or reader.pos < reader.end) else None
    reader.finish()  # [MQTT-3.1.2-18] [MQTT-3.1.2-20] (3.1.1), [MQTT-3.1.2-16] [MQTT-3.1.2-18] (5.0)
    return Connect(level, client_id, clean_start, keepalive, username, password, will, properties, bridge)


def put_connect(packet: Connect, version: int) -> bytes:
    """Encode CONNECT; its protocol level must be `version`, or 3 (MQIsdp) with `version` 4."""
    level = packet.protocol_level
    if level != version and (level, version) != (3, 4):
        raise EncodeError(f"CONNECT of level {level} in version {version}")
    if level < 5 and packet.password is not None and packet.username is None:  # [MQTT-3.1.2-22]
        raise EncodeError("password without user name")
    will = packet.will
    flags = packet.clean_start << 1 | (packet.password is not None) << 6 | (packet.username is not None) << 7
    if will is not None:
        if will.qos not in (0, 1, 2):
            raise EncodeError(f"will QoS is {will.qos}")
        flags |= 0x04 | will.qos << 3 | will.retain << 5
    parts = [
        put_string("MQIsdp" if level == 3 else "MQTT"),
        bytes((level | packet.bridge << 7, flags)),
        put_int(packet.keepalive, 2),
    ]
    if level == 5:
        parts.append(put_properties(packet.properties, _CONNECT))
    elif packet.properties:
        raise EncodeError("properties in MQTT 3.1.1")
    parts.append(put_string(packet.client_id))
    if will is not None:
        if level == 5:
            parts.append(put_properties(will.properties, WILL))
        elif will.properties:
            raise EncodeError("properties in MQTT 3.1.1")
        parts.append(put_string(will.topic))
        parts.append(put_binary(will.payload))
    if packet.username is not None:
        parts.append(put_string(packet.username))
    if packet.password is not None:
        parts.append(put_binary(packet.password))
    return put_packet(0x10, b"".join(parts))


def read_connack(reader: Reader, version: int, limits: Limits) -> Connack:
    """Read CONNACK (client side)."""
    flags = reader.u8()
    if flags > 1:  # [MQTT-3.2.2-1] (5.0)
        raise MalformedPacket("reserved bits of the connect acknowledge flags are set")
    number = reader.u8()
    code: int
    properties = None
    if version == 5:
        if number not in _CONNACK_REASONS:  # [MQTT-3.2.2-8] (5.0)
            raise ProtocolError(f"reason code {number:#04x} is not one of CONNACK's")
        code = ReasonCode(number)
        properties = read_properties(reader, _CONNACK, limits.max_user_properties, limits.max_user_property_bytes)
    else:
        if number > 5:
            raise ProtocolError(f"return code {number} is reserved")
        code = ConnackCode(number)
    if flags and code:  # [MQTT-3.2.2-4] (3.1.1), [MQTT-3.2.2-6] (5.0)
        raise ProtocolError("session present on a refused connection")
    reader.finish()
    return Connack(bool(flags), code, properties)


def put_connack(packet: Connack, version: int) -> bytes:
    """Encode CONNACK."""
    allowed = packet.code in _CONNACK_REASONS if version == 5 else 0 <= packet.code <= 5
    if not allowed or (packet.session_present and packet.code):
        raise EncodeError(f"CONNACK with code {packet.code} and session present {packet.session_present}")
    body = bytes((packet.session_present, packet.code))
    if version == 5:
        body += put_properties(packet.properties, _CONNACK)
    elif packet.properties:
        raise EncodeError("properties in MQTT 3.1.1")
    return put_packet(0x20, body)
