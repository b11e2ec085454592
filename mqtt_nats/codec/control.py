# SPDX-License-Identifier: Apache-2.0
"""PINGREQ, PINGRESP, DISCONNECT and AUTH (sections 3.12 to 3.15)."""

from __future__ import annotations

from dataclasses import dataclass

from mqtt_nats.codec.errors import EncodeError, ProtocolError
from mqtt_nats.codec.properties import Properties, place, put_properties, read_properties
from mqtt_nats.codec.reasons import ReasonCode
from mqtt_nats.codec.wire import Limits, PacketKind, Reader, put_packet

_DISCONNECT = place(PacketKind.DISCONNECT)
_AUTH = place(PacketKind.AUTH)

_EITHER = frozenset({0x00, 0x80, 0x81, 0x82, 0x83, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99})
_FROM_CLIENT = _EITHER | {0x04}
_FROM_SERVER = _EITHER | {0x87, 0x89, 0x8B, 0x8C, 0x8D, 0x8E, 0x8F, *range(0x9A, 0xA3)}  # tables 2-6 and 3-10
_AUTH_FROM_CLIENT = frozenset({0x18, 0x19})
_AUTH_FROM_SERVER = frozenset({0x00, 0x18})  # table 3-11


@dataclass(frozen=True, slots=True)
class PingReq:
    """PINGREQ packet."""


@dataclass(frozen=True, slots=True)
class PingResp:
    """PINGRESP packet."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """DISCONNECT packet. In 3.1.1 without reason code, and only from a client."""

    reason: int = ReasonCode.NORMAL_DISCONNECTION
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Auth:
    """AUTH packet: a step of enhanced authentication, MQTT 5.0 only."""

    reason: int = ReasonCode.SUCCESS
    properties: Properties | None = None


def read_disconnect(reader: Reader, version: int, limits: Limits, from_server: bool) -> Disconnect:
    """Read DISCONNECT; in 5.0 reason code and properties may be absent."""
    if version != 5:
        reader.finish()
        return Disconnect()
    number = reader.u8() if reader.pos < reader.end else 0
    if number not in (_FROM_SERVER if from_server else _FROM_CLIENT):  # [MQTT-3.14.2-1] (5.0)
        raise ProtocolError(f"reason code {number:#04x} is not one of DISCONNECT's on this side")
    properties = None
    if reader.pos < reader.end:
        properties = read_properties(reader, _DISCONNECT, limits.max_user_properties, limits.max_user_property_bytes)
        reader.finish()
    misplaced = "session_expiry_interval" if from_server else "server_reference"
    if properties is not None and misplaced in properties:  # [MQTT-3.14.2-2] (5.0)
        raise ProtocolError(f"property {misplaced} is not allowed in this direction")
    return Disconnect(ReasonCode(number), properties)


def put_disconnect(packet: Disconnect, version: int) -> bytes:
    """Encode DISCONNECT in its shortest form."""
    if version != 5:
        if packet.reason or packet.properties:
            raise EncodeError("reason or properties in MQTT 3.1.1")
        return b"\xe0\0"
    if packet.reason not in _FROM_SERVER and packet.reason not in _FROM_CLIENT:
        raise EncodeError(f"reason code {packet.reason:#04x} is not one of DISCONNECT's")
    return put_packet(0xE0, _put_tail(packet.reason, packet.properties, _DISCONNECT))


def read_auth(reader: Reader, limits: Limits, from_server: bool) -> Auth:
    """Read AUTH; reason code and properties may be absent for success."""
    number = reader.u8() if reader.pos < reader.end else 0
    if number not in (_AUTH_FROM_SERVER if from_server else _AUTH_FROM_CLIENT):  # [MQTT-3.15.2-1] (5.0)
        raise ProtocolError(f"reason code {number:#04x} is not one of AUTH's on this side")
    properties = None
    if reader.pos < reader.end:
        properties = read_properties(reader, _AUTH, limits.max_user_properties, limits.max_user_property_bytes)
        reader.finish()
    if number and (properties is None or "authentication_method" not in properties):  # section 3.15.2.2.2
        raise ProtocolError("AUTH without authentication method")
    return Auth(ReasonCode(number), properties)


def put_auth(packet: Auth, version: int) -> bytes:
    """Encode AUTH in its shortest form."""
    if version != 5:
        raise EncodeError("AUTH in MQTT 3.1.1")
    if packet.reason not in _AUTH_FROM_SERVER and packet.reason not in _AUTH_FROM_CLIENT:
        raise EncodeError(f"reason code {packet.reason:#04x} is not one of AUTH's")
    if packet.reason and "authentication_method" not in (packet.properties or {}):
        raise EncodeError("AUTH without authentication method")
    return put_packet(0xF0, _put_tail(packet.reason, packet.properties, _AUTH))


def _put_tail(reason: int, properties: Properties | None, where: int) -> bytes:
    if properties:
        return bytes((reason,)) + put_properties(properties, where)
    return bytes((reason,)) if reason else b""
