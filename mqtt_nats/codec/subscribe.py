# SPDX-License-Identifier: Apache-2.0
"""SUBSCRIBE, SUBACK, UNSUBSCRIBE and UNSUBACK (sections 3.8 to 3.11)."""

from __future__ import annotations

from dataclasses import dataclass

from mqtt_nats.codec.errors import EncodeError, MalformedPacket, ProtocolError, QuotaExceeded
from mqtt_nats.codec.properties import Properties, place, put_properties, read_properties
from mqtt_nats.codec.topics import SHARED, check_filter_syntax
from mqtt_nats.codec.wire import Limits, PacketKind, Reader, put_packet, put_packet_id, put_string

_SUBSCRIBE = place(PacketKind.SUBSCRIBE)
_UNSUBSCRIBE = place(PacketKind.UNSUBSCRIBE)
_SUBACK = place(PacketKind.SUBACK)
_UNSUBACK = place(PacketKind.UNSUBACK)

_SUBACK_CODES = {
    4: frozenset({0, 1, 2, 0x80}),  # [MQTT-3.9.3-2]
    5: frozenset({0, 1, 2, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2}),  # [MQTT-3.9.3-2] (5.0)
}
_UNSUBACK_CODES = frozenset({0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91})  # [MQTT-3.11.3-2] (5.0)


@dataclass(frozen=True, slots=True)
class Subscription:
    """One filter of a SUBSCRIBE. Its syntax is checked on reading (MalformedPacket); limits are checked elsewhere."""

    topic_filter: str
    qos: int
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0


@dataclass(frozen=True, slots=True)
class Subscribe:
    """SUBSCRIBE packet."""

    packet_id: int
    filters: tuple[Subscription, ...]
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Suback:
    """SUBACK packet: one granted QoS or failure code per filter, in order."""

    packet_id: int
    codes: tuple[int, ...]
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """UNSUBSCRIBE packet; filters as in Subscription."""

    packet_id: int
    filters: tuple[str, ...]
    properties: Properties | None = None


@dataclass(frozen=True, slots=True)
class Unsuback:
    """UNSUBACK packet: one reason code per filter, in order; none in 3.1.1."""

    packet_id: int
    codes: tuple[int, ...] = ()
    properties: Properties | None = None


def read_subscribe(reader: Reader, version: int, limits: Limits) -> Subscribe:
    """Read SUBSCRIBE."""
    packet_id = reader.packet_id()
    properties = (
        read_properties(reader, _SUBSCRIBE, limits.max_user_properties, limits.max_user_property_bytes)
        if version == 5
        else None
    )
    filters: list[Subscription] = []
    while reader.pos < reader.end:
        if len(filters) >= limits.max_filters:
            raise QuotaExceeded(f"more than {limits.max_filters} filters in one packet")
        topic_filter = reader.string()  # [MQTT-3.8.3-1] (3.1.1, 5.0)
        check_filter_syntax(topic_filter)
        options = reader.u8()
        if options & (0xC0 if version == 5 else 0xFC):  # [MQTT-3-8.3-4] (3.1.1), [MQTT-3.8.3-5] (5.0)
            raise MalformedPacket("reserved bits of the subscription options are set")
        no_local = bool(options & 4)
        qos = options & 3
        handling = options >> 4 & 3
        if qos == 3 or handling == 3:
            raise ProtocolError("QoS or retain handling is 3")
        if no_local and topic_filter.startswith(SHARED):  # [MQTT-3.8.3-4] (5.0)
            raise ProtocolError("no local on a shared subscription")
        filters.append(Subscription(topic_filter, qos, no_local, bool(options & 8), handling))
    if not filters:  # [MQTT-3.8.3-3] (3.1.1), [MQTT-3.8.3-2] (5.0)
        raise ProtocolError("SUBSCRIBE without filter")
    return Subscribe(packet_id, tuple(filters), properties)


