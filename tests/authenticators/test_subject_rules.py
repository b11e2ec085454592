# SPDX-License-Identifier: Apache-2.0
"""Permissions of users of nats-server, held against MQTT topics and filters."""

import itertools
from typing import Any

import pytest

from mqtt_nats.access.acl import Identity
from mqtt_nats.authenticators.nats_users import parse_info
from mqtt_nats.authenticators.subject_rules import SubjectRules, Subjects
from mqtt_nats.codec import matches

NONE: dict[str, Any] = {}


def rules(publish: Any = None, subscribe: Any = None) -> SubjectRules:
    return SubjectRules(Subjects.parse(publish), Subjects.parse(subscribe))


@pytest.mark.parametrize(
    ("permissions", "topic", "permitted"),
    [
        (None, "a/b", True),
        (NONE, "a/b", True),
        ({"allow": []}, "a/b", True),
        ({"allow": ["a.>"]}, "a/b", True),
        ({"allow": ["a.>"]}, "a/b/c", True),
        ({"allow": ["a.>"]}, "a", False),
        ({"allow": ["a.*"]}, "a/b", True),
        ({"allow": ["a.*"]}, "a/b/c", False),
        ({"allow": ["a.b"]}, "a/b", True),
        ({"allow": ["a.b"]}, "a/c", False),
        ({"allow": ["a.b queue"]}, "a/b", False),
        ({"allow": [">"], "deny": ["a.secret.>"]}, "a/open", True),
        ({"allow": [">"], "deny": ["a.secret.>"]}, "a/secret/x", False),
        ({"deny": ["*.x"]}, "a/x", False),
        ({"deny": ["*.x"]}, "$own/x", False),
        ({"deny": ["a.b queue"]}, "a/b", False),
        ({"deny": [">"]}, "a", False),
        ({"allow": ["a.b"]}, "a.b", False),  # a dot in a level is no separator
        ({"allow": ["a.*"]}, "a/*", True),
        ({"allow": ["a.b c"]}, "a/b c", False),
        ({"allow": [">"]}, "x" * 4000, False),
    ],
)
def test_publish(permissions: Any, topic: str, permitted: bool) -> None:
    found = rules(publish=permissions).permissions(Identity(None, "c"))
    data = topic.encode()
    assert found.may_publish(topic, 0, False) is permitted
    assert found.publish(len(data).to_bytes(2) + data, 1, True) is permitted


@pytest.mark.parametrize(
    ("permissions", "topic_filter", "permitted"),
    [
        (None, "#", True),
        ({"allow": ["a.>"]}, "a/+", True),
        ({"allow": ["a.>", "a"]}, "a/#", True),
        ({"allow": ["a.>"]}, "a/#", False),  # which has a itself in it
        ({"allow": ["a.>"]}, "#", False),
        ({"allow": ["a.>"]}, "+/b", False),
        ({"allow": ["a.*"]}, "a/#", False),
        ({"allow": ["*.b"]}, "+/b", True),
        ({"allow": ["*.b"]}, "x/b", True),
        ({"allow": [">"], "deny": ["a.secret"]}, "a/+", False),
        ({"allow": [">"], "deny": ["a.secret"]}, "#", False),
        ({"allow": [">"], "deny": ["a.secret"]}, "b/#", True),
        ({"allow": [">"], "deny": ["a.secret"]}, "a/secret", False),
        ({"allow": [">"], "deny": ["a.>"]}, "a", True),
        ({"allow": [">"], "deny": ["$SYS.>", "$JS.>"]}, "#", True),  # MQTT's wildcards do not match these
        ({"allow": [">"], "deny": ["$own.>"]}, "$own/#", False),
        ({"allow": [">"], "deny": [">"]}, "a", False),
        ({"allow": [">"]}, "$JS/x", False),
    ],
)
def test_subscribe(permissions: Any, topic_filter: str, permitted: bool) -> None:
    assert rules(subscribe=permissions).subscribe(topic_filter, 1) is permitted
    assert rules(publish=permissions).subscribe("x/y", 1)  # the other list is not about it


TOKENS = ("a", "b", "*", ">")
PATTERNS = [
    pattern for size in (1, 2, 3) for pattern in itertools.product(TOKENS, repeat=size) if ">" not in pattern[:-1]
]
TOPICS = ["/".join(levels) for size in (1, 2, 3) for levels in itertools.product("ab", repeat=size)]
FILTERS = {"*": "+", ">": "#"}


def test_a_subscription_brings_only_what_is_permitted() -> None:
    """Each pair of patterns of three levels, against each filter of two: no topic of a permitted one is denied."""
    filters = ["/".join(FILTERS.get(token, token) for token in pattern) for pattern in PATTERNS if len(pattern) < 3]
    brought = {one: [topic for topic in TOPICS if matches(one, topic)] for one in filters}
    permitted = 0
    for allow, deny in itertools.product(PATTERNS, PATTERNS[:20]):
        subjects = {"allow": [".".join(allow)], "deny": [".".join(deny)]}
        found = rules(subjects, subjects)
        topics = {topic for topic in TOPICS if found.may_publish(topic, 0, False)}
        for one in filters:
            if found.subscribe(one, 0):
                permitted += 1
                assert topics.issuperset(brought[one]), (subjects, one)
    assert permitted > 500


@pytest.mark.parametrize("values", [[], "x", 5, {"allow": "a"}, {"allow": [1]}, {"deny": {"a": 1}}, {"deny": [None]}])
def test_permissions_that_cannot_be_understood(values: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        Subjects.parse(values)


def test_what_nats_says_of_a_user() -> None:
    found = parse_info(
        b'{"data": {"user": "ann", "account": "A", "expires": 5000000000,'
        b'"permissions": {"publish": {"allow": ["a"]}, "subscribe": {"deny": ["b"]}}}}',
        100.0,
    )
    assert (found.user, found.account, found.expires) == ("ann", "A", 105.0)
    assert not found.rules.may_publish("b", 0, False)
    assert not found.rules.subscribe("b", 0)
    assert parse_info(b'{"data": {"user": "ann", "account": "A"}}', 0).rules.subscribe("#", 0)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"x",
        b"{}",
        b"[]",
        b'{"data": []}',
        b'{"error": {"code": 500}}',
        b'{"data": {"user": "ann"}}',
        b'{"data": {"user": "ann", "account": 5}}',
        b'{"data": {"user": "ann", "account": "A", "permissions": [1]}}',
        b'{"data": {"user": "ann", "account": "A", "permissions": {"publish": [1]}}}',
        b'{"data": {"user": "ann", "account": "A", "expires": "soon"}}',
    ],
)
def test_answers_that_say_nothing(payload: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_info(payload, 0)


@pytest.mark.parametrize(
    ("permissions", "topic_filter", "granted"),
    [
        (None, "#", True),
        ({"allow": ["a.>"]}, "#", True),
        ({"allow": ["a.>"]}, "+/b", True),
        ({"allow": ["a.b"]}, "a/+", True),
        ({"allow": ["a.b"]}, "c/+", False),
        ({"allow": ["a.>"], "deny": ["a.secret.>"]}, "a/#", True),
        ({"allow": ["a.>"], "deny": ["a.secret.>"]}, "a/secret/+", False),
        ({"allow": ["a.b"]}, "x" * 4000 + "/+", False),
    ],
)
def test_filters_of_which_each_message_is_looked_at(permissions: Any, topic_filter: str, granted: bool) -> None:
    assert rules(subscribe=permissions).may_touch(topic_filter, 0) is granted
