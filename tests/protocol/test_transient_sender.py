# SPDX-License-Identifier: Apache-2.0
"""Every (state, packet) pair of the sender's side of a regular session, its window and its queue."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.codec import ProtocolError, QuotaExceeded
from mqtt_nats.codec.wire import PUBACK, PUBCOMP, PUBREC
from mqtt_nats.protocol.transient_sender import ENTRY_BYTES, PUBLISHED1, PUBLISHED2, RELEASED, TransientSender

HEAD = b"\x32\x07\x00\x01t"


def machine(limit: int = 3, queued: int = 2) -> tuple[TransientSender, list[bytes]]:
    written: list[bytes] = []
    return TransientSender(limit, queued, written.append), written


def identifier(packet: bytes) -> int:
    """The packet identifier of a PUBLISH made of HEAD."""
    assert packet.startswith(HEAD)
    return int.from_bytes(packet[len(HEAD) : len(HEAD) + 2], "big")


def pubrel(packet_id: int) -> bytes:
    return bytes((0x62, 2, packet_id >> 8, packet_id & 0xFF))


# (state, packet, a reason of 0x80 or more) -> (state afterwards, answered with PUBREL), or None for a violation
IGNORED = "unchanged"
TABLE: dict[tuple[int | None, int, bool], tuple[int | None, bool] | None] = {}
for _failed in (False, True):
    TABLE |= {
        (PUBLISHED1, PUBACK, _failed): (None, False),
        (PUBLISHED1, PUBREC, _failed): None,
        (PUBLISHED1, PUBCOMP, _failed): None,
        (PUBLISHED2, PUBACK, _failed): None,
        (PUBLISHED2, PUBREC, _failed): (None, False) if _failed else (RELEASED, True),
        (PUBLISHED2, PUBCOMP, _failed): None,
        (RELEASED, PUBACK, _failed): None,
        (RELEASED, PUBREC, _failed): (RELEASED, not _failed),
        (RELEASED, PUBCOMP, _failed): (None, False),
        (None, PUBACK, _failed): (None, False),
        (None, PUBREC, _failed): (None, not _failed),
        (None, PUBCOMP, _failed): (None, False),
    }


def test_the_table_is_complete() -> None:
    pairs = itertools.product((None, PUBLISHED1, PUBLISHED2, RELEASED), (PUBACK, PUBREC, PUBCOMP), (False, True))
    assert set(pairs) == set(TABLE)


@pytest.mark.parametrize(("case", "expected"), TABLE.items())
def test_packet(case: tuple[int | None, int, bool], expected: tuple[int | None, bool] | None) -> None:
    state, kind, failed = case
    outbound, written = machine()
    if state is not None:
        outbound.inflight[0x0107] = state
    outbound.inflight[9] = PUBLISHED1
    if expected is None:
        with pytest.raises(ProtocolError):
            outbound.acknowledged(kind, [0x0107], failed)
        assert outbound.inflight == {0x0107: state, 9: PUBLISHED1}
        return
    outbound.acknowledged(kind, [0x0107], failed)
    after, answered = expected
    assert outbound.inflight == ({} if after is None else {0x0107: after}) | {9: PUBLISHED1}
    assert written == ([pubrel(0x0107)] if answered else [])


def test_window_and_queue() -> None:
    outbound, written = machine(limit=2, queued=2)
    for payload in (b"a", b"b", b"c", b"d"):
        outbound.publish(1, HEAD, payload)
    assert written == [HEAD + b"\0\1a", HEAD + b"\0\2b"]
    with pytest.raises(QuotaExceeded):
        outbound.publish(1, HEAD, b"e")
    outbound.acknowledged(PUBACK, [2, 2, 77])
    assert written[2:] == [HEAD + b"\0\3c"]
    outbound.acknowledged(PUBACK, [1, 3])
    assert written[3:] == [HEAD + b"\0\4d"]
    outbound.publish(1, HEAD, b"f")
    assert written[4:] == [HEAD + b"\0\5f"], "nothing waits any more"


def test_a_released_message_keeps_its_place() -> None:
    outbound, written = machine(limit=1)
    outbound.publish(2, HEAD, b"a")
    outbound.publish(2, HEAD, b"b")
    outbound.acknowledged(PUBREC, [1])
    assert written[1:] == [pubrel(1)]
    outbound.acknowledged(PUBCOMP, [1])
    assert written[2:] == [HEAD + b"\0\2b"]


def test_an_identifier_in_use_is_passed_over() -> None:
    """[MQTT-2.3.1-4]"""
    outbound, written = machine(limit=65535)
    outbound.publish(1, HEAD, b"")
    outbound._last = 65534
    for _ in range(3):
        outbound.publish(1, HEAD, b"")
    assert [identifier(packet) for packet in written] == [1, 65535, 2, 3]


@given(
    st.lists(st.tuples(st.integers(1, 2), st.booleans()), max_size=60),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_everything_arrives_once_and_in_order(messages: Iterable[tuple[int, bool]], limit: int, random: object) -> None:
    """Whatever a client acknowledges when: order is kept, the window too, identifiers are never shared."""
    import random as module

    assert isinstance(random, module.Random)
    wire: list[bytes] = []
    outbound = TransientSender(limit, 1000, wire.append)
    received: list[bytes] = []
    sent: list[bytes] = []
    to_answer: list[tuple[int, int]] = []
    used: set[int] = set()

    def read() -> None:
        for packet in wire:
            if packet[0] == 0x62:
                to_answer.append((PUBCOMP, packet[2] << 8 | packet[3]))
                continue
            number = identifier(packet)
            assert number not in used
            used.add(number)
            assert len(used) <= limit
            received.append(packet[len(HEAD) + 2 :])
            to_answer.append((PUBACK if received[-1][0] == 1 else PUBREC, number))
        wire.clear()

    def answer() -> None:
        kind, number = to_answer.pop(random.randrange(len(to_answer)))
        if kind != PUBREC:
            used.discard(number)
        outbound.acknowledged(kind, [number])
        read()

    for index, (qos, answering) in enumerate(messages):
        sent.append(bytes((qos,)) + b"%d" % index)
        outbound.publish(qos, HEAD, sent[-1])
        read()
        if answering and to_answer:
            answer()
    while to_answer:
        answer()
    assert received == sent
    assert not outbound.inflight
    assert not outbound.waiting


def test_room_for_a_message_that_may_wait() -> None:
    """Half of what may wait, in messages and in bytes, and no more than one window."""
    outbound, _ = machine(limit=3, queued=10)
    one = ENTRY_BYTES + len(HEAD) + 1
    outbound.max_bytes = 6 * one
    for waiting in range(-3, 3):
        assert outbound.has_room_for(1)
        assert outbound.waiting == max(waiting, 0)
        outbound.publish(1, HEAD, b"p")
    assert outbound.has_room_for(1) is False  # a window of 3 waits
    outbound.acknowledged(PUBACK, [1])
    assert outbound.has_room_for(one)
    assert not outbound.has_room_for(one + 1)
    few, _ = machine(limit=3, queued=3)
    for _ in range(4):
        few.publish(1, HEAD, b"p")
    assert not few.has_room_for(1)


def test_bytes_that_wait() -> None:
    """Topic, properties and what a message keeps until it is encoded count, and are told to whom it concerns."""
    held: list[int] = []
    outbound = TransientSender(1, 10, lambda data: None, max_bytes=1000, hold=held.append)
    sizes = [ENTRY_BYTES + len(HEAD) + 1, ENTRY_BYTES + 500, ENTRY_BYTES + 100]
    outbound.publish(1, HEAD, b"p")
    assert held == []
    outbound.publish(1, HEAD, b"p")
    for size in (500, 100):
        outbound.publish(1, b"", b"", lambda identifier: HEAD, size=size)
    assert held == sizes
    assert outbound.waiting_bytes == sum(sizes)
    with pytest.raises(QuotaExceeded, match="1000 bytes wait"):
        outbound.publish(1, b"", b"x" * 200)
    assert outbound.waiting_bytes == sum(sizes), "what is refused does not wait"
    outbound.acknowledged(PUBACK, [1])
    assert outbound.waiting_bytes == sum(held) == sum(sizes[1:])
    outbound.close()
    assert outbound.waiting_bytes == sum(held) == outbound.waiting == 0


def test_whoever_waits_for_room_is_told_once() -> None:
    """When no more than half a window waits."""
    outbound, _ = machine(limit=4, queued=10)
    told: list[int] = []
    for _ in range(8):
        outbound.publish(1, HEAD, b"p")
    outbound.on_room = lambda: told.append(outbound.waiting)
    outbound.acknowledged(PUBACK, [1])
    assert not told
    outbound.acknowledged(PUBACK, [2])
    assert told == [2]
    outbound.acknowledged(PUBACK, [3, 4])
    assert told == [2]
