# SPDX-License-Identifier: Apache-2.0
"""Mutated inputs through the decoder of MQTT packets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import mqtt_nats.codec
from mqtt_nats.codec import Ack, AckRun, Decoder, Limits, Packet, encode
from tests.codec.cases import CASES
from tests.codec.support import LIMITS, decoder, flatten
from tests.fuzz.engine import Input, Target, Unexpected

SMALL: Final = Limits(
    max_packet_size=400, connect_packet_size=200, max_topic_levels=4, max_filters=4, max_user_properties=2
)
STARTS: Final = ((0, "client"), (4, "client"), (5, "client"), (4, "server"), (5, "server"))
"""Protocol version that is known at the beginning, and who sends; the variants of the target."""

CHECKED: Final = 4
"""Of so many inputs one is also cut into reads, and written again."""

Make = Callable[[int, str, Limits], Decoder]


def seeds() -> list[Input]:
    """Packets that are right, each where it may come."""
    return [
        (index, case.raw) for case in CASES for index, start in enumerate(STARTS) if start == _start(case.raw, case)
    ]


def _start(data: bytes, case: object) -> tuple[int, str]:
    version, side = getattr(case, "version"), getattr(case, "side")  # noqa: B009  # of several tables
    return (0 if data[:1] == b"\x10" else version), side


def read(data: bytes, start: int, limits: Limits, make: Make = decoder) -> tuple[Decoder, list[Packet]]:
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


def compare(
    data: bytes, start: int, limits: Limits, cut: int, reader: Decoder, packets: list[Packet], make: Make
) -> None:
    """Decode one input in several reads, and what was read once more.

    Raises:
        Unexpected: that makes a difference.
    """
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


def check(one: Input, number: int, make: Make) -> tuple[int, bool]:
    """Any bytes give packets or a documented error, and nothing after an error.

    The result does not depend on how the bytes were cut into reads. A packet that was read is the same when it is
    written and read again. A decoder that waits for the rest of a packet keeps no more bytes than it was given, and
    no more than the largest packet has.
    """
    start, data = one
    limits = LIMITS if (number // 12) & 1 else SMALL  # each for inputs that are followed, and for those compared
    reader, packets = read(data, start, limits, make)
    if number % CHECKED == 0:
        compare(data, start, limits, 1 + number // CHECKED % 12, reader, packets, make)
    return len(packets), reader.error is not None


def target(make: Make = decoder) -> Target:
    """The decoder as a target.

    Args:
        make: makes the decoder of a start with limits.
    """
    return Target("decoder", (mqtt_nats.codec,), seeds, partial(check, make=make), len(STARTS))
