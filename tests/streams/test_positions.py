# SPDX-License-Identifier: Apache-2.0
"""Positions of sessions as they are stored."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_streams.positions import Position, decode, expected_block

SEQUENCES = st.integers(0, 2**63 - 1)
POSITIONS = st.builds(
    Position,
    st.text(max_size=10),
    st.text(max_size=10),
    st.lists(st.text(max_size=10), max_size=3),
    st.booleans(),
    SEQUENCES,
    st.dictionaries(SEQUENCES, st.sampled_from((1, 2))),
    st.dictionaries(st.integers(1, 65535), SEQUENCES),
    SEQUENCES,
    st.lists(SEQUENCES, max_size=5),
    st.text(max_size=10),
    st.integers(-1, 2**63 - 2),
    st.lists(st.text(max_size=10), max_size=3),
    st.dictionaries(st.integers(1 - 2**63, 2**63 - 1), st.integers(1, 65535), max_size=3),
)

GOOD = orjson.loads(Position("a", "b", ["c"], True, 5, {4: 1, 3: 2}, {7: 2}).encode())


@given(POSITIONS)
def test_what_is_written_is_read(position: Position) -> None:
    """All of it comes back."""
    assert decode(position.encode()) == position


@pytest.mark.parametrize("most", [0, 10**9])
def test_the_last_position_of_a_connection_is_shorter_than_the_first(most: int) -> None:
    """Also with the sequence in its header, which has grown: nats-server keeps less of what was replaced."""
    first = Position("a", "b", ["c"], reached=most, gateway="g")
    last = Position("a", "b", ["c"], clean=True, reached=most, gateway="g", most=most)
    assert len(expected_block(most) + last.encode()) < len(expected_block(0) + first.encode())


@pytest.mark.parametrize(
    "change",
    [
        {"id": 1},
        {"generation": None},
        {"live": [1]},
        {"live": 5},
        {"reached": -1},
        {"reached": 2**63},
        {"reached": True},
        {"qos1": ["x"]},
        {"qos2": 5},
        {"released": [[0, 1]]},
        {"released": [[65536, 1]]},
        {"released": [[1]]},
        {"released": [[1, -1]]},
        {"perhaps": -1},
        {"perhaps": "1"},
        {"unsent": 5},
        {"unsent": [-1]},
        {"gateway": 5},
        {"most": -2},
        {"most": None},
        {"most": True},
    ],
    ids=str,
)
def test_what_is_no_position_is_none(change: dict[str, object]) -> None:
    """Nobody knows what else is wrong with it."""
    assert decode(orjson.dumps(GOOD)) is not None
    assert decode(orjson.dumps(GOOD | change)) is None


def test_what_a_clean_position_leaves_out() -> None:
    """It is empty then."""
    less = {name: value for name, value in GOOD.items() if name not in ("perhaps", "unsent")}
    assert decode(orjson.dumps(less)) == Position("a", "b", ["c"], True, 5, {4: 1, 3: 2}, {7: 2})


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"5", b"{}"])
def test_what_is_no_object_is_none(data: bytes) -> None:
    """Whatever somebody has stored there."""
    assert decode(data) is None
