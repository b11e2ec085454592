# SPDX-License-Identifier: Apache-2.0
"""The filters that match a topic: the same as by the plain definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.codec.topics import matches
from mqtt_nats.pubsub.filter_trie import FilterTrie

LEVELS = st.sampled_from(["", "a", "b", "$x", "ab"])
TOPICS = st.lists(LEVELS, min_size=1, max_size=4).map("/".join).filter(bool)


@st.composite
def filters(draw: st.DrawFn) -> str:
    levels = draw(st.lists(st.one_of(LEVELS, st.just("+")), max_size=4))
    if not levels or draw(st.booleans()):
        levels.append("#")
    return "/".join(levels) or "+"


@given(st.lists(filters(), max_size=12, unique=True), st.lists(TOPICS, min_size=1, max_size=6), st.data())
def test_match(added: list[str], topics: list[str], data: st.DataObject) -> None:
    trie: FilterTrie[str] = FilterTrie()
    for each in added:
        trie.add(each, each)
    for topic in topics:
        assert sorted(trie.match(topic)) == sorted(each for each in added if matches(each, topic))
    removed = data.draw(st.lists(st.sampled_from(added), unique=True)) if added else []
    for each in removed:
        trie.remove(each)
        trie.remove(each)
    for topic in topics:
        left = [each for each in added if each not in removed]
        assert sorted(trie.match(topic)) == sorted(each for each in left if matches(each, topic))


@given(st.lists(filters(), max_size=12, unique=True))
def test_nothing_is_left_behind(added: list[str]) -> None:
    trie: FilterTrie[str] = FilterTrie()
    for each in added:
        trie.add(each, each)
    for each in reversed(added):
        trie.remove(each)
    root = trie._root
    assert not root.children
    assert root.exact is None
    assert root.rest is None


def test_a_filter_that_was_never_added() -> None:
    trie: FilterTrie[int] = FilterTrie()
    trie.add("a/b/c", 1)
    for absent in ("a", "a/b", "a/#", "a/b/c/d", "x"):
        trie.remove(absent)
    assert trie.match("a/b/c") == [1]


def test_deep_topics_are_not_recursed() -> None:
    trie: FilterTrie[int] = FilterTrie()
    deep = "/".join("a" * 20_000)
    trie.add(deep, 1)
    trie.add(deep + "/#", 2)
    assert trie.match(deep) == [1, 2]
    trie.remove(deep)
    assert trie.match(deep) == [2]
