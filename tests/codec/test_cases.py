# SPDX-License-Identifier: Apache-2.0
"""The table of raw bytes, used in every way: decoded, encoded, byte by byte, with more bytes behind."""

from __future__ import annotations

import pytest

from mqtt_nats.codec import Connect, Decoder, Packet, encode
from tests.codec.cases import CASES, Case
from tests.codec.support import LIMITS, decoder, flatten

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def _decoder(case: Case) -> Decoder:
    return decoder(0 if isinstance(case.packet, Connect) else case.version, case.side)


def _decode(case: Case, *reads: bytes) -> list[Packet]:
    reader = _decoder(case)
    packets = [packet for read in reads for packet in flatten(reader.feed(read))]
    assert reader.error is None
    return packets


@every_case
def test_decode(case: Case) -> None:
    assert _decode(case, case.raw) == [case.packet]


@every_case
def test_encode(case: Case) -> None:
    raw = encode(case.packet, case.version)
    if case.canonical:
        assert raw == case.raw
    elif not getattr(case.packet, "bridge", False):
        assert raw != case.raw
        assert len(raw) <= len(case.raw)
        assert _decode(case, raw) == list(flatten([case.packet])) or raw[1] == 2  # a short ack comes back as a run


@every_case
def test_one_byte_at_a_time(case: Case) -> None:
    reader = _decoder(case)
    for byte in case.raw[:-1]:
        assert reader.feed(bytes((byte,))) == []
    assert list(flatten(reader.feed(case.raw[-1:]))) == [case.packet]
    assert reader.error is None


@every_case
def test_trailing_data(case: Case) -> None:
    ping = b"\xd0\0" if case.side == "server" else b"\xc0\0"
    packets = _decode(case, case.raw + ping + ping[:1], ping[1:])
    assert packets[0] == case.packet
    assert [encode(packet, case.version) for packet in packets[1:]] == [ping, ping]


@every_case
def test_trailing_garbage_comes_after_the_packet(case: Case) -> None:
    reader = _decoder(case)
    assert list(flatten(reader.feed(case.raw + b"\0\0"))) == [case.packet]
    assert reader.error is not None
    assert reader.feed(case.raw) == []


@pytest.mark.parametrize("case", [case for case in CASES if case.packet.__class__ is Connect], ids=lambda case: case.id)
def test_version_comes_from_connect(case: Case) -> None:
    reader = Decoder(LIMITS)
    assert reader.version == 0
    reader.feed(case.raw)
    assert reader.version == case.version
