# SPDX-License-Identifier: Apache-2.0
"""Wire types of MQTT (section 1.5), packet kinds (table 2.1), and limits of packets from a peer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from mqtt_nats.codec.errors import EncodeError, MalformedPacket, ProtocolError

MAX_REMAINING_LENGTH = 268_435_455
"""Largest value of a variable byte integer; as a remaining length in bytes (section 1.5.5)."""


PUBACK: Final = 4
PUBREC: Final = 5
PUBREL: Final = 6
PUBCOMP: Final = 7
"""Packet types of the acknowledgements, as plain numbers: the message path compares them for each packet."""


class PacketKind(IntEnum):
    """Packet kind: the upper four bits of a packet's first byte."""

    CONNECT = 1
    CONNACK = 2
    PUBLISH = 3
    PUBACK = 4
    PUBREC = 5
    PUBREL = 6
    PUBCOMP = 7
    SUBSCRIBE = 8
    SUBACK = 9
    UNSUBSCRIBE = 10
    UNSUBACK = 11
    PINGREQ = 12
    PINGRESP = 13
    DISCONNECT = 14
    AUTH = 15


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one connection. Limits with a default are also bounded by the packet size or by the protocol."""

    max_packet_size: int
    """Most bytes of a whole packet after CONNECT, fixed header included."""
    connect_packet_size: int
    """Most bytes of CONNECT, and of AUTH until CONNACK: bounds the buffer of a client that is not authenticated."""
    max_topic_levels: int
    """Most levels of a topic name or filter."""
    max_filters: int
    """Most filters of one SUBSCRIBE or UNSUBSCRIBE."""
    max_user_properties: int
    """Most user properties of one property list."""
    max_user_property_bytes: int = 0xFFFF_FFFF
    """Most bytes of the names and values of user properties of one list."""
    max_qos: int = 2
    """Highest QoS of a PUBLISH and of a will."""
    max_client_id_length: int = 65_535
    """Most bytes of a client identifier."""


class Reader:
    """Cursor over `data[pos:end]`, the body of one packet. A read behind the end raises MalformedPacket."""

    __slots__ = ("data", "end", "pos")

    def __init__(self, data: bytes, pos: int, end: int) -> None:
        self.data = data
        self.pos = pos
        self.end = end

    def narrow(self, stop: int) -> int:
        """Read up to position `stop` only; return the former end. MalformedPacket when the packet ends before."""
        outer = self.end
        if stop > outer:
            raise MalformedPacket("properties end after the packet")
        self.end = stop
        return outer

    def widen(self, end: int) -> None:
        """Read up to position `end` again, as before :meth:`narrow`."""
        self.end = end

    def take(self, size: int) -> bytes:
        """Read the next `size` bytes."""
        start = self.pos
        stop = start + size
        if stop > self.end:
            raise MalformedPacket("packet ends inside a field")
        self.pos = stop
        return self.data[start:stop]

    def u8(self) -> int:
        """Read one byte."""
        return self.take(1)[0]

    def u16(self) -> int:
        """Read a two byte integer, big-endian."""
        return int.from_bytes(self.take(2), "big")

    def u32(self) -> int:
        """Read a four byte integer, big-endian."""
        return int.from_bytes(self.take(4), "big")

    def varint(self) -> int:
        """Read a variable byte integer, at most four bytes and no longer than needed. [MQTT-1.5.5-1] (5.0)"""
        value = shift = 0
        while True:
            byte = self.u8()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if shift and not byte:
                    raise MalformedPacket("variable byte integer is longer than needed")
                return value
            shift += 7
            if shift > 21:
                raise MalformedPacket("variable byte integer has more than four bytes")

    def binary(self) -> bytes:
        """Read binary data with its two byte length."""
        return self.take(self.u16())

    def string(self) -> str:
        """Read a UTF-8 string with its two byte length. [MQTT-1.5.3-1] [MQTT-1.5.3-2] [MQTT-1.5.3-3] (3.1.1),
        [MQTT-1.5.4-1] [MQTT-1.5.4-2] [MQTT-1.5.4-3] (5.0)
        """
        return text(self.binary())

    def packet_id(self) -> int:
        """Read a packet identifier, never 0. [MQTT-2.3.1-1] (3.1.1), [MQTT-2.2.1-3] (5.0)"""
        value = self.u16()
        if not value:
            raise ProtocolError("packet identifier is 0")
        return value

    def finish(self) -> None:
        """Raise MalformedPacket for bytes after the last field."""
        if self.pos != self.end:
            raise MalformedPacket("packet has bytes after its last field")


def text(raw: bytes) -> str:
    """Decode UTF-8 strictly: no surrogates, no overlong forms, no U+0000; U+FEFF stays. MalformedPacket otherwise."""
    try:
        value = raw.decode("utf-8")  # strict: also refuses U+D800..U+DFFF
    except UnicodeDecodeError:
        raise MalformedPacket("string is not valid UTF-8") from None
    if "\0" in value:
        raise MalformedPacket("string contains U+0000")
    return value


def put_varint(value: int) -> bytes:
    """Encode a variable byte integer in the fewest bytes. [MQTT-1.5.5-1] (5.0)"""
    if value < 0 or value > MAX_REMAINING_LENGTH:
        raise EncodeError(f"{value} does not fit a variable byte integer")
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if value < 0x20_0000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14 & 0x7F | 0x80, value >> 21))


def put_int(value: int, size: int) -> bytes:
    """Encode a big-endian integer of `size` bytes."""
    try:
        return value.to_bytes(size, "big")
    except OverflowError:
        raise EncodeError(f"{value} does not fit {size} byte(s)") from None


def put_binary(value: bytes) -> bytes:
    """Encode binary data with its length, at most 65,535 bytes."""
    if len(value) > 0xFFFF:
        raise EncodeError(f"field of {len(value)} bytes is longer than 65,535")
    return len(value).to_bytes(2, "big") + value


def put_string(value: str) -> bytes:
    """Encode a string with its length. [MQTT-1.5.3-1] [MQTT-1.5.3-2] (3.1.1), [MQTT-1.5.4-1] [MQTT-1.5.4-2] (5.0)"""
    if "\0" in value:
        raise EncodeError("string contains U+0000")
    try:
        raw = value.encode("utf-8")
    except UnicodeEncodeError:
        raise EncodeError("string contains a surrogate") from None
    return put_binary(raw)


def put_packet_id(value: int) -> bytes:
    """Encode a packet identifier, 1 to 65,535. [MQTT-2.3.1-1]"""
    if not value:
        raise EncodeError("packet identifier is 0")
    return put_int(value, 2)


def put_packet(first: int, body: bytes) -> bytes:
    """Join fixed header and body."""
    return bytes((first,)) + put_varint(len(body)) + body
