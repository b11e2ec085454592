# SPDX-License-Identifier: Apache-2.0
"""PUBACK, PUBREC, PUBREL and PUBCOMP (sections 3.4 to 3.7)."""

from __future__ import annotations

from dataclasses import dataclass

from mqtt_nats.codec.errors import EncodeError, ProtocolError
from mqtt_nats.codec.properties import Properties, place, put_properties, read_properties
from mqtt_nats.codec.reasons import ReasonCode
from mqtt_nats.codec.wire import Limits, PacketKind, Reader, put_packet, put_packet_id

FIRST = {4: 0x40, 5: 0x50, 6: 0x62, 7: 0x70}
"""First byte by packet kind: PUBREL has a reserved bit set. [MQTT-3.6.1-1] (3.1.1, 5.0)"""

_RECEIVED = frozenset({0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99})
_RELEASED = frozenset({0x00, 0x92})
_REASONS = {4: _RECEIVED, 5: _RECEIVED, 6: _RELEASED, 7: _RELEASED}


@dataclass(slots=True, init=False)
class AckRun:
    """Consecutive acknowledgements of one kind without reason code. Not frozen, for speed: one is made per run."""

    kind: int
    """Packet kind: PUBACK 4, PUBREC 5, PUBREL 6, PUBCOMP 7."""
    ids: list[int]
    """Packet identifiers in order, at least one."""

    def __init__(self, kind: int, ids: list[int]) -> None:  # explicit: mypyc does not compile a dataclass's __init__
        self.kind = kind
        self.ids = ids


@dataclass(frozen=True, slots=True)
class Ack:
    """One acknowledgement of MQTT 5.0 with a reason code or properties. `kind` as in AckRun."""

    kind: int
    packet_id: int
    reason: int
    properties: Properties | None = None


def read_ack(kind: int, reader: Reader, limits: Limits) -> Ack:
    """Read an acknowledgement of MQTT 5.0 with three bytes or more. The property length may be absent."""
    packet_id = reader.packet_id()
    number = reader.u8()
    if number not in _REASONS[kind]:  # [MQTT-3.4.2-1] [MQTT-3.5.2-1] [MQTT-3.6.2-1] [MQTT-3.7.2-1] (5.0)
        raise ProtocolError(f"reason code {number:#04x} is not one of {PacketKind(kind).name}'s")
    properties = None
    if reader.pos < reader.end:
        properties = read_properties(
            reader, place(PacketKind(kind)), limits.max_user_properties, limits.max_user_property_bytes
        )
        reader.finish()
    return Ack(kind, packet_id, ReasonCode(number), properties)


def put_ack(packet: Ack, version: int) -> bytes:
    """Encode one acknowledgement, in the short form for success without properties."""
    if packet.kind not in FIRST:
        raise EncodeError(f"packet kind {packet.kind} is no acknowledgement")
    body = put_packet_id(packet.packet_id)
    if version != 5:
        if packet.reason or packet.properties:
            raise EncodeError("reason or properties in MQTT 3.1.1")
    elif packet.reason or packet.properties:
        if packet.reason not in _REASONS[packet.kind]:
            raise EncodeError(f"reason code {packet.reason:#04x} is not one of {PacketKind(packet.kind).name}'s")
        body += bytes((packet.reason,))
        if packet.properties:
            body += put_properties(packet.properties, place(PacketKind(packet.kind)))
    return put_packet(FIRST[packet.kind], body)
