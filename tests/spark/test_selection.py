# SPDX-License-Identifier: Apache-2.0
"""Which subjects are asked for."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_streams.subjects import filter_to_subjects, topic_to_subject
from pyspark_mqtt_nats.reading.selection import FILTERS_MOST, Filters, asked, visible, without_covered

TOKENS = ("a", "b", "*")
SUBJECTS = [".".join(tokens) for size in (1, 2, 3) for tokens in itertools.product("ab", repeat=size)]
FILTERS = st.builds(
    lambda tokens, tail: ".".join([*tokens, *tail]) or ">",
    st.lists(st.sampled_from(TOKENS), max_size=3),
    st.sampled_from([(), (">",)]),
)


def covers(outer: str, inner: str) -> bool:
    return Filters([outer]).covers(inner)


def matches(pattern: str, subject: str) -> bool:
    """The rule of NATS, written down another way."""
    wide, tokens = pattern.split("."), subject.split(".")
    if wide[-1] == ">":
        return len(tokens) >= len(wide) and matches(
            ".".join(wide[:-1]) or "x", ".".join(tokens[: len(wide) - 1]) or "x"
        )
    return len(wide) == len(tokens) and all(a in ("*", b) for a, b in zip(wide, tokens, strict=True))


@given(FILTERS, FILTERS)
def test_covers(outer: str, inner: str) -> None:
    """`SUBJECTS` are enough to tell: three levels, and filters of at most four."""
    deeper = [f"{subject}.{token}" for subject in SUBJECTS for token in "ab"]
    everything = {*SUBJECTS, *deeper, *(f"{subject}.a" for subject in deeper)}
    inside = {subject for subject in everything if matches(inner, subject)}
    outside = {subject for subject in everything if matches(outer, subject)}
    assert covers(outer, inner) == (inside <= outside)


@given(st.lists(FILTERS, min_size=1, max_size=6))
def test_what_is_left_matches_the_same(filters: list[str]) -> None:
    kept = without_covered(filters)
    assert set(kept) <= set(filters)
    assert not [pair for pair in itertools.permutations(kept, 2) if covers(*pair)]
    for subject in SUBJECTS:
        assert any(matches(one, subject) for one in kept) == any(matches(one, subject) for one in filters)


@pytest.mark.parametrize(
    ("filters", "hidden", "shown"),
    [
        (["+/x"], ["$own/x"], ["a/x", "_INBO/x"]),
        (["+/x", "$own/#"], ["$other/x"], ["$own/x", "a/x"]),
        (["+/x", "$own/x"], ["$own2/x"], ["$own/x"]),
        (["+"], ["$own"], ["a"]),
    ],
)
@pytest.mark.parametrize("evaluated", [True, False])
def test_filters_that_start_with_a_wildcard_hide_what_starts_with_a_dollar(
    filters: list[str], hidden: list[str], shown: list[str], evaluated: bool
) -> None:
    """[MQTT-4.7.2-1]"""
    subjects = [f"$MQTT.msgs.{subject}" for one in filters for subject in filter_to_subjects(one)]
    check = visible(subjects, "$MQTT.msgs.", evaluated)
    assert check is not None
    assert not any(check(topic_to_subject(topic)) for topic in hidden)
    assert all(check(topic_to_subject(topic)) for topic in shown)


def test_all_other_filters_hide_nothing() -> None:
    assert visible((), "p.", evaluated=False) is None
    assert visible(("p.a.>", "p.a", "p.$x.>"), "p.", evaluated=True) is None


def test_what_the_reader_selects_where_there_are_too_many_filters_for_nats() -> None:
    """The same topics as NATS would."""
    few = ("p.a.*", "p.*.x", "p.$own.>")
    many = (*few, *(f"p.topic.{number}" for number in range(FILTERS_MOST)))
    assert asked(few) == few
    assert asked(many) == ()
    check = visible(many, "p.", evaluated=False)
    assert check is not None
    found = [one for one in ("a.b", "b.x", "b.y", "a.b.c", "$own.x", "$other.x", "topic.5", "topic.x") if check(one)]
    assert found == ["a.b", "b.x", "$own.x", "topic.5", "topic.x"]


def test_ten_thousand_filters_are_compared_in_a_moment() -> None:
    subjects = [f"site.{number}.{tail}" for number in range(10_000) for tail in ("temp", "temp.>")]
    begun = time.process_time()
    assert without_covered(subjects) == subjects
    assert without_covered([*subjects, "site.*.>"]) == ["site.*.>"]
    check = visible(subjects, "", evaluated=False)
    assert check is not None
    assert sum(map(check, subjects)) == len(subjects)
    assert time.process_time() - begun < 5  # 400 million comparisons take minutes
