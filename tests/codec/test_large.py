# SPDX-License-Identifier: Apache-2.0
"""Which PUBLISH packets may be read into a buffer of their own, and what the decoder hands over of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mqtt_nats.codec import Connect, PublishRun, encode, encode_publish
from mqtt_nats.codec.decoder import OWN_BUFFER_BYTES
from tests.codec.support import LIMITS, decoder, key

each_version = pytest.mark.parametrize("version", [4, 5])


def packet(topic: str, size: int, version: int, *, qos: int = 0, retain: bool = False) -> bytes:
    """A PUBLISH of `size` bytes of payload."""
    return encode_publish(key(topic), b"x" * size, qos, retain, False, 7 if qos else 0, version)


@each_version
@pytest.mark.parametrize("size", [OWN_BUFFER_BYTES, 200_000, 299_000])
@pytest.mark.parametrize("topic", ["t", "a/topic" * 100])
def test_a_large_publish_is_told_by_its_beginning(version: int, size: int, topic: str) -> None:
    raw = packet(topic, size, version)
    run = decoder(version, "client").opening(raw[:1024])
    (parsed,) = decoder(version, "client").feed(raw)
    assert isinstance(parsed, PublishRun)
    assert run == replace(parsed, raw=b"")


@each_version
def test_as_large_as_need_be(version: int) -> None:
    head = len(packet("t", OWN_BUFFER_BYTES, version)) - OWN_BUFFER_BYTES
    assert decoder(version, "client").opening(packet("t", OWN_BUFFER_BYTES - head, version)) is not None
    assert decoder(version, "client").opening(packet("t", OWN_BUFFER_BYTES - head - 1, version)) is None


@each_version
def test_every_beginning_that_is_too_short(version: int) -> None:
    raw = packet("topic", 200_000, version)
    enough = raw.index(b"x") if version == 5 else raw.index(b"x") + 1
    for length in range(enough):
        assert decoder(version, "client").opening(raw[:length]) is None
    assert decoder(version, "client").opening(raw[: enough + 1]) is not None


@pytest.mark.parametrize(
    ("version", "raw"),
    [
        (4, packet("t", 200_000, 4, qos=1)),
        (4, packet("t", 200_000, 4, retain=True)),
        (5, packet("t", 200_000, 5, qos=2)),
        (4, packet("t", 400_000, 4)),  # more than is taken
        (4, packet("t", 3_000_000, 4)),  # four bytes of length
        (4, packet("t", 20_000, 4)),
        (4, b"\x30\x80\x80\x00" + bytes(20)),  # a length longer than needed
        (4, b"\x30\x85\x00" + bytes(20)),
        (4, packet("t" * 2000, 200_000, 4)[:1024]),  # a topic that does not end
        (5, b"\x30\x80\x80\x09\0\0" + bytes(20)),  # no topic
        (5, b"\x30\x80\x80\x09\0\1t\x03\x23\0\1" + bytes(20)),  # properties
        (0, encode(Connect(4, "x", True, 0), 4)),
        (4, b"\xc0\0"),
        (4, b""),
    ],
)
def test_what_is_none(version: int, raw: bytes) -> None:
    assert decoder(version, "client").opening(raw) is None


@each_version
@pytest.mark.parametrize("before", [0, 1, 3])
def test_the_incomplete_one_is_handed_over(version: int, before: int) -> None:
    raw = packet("t/1", 200_000, version)
    reader = decoder(version, "client")
    small = packet("t/2", 10, version)
    assert len(reader.feed(small * before + raw[:30_000])) == (before > 0)
    large = [reader.large]
    assert reader.surrender(8) is not None
    large.append(reader.large)
    assert large == [True, False]
    assert len(reader.feed(small)) == 1, "nothing is left of it"


@each_version
def test_a_part_of_it_must_be_there(version: int) -> None:
    raw = packet("t/1", 200_000, version)
    reader = decoder(version, "client")
    reader.feed(raw[:30_000])
    assert reader.surrender(4) is None
    reader.feed(raw[30_000:60_000])
    found = reader.surrender(4)
    assert found is not None
    run, parts = found
    assert b"".join(parts) == raw[:60_000]
    assert run.step == len(raw)


def test_what_is_not_handed_over_is_read_as_ever() -> None:
    raw = packet("t/1", 200_000, 4, qos=1)
    reader = decoder(4, "client")
    reader.feed(raw[:150_000])
    assert reader.surrender(4) is None
    (found,) = reader.feed(raw[150_000:])
    (whole,) = decoder(4, "client").feed(raw)
    assert found == whole


def test_nothing_after_a_violation() -> None:
    reader = decoder(4, "client")
    reader.feed(packet("t", 10, 4) + b"\x00")
    assert reader.error is not None
    assert not reader.large
    assert reader.surrender(4) is None


@each_version
def test_payload_of_what_was_read_into_a_buffer(version: int) -> None:
    raw = packet("t/1", 200_000, version)
    run = decoder(version, "client").opening(raw[:1024])
    assert run is not None
    run.raw = bytearray(raw)
    payloads = run.payloads()
    assert payloads == [b"x" * 200_000]
    assert isinstance(payloads[0], bytes), "who keeps it may have it as a key"


def test_the_limit_is_that_of_the_moment() -> None:
    raw = packet("t", 200_000, 4)
    limits = replace(LIMITS, max_packet_size=len(raw) - 1)
    assert decoder(4, "client", limits).opening(raw) is None
    assert decoder(4, "client", replace(LIMITS, max_packet_size=len(raw))).opening(raw) is not None
