# SPDX-License-Identifier: Apache-2.0
"""Texts of shared subscriptions: group, filter, and which filters may match the same topic."""

from __future__ import annotations

import pytest

from mqtt_nats.codec import TopicFilterInvalid
from mqtt_nats.pubsub.shared_filters import groups_of, is_open, parse_shared, plain_filter
from mqtt_streams.shared import group_hash


@pytest.mark.parametrize(
    ("text", "group", "topic_filter"),
    [
        ("$share/g/a", "g", "a"),
        ("$share/g/a/+/#", "g", "a/+/#"),
        ("$share/g//a", "g", "/a"),
        ("$share/g//", "g", "/"),
        ("$share/a b/$SYS/x", "a b", "$SYS/x"),
        ("$share/g/$share/h/a", "g", "$share/h/a"),
    ],
)
def test_group_and_filter(text: str, group: str, topic_filter: str) -> None:
    """[MQTT-4.8.2-1] (5.0)"""
    assert parse_shared(text, 10) == (group, topic_filter)
    assert plain_filter(text) == topic_filter


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("$share/", "a shared subscription is"),
        ("$share/g", "a shared subscription is"),
        ("$share//a", "a shared subscription is"),
        ("$share/g+/a", "a shared subscription is"),
        ("$share/#/a", "a shared subscription is"),
        ("$share/g/", "topic filter is empty"),
        ("$share/g/a#", "# is not the whole"),
        ("$share/g/a+/b", r"\+ is not the whole"),
        ("$share/g/a\0", r"U\+0000"),
        ("$share/g/1/2/3/4", "more than 3 levels"),
    ],
)
def test_an_illegal_text_is_refused(text: str, reason: str) -> None:
    """[MQTT-4.8.2-1] [MQTT-4.8.2-2] (5.0)"""
    with pytest.raises(TopicFilterInvalid, match=reason):
        parse_shared(text, 3)


def test_the_levels_of_the_group_do_not_count() -> None:
    assert parse_shared("$share/g/1/2/3", 3) == ("g", "1/2/3")


def test_groups_are_known_by_group_and_filter() -> None:
    """A record of another gateway may have texts that this one does not take: they name no group."""
    texts = ["$share/g/a", "$share/g", "$share/h/a", "$share/g/a#", "$share/g/b", "a"]
    assert groups_of(texts) == [group_hash("g", "a"), group_hash("h", "a"), group_hash("g", "b")]
    assert len(set(groups_of(texts))) == 3
    assert groups_of([]) == []


def test_a_filter_of_many_levels_that_another_gateway_took_has_its_group() -> None:
    deep = "/".join("1" * 1000)
    assert groups_of([f"$share/g/{deep}"]) == [group_hash("g", deep)]


@pytest.mark.parametrize("text", ["a/b", "", "/", "$SYS/a", "share/g/a", "$shared/g/a"])
def test_other_filters_are_as_they_are(text: str) -> None:
    assert plain_filter(text) == text


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("a", False),
        ("a/b/c", False),
        ("$SYS/a", False),
        ("+", True),
        ("a/+/b", True),
        ("#", True),
        ("$share/g/a", True),
    ],
)
def test_which_filters_may_match_a_topic_of_another(text: str, may: bool) -> None:
    """Two groups may have the same filter without wildcards."""
    assert is_open(text) is may
