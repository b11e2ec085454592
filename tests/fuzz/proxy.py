# SPDX-License-Identifier: Apache-2.0
"""Mutated headers of the PROXY protocol."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final

import mqtt_nats.transport.proxy
from mqtt_nats.transport.proxy import FIELDS_MOST, LINE, LINE_MOST, SIGNATURE, BadHeader, HeaderReader
from tests.fuzz.engine import Input, Target, Unexpected, expect
from tests.fuzz.mutation import of_pieces
from tests.transport.test_proxy_header import BAD, GOOD, IPV4, IPV6

FOLLOWING: Final = b"\x10" * 100
"""What stands behind the header."""

_PIECES: Final = (
    *(
        SIGNATURE,
        LINE,
        b"\r\n",
        b"\n",
        b" ",
        b"TCP4",
        b"TCP6",
        b"UNKNOWN",
        b"1.2.3.4",
        b"::1",
        b"65535",
        b"65536",
        b"0",
    ),
    *(
        b"\x20",
        b"\x21",
        b"\x11",
        b"\x31",
        b"\0\x0c",
        b"\0\x24",
        b"\x08\0",
        b"\x08\x01",
        IPV4,
        IPV6,
        b"\xd9\xa1",
        b"%eth0",
    ),
)


def seeds() -> list[Input]:
    """Headers that are right, and some that are not."""
    return [(0, one) for one in (*GOOD, *BAD)]


def _read(data: bytes, portion: int) -> tuple[HeaderReader, int, str]:
    """Feed what is asked for, at most ``portion`` bytes at a time; the reader, bytes taken, and what was wrong."""
    reader = HeaderReader()
    taken = 0
    while reader.need and taken < len(data):
        expect(reader.need > 0, f"it asks for {reader.need} bytes")
        some = data[taken : taken + min(reader.need, portion)]
        taken += len(some)
        try:
            reader.feed(some)
        except BadHeader as error:
            return reader, taken, str(error)
        except Exception as error:
            raise Unexpected(f"{type(error).__name__}: {error}") from error
    return reader, taken, ""


def check(one: Input, number: int) -> tuple[int, bool]:
    """Any bytes are a header, the beginning of a header, or BadHeader.

    The result does not depend on how the bytes were cut into reads. The reader asks for no byte after the header,
    for at most 107 bytes of version 1, and for at most 2,064 bytes of version 2. Only a header of a connection that
    a proxy passes on gives the address of a client: an IP address and a port that stand in the header.
    """
    _, data = one
    data += FOLLOWING
    whole = _read(data, len(data))
    parts = _read(data, 1 + number % 7)
    expect(
        (whole[0].source, whole[2]) == (parts[0].source, parts[2]) and (whole[1] == parts[1] or whole[2]),
        f"cut into reads it is {parts[0].source} {parts[2]!r} after {parts[1]} bytes",
    )
    reader, taken, wrong = whole
    second = data.startswith(SIGNATURE)
    expect(taken <= (16 + FIELDS_MOST if second else LINE_MOST), f"it takes {taken} bytes")
    if reader.need or wrong:
        expect(reader.source is None, "it names somebody of whom it does not know enough")
        return 0, bool(wrong)
    header = data[:taken]
    expect(header.startswith((SIGNATURE, LINE)), "what begins otherwise is a header")
    if second:
        expect(taken == 16 + int.from_bytes(header[14:16], "big"), f"the header of version 2 ends at {taken}")
    else:
        expect(header.endswith(b"\r\n") and header.count(b"\n") == 1, "the line ends elsewhere")
    _named(reader, header, second)
    return 1, False


def _named(reader: HeaderReader, header: bytes, second: bool) -> None:
    if reader.source is None:
        for_others = header[12] == 0x21 and header[13] in (0x11, 0x21) if second else header[6:10] in (b"TCP4", b"TCP6")
        expect(not for_others, "it names nobody")
        return
    address, port = reader.source
    try:
        raw = ip_address(address).packed
    except ValueError:
        raise Unexpected(f"{address!r} is no address") from None
    expect(0 <= port <= 65_535, f"{port} is no port")
    if second:
        expect(header[12] == 0x21 and header[13] == (0x11 if len(raw) == 4 else 0x21), "it speaks for nobody")
        expect(header[16:].startswith(raw), f"{address} does not stand there")
        expect(header[16 + 2 * len(raw) :].startswith(port.to_bytes(2, "big")), f"{port} does not stand there")
    else:
        words = header[:-2].split(b" ")
        expect(ip_address(words[2].decode()).packed == raw and words[4] == b"%d" % port, "another line says so")


TARGET: Final = Target("proxy", (mqtt_nats.transport.proxy,), seeds, check, mutate=of_pieces(*_PIECES))
