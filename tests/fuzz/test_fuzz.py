# SPDX-License-Identifier: Apache-2.0
"""A short run of the fuzzer, and decoders with mistakes that it has to find."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mqtt_nats.codec import Decoder, Limits, Packet, Subscribe
from tests.codec.support import decoder
from tests.fuzz.arcs import Arcs
from tests.fuzz.codec import STARTS, fuzz, fuzz_in_processes, seeds


def test_the_codec() -> None:
    seed = secrets.token_hex(8)
    outcome = fuzz(40_000, seed)
    assert not outcome.failures, f"seed {seed}: {outcome.failures}"
    assert outcome.inputs == 40_000
    assert 0 < outcome.refused < outcome.inputs
    assert outcome.grown < 64 * 1024 * 1024
    first = fuzz(0, seed)
    assert len(outcome.corpus) > len(first.corpus)  # it has found something that the seeds do not reach
    assert len(outcome.arcs) > len(first.arcs) > 100


def test_in_processes() -> None:
    outcomes = fuzz_in_processes(3001, "seed", 2)
    assert [one.inputs for one in outcomes] == [1501, 1500]
    assert outcomes[0].corpus != outcomes[1].corpus


class Broken(Decoder):
    """Two filters, the first of which is at QoS 2 and the second at QoS 1, end it."""

    __slots__ = ()

    def feed(self, data: bytes) -> list[Packet]:
        packets = super().feed(data)
        for packet in packets:
            if isinstance(packet, Subscribe) and [one.qos for one in packet.filters[:2]] == [2, 1]:
                raise IndexError("index out of range")
        return packets


class Forgetful(Decoder):
    """What is left of a read of exactly seven bytes is forgotten."""

    __slots__ = ()

    def feed(self, data: bytes) -> list[Packet]:
        packets = super().feed(data)
        if len(data) == 7:
            self._held = []
        return packets


class Hoarding(Decoder):
    """Keeps what it has read."""

    __slots__ = ()

    def feed(self, data: bytes) -> list[Packet]:
        packets = super().feed(data)
        if self._held:
            self._held.append(data)
        return packets


def _maker(kind: Callable[[Limits, int], Decoder]) -> Callable[[int, str, Limits], Decoder]:
    return lambda version, side, limits: decoder(version, side, limits) if side == "server" else kind(limits, version)


@pytest.mark.parametrize(
    ("kind", "text"), [(Broken, "IndexError: index"), (Forgetful, "cut into reads of 7"), (Hoarding, "bytes are kept")]
)
def test_it_finds_a_mistake(kind: Callable[[Limits, int], Decoder], text: str) -> None:
    outcome = fuzz(100_000, "seed", make=_maker(kind), stop=1)
    (((start, data), found),) = outcome.failures
    assert text in found
    assert STARTS[start][1] == "client"
    assert (start, data) not in seeds()


def test_steps_between_lines() -> None:
    def branches(number: int) -> int:
        if number:
            return 1
        return 2

    arcs = Arcs(Path(__file__).parent)
    steps = [arcs.follow(partial(branches, number)) for number in (0, 0, 1, 1)]
    assert steps == [True, False, True, False]
    assert not Arcs(Path(__file__).parent / "elsewhere").follow(partial(branches, 0))
