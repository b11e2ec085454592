# SPDX-License-Identifier: Apache-2.0
"""Decoders, limits and comparisons that the tests of the codec share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mqtt_nats.codec import AckRun, ClientDecoder, Decoder, Limits, MqttError, Packet, Publish, PublishRun

LIMITS = Limits(
    max_packet_size=300_000,
    connect_packet_size=65_536,
    max_topic_levels=128,
    max_filters=20,
    max_user_properties=10,
)


def key(topic: str) -> bytes:
    """A topic as it stands in PUBLISH."""
    raw = topic.encode()
    return len(raw).to_bytes(2, "big") + raw


def decoder(version: int, side: str, limits: Limits = LIMITS) -> Decoder:
    """A decoder of what `side` ("client" or "server") sends."""
    return ClientDecoder(limits, version) if side == "server" else Decoder(limits, version)


def flatten(packets: Iterable[Packet]) -> Iterator[Packet]:
    """Runs as single packets: how many packets share a run depends on how the bytes were cut into reads."""
    for packet in packets:
        if isinstance(packet, PublishRun):
            for payload in packet.payloads():
                yield Publish(0, False, False, packet.key, 0, payload)
        elif isinstance(packet, AckRun):
            for number in packet.ids:
                yield AckRun(packet.kind, [number])
        else:
            yield packet


def outcome(reader: Decoder, reads: Iterable[bytes]) -> tuple[list[Packet], type[MqttError] | None, str]:
    """All packets of the reads, flattened, and how it ended."""
    packets: list[Packet] = []
    for read in reads:
        packets.extend(flatten(reader.feed(read)))
    error = reader.error
    return packets, None if error is None else type(error), str(error)


def cut(data: bytes, sizes: Iterable[int]) -> Iterator[bytes]:
    """`data` in reads of the given sizes, the rest in one."""
    at = 0
    for size in sizes:
        if at >= len(data):
            return
        yield data[at : at + size]
        at += size
    yield data[at:]
