# SPDX-License-Identifier: Apache-2.0
"""Tokens: what can be answered, for how long, and how many are known."""

from __future__ import annotations

import pytest

from mqtt_nats.ingress import request_reply as replying
from mqtt_nats.ingress.request_reply import KNOWN_BYTES, KNOWN_FOR, KNOWN_MOST, Tokens


def test_known_for_a_limited_time() -> None:
    tokens: Tokens[str] = Tokens()
    token = tokens.issue("a", 10, 1000.0)
    assert tokens.find(token, 1000.0) == "a"
    assert tokens.find(token, 1000.0 + KNOWN_FOR - 0.1) == "a"
    assert tokens.find(token, 1000.0 + KNOWN_FOR) is None
    assert tokens.find(b"", 1000.0) is None


def test_the_expired_take_no_memory() -> None:
    tokens: Tokens[int] = Tokens()
    for index in range(10):
        tokens.issue(index, 10, 1000.0 + index)
    last = tokens.issue(10, 10, 1000.0 + KNOWN_FOR + 5)
    assert len(tokens) == 5
    assert tokens.find(last, 1000.0 + KNOWN_FOR + 5) == 10


def test_the_oldest_make_room() -> None:
    tokens: Tokens[int] = Tokens()
    issued = [tokens.issue(index, 1, 0.0) for index in range(KNOWN_MOST + 2)]
    assert len(set(issued)) == len(issued)
    assert len(tokens) == KNOWN_MOST
    assert [tokens.find(token, 0.0) for token in issued[:3]] == [None, None, 2]
    assert tokens.find(issued[-1], 0.0) == KNOWN_MOST + 1


def test_memory_is_bounded() -> None:
    tokens: Tokens[int] = Tokens()
    large = KNOWN_BYTES // 4
    issued = [tokens.issue(index, large, 0.0) for index in range(6)]
    assert [tokens.find(token, 0.0) for token in issued] == [None, None, 2, 3, 4, 5]
    tokens.forget(issued[2])
    tokens.forget(issued[2])
    issued.append(tokens.issue(6, large, 0.0))
    assert [tokens.find(token, 0.0) for token in issued] == [None, None, None, 3, 4, 5, 6]


@pytest.mark.parametrize("size", [1, KNOWN_BYTES // 100])
def test_who_asks_much_forgets_its_own(size: int) -> None:
    """Others are answered, however much one asks; who asks little gets room from the others."""
    tokens: Tokens[int] = Tokens()
    few = [tokens.issue(index, size, 0.0, f"user {index % 3}") for index in range(9)]
    flood = [tokens.issue(index, size, 0.0, "192.0.2.1") for index in range(KNOWN_MOST if size == 1 else 1000)]
    assert [tokens.find(token, 0.0) for token in few] == list(range(9))
    assert tokens.find(flood[-1], 0.0) is not None
    assert tokens.find(flood[0], 0.0) is None
    last = tokens.issue(9, size, 0.0, "user 0")
    assert tokens.find(last, 0.0) == 9
    for token in (*few, *flood, last):
        tokens.forget(token)
    assert (len(tokens), tokens._bytes, tokens._owned) == (0, 0, {})


def test_cannot_be_guessed() -> None:
    assert replying.TOKEN_BYTES >= 16
    tokens: Tokens[int] = Tokens()
    for _ in range(100):
        token = tokens.issue(1, 1, 0.0)
        assert len(token) >= 22
        assert not set(token) & set(b"./+#*> $")
