# SPDX-License-Identifier: Apache-2.0
"""PUBLISH (section 3.3). A topic is kept in its wire form with length prefix, as `key` for caches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from struct import iter_unpack

from mqtt_nats.codec.errors import EncodeError, ProtocolError
from mqtt_nats.codec.properties import Properties, place, put_properties, read_properties
from mqtt_nats.codec.wire import Limits, PacketKind, Reader, put_packet_id, put_varint

_PUBLISH = place(PacketKind.PUBLISH)
_BLOCK = 16  # packets of one struct layout
_FIRST = tuple(bytes((first,)) for first in range(0x100))
_LENGTHS = 0x1000  # remaining lengths with a precomputed encoding: enough for most messages, takes 200 KB
_LENGTH = tuple(put_varint(size) for size in range(_LENGTHS))


@dataclass(slots=True, init=False)
class Publish:
    """One PUBLISH that is not part of a run. Not frozen, for speed: one is made per message."""

    qos: int
    retain: bool
    dup: bool
    key: bytes
    """Topic in wire form: two length bytes and UTF-8, not yet validated. `b"\\0\\0"`: see property `topic_alias`."""
    packet_id: int
    """Packet identifier; 0 at QoS 0."""
    payload: bytes
    properties: Properties | None = None

    def __init__(  # explicit: mypyc does not compile a dataclass's __init__
        self,
        qos: int,
        retain: bool,
        dup: bool,
        key: bytes,
        packet_id: int,
        payload: bytes,
        properties: Properties | None = None,
    ) -> None:
        self.qos = qos
        self.retain = retain
        self.dup = dup
        self.key = key
        self.packet_id = packet_id
        self.payload = payload
        self.properties = properties


@dataclass(slots=True, init=False)
class PublishRun:
    """One or more consecutive PUBLISH packets of equal size and topic: QoS 0, no RETAIN, no DUP, no properties."""

    key: bytes
    """Topic as in Publish, never an alias."""
    raw: bytes | bytearray
    """All packets as received; for a large packet the bytearray into which it was read, which is not changed later."""
    count: int
    """Number of packets."""
    step: int
    """Bytes of each packet."""
    head: int
    """Bytes in front of the payload in each packet."""

    def __init__(self, key: bytes, raw: bytes | bytearray, count: int, step: int, head: int) -> None:
        self.key = key
        self.raw = raw
        self.count = count
        self.step = step
        self.head = head

    def fill(self, raw: bytearray) -> None:
        """Set the bytes of a large packet, whose beginning was parsed before the rest was read."""
        self.raw = raw

    def part(self, start: int, count: int) -> PublishRun:
        """Return a run of ``count`` packets from index ``start`` on."""
        step = self.step
        return PublishRun(self.key, self.raw[start * step : (start + count) * step], count, step, self.head)

    def payloads(self) -> list[bytes]:
        """Return the payload of each packet, in order."""
        raw = self.raw
        if isinstance(raw, bytearray):
            return [bytes(memoryview(raw)[self.head :])]
        if self.count == 1:
            return [raw[self.head :]]
        layout = f"{self.head}x{self.step - self.head}s"
        blocks = self.count // _BLOCK * _BLOCK * self.step
        payloads: list[bytes] = []
        if blocks:
            payloads.extend(chain.from_iterable(iter_unpack(layout * _BLOCK, memoryview(raw)[:blocks])))
        payloads.extend([payload for (payload,) in iter_unpack(layout, memoryview(raw)[blocks:])])
        return payloads


def read_publish5(first: int, reader: Reader, from_server: bool, limits: Limits) -> Publish:
    """Read any PUBLISH of MQTT 5.0; the flags of the first byte have been checked."""
    start = reader.pos
    size = reader.u16()
    reader.take(size)
    key = reader.data[start : reader.pos]
    qos = first >> 1 & 3
    packet_id = reader.packet_id() if qos else 0  # [MQTT-2.3.1-5] (3.1.1), [MQTT-2.2.1-2] (5.0)
    properties = read_properties(reader, _PUBLISH, limits.max_user_properties, limits.max_user_property_bytes)
    if properties is None:
        if not size:
            raise ProtocolError("empty topic without topic alias")
    else:
        if not size and "topic_alias" not in properties:
            raise ProtocolError("empty topic without topic alias")
        if not from_server and "subscription_identifier" in properties:  # [MQTT-3.3.4-6] (5.0)
            raise ProtocolError("subscription identifier from a client")
    payload = reader.take(reader.end - reader.pos)
    return Publish(qos, bool(first & 1), bool(first & 8), key, packet_id, payload, properties)


def publish_head(flags_byte: int, key: bytes, body_len_after_key: int) -> bytes:
    """Return first byte, remaining length and topic of a PUBLISH whose packet identifier, properties and payload have
    `body_len_after_key` bytes together. `key` as in Publish. EncodeError above 268,435,455 bytes.
    """
    size = len(key) + body_len_after_key
    return _FIRST[flags_byte] + (_LENGTH[size] if size < _LENGTHS else put_varint(size)) + key


def encode_publish(
    key: bytes,
    payload: bytes,
    qos: int,
    retain: bool,
    dup: bool,
    packet_id: int,
    version: int,
    properties: Properties | None = None,
) -> bytes:
    """Encode a whole PUBLISH. `key` as in Publish; `packet_id` 0 at QoS 0. EncodeError without a legal encoding."""
    if len(key) < 2 or key[0] << 8 | key[1] != len(key) - 2:
        raise EncodeError("topic key without its length")
    if qos == 0:
        if packet_id or dup:  # [MQTT-2.3.1-5] [MQTT-3.3.1-2] (3.1.1), [MQTT-2.2.1-2] (5.0)
            raise EncodeError("packet identifier or DUP at QoS 0")
        variable = b""
    elif qos == 1 or qos == 2:
        variable = put_packet_id(packet_id)
    else:  # [MQTT-3.3.1-4] (3.1.1, 5.0)
        raise EncodeError(f"QoS is {qos}")
    if version == 5:
        variable += put_properties(properties, _PUBLISH)
    elif properties:
        raise EncodeError("properties in MQTT 3.1.1")
    first = 0x30 | dup << 3 | qos << 1 | retain
    return publish_head(first, key, len(variable) + len(payload)) + variable + payload


def put_publish(packet: Publish, version: int) -> bytes:
    """Encode PUBLISH."""
    return encode_publish(
        packet.key,
        packet.payload,
        packet.qos,
        packet.retain,
        packet.dup,
        packet.packet_id,
        version,
        packet.properties,
    )


def put_run(packet: PublishRun, version: int) -> bytes:
    """Encode each PUBLISH of a run in a version, which may differ from the version of its reception."""
    return b"".join([encode_publish(packet.key, one, 0, False, False, 0, version) for one in packet.payloads()])
