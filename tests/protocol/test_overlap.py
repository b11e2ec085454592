# SPDX-License-Identifier: Apache-2.0
"""Which of several matching subscriptions delivers a stored message."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.overlap import MAX_TOPICS, Overlap, patterns_meet, subject_matches

MATCHING = [
    (">", "a", True),
    (">", "a.b", True),
    ("a.>", "a", False),
    ("a.>", "a.b", True),
    ("a.>", "a.b.c", True),
    ("a.>", "ab.c", False),
    ("a", "a", True),
    ("a", "a.b", False),
    ("a.b", "a", False),
    ("*", "a", True),
    ("*", "a.b", False),
    ("a.*", "a.b", True),
    ("a.*", "a.b.c", False),
    ("*.b", "a.b", True),
    ("*.b", "a.c", False),
    ("a.*.c", "a.b.c", True),
    ("*.*.>", "a.b", False),
    (">", "$a.b", False),  # [MQTT-4.7.2-1] (3.1.1, 5.0)
    ("*.b", "$a.b", False),  # [MQTT-4.7.2-1] (3.1.1, 5.0)
    ("$a.*", "$a.b", True),
    ("*.b", "a$.b", True),
]


@pytest.mark.parametrize(("pattern", "subject", "expected"), MATCHING)
def test_subject_matches(pattern: str, subject: str, expected: bool) -> None:
    assert subject_matches(pattern, subject.split(".")) is expected


PATTERNS = st.sampled_from([">", "a", "a.>", "a.b", "a.*", "*.b", "b", "*", "b.>"])
SUBJECTS = st.sampled_from(["a", "b", "a.a", "a.b", "b.b", "a.b.c"])
SUBSCRIPTIONS = st.lists(
    st.tuples(PATTERNS, st.integers(1, 30), st.integers(1, 2)), min_size=1, max_size=6, unique_by=lambda entry: entry[0]
)


def overlap_of(subscriptions: list[tuple[str, int, int]]) -> Overlap[str]:
    overlap: Overlap[str] = Overlap()
    for pattern, start, qos in subscriptions:
        overlap.add(pattern, pattern, SubscriptionState(qos, start))
    return overlap


@given(SUBSCRIPTIONS, st.randoms(use_true_random=False), SUBJECTS, st.integers(1, 40))
def test_every_gateway_finds_the_same_owner(
    subscriptions: list[tuple[str, int, int]], random: object, subject: str, sequence: int
) -> None:
    import random as module

    assert isinstance(random, module.Random)
    shuffled = subscriptions.copy()
    random.shuffle(shuffled)
    owner, granted = overlap_of(subscriptions).owner(subject, sequence)
    assert overlap_of(shuffled).owner(subject, sequence) == (owner, granted)
    matching = [
        entry for entry in subscriptions if entry[1] <= sequence and subject_matches(entry[0], subject.split("."))
    ]
    assert owner == (min(matching, key=lambda entry: (entry[1], entry[0]))[0] if matching else None)
    assert granted == max((qos for _, _, qos in matching), default=0)


@given(SUBSCRIPTIONS, SUBJECTS)
def test_a_topic_keeps_its_owner(subscriptions: list[tuple[str, int, int]], subject: str) -> None:
    """A later subscription takes nothing from an earlier one."""
    overlap = overlap_of(subscriptions)
    owners = {overlap.owner(subject, sequence)[0] for sequence in range(1, 50)}
    assert len(owners - {None}) <= 1


@given(SUBSCRIPTIONS, st.lists(SUBJECTS, max_size=40), st.randoms(use_true_random=False))
def test_each_sequence_is_delivered_once(
    subscriptions: list[tuple[str, int, int]], stream: list[str], random: object
) -> None:
    """Of all that match a message one delivers it; after a crash the same one."""
    import random as module

    assert isinstance(random, module.Random)
    for _ in range(2):
        random.shuffle(subscriptions)
        overlap = overlap_of(subscriptions)
        delivered: list[int] = []
        due = 0
        for sequence, subject in enumerate(stream, 1):
            copies = [
                pattern
                for pattern, start, _ in subscriptions
                if start <= sequence and subject_matches(pattern, subject.split("."))
            ]
            due += bool(copies)
            delivered += [sequence for pattern in copies if overlap.owner(subject, sequence)[0] == pattern]
        assert len(delivered) == len(set(delivered)) == due


@given(PATTERNS, PATTERNS)
def test_patterns_meet(one: str, two: str) -> None:
    subjects = [".".join(tokens) for size in (1, 2, 3) for tokens in itertools.product("abx", repeat=size)]
    both = [
        each for each in subjects if subject_matches(one, each.split(".")) and subject_matches(two, each.split("."))
    ]
    assert patterns_meet(one, two) == patterns_meet(two, one) == bool(both)


def test_what_was_sent_at_the_higher_qos_of_an_ended_subscription_keeps_it() -> None:
    overlap: Overlap[str] = Overlap()
    low, high, apart = SubscriptionState(1, 1), SubscriptionState(2, 5), SubscriptionState(1, 1)
    for pattern, source in (("a.>", low), ("a.b", high), ("b", apart)):
        overlap.add(pattern, pattern, source)
        source.last = 20
    assert overlap.owner("a.b", 15) == ("a.>", 2)
    assert overlap.remove("a.b") == ["a.>"]
    assert overlap.owner("a.b", 20) == ("a.>", 2)
    assert overlap.owner("a.b", 21) == ("a.>", 1)
    assert overlap.owner("b", 15) == ("b", 1)


def test_an_ended_subscription_leaves_the_rest() -> None:
    overlap = overlap_of([("a.>", 1, 2), ("a.b", 5, 1)])
    assert overlap.owner("a.b", 9) == ("a.>", 2)
    overlap.remove("a.>")
    assert overlap.owner("a.b", 9) == ("a.b", 1)
    assert overlap.owner("a.c", 9) == (None, 0)


def test_who_may_have_left_messages_to_an_ended_subscription() -> None:
    """Those that come after it; the ones before it had their messages themselves."""
    overlap: Overlap[str] = Overlap()
    sources = {
        name: SubscriptionState(1, start) for name, start in [("first", 5), ("a", 7), ("b", 7), ("last", 9), ("c", 9)]
    }
    for name, pattern in [("first", "t.>"), ("a", "t"), ("b", "t"), ("last", "*"), ("c", "u")]:
        overlap.add(pattern, name, sources[name])
    assert overlap.after("first") == [], "another level"
    assert overlap.after("a") == [sources["b"], sources["last"]]
    assert overlap.after("b") == [sources["last"]], "of the same start and subject: as they were made"
    assert overlap.after("last") == [sources["c"]]


def test_a_changed_qos_counts_from_where_it_was_changed() -> None:
    overlap: Overlap[str] = Overlap()
    source = SubscriptionState(2, 1)
    source.was_qos, source.until = 1, 10
    overlap.add("a", "a", source)
    assert overlap.owner("a", 10) == ("a", 1)
    assert overlap.owner("a", 11) == ("a", 2)


def test_the_cache_is_bounded() -> None:
    overlap = overlap_of([(">", 1, 1)])
    for number in range(MAX_TOPICS + 10):
        assert overlap.owner(f"t{number}", 1) == (">", 1)
    assert len(overlap._matching) <= MAX_TOPICS


def test_own_messages_pass_by_subscriptions_with_no_local() -> None:
    overlap: Overlap[str] = Overlap()
    deaf, other = SubscriptionState(2, 1), SubscriptionState(1, 5)
    deaf.no_local, deaf.identifier = True, 1
    other.identifier, other.kept = 2, True
    overlap.add("a.>", "deaf", deaf)
    overlap.add("a.b", "other", other)
    assert overlap.owner("a.b", 9) == ("deaf", 2)
    assert overlap.owner("a.b", 9, True) == ("other", 1)
    assert overlap.owner("a.c", 9, True) == (None, 0)
    assert overlap.extras("a.b", 9, False) == ([1, 2], True)
    assert overlap.extras("a.b", 9, True) == ([2], True)
    assert overlap.extras("a.b", 4, False) == ([1], False), "the second subscription began later"
    assert overlap.extras("a.b", 4, False, pending=True) == ([1, 2], True), "an import may have moved its begin"


def test_a_subscription_whose_place_qos_0_has_taken() -> None:
    """What was stored before is its own, and of those that come after it what is stored since."""
    overlap = overlap_of([("a", 1, 2), (">", 2, 1)])
    for _, _, value, source in overlap._entries:
        if value == "a":
            source.end_at(9)
    assert (overlap.owner("a", 9), overlap.owner("a", 10)) == (("a", 2), (">", 1))
    assert overlap.matching("a", 10, False) == [">"]
    source.identifier = 7
    assert overlap.extras("a", 10, False) == ([7], False)
