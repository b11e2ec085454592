# SPDX-License-Identifier: Apache-2.0
"""The header of the PROXY protocol, byte by byte."""

from __future__ import annotations

import contextlib
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.transport.proxy import SIGNATURE, BadHeader, HeaderReader


def second(family: int, fields: bytes, *, command: int = 0x21, size: int | None = None) -> bytes:
    """A header of version 2."""
    return SIGNATURE + bytes((command, family)) + (len(fields) if size is None else size).to_bytes(2, "big") + fields


IPV4 = bytes((192, 0, 2, 7, 198, 51, 100, 1)) + (40_312).to_bytes(2, "big") + (1883).to_bytes(2, "big")
IPV6 = socket.inet_pton(socket.AF_INET6, "2001:db8::7") + bytes(16) + (1).to_bytes(2, "big") + bytes(2)

GOOD: dict[bytes, tuple[str, int] | None] = {
    b"PROXY TCP4 192.0.2.7 198.51.100.1 40312 1883\r\n": ("192.0.2.7", 40_312),
    b"PROXY TCP4 1.1.1.1 1.1.1.1 0 0\r\n": ("1.1.1.1", 0),
    b"PROXY TCP6 2001:db8::7 ::1 65535 1\r\n": ("2001:db8::7", 65_535),
    b"PROXY TCP6 " + b"ffff:" * 7 + b"ffff " + b"ffff:" * 7 + b"ffff 65535 65535\r\n": ("ffff:" * 7 + "ffff", 65_535),
    b"PROXY UNKNOWN\r\n": None,
    b"PROXY UNKNOWN whatever it says here\r\n": None,
    b"PROXY UNKNOWN " + b"x" * 91 + b"\r\n": None,
    second(0x11, IPV4): ("192.0.2.7", 40_312),
    second(0x11, IPV4 + b"\x03\0\x04abcd"): ("192.0.2.7", 40_312),
    second(0x21, IPV6): ("2001:db8::7", 1),
    second(0x31, bytes(216)): None,
    second(0x00, b""): None,
    second(0x12, IPV4): None,
    second(0x00, b"", command=0x20): None,
    second(0x11, IPV4, command=0x20): None,
    second(0xFF, b"anything", command=0x20): None,
    second(0x11, IPV4 + bytes(2048 - len(IPV4))): ("192.0.2.7", 40_312),
}

BAD = [
    b"GET / HTTP/1.1\r\n",
    b"\x10\x10\0\4MQTT\4\2\0\0\0\0" + bytes(20),
    bytes.fromhex("16030100a5010000a1030300"),
    b"PROXY TCP4 192.0.2.7 198.51.100.1 40312\r\n",
    b"PROXY TCP4 192.0.2.7 198.51.100.1 40312 1883 7\r\n",
    b"PROXY TCP4  192.0.2.7 198.51.100.1 40312 1883\r\n",
    b"PROXY TCP4 192.0.2.256 198.51.100.1 40312 1883\r\n",
    b"PROXY TCP4 192.0.2.07 198.51.100.1 40312 1883\r\n",
    b"PROXY TCP4 2001:db8::7 198.51.100.1 40312 1883\r\n",
    b"PROXY TCP6 192.0.2.7 198.51.100.1 40312 1883\r\n",
    b"PROXY TCP4 192.0.2.7 198.51.100.1 65536 1883\r\n",
    b"PROXY TCP4 192.0.2.7 198.51.100.1 040312 1883\r\n",
    b"PROXY TCP4 192.0.2.7 198.51.100.1 -1 1883\r\n",
    b"PROXY TCP4 \xff.0.2.7 198.51.100.1 40312 1883\r\n",
    b"PROXY UDP4 192.0.2.7 198.51.100.1 40312 1883\r\n",
    b"PROXY TCP4 192.0.2.7 198.51.100.1 40312 1883\n\n\n",
    b"PROXY UNKNOWN " + b"x" * 200,
    b"proxy TCP4 192.0.2.7 198.51.100.1 40312 1883\r\n",
    second(0x11, IPV4, command=0x11),
    second(0x11, IPV4, command=0x22),
    second(0x11, IPV4[:-1]),
    second(0x21, IPV4),
    second(0x31, bytes(215)),
    second(0x13, IPV4),
    second(0x41, bytes(300)),
    second(0x11, IPV4, size=65_535),
    second(0x11, IPV4 + bytes(2049 - len(IPV4))),
    SIGNATURE[:-1] + b"X" + bytes(20),
]


def read(data: bytes, portion: int = 1 << 16) -> tuple[HeaderReader, int]:
    """Feed not more than is asked for; the reader, and how much it took."""
    reader = HeaderReader()
    taken = 0
    while reader.need:
        some = data[taken : taken + min(reader.need, portion)]
        if not some:
            break
        reader.feed(some)
        taken += len(some)
    return reader, taken


@pytest.mark.parametrize("portion", [1, 3, 1 << 16])
@pytest.mark.parametrize("header", GOOD)
def test_good(header: bytes, portion: int) -> None:
    """Nothing of what follows is taken."""
    reader, taken = read(header + b"\x10" * 100, portion)
    assert reader.need == 0
    assert taken == len(header)
    assert reader.source == GOOD[header]


@pytest.mark.parametrize("portion", [1, 1 << 16])
@pytest.mark.parametrize("header", BAD)
def test_bad(header: bytes, portion: int) -> None:
    with pytest.raises(BadHeader):
        read(header, portion)


@pytest.mark.parametrize("header", GOOD)
def test_incomplete(header: bytes) -> None:
    for end in range(len(header)):
        assert read(header[:end])[0].need > 0


@given(st.sampled_from(sorted(GOOD)), st.integers(0, 60), st.binary(max_size=4), st.integers(1, 20))
def test_anything(header: bytes, at: int, more: bytes, portion: int) -> None:
    """It is read, or refused, or not complete, and never takes much."""
    data = header[:at] + more + header[at + len(more) :] + bytes(3000)
    with contextlib.suppress(BadHeader):
        reader, taken = read(data, portion)
        assert taken <= 16 + 2048
        assert reader.need == 0
