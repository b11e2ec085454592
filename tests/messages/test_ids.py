# SPDX-License-Identifier: Apache-2.0
"""The ids of messages: when, where, and which of them."""

from time import time_ns

import pytest

from mqtt_nats.messages.ids import MessageIds, precedes

GATEWAY = 0x0000ABCDEF12


def test_an_id_says_when_and_where_it_was_made() -> None:
    ids = MessageIds(GATEWAY)
    before = time_ns() // 1000
    found = ids.next()
    after = time_ns() // 1000
    assert len(found) == 32
    assert found == found.lower()
    assert before <= int(found[:16], 16) <= after
    assert found[16:28] == ids.own == b"0000abcdef12"
    assert found[28:] == b"0001"


def test_ids_are_all_different_and_in_order() -> None:
    # More than the counter has numbers, and long enough for the upper digits of the time to change.
    ids = MessageIds(GATEWAY)
    seen: set[bytes] = set()
    high: set[bytes] = set()
    made, last = 0, 0
    while made < 140_000 or len(high) < 2:
        found = ids.next()
        now = int(found[:16], 16)
        assert now >= last
        assert abs(time_ns() // 1000 - now) < 1_000_000
        last = now
        high.add(found[:14])
        seen.add(found)
        made += 1
    assert len(seen) == made


def test_an_id_that_was_told_is_given_once() -> None:
    ids = MessageIds(GATEWAY)
    ids.given = b"f" * 32
    assert ids.next() == b"f" * 32
    assert ids.next() != b"f" * 32


def test_the_ids_of_one_gateway_tell_which_message_was_first() -> None:
    ids, others = MessageIds(GATEWAY), MessageIds(GATEWAY + 1)
    first, second = ids.next(), ids.next()
    assert precedes(first, second)
    assert not precedes(second, first)
    assert not precedes(first, first)
    assert not precedes(first, others.next())


@pytest.mark.parametrize(
    ("one", "other", "before"),
    [
        (b"q2-9", b"q2-10", True),
        (b"q2-10", b"q2-9", False),
        (b"q2-9", b"q2-9", False),
        (b"q2-later-x", b"q2-10", False),
        (b"will-a", b"will-b", False),
        (b"", b"q2-1", False),
        (b"", b"", False),
    ],
)
def test_releases_are_in_the_order_in_which_they_were_held(one: bytes, other: bytes, before: bool) -> None:
    assert precedes(one, other) == before
