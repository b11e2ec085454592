# SPDX-License-Identifier: Apache-2.0
"""What the shared reader reads: filters that do not meet, or everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.broker.reader import EVERYTHING, FILTERS_MOST, chosen, covers
from mqtt_nats.session.overlap import patterns_meet, subject_matches

TOKENS = st.sampled_from(["a", "b", "*"])
FILTERS = st.builds(
    lambda tokens, rest: ".".join(["$MQTT", "msgs", *tokens, *([">"] if rest else [])]),
    st.lists(TOKENS, min_size=1, max_size=3),
    st.booleans(),
)
SUBJECTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(lambda tokens: ["$MQTT", "msgs", *tokens])


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], ()),
        (["$MQTT.msgs.a"], ("$MQTT.msgs.a",)),
        (["$MQTT.msgs.a", "$MQTT.msgs.*"], ("$MQTT.msgs.*",)),
        (["$MQTT.msgs.a.>", "$MQTT.msgs.a.b", "$MQTT.msgs.c"], ("$MQTT.msgs.a.>", "$MQTT.msgs.c")),
        (["$MQTT.msgs.*.b", "$MQTT.msgs.a.*"], EVERYTHING),
        ([f"$MQTT.msgs.{number}" for number in range(FILTERS_MOST + 1)], EVERYTHING),
    ],
)
def test_what_is_read(filters: list[str], expected: tuple[str, ...]) -> None:
    """nats-server takes no filters that meet."""
    assert set(chosen(filters)) == set(expected)


@given(st.lists(FILTERS, max_size=6), SUBJECTS)
def test_nothing_that_is_wanted_is_left_out(filters: list[str], tokens: list[str]) -> None:
    """Whatever matches one of the filters is read, and no two that are read meet."""
    read = chosen(filters)
    if any(subject_matches(one, tokens) for one in filters):
        assert any(subject_matches(one, tokens) for one in read)
    assert not any(patterns_meet(one, other) for one in read for other in read if one != other)


@given(FILTERS, FILTERS, SUBJECTS)
def test_what_covers_matches_more(wide: str, narrow: str, tokens: list[str]) -> None:
    """A filter that covers another matches whatever that does."""
    if covers(wide, narrow) and subject_matches(narrow, tokens):
        assert subject_matches(wide, tokens)
