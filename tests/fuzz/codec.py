# SPDX-License-Identifier: Apache-2.0
"""Mutated inputs through the decoder.

Any bytes give packets or a documented error; how they were cut into reads changes neither; what was read is the same
when it is written and read again; a decoder that waits for the rest of a packet keeps no more than it was given.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import psutil

import mqtt_nats.codec
from mqtt_nats.codec import Ack, AckRun, Decoder, Limits, Packet, encode
from tests.codec.cases import CASES
from tests.codec.support import LIMITS, decoder, flatten
from tests.fuzz.arcs import Arc, Arcs
from tests.fuzz.mutation import mutated

CODEC: Final = Path(mqtt_nats.codec.__file__).parent
SMALL: Final = Limits(
    max_packet_size=400, connect_packet_size=200, max_topic_levels=4, max_filters=4, max_user_properties=2
)
STARTS: Final = ((0, "client"), (4, "client"), (5, "client"), (4, "server"), (5, "server"))

FOLLOWED: Final = 6
"""Of so many inputs one is followed through the code, which takes about ten times as long as decoding it."""

CHECKED: Final = 4
"""Of so many inputs one is also cut into reads, and written again."""

Input = tuple[int, bytes]
"""Where the decoder starts, as an index of ``STARTS``, and what it reads."""


class Unexpected(Exception):
    """The decoder did what it must not."""


@dataclass
class Outcome:
    """What came of some inputs.

    Attributes:
        inputs: how many there were.
        refused: how many of them ended in a violation of the protocol.
        packets: packets that were read.
        corpus: inputs that have reached something new.
        arcs: what they have reached.
        failures: inputs with which something was wrong, and what.
        seconds: how long it took.
        grown: bytes by which the process has grown since a tenth of the inputs had been read.
    """

    inputs: int = 0
    refused: int = 0
    packets: int = 0
    corpus: list[Input] = field(default_factory=list)
    arcs: set[Arc] = field(default_factory=set)
    failures: list[tuple[Input, str]] = field(default_factory=list)
    seconds: float = 0.0
    grown: int = 0


def seeds() -> list[Input]:
    """Packets that are right, each where it may come."""
    return [
        (index, case.raw) for case in CASES for index, start in enumerate(STARTS) if start == _start(case.raw, case)
    ]


def _start(data: bytes, case: object) -> tuple[int, str]:
    version, side = getattr(case, "version"), getattr(case, "side")  # noqa: B009  # of several tables
    return (0 if data[:1] == b"\x10" else version), side


def read(
    data: bytes, start: int, limits: Limits, make: Callable[..., Decoder] = decoder
) -> tuple[Decoder, list[Packet]]:
    """Decode one input in one read.

    Raises:
        Unexpected: of an error that is not documented, or what is kept is too much.
    """
    reader = make(*STARTS[start], limits)
    try:
        packets = reader.feed(data)
    except Exception as error:
        raise Unexpected(f"{type(error).__name__}: {error}") from error
    if reader.error is not None:
        if reader.feed(b"\xc0\0"):
            raise Unexpected(f"after {reader.error!r} it goes on")
    elif (kept := sum(map(len, reader._held))) > min(len(data), limits.max_packet_size):
        raise Unexpected(f"{kept} bytes are kept")
    return reader, packets


def check(data: bytes, start: int, limits: Limits, cut: int, make: Callable[..., Decoder] = decoder) -> None:
    """Decode one input in several reads, and what was read once more.

    Raises:
        Unexpected: that makes a difference.
    """
    reader, packets = read(data, start, limits, make)
    whole = list(flatten(packets))
    other = make(*STARTS[start], limits)
    parts = [one for at in range(0, len(data), cut) for one in flatten(other.feed(data[at : at + cut]))]
    if parts != whole or repr(other.error) != repr(reader.error) or other.version != reader.version:
        raise Unexpected(f"cut into reads of {cut} bytes it is read as {parts} and {other.error!r}")
    version = reader.version
    if not whole:
        return
    again = make(*STARTS[start], LIMITS)
    written = b"".join(encode(packet, version) for packet in whole)
    if list(map(_short, flatten(again.feed(written)))) != list(map(_short, whole)):
        raise Unexpected(f"written again it is {written!r}")


def _short(packet: Packet) -> Packet:
    """A long form of an acknowledgement that says no more than the short one is written as that."""
    if isinstance(packet, Ack) and not packet.reason and not packet.properties:
        return AckRun(packet.kind, [packet.packet_id])
    return packet


def fuzz(
    count: int, seed: str, corpus: Sequence[Input] = (), make: Callable[..., Decoder] = decoder, stop: int = 20
) -> Outcome:
    """Feed ``count`` mutated inputs to decoders; ends early after ``stop`` failures."""
    random = Random(seed)
    arcs = Arcs(CODEC)
    outcome = Outcome(arcs=arcs.seen)
    material: list[Input] = []
    for start, data in [*seeds(), *corpus]:
        if arcs.follow(lambda data=data, start=start: read(data, start, LIMITS, make)):  # type: ignore[misc]
            material.append((start, data))
    material = material or [*seeds(), *corpus]  # compiled code does not tell which of its lines run
    process = psutil.Process()
    settled = max(count // 10, 1)
    before = 0
    begin = time.monotonic()
    choose = random.random
    for number in range(count):
        if number == settled:
            before = process.memory_info().rss
        total = len(material)
        # What was found late has been tried less often.
        at = int(choose() * total) if choose() < 0.5 else total - 1 - int(choose() ** 3 * total)
        start, base = material[at]
        if choose() < 0.1:
            start = int(choose() * len(STARTS))
        data = mutated(base, material[int(choose() * total)][1], random)
        limits = LIMITS if number & 1 else SMALL
        try:
            if number % FOLLOWED:
                reader, packets = read(data, start, limits, make)
            else:
                done: list[tuple[Decoder, list[Packet]]] = []
                if arcs.follow(lambda: done.append(read(data, start, limits, make))):  # noqa: B023
                    material.append((start, data))
                reader, packets = done[0]
            if number % CHECKED == 0:
                check(data, start, limits, 1 + int(choose() * 12), make)
        except Unexpected as error:
            outcome.failures.append(((start, data), str(error)))
            if len(outcome.failures) >= stop:
                break
            continue
        outcome.inputs += 1
        outcome.packets += len(packets)
        outcome.refused += reader.error is not None
    outcome.seconds = time.monotonic() - begin
    outcome.grown = max(process.memory_info().rss - before, 0) if before else 0
    outcome.corpus = material
    return outcome


def fuzz_in_processes(count: int, seed: str, jobs: int) -> list[Outcome]:
    """As :func:`fuzz`, shared out to ``jobs`` processes."""
    if jobs == 1:
        return [fuzz(count, seed)]
    shares = [count // jobs + (index < count % jobs) for index in range(jobs)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return pool.starmap(fuzz, [(share, f"{seed}-{index}") for index, share in enumerate(shares)])