def put_subscribe(packet: Subscribe, version: int) -> bytes:
    """Encode SUBSCRIBE."""
    parts = _start(packet.packet_id, packet.properties, _SUBSCRIBE, version)
    if not packet.filters:
        raise EncodeError("SUBSCRIBE without filter")
    for one in packet.filters:
        if one.qos not in (0, 1, 2) or one.retain_handling not in (0, 1, 2):
            raise EncodeError(f"QoS {one.qos}, retain handling {one.retain_handling}")
        options = one.qos | one.no_local << 2 | one.retain_as_published << 3 | one.retain_handling << 4
        if version != 5 and options > 3:
            raise EncodeError("subscription options in MQTT 3.1.1")
        parts.append(put_string(one.topic_filter))
        parts.append(bytes((options,)))
    return put_packet(0x82, b"".join(parts))


def read_unsubscribe(reader: Reader, version: int, limits: Limits) -> Unsubscribe:
    """Read UNSUBSCRIBE."""
    packet_id = reader.packet_id()
    properties = (
        read_properties(reader, _UNSUBSCRIBE, limits.max_user_properties, limits.max_user_property_bytes)
        if version == 5
        else None
    )
    filters: list[str] = []
    while reader.pos < reader.end:
        if len(filters) >= limits.max_filters:
            raise QuotaExceeded(f"more than {limits.max_filters} filters in one packet")
        topic_filter = reader.string()  # [MQTT-3.10.3-1] (3.1.1, 5.0)
        check_filter_syntax(topic_filter)
        filters.append(topic_filter)
    if not filters:  # [MQTT-3.10.3-2] (3.1.1, 5.0)
        raise ProtocolError("UNSUBSCRIBE without filter")
    return Unsubscribe(packet_id, tuple(filters), properties)


def put_unsubscribe(packet: Unsubscribe, version: int) -> bytes:
    """Encode UNSUBSCRIBE."""
    parts = _start(packet.packet_id, packet.properties, _UNSUBSCRIBE, version)
    if not packet.filters:
        raise EncodeError("UNSUBSCRIBE without filter")
    parts.extend(put_string(one) for one in packet.filters)
    return put_packet(0xA2, b"".join(parts))


def read_suback(reader: Reader, version: int, limits: Limits) -> Suback:
    """Read SUBACK (client side)."""
    packet_id = reader.packet_id()
    properties = (
        read_properties(reader, _SUBACK, limits.max_user_properties, limits.max_user_property_bytes)
        if version == 5
        else None
    )
    codes = _read_codes(reader, _SUBACK_CODES[version])
    return Suback(packet_id, codes, properties)


def read_unsuback(reader: Reader, version: int, limits: Limits) -> Unsuback:
    """Read UNSUBACK (client side)."""
    packet_id = reader.packet_id()
    if version != 5:
        reader.finish()
        return Unsuback(packet_id)
    properties = read_properties(reader, _UNSUBACK, limits.max_user_properties, limits.max_user_property_bytes)
    return Unsuback(packet_id, _read_codes(reader, _UNSUBACK_CODES), properties)


def put_suback(packet: Suback, version: int) -> bytes:
    """Encode SUBACK."""
    parts = _start(packet.packet_id, packet.properties, _SUBACK, version)
    parts.append(_put_codes(packet.codes, _SUBACK_CODES[version]))
    return put_packet(0x90, b"".join(parts))


def put_unsuback(packet: Unsuback, version: int) -> bytes:
    """Encode UNSUBACK."""
    parts = _start(packet.packet_id, packet.properties, _UNSUBACK, version)
    if version == 5:
        parts.append(_put_codes(packet.codes, _UNSUBACK_CODES))
    elif packet.codes:
        raise EncodeError("reason codes in UNSUBACK of MQTT 3.1.1")
    return put_packet(0xB0, b"".join(parts))


def _start(packet_id: int, properties: Properties | None, where: int, version: int) -> list[bytes]:
    parts = [put_packet_id(packet_id)]
    if version == 5:
        parts.append(put_properties(properties, where))
    elif properties:
        raise EncodeError("properties in MQTT 3.1.1")
    return parts


def _read_codes(reader: Reader, allowed: frozenset[int]) -> tuple[int, ...]:
    codes = tuple(reader.take(reader.end - reader.pos))
    if not codes or not allowed.issuperset(codes):
        raise ProtocolError("no code, or one that does not belong in this packet")
    return codes


def _put_codes(codes: tuple[int, ...], allowed: frozenset[int]) -> bytes:
    if not codes or not allowed.issuperset(codes):
        raise EncodeError("no code, or one that does not belong in this packet")
    return bytes(codes)
