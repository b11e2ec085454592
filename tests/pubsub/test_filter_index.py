# SPDX-License-Identifier: Apache-2.0
"""The filters that match a topic: the same as by the plain definition, at a cost that is bounded."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtt_nats.codec.topics import matches
from mqtt_nats.pubsub.filter_index import BLOCK, COMPARED_SINGLY_MOST, DEPTH, FilterIndex, OverlapLimit, Overlaps

LEVELS = st.sampled_from(["", "a", "b", "$x", "ab"])
TOPICS = st.lists(LEVELS, min_size=1, max_size=4).map("/".join).filter(bool)


@st.composite
def filters(draw: st.DrawFn) -> str:
    levels = draw(st.lists(st.one_of(LEVELS, st.just("+")), max_size=4))
    if not levels or draw(st.booleans()):
        levels.append("#")
    return "/".join(levels) or "+"


@given(st.lists(filters(), max_size=40, unique=True), st.lists(TOPICS, min_size=1, max_size=6), st.data())
def test_match(added: list[str], topics: list[str], data: st.DataObject) -> None:
    index: FilterIndex[str] = FilterIndex()
    for each in added:
        index.add(each, each)
    assert len(index) == len(added)
    for topic in topics:
        assert sorted(index.match(topic)) == sorted(each for each in added if matches(each, topic))
    removed = data.draw(st.lists(st.sampled_from(added), unique=True)) if added else []
    for each in removed:
        index.remove(each)
        index.remove(each)
    for topic in topics:
        left = [each for each in added if each not in removed]
        assert sorted(index.match(topic)) == sorted(each for each in left if matches(each, topic))


def some(numbers: random.Random, most: int) -> str:
    levels = [numbers.choice("ab++") for _ in range(numbers.randint(1, most))]
    if numbers.random() < 0.3:
        levels.append("#")
    return "/".join(levels)


@pytest.mark.parametrize("most", [4, DEPTH, DEPTH + 4])
@settings(max_examples=5)
@given(st.integers())
def test_many_filters_that_come_and_go(most: int, seed: int) -> None:
    """More than one block of filters in one place, at both sides of the depth from which filters share a place."""
    numbers = random.Random(seed)
    index: FilterIndex[str] = FilterIndex()
    present: dict[str, None] = {}
    for _ in range(3 * BLOCK):
        each = some(numbers, most)
        if numbers.random() < 0.75:
            index.add(each, each)
            present[each] = None
        else:
            index.remove(each)
            present.pop(each, None)
    for size in (len(present), len(present) // 2, COMPARED_SINGLY_MOST, 0):
        while len(present) > size:
            each = numbers.choice(list(present)) if len(present) < 100 else next(iter(present))
            del present[each]
            index.remove(each)
        assert len(index) == size
        for length in (1, 2, 4, DEPTH - 1, DEPTH, DEPTH + 1, DEPTH + 3):
            topic = "/".join(numbers.choice("ab") for _ in range(length))
            assert sorted(index.match(topic)) == sorted(each for each in present if matches(each, topic))


@given(st.lists(filters(), max_size=40, unique=True))
def test_nothing_is_left_behind(added: list[str]) -> None:
    index: FilterIndex[str] = FilterIndex()
    for each in added:
        index.add(each, each)
    for each in reversed(added):
        index.remove(each)
    assert len(index) == 0
    assert not any(index._places)
    assert not index._open.blocks
    assert not index._open.values


def test_a_value_is_replaced() -> None:
    index: FilterIndex[int] = FilterIndex()
    for each in ("a/b", "a/+", "#", "+/" * DEPTH + "a"):
        index.add(each, 1)
        index.add(each, 2)
    assert index.match("a/b") == [2, 2, 2]
    assert len(index) == 4


def test_a_filter_that_was_never_added() -> None:
    index: FilterIndex[int] = FilterIndex()
    index.add("a/+/c", 1)
    for absent in ("a", "a/b", "a/#", "a/+/c/d", "x", "+/+/c", "a/+/c/#", "#", "+"):
        index.remove(absent)
    assert index.match("a/b/c") == [1]


def test_deep_topics() -> None:
    index: FilterIndex[int] = FilterIndex()
    deep = "/".join("a" * 20_000)
    index.add(deep, 1)
    index.add(deep + "/#", 2)
    assert index.match(deep) == [1, 2]
    index.remove(deep)
    assert index.match(deep) == [2]


@pytest.mark.parametrize("levels", [DEPTH, 120])
def test_what_a_match_looks_at_is_bounded(levels: int) -> None:
    """Thousands of filters with ``a`` or ``+`` in each level: what a topic meets is the places, and full blocks."""
    numbers = random.Random(levels)
    index: FilterIndex[str] = FilterIndex()
    added: set[str] = set()
    while len(added) < 5 * BLOCK:
        each = "/".join(numbers.choice("a+") for _ in range(levels))
        if each not in added:
            index.add(each, each)
            added.add(each)
    assert sorted(index.match("/".join("a" * levels))) == sorted(added)
    places = [place for at in index._places for place in at.values()] + [index._open, index._long]
    assert len(places) <= DEPTH + 2
    assert all(len(place.values) <= COMPARED_SINGLY_MOST or place.blocks for place in places)
    assert sum(len(place.blocks) for place in places) <= len(added) // BLOCK + len(places)


def meets(one: str, other: str) -> bool:
    """By definition, on topics of three kinds of levels, one more than the filters have."""
    topics = ("/".join(levels) for size in range(1, 5) for levels in itertools.product("abc", repeat=size))
    return any(matches(one, topic) and matches(other, topic) for topic in topics)


PARTS = st.lists(st.sampled_from(["a", "b", "+"]), min_size=1, max_size=3)
OPEN = st.builds(lambda levels, end: "/".join([*levels, *end]), PARTS, st.sampled_from([[], ["#"]]))


@settings(max_examples=30)
@given(st.lists(OPEN, max_size=30, unique=True), OPEN, st.data())
def test_overlaps_are_counted(added: list[str], asked: str, data: st.DataObject) -> None:
    overlaps = Overlaps()
    for each in added:
        overlaps.add(each)
        overlaps.add(each)
    assert overlaps.count(asked) == sum(meets(each, asked) for each in added)
    for each in data.draw(st.lists(st.sampled_from(added), unique=True)) if added else []:
        overlaps.remove(each)
        overlaps.remove(each)
        added.remove(each)
    assert overlaps.count(asked) == sum(meets(each, asked) for each in added)


NAMES = ["/".join(levels) for size in range(1, 6) for levels in itertools.product("abc", repeat=size)]


@pytest.mark.parametrize("most", [1, 3])
@settings(max_examples=60)
@given(st.integers())
def test_as_many_as_a_topic_may_match(most: int, seed: int) -> None:
    """The same as by definition; filters of groups are there more than once."""
    numbers = random.Random(seed)
    limit = OverlapLimit(most, 1_000_000)
    taken: list[str] = []
    for _ in range(40):
        each = some(numbers, 4)
        fits = all(sum(matches(one, name) for one in [*taken, each]) <= most for name in NAMES if matches(each, name))
        assert limit.add_if_fits(each) == fits, (taken, each)
        if fits:
            taken.append(each)
    assert taken


def test_one_filter_that_covers_many_others() -> None:
    """It overlaps all of them, and no topic matches more than two."""
    limit = OverlapLimit(2)
    assert all(limit.add_if_fits(f"site/{number}/+") for number in range(1000))
    assert limit.add_if_fits("#")
    assert not limit.add_if_fits("site/#")
    assert not limit.add_if_fits("site/7/on")
    assert limit.add_if_fits("elsewhere/#")


def test_what_is_there_already_counts() -> None:
    limit = OverlapLimit(2)
    for each in ("a/+", "+/b", "#"):  # more than may be, as an earlier version let it
        limit.add(each)
    assert not limit.add_if_fits("a/b")
    assert limit.add_if_fits("b/c")


def test_comparisons_for_that_are_bounded() -> None:
    """Beyond them nothing is let in that overlaps many others; everything else is."""
    numbers = random.Random(1)
    limit = OverlapLimit(16, 3000)
    nasty = list(dict.fromkeys("/".join(numbers.choices("a+", k=120)) for _ in range(500)))
    assert sum(map(limit.add_if_fits, nasty)) == 16
    assert limit._comparisons < 0
    assert not limit.add_if_fits("/".join("a" * 120))
    assert limit.add_if_fits("b/+")
