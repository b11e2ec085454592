# SPDX-License-Identifier: Apache-2.0
"""Subject mappings: how they are read, what they make of a subject, which cannot be followed."""

import pytest

from mqtt_nats.codec import TopicNameInvalid
from mqtt_nats.pubsub.routing_table import Table
from mqtt_nats.pubsub.subject_mapping import mapped, parse_mappings


@pytest.mark.parametrize(
    ("source", "target", "subject", "found"),
    [
        ("a", "b", "a", "b"),
        ("a", "b", "a.a", "a.a"),
        ("a", "b.c", "a", "b.c"),
        ("a.*", "b.$1", "a.x", "b.x"),
        ("a.*", "b.$1", "a", "a"),
        ("a.*", "b.$1", "a.x.y", "a.x.y"),
        ("a.*", "b.c", "a.x", "b.c"),
        ("a.*.*", "$2.{{wildcard(1)}}.$2", "a.x.y", "y.x.y"),
        ("a.*", "b.{{ wildcard( 1 ) }}", "a.x", "b.x"),
        ("*.b.*", "$1.c.$2", "x.b.y", "x.c.y"),
        ("a.>", "b.>", "a.x.y", "b.x.y"),
        ("a.>", "b.>", "a", "a"),
        (">", "b.>", "x.y", "b.x.y"),
        ("a.*.>", "b.$1.c.>", "a.x.y.z", "b.x.c.y.z"),
        ("a.*.>", "b.$1.c.>", "a.x", "a.x"),
    ],
)
def test_what_is_made_of_a_subject(source: str, target: str, subject: str, found: str) -> None:
    assert mapped(parse_mappings({source: target}), subject) == found


def test_the_first_that_fits_counts_and_nothing_is_mapped_twice() -> None:
    transforms = parse_mappings({"a.b": "c", "a.*": "a.b", "c": "d"})
    assert [mapped(transforms, one) for one in ("a.b", "a.x", "c", "e")] == ["c", "a.b", "d", "e"]


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ("a..b", "b", "'a..b' is not a subject"),
        ("", "b", "'' is not a subject"),
        ("a.>.b", "b", "'a.>.b' is not a subject"),
        ("a b", "b", "'a b' is not a subject"),
        ("a.>", "b", "both sides of a mapping end with >"),
        ("a", "b.>", "both sides of a mapping end with >"),
        ("a.*", "b.$2", "'a.*' has no wildcard 2"),
        ("a.*", "b.$0", "'a.*' has no wildcard 0"),
        ("a.*", "b.*", r"expected tokens, \$1 and"),
        ("a.*", "b.{{partition(3,1)}}", r"expected tokens, \$1 and"),
        ("a", "b..c", r"expected tokens, \$1 and"),
        ("a", "$JS.API", r"expected tokens, \$1 and"),
        ("a", "$SYS.x", r"expected tokens, \$1 and"),
    ],
)
def test_what_cannot_be_followed(source: str, target: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_mappings({source: target})


def key(topic: str) -> bytes:
    return len(topic).to_bytes(2) + topic.encode()


def test_routes() -> None:
    """What is published on a topic, and what arrives on it, are different things."""
    table = Table(mappings=parse_mappings({"a.*": "b.$1", "b.x": "c"}))
    route = table.route(key("a/x"))
    assert (route.topic, route.key, route.subject) == ("b/x", key("b/x"), "b.x")
    assert (route.asked, route.origin) == (key("a/x"), "a.x")
    assert (route.pub, route.hpub) == (b"PUB a.x ", b"HPUB a.x ")
    assert route.msgs == b"HPUB $MQTT.msgs.b.x "
    arrived = table.route_of_subject(b"b.x")
    assert arrived is not None
    assert arrived is not route
    assert arrived.topic == "b/x"
    assert table.route(key("b/x")).topic == "c"
    published = table.route_to(b"b.x")
    assert published is table.route(key("b/x"))
    assert table.route_to(b"\xff") is None
    plain = table.route(key("d"))
    assert (plain.asked, plain.origin) == (plain.key, plain.subject) == (key("d"), "d")


def test_a_topic_that_is_mapped_to_none() -> None:
    table = Table(mappings=parse_mappings({"a": "b.+"}))
    with pytest.raises(TopicNameInvalid, match="mapped"):
        table.route(key("a"))
