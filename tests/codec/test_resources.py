# SPDX-License-Identifier: Apache-2.0
"""Memory is bounded by the limits, work is linear in the input."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc

import pytest

from mqtt_nats.codec import Decoder, Limits, Packet, PacketTooLarge, PublishRun, encode_publish
from tests.codec.support import key

LIMITS = Limits(1 << 20, 4096, 128, 100, 100)


class Counting(Decoder):
    """A decoder that counts the bytes it looks at."""

    __slots__ = ("seen",)

    def __init__(self, limits: Limits, version: int) -> None:
        super().__init__(limits, version)
        self.seen = 0

    def _parse(self, data: bytes, pos: int, packets: list[Packet]) -> None:
        self.seen += len(data) - pos
        super()._parse(data, pos, packets)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_each_byte_is_looked_at_once(size: int) -> None:
    raw = encode_publish(key("t"), bytes(200_000), 0, False, False, 0, 4) * 2
    reader = Counting(LIMITS, 4)
    packets = [packet for at in range(0, len(raw), size) for packet in reader.feed(raw[at : at + size])]
    assert len(packets) == 2
    assert reader.seen < len(raw) + 2 * (size + 20)


@pytest.mark.parametrize("size", [1, 2, 64])
def test_memory_of_an_incomplete_packet(size: int) -> None:
    raw = encode_publish(key("t"), bytes(500_000), 0, False, False, 0, 4)
    reads = [raw[at : at + size] for at in range(0, len(raw), size)]
    reader = Decoder(LIMITS, 4)
    tracemalloc.start()
    try:
        for read in reads[:-1]:
            reader.feed(read)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.5 * len(raw)
    (run,) = reader.feed(reads[-1])
    assert isinstance(run, PublishRun)
    assert run.payloads() == [bytes(500_000)]


@pytest.mark.parametrize("sizes", [(1, 5000), (2047, 2048, 2049), (3, 100_000), (70_000,)])
def test_large_packets_in_pieces(sizes: tuple[int, ...]) -> None:
    """What is kept of an incomplete packet is joined in its order, whatever was copied of it."""
    payloads = [bytes((number,)) * 90_000 + b"end" for number in range(1, 5)]
    raw = b"".join(encode_publish(key("t"), payload, 0, False, False, 0, 4) for payload in payloads)
    reader = Decoder(LIMITS, 4)
    got: list[bytes] = []
    at = number = 0
    while at < len(raw):
        size = sizes[number % len(sizes)]
        for packet in reader.feed(raw[at : at + size]):
            assert isinstance(packet, PublishRun)
            got += packet.payloads()
        at += size
        number += 1
    assert got == payloads


def test_a_small_rest_does_not_keep_a_large_read() -> None:
    reader = Decoder(LIMITS, 4)
    small = encode_publish(key("t"), b"x" * 30_000, 0, False, False, 0, 4)
    large = encode_publish(key("t"), bytes(500_000), 0, False, False, 0, 4)
    tracemalloc.start()
    try:
        reader.feed(large + small[:20_000])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 40_000


@pytest.mark.parametrize(
    ("version", "head"), [(0, b"\x10\x81\x20"), (4, b"\x30\x81\x80\x40"), (5, b"\x82\xff\xff\x7f")]
)
def test_too_large_is_refused_before_the_body(version: int, head: bytes) -> None:
    reader = Decoder(LIMITS, version)
    assert reader.feed(head) == []
    assert isinstance(reader.error, PacketTooLarge)


def test_short_runs_do_not_scan_ahead() -> None:
    """Short runs in a large read: the search for the end of a run must not look at the rest of the read each time.

    By processor time, since the search is one call: quadratic would be 64 times, linear is 8 times.
    """
    both = b"".join(encode_publish(key(topic), b"", 0, False, False, 0, 4) * 25 for topic in ("a", "b"))

    def cost(count: int) -> float:
        data = both * count
        best = 1e9
        for _ in range(5):
            reader = Decoder(LIMITS, 4)
            start = time.process_time()
            packets = reader.feed(data)
            best = min(best, time.process_time() - start)
            assert len(packets) == 2 * count
        return best

    assert cost(1600) < 24 * cost(200)


@pytest.mark.processes
def test_no_asyncio() -> None:
    """The codec is sans-IO: importing it brings in no event loop and no socket."""
    code = (
        "import sys, mqtt_nats.codec; sys.exit(not {'asyncio', 'anyio', 'socket', 'logging'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
