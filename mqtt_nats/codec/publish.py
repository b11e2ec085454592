# SPDX-License-Identifier: Apache-2.0
"""PUBLISH (section 3.3). A topic stays what it was on the wire, length prefix included: a `key` for caches."""

from __future__ import annotations

from dataclasses import dataclass

from mqtt_nats.codec.errors import EncodeError, ProtocolError
from mqtt_nats.codec.properties import Properties, place, put_properties, read_properties
from mqtt_nats.codec.wire import PacketKind, Reader, put_packet, put_packet_id

_PUBLISH = place(PacketKind.PUBLISH)


@dataclass(slots=True)
class Publish:
    """One PUBLISH that is not part of a run. Not frozen: the decoder makes one per message."""

    qos: int
    retain: bool
    dup: bool
    key: bytes
    """Topic as on the wire: two length bytes and UTF-8 not yet validated. `b"\\0\\0"`: see property `topic_alias`."""
    packet_id: int
    """0 at QoS 0."""
    payload: bytes
    properties: Properties | None = None


@dataclass(slots=True)
class PublishRun:
    """One or more consecutive PUBLISH packets of equal size and topic: QoS 0, no RETAIN, no DUP, no properties."""

    key: bytes
    """Topic as in Publish, never an alias."""
    raw: bytes
    """All packets as received."""
    count: int
    step: int
    """Bytes per packet."""
    head: int
    """Bytes before the payload in each packet."""

    def payloads(self) -> list[bytes]:
        """The payload of each packet, in order."""
        raw = self.raw
        if self.count == 1:
            return [raw[self.head :]]
        size = self.step - self.head
        return [raw[at : at + size] for at in range(self.head, len(raw) + 1, self.step)]


def read_publish5(first: int, reader: Reader, from_server: bool, max_user_properties: int) -> Publish:
    """Read a PUBLISH of MQTT 5.0 in general; the first byte's flags are known to be legal."""
    start = reader.pos
    size = reader.u16()
    reader.take(size)
    key = reader.data[start : reader.pos]
    qos = first >> 1 & 3
    packet_id = reader.packet_id() if qos else 0  # [MQTT-2.2.1-2]
    properties = read_properties(reader, _PUBLISH, max_user_properties)
    if properties is None:
        if not size:
            raise ProtocolError("empty topic without topic alias")
    else:
        if not size and "topic_alias" not in properties:
            raise ProtocolError("empty topic without topic alias")
        if not from_server and "subscription_identifier" in properties:  # [MQTT-3.3.4-6]
            raise ProtocolError("subscription identifier from a client")
    payload = reader.take(reader.end - reader.pos)
    return Publish(qos, bool(first & 1), bool(first & 8), key, packet_id, payload, properties)


def put_publish(packet: Publish, version: int) -> bytes:
    """Encode PUBLISH."""
    key, qos = packet.key, packet.qos
    if len(key) < 2 or int.from_bytes(key[:2], "big") != len(key) - 2:
        raise EncodeError("topic key without its length")
    if qos not in (0, 1, 2) or (packet.dup and not qos):  # [MQTT-3.3.1-2] [MQTT-3.3.1-4]
        raise EncodeError(f"QoS {qos} with DUP {packet.dup}")
    parts = [key]
    if qos:
        parts.append(put_packet_id(packet.packet_id))
    elif packet.packet_id:  # [MQTT-2.3.1-5] (3.1.1), [MQTT-2.2.1-2] (5.0)
        raise EncodeError("packet identifier at QoS 0")
    if version == 5:
        parts.append(put_properties(packet.properties, _PUBLISH))
    elif packet.properties:
        raise EncodeError("properties in MQTT 3.1.1")
    parts.append(packet.payload)
    return put_packet(0x30 | packet.dup << 3 | qos << 1 | packet.retain, b"".join(parts))
