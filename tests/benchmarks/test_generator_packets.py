# SPDX-License-Identifier: Apache-2.0
"""The load generator notices lost, repeated, swapped and damaged messages, and only those."""

from __future__ import annotations

import ast
import socket

import pytest

from benchmarks.generator.clients import Client, Loop
from benchmarks.generator.packets import (
    MAX_BATCH,
    PUBACK,
    PUBREC,
    Batch,
    DeliveryError,
    Layout,
    Verifier,
    ack_count,
    acks,
    connect,
    remaining_length,
    stamp_of,
    subscribe,
)
from benchmarks.natsclients import NatsGreeting, NatsSubscriber, layout_of
from tests.harness.nats import ROOT

TOPIC = "bench/00003"
SOURCE = 3


def messages(first: int, count: int, *, qos: int = 0, source: int = SOURCE, stamp: int = 0) -> list[bytes]:
    """PUBLISH packets of one publisher, one by one."""
    layout = Layout(TOPIC, 32, qos)
    batch = Batch(layout, source, 7)
    found: list[bytes] = []
    while len(found) < count:
        data = bytes(batch.fill(first + len(found), count - len(found), stamp))
        found += [data[start : start + layout.size] for start in range(0, len(data), layout.size)]
    return found


def verify(expected: int, received: list[bytes], *, qos: int = 0) -> int:
    """Give packets to a verifier that waits for ``expected``; what it waits for afterwards."""
    verifier = Verifier(Layout(TOPIC, 32, qos), first=SOURCE)
    verifier.expected[0] = expected
    verifier.take(bytearray(b"".join(received)), 0, len(received))
    return verifier.expected[0]


def test_connect_and_subscribe_bytes() -> None:
    assert connect("ab", clean=True, keep_alive=10).hex() == "100e00044d51545404020 00a00026162".replace(" ", "")
    assert connect("ab", clean=False, keep_alive=10)[9] == 0
    assert subscribe("a/+", 1).hex() == "820800010003612f2b01"


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(0, "00"), (127, "7f"), (128, "8001"), (16383, "ff7f"), (16384, "808001"), (2097152, "80808001")],
)
def test_remaining_length(value: int, encoded: str) -> None:
    assert remaining_length(value).hex() == encoded


def test_publish_bytes() -> None:
    packet = messages(0x01020304, 1, qos=1, stamp=5)[0]
    assert packet[:2] == bytes((0x32, 2 + len(TOPIC) + 2 + 32))
    assert packet[2:15] == b"\x00\x0b" + TOPIC.encode()
    assert int.from_bytes(packet[15:17], "big") == 0x0304 + 1
    assert packet[17:34] == bytes((0, 0, 0, SOURCE, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 5, 1))
    assert packet[34:] == bytes(15)


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("first", [0, 250, 0x7FFE, 0xFFFE, 0x1FFFE, 0x1000000])
def test_sequence_in_order(first: int, qos: int) -> None:
    received = messages(first, 20, qos=qos)
    assert len(set(received)) == 20
    assert verify(first, received, qos=qos) == first + 20
    for packet in received:
        assert verify(first, [packet], qos=qos) == first + 1
        first += 1


@pytest.mark.parametrize("position", [0, 1, 18])
def test_loss(position: int) -> None:
    received = messages(250, 20)
    del received[position]
    what = f"publisher 3: lost .*: sequence {251 + position} came where {250 + position} was due"
    with pytest.raises(DeliveryError, match=what):
        verify(250, received)


def test_loss_of_a_whole_period() -> None:
    with pytest.raises(DeliveryError, match="lost"):
        verify(5, messages(5 + 65536, 3))


@pytest.mark.parametrize("position", [0, 1, 19])
def test_duplicate(position: int) -> None:
    received = messages(250, 20)
    received.insert(position + 1, received[position])
    with pytest.raises(DeliveryError, match=f"duplicate: sequence {250 + position} came again"):
        verify(250, received)


def test_repeated_read() -> None:
    with pytest.raises(DeliveryError, match="duplicate: sequence 249"):
        verify(250, messages(249, 1))


@pytest.mark.parametrize("position", [0, 7, 18])
def test_reordering(position: int) -> None:
    received = messages(0, 20)
    received[position], received[position + 1] = received[position + 1], received[position]
    with pytest.raises(DeliveryError, match=f"reordered: sequence {position + 1} came where {position} was due"):
        verify(0, received)


def test_wrong_publisher() -> None:
    for count in (1, 2):
        with pytest.raises(DeliveryError, match="publisher 4 went to the wrong subscriber"):
            verify(0, messages(0, count, source=4))


@pytest.mark.parametrize("count", [1, 3])
def test_wrong_packet(count: int) -> None:
    received = messages(0, count, qos=1)
    with pytest.raises(DeliveryError, match="unexpected packet"):
        verify(0, [*received[:-1], b"\x30" + received[-1][1:]], qos=1)
    dup = [*received[:-1], b"\x3a" + received[-1][1:]]
    assert verify(0, dup, qos=1) == count


def interleaved(count: int) -> list[list[bytes]]:
    """``count`` messages of each of three publishers, taken in turns."""
    each = [messages(0, count, source=source) for source in range(3)]
    return [[each[source][i] for source in range(3)] for i in range(count)]


