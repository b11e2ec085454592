# SPDX-License-Identifier: Apache-2.0
"""Runs: grouped where packets differ only in payload or packet identifier, and never anything but those packets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.codec import AckRun, Packet, ProtocolError, Publish, PublishRun, ack_bytes, encode_publish
from tests.codec.support import decoder, flatten, key, outcome

each_version = pytest.mark.parametrize("version", [4, 5])
each_count = pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25, 40, 41, 500])


def _plain(topic: str, payload: bytes, version: int) -> bytes:
    return encode_publish(key(topic), payload, 0, False, False, 0, version)


@each_version
@each_count
@pytest.mark.parametrize("size", [0, 1, 130])
def test_one_run(version: int, count: int, size: int) -> None:
    payloads = [number.to_bytes(2, "big") * (size // 2) + b"x" * (size % 2) for number in range(count)]
    raw = b"".join(_plain("t/1", payload, version) for payload in payloads)
    (run,) = decoder(version, "client").feed(raw)
    assert isinstance(run, PublishRun)
    assert (run.key, run.raw, run.count) == (key("t/1"), raw, count)
    assert run.step * count == len(raw)
    assert raw[: run.head] == _plain("t/1", payloads[0], version)[: run.step - size]
    assert run.payloads() == payloads


@each_version
@each_count
@pytest.mark.parametrize(
    ("topic", "payload", "retain", "level"),
    [("t/2", b"abcd", False, 0), ("t/1", b"abc", False, 0), ("t/1", b"abcd", True, 0), ("t/1", b"ab", False, 1)],
    ids=["topic", "size", "retain", "QoS"],
)
def test_what_ends_a_run(version: int, count: int, topic: str, payload: bytes, retain: bool, level: int) -> None:
    same = _plain("t/1", b"1234", version)
    other = encode_publish(key(topic), payload, level, retain, False, level, version)
    packets = decoder(version, "client").feed(same * count + other + same * 3)
    run, between, rest = packets
    assert isinstance(run, PublishRun)
    assert run.count == count
    assert isinstance(rest, PublishRun)
    assert rest.count == 3
    assert list(flatten([between])) == [Publish(level, retain, False, key(topic), level, payload)]


@each_version
@each_count
def test_only_complete_packets(version: int, count: int) -> None:
    one = _plain("t/1", b"1234", version)
    for missing in range(1, len(one)):
        reader = decoder(version, "client")
        packets = reader.feed(one * count + one[:-missing])
        assert sum(packet.count for packet in packets if isinstance(packet, PublishRun)) == count
        (last,) = reader.feed(one[-missing:])
        assert isinstance(last, PublishRun)
        assert last.count == 1


@each_version
def test_header_bytes_in_payloads(version: int) -> None:
    """Payloads made of headers, whole, shifted and cut, do not confuse the run."""
    head = _plain("t/0", b"", version)
    size = 3 * len(head)
    head = _plain("t/0", bytes(size), version)[:-size]
    stuff = [(head * 4)[at : at + size] for at in range(len(head))] * 5
    raw = b"".join(_plain("t/0", payload, version) for payload in stuff)
    (run,) = decoder(version, "client").feed(raw)
    assert isinstance(run, PublishRun)
    assert run.payloads() == stuff


@pytest.mark.parametrize("length", [b"\x85\0", b"\x85\x80\0", b"\x85\x80\x80\0"])
def test_longer_length_than_needed_is_no_run(length: bytes) -> None:
    """3.1.1 does not forbid it, 5.0 does: such bytes must not be passed on as they are."""
    one = b"\x30" + length + b"\0\1txx"
    assert decoder(4, "client").feed(one * 3) == [Publish(0, False, False, b"\0\1t", 0, b"xx")] * 3
    ack = b"\x40" + length.replace(b"\x85", b"\x82") + b"\0\1"
    assert decoder(4, "client").feed(ack * 3) == [AckRun(4, [1])] * 3


def test_longer_length_of_a_large_packet_is_no_run() -> None:
    payload = bytes(0x4000)
    one = b"\x30\x83\x80\x81\0\0\1t" + payload
    assert decoder(4, "client").feed(one * 2) == [Publish(0, False, False, b"\0\1t", 0, payload)] * 2


def test_property_length_ends_a_run() -> None:
    plain = _plain("t", b"\x01\x01xx", 5)
    other = encode_publish(key("t"), b"xx", 0, False, False, 0, 5, {"payload_format_indicator": 1})
    assert len(plain) == len(other)
    first, second, third = decoder(5, "client").feed(plain * 2 + other + plain)
    assert isinstance(first, PublishRun)
    assert isinstance(second, Publish)
    assert isinstance(third, PublishRun)


@each_count
@pytest.mark.parametrize("kind", [4, 5, 6, 7])
def test_acks(kind: int, count: int) -> None:
    ids = [number * 97 % 65535 + 1 for number in range(count)]
    raw = b"".join(ack_bytes(kind, number) for number in ids)
    other = ack_bytes(4 if kind == 7 else kind + 1, 9)
    packets = decoder(4, "client").feed(raw + other + raw[:3])
    assert packets == [AckRun(kind, ids), AckRun(4 if kind == 7 else kind + 1, [9])]


@each_count
def test_id_zero_after_good_ones(count: int) -> None:
    raw = b"".join(ack_bytes(4, number + 1) for number in range(count))
    packets, error, _ = outcome(decoder(4, "client"), [raw + ack_bytes(4, 0) + raw])
    assert packets == [AckRun(4, [number + 1]) for number in range(count)]
    assert error is ProtocolError


@each_version
@given(
    picks=st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "long/" * 12]), st.sampled_from([0, 5, 200]), st.sampled_from([1, 2, 12, 30])
        ),
        max_size=12,
    )
)
def test_mixture(version: int, picks: list[tuple[str, int, int]]) -> None:
    expected: list[Packet] = []
    raw = b""
    for topic, size, count in picks:
        for number in range(count):
            payload = bytes((number,)) * size
            expected.append(Publish(0, False, False, key(topic), 0, payload))
            raw += _plain(topic, payload, version)
    assert outcome(decoder(version, "client"), [raw]) == (expected, None, "None")
