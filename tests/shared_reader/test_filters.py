# SPDX-License-Identifier: Apache-2.0
"""What a reader of stored messages reads: filters that do not meet, prefixes, or everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.protocol.overlap import patterns_meet, subject_matches
from mqtt_nats.shared_reader import filters as module
from mqtt_nats.shared_reader.filters import (
    EVERYTHING,
    FILTERS_MOST,
    FILTERS_SIZE_MOST,
    WANTED_MOST,
    FilterSet,
    chosen,
    common,
)
from mqtt_streams.messages import PREFIX

TOKENS = st.sampled_from(["a", "b", "*"])
FILTERS = st.builds(
    lambda tokens, rest: PREFIX + ".".join([*tokens, *([">"] if rest else [])]),
    st.lists(TOKENS, min_size=1, max_size=3),
    st.booleans(),
)
SUBJECTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(lambda tokens: ["$MQTT", "msgs", *tokens])


def devices(count: int, tail: str = "") -> list[str]:
    """Filters of devices at ten sites."""
    return [f"{PREFIX}site{number % 10}.device{number}{tail}" for number in range(count)]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], ()),
        ([f"{PREFIX}a"], (f"{PREFIX}a",)),
        ([f"{PREFIX}a", f"{PREFIX}*"], (f"{PREFIX}*",)),
        ([f"{PREFIX}a.>", f"{PREFIX}a.b", f"{PREFIX}c"], (f"{PREFIX}a.>", f"{PREFIX}c")),
        ([f"{PREFIX}*.b", f"{PREFIX}a.*"], EVERYTHING),
        (devices(FILTERS_MOST), tuple(devices(FILTERS_MOST))),
        (devices(FILTERS_MOST + 1), tuple(f"{PREFIX}site{number}.>" for number in range(10))),
        (devices(FILTERS_MOST, ".x.>"), tuple(devices(FILTERS_MOST, ".x.>"))),
        ([*devices(FILTERS_MOST + 1), f"{PREFIX}a"], (f"{PREFIX}a", *(f"{PREFIX}site{one}.>" for one in range(10)))),
        ([f"{PREFIX}{number}" for number in range(FILTERS_MOST + 1)], EVERYTHING),
        ([f"{PREFIX}{letter}.{letter * FILTERS_SIZE_MOST}" for letter in "ab"], (f"{PREFIX}a.>", f"{PREFIX}b.>")),
        (devices(WANTED_MOST + 1), EVERYTHING),
        # Of many levels: nats-server would compare them for seconds.
        (devices(300, f".x{'.x' * 28}"), tuple(devices(300, f".x{'.x' * 28}"))),
        (devices(600, f".x{'.x' * 28}"), tuple(f"{one}{'.x' * 6}.>" for one in devices(600))),
        ([*devices(FILTERS_MOST), f"{PREFIX}z.*.b", f"{PREFIX}z.a.*"], EVERYTHING),
        (
            [*devices(FILTERS_MOST + 1, ".x"), *devices(9, ".y")],
            tuple(f"{PREFIX}site{number}.>" for number in range(10)),
        ),
    ],
)
def test_what_is_read(filters: list[str], expected: tuple[str, ...]) -> None:
    """nats-server takes no filters that meet; where there are too many, prefixes stand for them."""
    assert set(chosen(filters)) == set(expected)


@given(st.lists(FILTERS, max_size=6), SUBJECTS, st.booleans())
def test_nothing_that_is_wanted_is_left_out(filters: list[str], tokens: list[str], few: bool) -> None:
    """Whatever matches one of the filters is read, and no two that are read meet."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if few:
            monkeypatch.setattr(module, "FILTERS_MOST", 2)
        read = chosen(filters)
    if any(subject_matches(one, tokens) for one in filters):
        assert any(subject_matches(one, tokens) for one in read)
    assert not any(patterns_meet(one, other) for one in read for other in read if one != other)
    assert len(read) <= (2 if few else 6)


@given(st.lists(FILTERS, max_size=6), FILTERS, SUBJECTS)
def test_what_covers_matches_more(filters: list[str], narrow: str, tokens: list[str]) -> None:
    """A set that covers a filter has one that matches whatever the filter does; what meets it is found."""
    found = FilterSet(filters)
    if found.covers(narrow) and subject_matches(narrow, tokens):
        assert any(subject_matches(one, tokens) for one in filters)
    assert set(found.meeting(narrow)) == {one for one in filters if patterns_meet(one, narrow)}
    assert all(found.covers(one) for one in filters)


def test_a_topic_of_many_levels() -> None:
    deep = PREFIX + ".".join("a" * 30_000)
    assert chosen([deep, f"{PREFIX}a.b"]) == (deep, f"{PREFIX}a.b")
    assert chosen([deep, f"{PREFIX}a.>"]) == (f"{PREFIX}a.>",)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["a.b"], "a.b"),
        (["a.b.c", "a.b.*"], "a.b.>"),
        (["a.b", "a.b.>"], "a.>"),
        (["a.*.c", "a.*.d"], "a.*.>"),
        (["a", "b"], ">"),
    ],
)
def test_one_filter_for_all(filters: list[str], expected: str) -> None:
    assert common([PREFIX + one for one in filters]) == PREFIX + expected


@given(st.lists(FILTERS, min_size=1, max_size=5), SUBJECTS)
def test_one_filter_matches_what_each_matches(filters: list[str], subject: list[str]) -> None:
    if any(subject_matches(one, subject) for one in filters):
        assert subject_matches(common(filters), subject)