def test_many_publishers() -> None:
    layout = Layout(TOPIC, 32, 0)
    verifier = Verifier(layout, 3)
    turns = interleaved(10)
    data = bytearray(b"".join(packet for turn in turns for packet in turn))
    verifier.take(data, 0, 5)
    verifier.take(data, 5 * layout.size, 1)
    verifier.take(data, 6 * layout.size, 24)
    assert verifier.expected == [10, 10, 10]


@pytest.mark.parametrize(
    ("replace", "by", "message"),
    [(4, 5, "publisher 1: lost"), (4, 3, "publisher 1: duplicate"), (4, None, "publisher 1: reordered")],
)
def test_many_publishers_one_wrong(replace: int, by: int | None, message: str) -> None:
    turns = interleaved(10)
    if by is None:
        turns[replace][1], turns[replace + 1][1] = turns[replace + 1][1], turns[replace][1]
    else:
        turns[replace][1] = turns[by][1]
    if by == 5:
        turns = turns[:5]
    with pytest.raises(DeliveryError, match=message):
        Verifier(Layout(TOPIC, 32, 0), 3).take(
            bytearray(b"".join(packet for turn in turns for packet in turn)), 0, 3 * len(turns)
        )


def test_many_publishers_unknown() -> None:
    with pytest.raises(DeliveryError, match="unknown publisher 3"):
        Verifier(Layout(TOPIC, 32, 0), 3).take(bytearray(messages(0, 1)[0]), 0, 1)


def test_stamp_is_found() -> None:
    layout = Layout(TOPIC, 32, 0)
    data = bytearray(b"".join(messages(0, 3) + messages(3, 1, stamp=123456789) + messages(4, 2)))
    assert stamp_of(layout, data, 0, len(data)) == 123456789
    assert stamp_of(layout, data, 0, 3 * layout.size) == 0
    assert stamp_of(layout, data, 3 * layout.size, 4 * layout.size) == 123456789


@pytest.mark.parametrize("first", [0, 254, 0x7FF0, 0x12345])
def test_acknowledgements(first: int) -> None:
    layout = Layout(TOPIC, 32, 1)
    received = bytearray(b"".join(messages(first, 20, qos=1)))
    answers = acks(PUBREC, layout, received, layout.size, 19)
    ids = [received[i * layout.size + layout.packet_id :][:2] for i in range(1, 20)]
    assert answers == b"".join(b"\x50\x02" + packet_id for packet_id in ids)
    answers[0::4] = bytes([PUBACK]) * 19
    ack_count(PUBACK, answers, 19, first + 1)
    for wrong in (answers[4:8] + answers[:4] + answers[8:], answers[4:] + answers[:4], b"\x50" + answers[1:]):
        with pytest.raises(DeliveryError, match="not in order"):
            ack_count(PUBACK, bytearray(wrong), 19, first + 1)


def test_tables_cover_the_largest_batch() -> None:
    layout = Layout(TOPIC, 17, 1)
    batch = Batch(layout, SOURCE, MAX_BATCH)
    verifier = Verifier(layout, first=SOURCE)
    first = 0x8000 - 1
    verifier.expected[0] = first
    data = bytearray(batch.fill(first, MAX_BATCH, 0))
    verifier.take(data, 0, MAX_BATCH)
    ack_count(PUBACK, acks(PUBACK, layout, data, 0, MAX_BATCH), MAX_BATCH, first)
    assert verifier.expected[0] == first + MAX_BATCH


def test_a_nats_subscriber_answers_pings_between_messages() -> None:
    """They may come anywhere, also cut in two by a read; anything else makes the run void."""
    layout = layout_of("bench/00003", 32, received=True)
    assert layout.head == b"MSG bench.00003 1 32\r\n"
    batch = Batch(layout, SOURCE, 7)
    raw = bytes(batch.fill(0, 5, 0))
    cut = 2 * layout.size
    data = raw[:cut] + b"PING\r\n" + raw[cut:] + b"PING\r\n"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop = Loop(layout.size)
        ours.setblocking(False)
        greeting = NatsGreeting(loop, ours, Client("n", "bench/+"))
        theirs.sendall(b"INFO {}\r\nPONG\r\n" + data[:10])
        while not greeting.done:
            loop.turn(1)
        subscriber = NatsSubscriber(greeting, Verifier(layout, first=SOURCE), [])
        for at in range(10, len(data), 9):
            theirs.sendall(data[at : at + 9])
            loop.turn(1)
        assert subscriber.verifier.expected == [5]
        said = theirs.recv(4096)
        assert said.startswith(b"CONNECT {")
        assert b"SUB bench.* 1\r\nPING\r\n" in said
        assert said.endswith(b"PONG\r\nPONG\r\n")
        theirs.sendall(b"-ERR 'Slow Consumer'\r\n")
        with pytest.raises(DeliveryError, match="Slow Consumer"):
            loop.turn(1)
        loop.close()


def test_nothing_is_of_what_is_measured() -> None:
    """Neither the gateway's modules, whose faults would be its own, nor an event loop that costs time."""
    folder = ROOT / "benchmarks" / "generator"
    nodes = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    found = {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
    found |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    foreign = {"asyncio", "mqtt_nats", "mqtt_streams", "pyspark_mqtt_nats", "nats"}
    assert not {one.partition(".")[0] for one in found} & foreign
    own = {f"benchmarks.generator.{path.stem}" for path in folder.glob("*.py")} | {"benchmarks.generator"}
    assert {one for one in found if one.startswith("benchmarks")} <= own
