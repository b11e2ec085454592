# SPDX-License-Identifier: Apache-2.0
"""Pre-encoded MQTT packets and bulk verification of what comes back.

All PUBLISH packets of one scenario and QoS have the same length, so a batch is one template repeated, with the
changing fields (packet id, sequence number) written as strided slices, and a read is verified in the same way: one
slice comparison per byte column, not one step per message.

``version`` is 4 for MQTT 3.1.1 and 5 for 5.0, as in CONNECT. In 5.0 every PUBLISH has properties, if only their length,
0, and an acknowledgement may be longer than its 4 bytes.

The payload starts with ``publisher:u32 sequence:u32 sent_ns:u64 stamped:u8`` (big endian) and is filled with zeros.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

MIN_PAYLOAD: Final = 17
MAX_BATCH: Final = 16384
"""Upper bound of messages in one batch or one read; the column tables are that much longer than their period."""

PID_PERIOD: Final = 0x8000
"""Packet ids of a publisher are ``sequence % PID_PERIOD + 1``: in order, never 0, far above every window."""

PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = 0x30, 0x40, 0x50, 0x62, 0x70
DUP: Final = 0x08

_LOW: Final = bytes(range(256)) * ((65536 + MAX_BATCH) // 256)
_MID: Final = bytes(i >> 8 & 255 for i in range(65536 + MAX_BATCH))
_PID_LOW: Final = bytes(i % PID_PERIOD + 1 & 255 for i in range(PID_PERIOD + MAX_BATCH))
_PID_HIGH: Final = bytes(i % PID_PERIOD + 1 >> 8 for i in range(PID_PERIOD + MAX_BATCH))
_SEQ_STAMP: Final = struct.Struct(">IQ")
_STAMP: Final = struct.Struct(">Q")
_SOURCE_SEQ: Final = struct.Struct(">II")
_U16: Final = struct.Struct(">H")


class DeliveryError(Exception):
    """Received messages differ from the sent ones: loss, duplicate, reordering or a damaged packet."""


def remaining_length(value: int) -> bytes:
    """MQTT variable byte integer of ``value`` (5.0, section 1.5.5)."""
    out = bytearray()
    while True:
        value, digit = divmod(value, 128)
        out.append(digit | 0x80 if value else digit)
        if not value:
            return bytes(out)


def _string(text: str) -> bytes:
    raw = text.encode()
    return _U16.pack(len(raw)) + raw


def connect(
    client_id: str,
    *,
    clean: bool,
    keep_alive: int = 600,
    version: int = 4,
    session_expiry: int = 0,
    user: str | None = None,
    password: str = "",
) -> bytes:
    """CONNECT; ``keep_alive`` and ``session_expiry`` (5.0, 0: the session ends with the connection) in seconds."""
    flags = 0x02 * clean | (0xC0 if user is not None else 0)
    body = b"\x00\x04MQTT" + bytes([version, flags]) + _U16.pack(keep_alive)
    if version == 5:
        body += b"\x05\x11" + session_expiry.to_bytes(4) if session_expiry else b"\x00"
    body += _string(client_id)
    if user is not None:
        body += _string(user) + _string(password)
    return b"\x10" + remaining_length(len(body)) + body


def subscribe(topic_filter: str, qos: int, version: int = 4) -> bytes:
    """SUBSCRIBE with packet id 1 and one filter; in 5.0 without properties and with no other option than QoS."""
    body = b"\x00\x01" + (b"\x00" if version == 5 else b"") + _string(topic_filter) + bytes([qos])
    return b"\x82" + remaining_length(len(body)) + body


def subscribe_many(filters: Sequence[str], qos: int, version: int = 4) -> bytes:
    """SUBSCRIBE with packet id 1 and many filters."""
    body = b"\x00\x01" + (b"\x00" if version == 5 else b"")
    body += b"".join(_string(each) + bytes([qos]) for each in filters)
    return b"\x82" + remaining_length(len(body)) + body


class Layout:
    """Where the fields are in the PUBLISH packets of one topic length, payload size (bytes), QoS and properties.

    ``properties`` of 5.0 are encoded, without their length; None: 3.1.1. Subscribers get the same.
    """

    def __init__(self, topic: str, payload: int, qos: int, properties: bytes | None = None) -> None:
        if payload < MIN_PAYLOAD:
            raise ValueError(f"payload must have at least {MIN_PAYLOAD} bytes")
        name = _string(topic)
        packet_id = bytes(2 if qos else 0)
        self.properties = b"" if properties is None else remaining_length(len(properties)) + properties
        self.version = 4 if properties is None else 5
        length = len(name) + len(packet_id) + len(self.properties) + payload
        self.qos = qos
        self.head = bytes([PUBLISH | qos << 1]) + remaining_length(length)
        self.packet_id = len(self.head) + len(name)
        self.source = self.packet_id + len(packet_id) + len(self.properties)
        self.seq = self.source + 4
        self.stamp = self.source + 8
        self.stamped = self.source + 16
        self.size = self.source + payload
        self.template = self.head + name + packet_id + self.properties + bytes(payload)
        at = self.source - len(self.properties)
        self.fixed = dict(enumerate(self.head)) | {at + i: byte for i, byte in enumerate(self.properties)}
        """Position → byte of what every packet has in common, apart from the topic."""


class NatsLayout(Layout):
    """Where the fields are in what NATS carries in place of such a PUBLISH, at QoS 0 and without headers.

    ``subject`` stands for the topic; ``sid`` is the number of the subscription, empty for what is published.
    """

    def __init__(self, subject: str, payload: int, sid: str = "") -> None:
        super().__init__(subject, payload, 0)
        words = ("MSG", subject, sid) if sid else ("PUB", subject)
        self.head = f"{' '.join(words)} {payload}\r\n".encode()
        self.source = len(self.head)
        self.seq, self.stamp, self.stamped = self.source + 4, self.source + 8, self.source + 16
        self.size = self.source + payload + 2
        self.template = self.head + bytes(payload) + b"\r\n"
        self.fixed = dict(enumerate(self.head)) | {self.size - 2: 0x0D, self.size - 1: 0x0A}


class Batch:
    """Up to ``limit`` consecutive PUBLISH packets of one publisher in one reused buffer."""

    def __init__(self, layout: Layout, source: int, limit: int) -> None:
        self.layout = layout
        self.limit = min(limit, MAX_BATCH)
        packet = bytearray(layout.template)
        _SOURCE_SEQ.pack_into(packet, layout.source, source, 0)
        self._buffer = bytearray(bytes(packet) * self.limit)
        self._view = memoryview(self._buffer)
        self._high = 0

    def fill(self, seq: int, count: int, stamp: int) -> memoryview:
        """Packets ``seq`` to at most ``seq + count - 1``, the first with the time ``stamp`` (ns; 0: no time).

        The answer is shorter where ``count`` passes ``limit`` or a multiple of 65,536, and valid until the next call.
        """
        at = self.layout
        buffer, size = self._buffer, at.size
        low = seq & 0xFFFF
        count = min(count, self.limit, 0x10000 - low)
        end = count * size
        if seq >> 16 != self._high:
            self._high = seq >> 16
            for column, byte in enumerate(_U16.pack(self._high)):
                buffer[at.seq + column :: size] = bytes([byte]) * self.limit
        if count > 1:
            buffer[at.seq + 2 : end : size] = _MID[low : low + count]
            buffer[at.seq + 3 : end : size] = _LOW[low : low + count]
        _SEQ_STAMP.pack_into(buffer, at.seq, seq, stamp)
        buffer[at.stamped] = 1 if stamp else 0
        if at.qos:
            low = seq % PID_PERIOD
            buffer[at.packet_id : end : size] = _PID_HIGH[low : low + count]
            buffer[at.packet_id + 1 : end : size] = _PID_LOW[low : low + count]
        return self._view[:end]


def stamp_of(layout: Layout, data: bytearray, start: int, end: int) -> int:
    """Time (ns) in the first stamped packet of ``data[start:end]``, 0 if there is none."""
    if end - start == layout.size:
        found = 0 if data[start + layout.stamped] else -1
    else:
        found = data[start + layout.stamped : end : layout.size].find(1)
    if found < 0:
        return 0
    stamp: int = _STAMP.unpack_from(data, start + found * layout.size + layout.stamp)[0]
    return stamp


def acks(kind: int, layout: Layout, data: bytearray, start: int, count: int) -> bytearray:
    """PUBACK or PUBREC (``kind``) for each of ``count`` PUBLISH packets from ``start``."""
    end = start + count * layout.size
    out = bytearray((kind, 2, 0, 0)) * count
    out[2::4] = data[start + layout.packet_id : end : layout.size]
    out[3::4] = data[start + layout.packet_id + 1 : end : layout.size]
    return out


def ack_count(kind: int, data: bytearray, count: int, seq: int) -> None:
    """Check that the first ``count`` packets are ``kind`` for the messages from ``seq`` on, in order."""
    end, low = count * 4, seq % PID_PERIOD
    if (
        data[0:end:4] != bytes([kind]) * count
        or data[2:end:4] != _PID_HIGH[low : low + count]
        or data[3:end:4] != _PID_LOW[low : low + count]
    ):
        shown = data[: min(end, 32)].hex(" ", 4)
        raise DeliveryError(f"acknowledgements from sequence {seq} are not in order: {shown}")


class Verifier:
    """Checks one subscriber's PUBLISH packets: each publisher's sequence without gap, repeat or swap.

    Either one publisher, whose number is ``first``, or ``sources`` publishers numbered from 0. ``expected[i]`` is the
    next sequence number of the i-th, so also how many have arrived from it.
    """

    def __init__(self, layout: Layout, sources: int = 1, first: int = 0) -> None:
        self.layout = layout
        self.first = first
        self.expected = [0] * sources
        after = layout.size - layout.source - 8
        self._fields = struct.Struct(f">{layout.source}xII{after}x")
        self._columns = [(column, bytes([byte]) * MAX_BATCH) for column, byte in layout.fixed.items()]

    def take(self, data: bytearray, start: int, count: int) -> None:
        """Count ``count`` whole packets from ``start``; raises `DeliveryError`."""
        at = self.layout
        size = at.size
        if (
            count == 1
            and data.startswith(at.head, start)
            and data.startswith(at.properties, start + at.source - len(at.properties))
            and _SOURCE_SEQ.unpack_from(data, start + at.source) == (self.first, self.expected[0])
            and len(self.expected) == 1
        ):
            self.expected[0] += 1
            return
        end = start + count * size
        for column, fixed in self._columns:
            if data[start + column : end : size] != fixed[:count]:
                self._explain(data, start, count)
        if len(self.expected) == 1:
            seq = self.expected[0]
            low = seq & 0xFFFF
            if (
                _SOURCE_SEQ.unpack_from(data, start + at.source) != (self.first, seq)
                or data[start + at.seq + 3 : end : size] != _LOW[low : low + count]
                or data[start + at.seq + 2 : end : size] != _MID[low : low + count]
            ):
                self._explain(data, start, count)
            self.expected[0] = seq + count
            return
        expected = self.expected
        packets = self._fields.iter_unpack(memoryview(data)[start:end])
        for source, seq in packets:
            if source >= len(expected):
                raise DeliveryError(f"message of unknown publisher {source}")
            if expected[source] != seq:
                found = [seq, *(later for other, later in packets if other == source)]
                raise DeliveryError(f"publisher {source}: {_difference(expected[source], found)}")
            expected[source] = seq + 1

    def source_of(self, data: bytearray, start: int) -> int:
        """Index in ``expected`` of the publisher of the packet at ``start``."""
        source: int = _SOURCE_SEQ.unpack_from(data, start + self.layout.source)[0]
        return source - self.first

    def _explain(self, data: bytearray, start: int, count: int) -> None:
        """Raise unless the only difference is the DUP flag, which a broker may set."""
        at = self.layout
        by_source: dict[int, list[int]] = {}
        for index in range(count):
            offset = start + index * at.size
            head = bytes(data[offset : offset + len(at.head)])
            if head[0] & ~DUP != at.head[0] & ~DUP or head[1:] != at.head[1:]:
                raise DeliveryError(f"unexpected packet {head.hex(' ')} instead of {at.head.hex(' ')}")
            properties = bytes(data[offset + at.source - len(at.properties) : offset + at.source])
            if properties != at.properties:
                raise DeliveryError(f"properties {properties.hex(' ')} instead of {at.properties.hex(' ')}")
            source, seq = _SOURCE_SEQ.unpack_from(data, offset + at.source)
            by_source.setdefault(source, []).append(seq)
        for source, found in by_source.items():
            if not 0 <= source - self.first < len(self.expected):
                raise DeliveryError(f"message of publisher {source} went to the wrong subscriber")
            expected = self.expected[source - self.first]
            if found != list(range(expected, expected + len(found))):
                raise DeliveryError(f"publisher {source}: {_difference(expected, found)}")


def _difference(expected: int, found: list[int]) -> str:
    """Name what is wrong with ``found``, which should count up from ``expected``."""
    for index, seq in enumerate(found):
        if seq == expected:
            expected += 1
            continue
        if seq < expected:
            return f"duplicate: sequence {seq} came again where {expected} was due"
        kind = "reordered" if expected in found[index:] else "lost (or reordered)"
        return f"{kind}: sequence {seq} came where {expected} was due"
    return "no difference"
