# SPDX-License-Identifier: Apache-2.0
"""Answers of a broker: CONNACK with its limits, SUBACK, and acknowledgements that carry reasons (5.0)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.generator.packets import PUBACK, PUBCOMP, PUBREC, PUBREL, DeliveryError

CONNACK, SUBACK, DISCONNECT = 0x20, 0x90, 0xE0

_WIDTH: Final = {0x11: 4, 0x13: 2, 0x21: 2, 0x22: 2, 0x24: 1, 0x25: 1, 0x27: 4, 0x28: 1, 0x29: 1, 0x2A: 1}
"""Bytes of the numbers among the properties of these packets [MQTT 5.0, 2.2.2.2]."""

_STRINGS: Final = {0x12: 1, 0x15: 1, 0x16: 1, 0x1A: 1, 0x1C: 1, 0x1F: 1, 0x26: 2}
"""Strings (or binary data), and of how many parts each is made."""

REASONS: Final = {
    2: "the client id is not accepted",
    3: "the server is unavailable",
    4: "bad user name or password",
    5: "not authorized",
    0x86: "bad user name or password",
    0x87: "not authorized",
    0x88: "the server is unavailable",
    0x89: "the server is busy",
    0x8A: "banned",
    0x97: "quota exceeded",
    0x9F: "connection rate exceeded",
}
"""Usual reasons of brokers that refuse a connection."""

_ACKS: Final = frozenset((PUBACK, PUBREC, PUBREL, PUBCOMP))


class LoadError(Exception):
    """The broker refused, closed a connection or did not answer in time."""


class RefusedError(Exception):
    """The broker says no, or not in the form of this version of MQTT."""


@dataclass(frozen=True)
class Limits:
    """Limits that a broker sets for a client in CONNACK; the defaults are those of the standard."""

    receive_maximum: int = 0xFFFF
    maximum_qos: int = 2
    packet_size: int = 0xFFFFFFF + 5
    """Bytes."""
    keep_alive: int = 0
    """Seconds; 0: what the client has said."""


def length_at(data: bytes | bytearray | memoryview, start: int, end: int) -> tuple[int, int] | None:
    """Value and end of the variable byte integer at ``start``; None where ``data[:end]`` ends too early."""
    value = 0
    for digit in range(4):
        if start + digit >= end:
            return None
        byte = data[start + digit]
        value |= (byte & 0x7F) << 7 * digit
        if byte < 0x80:
            return value, start + digit + 1
    raise DeliveryError(f"no length: {bytes(data[start : start + 4]).hex(' ')}")


def packet_at(data: bytes | bytearray | memoryview, start: int, end: int) -> tuple[int, bytes, int] | None:
    """First byte, body and end of the packet at ``start``; None where it is not complete in ``data[:end]``."""
    found = length_at(data, start + 1, end)
    if found is None or found[1] + found[0] > end:
        return None
    length, body = found
    return data[start], bytes(data[body : body + length]), body + length


def properties(body: bytes, start: int) -> tuple[dict[int, int], int]:
    """The numbers among the properties at ``start``, by identifier, and where the properties end."""
    found = length_at(body, start, len(body))
    if found is None or found[1] + found[0] > len(body):
        raise RefusedError(f"properties are cut off: {body.hex(' ')}")
    at, end, numbers = found[1], found[1] + found[0], {}
    while at < end:
        identifier = body[at]
        at += 1
        if identifier in _WIDTH:
            numbers[identifier] = int.from_bytes(body[at : at + _WIDTH[identifier]])
            at += _WIDTH[identifier]
            continue
        if identifier not in _STRINGS:
            raise RefusedError(f"unknown property 0x{identifier:02x}: {body.hex(' ')}")
        for _ in range(_STRINGS[identifier]):
            at += 2 + int.from_bytes(body[at : at + 2])
    if at != end:
        raise RefusedError(f"properties are cut off: {body.hex(' ')}")
    return numbers, end


def connack(kind: int, body: bytes, version: int) -> tuple[bool, Limits]:
    """Session Present and limits of a broker that accepts the connection; raises `RefusedError`."""
    if kind != CONNACK or len(body) < 2 or body[1] or (version == 4 and len(body) != 2):
        why = REASONS.get(body[1], "") if kind == CONNACK and len(body) >= 2 else ""
        raise RefusedError(f"connection refused{why and f': {why}'} (packet 0x{kind:02x}: {body.hex(' ')})")
    if version == 4:
        return bool(body[0]), Limits()
    numbers, end = properties(body, 2)
    if end != len(body):
        raise RefusedError(f"CONNACK is too long: {body.hex(' ')}")
    asked = {0x21: "receive_maximum", 0x24: "maximum_qos", 0x27: "packet_size", 0x13: "keep_alive"}
    return bool(body[0]), Limits(**{name: numbers[each] for each, name in asked.items() if each in numbers})


def suback(kind: int, body: bytes, version: int, qos: int) -> None:
    """Check that the subscription of packet id 1 is granted at ``qos``; raises `RefusedError`."""
    start = properties(body, 2)[1] if version == 5 and kind == SUBACK else 2
    if kind != SUBACK or body[:2] != b"\x00\x01" or body[start:] != bytes([qos]):
        raise RefusedError(f"subscription refused (packet 0x{kind:02x}: {body.hex(' ')})")


def shorten(data: bytearray, end: int) -> tuple[int, int]:
    """Cut the acknowledgements in ``data[:end]`` down to 4 bytes each, in place, as they always are in 3.1.1.

    Answers where the short ones end, and where the packet that is not complete yet starts. Raises `DeliveryError` for
    a reason that is not success, and for any other packet.
    """
    count = end // 4
    if end == count * 4 and data[1:end:4] == b"\x02" * count:
        return end, end
    short = start = 0
    while (found := packet_at(data, start, end)) is not None:
        kind, body, after = found
        if kind not in _ACKS or len(body) < 2:
            raise DeliveryError(f"unexpected packet {bytes(data[start : min(after, start + 16)]).hex(' ')}")
        if len(body) > 2 and body[2] >= 0x80:
            raise DeliveryError(f"packet 0x{kind:02x} has reason 0x{body[2]:02x}")
        data[short : short + 4] = bytes((kind, 2, body[0], body[1]))
        short, start = short + 4, after
    return short, start
