# SPDX-License-Identifier: Apache-2.0
"""Section 4.7: topic names, topic filters, matching."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.codec import (
    MalformedPacket,
    MqttError,
    TopicFilterInvalid,
    TopicNameInvalid,
    check_topic_name,
    matches,
    validate_topic_filter,
    validate_topic_name,
)
from mqtt_nats.codec.topics import check_filter_syntax
from tests.codec.support import key


@pytest.mark.parametrize(
    "topic", ["a", "/", "//", "a b", " ", "$SYS/x", "é/€/😀", "a.b>*", "\ufeff", "\x01", "x" * 65535]
)
def test_names(topic: str) -> None:
    assert validate_topic_name(key(topic)) == topic


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"\0\0", TopicNameInvalid),  # [MQTT-4.7.3-1]
        (b"\0\1#", TopicNameInvalid),  # [MQTT-3.3.2-2]
        (b"\0\3a/+", TopicNameInvalid),
        (b"\0\3a+b", TopicNameInvalid),
        (b"\0\1\0", MalformedPacket),  # [MQTT-4.7.3-2]
        (b"\0\1\xff", MalformedPacket),  # [MQTT-1.5.3-1]
        (b"\0\3\xed\xa0\x80", MalformedPacket),
        (b"\0\2\xc0\xaf", MalformedPacket),
        (b"\0\2a", MalformedPacket),
        (b"", MalformedPacket),
    ],
)
def test_bad_names(raw: bytes, error: type[MqttError]) -> None:
    with pytest.raises(MqttError) as caught:
        validate_topic_name(raw)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "topic_filter", ["#", "+", "a/#", "/#", "+/#", "+/+", "a/+/b", "/+", "+/", "a", "/", "a//#", "$SYS/#", "+/+/+/#"]
)
def test_filters(topic_filter: str) -> None:
    validate_topic_filter(topic_filter)


@pytest.mark.parametrize(
    "topic_filter",
    [
        "",
        "a#",
        "#/",
        "#/a",
        "a/#/b",
        "##",
        "a/b#",
        "#a",
        "a+",
        "+a",
        "a/+b",
        "a/b+/c",
        "++",
        "a\0b",
        "+#",
        "#+",
        "a/##",
    ],
)
def test_bad_filters(topic_filter: str) -> None:
    with pytest.raises(TopicFilterInvalid):
        validate_topic_filter(topic_filter)


@pytest.mark.parametrize("text", ["a/#", "$share", "$share/g/a", "$share/g/+/#", "$share/g//", "$share/$x/$y"])
def test_what_may_stand_in_a_packet(text: str) -> None:
    check_filter_syntax(text)


@pytest.mark.parametrize(
    "text",
    ["", "a#", "+a", "$share/", "$share/g", "$share//a", "$share/g/", "$share/+/a", "$share/a#/b", "$share/g/a#"],
)
def test_what_may_not(text: str) -> None:
    """It is the packet that is wrong, not the filter that is refused."""
    with pytest.raises(MalformedPacket):
        check_filter_syntax(text)


@pytest.mark.parametrize(
    ("check", "error"), [(check_topic_name, TopicNameInvalid), (validate_topic_filter, TopicFilterInvalid)]
)
def test_levels(check: Callable[[str, int], None], error: type[MqttError]) -> None:
    check("a/b/c", 3)
    check("//", 3)
    for longer in ("a/b/c/d", "///"):
        with pytest.raises(error):
            check(longer, 3)
    with pytest.raises(TopicNameInvalid):
        validate_topic_name(key("a/b/c/d"), 3)


@pytest.mark.parametrize(
    ("topic_filter", "topic", "expected"),
    [
        ("a", "a", True),
        ("a", "A", False),  # names are case sensitive
        ("a", "a/", False),
        ("a/", "a/", True),
        ("a", "/a", False),  # [MQTT-4.7.3-4]
        ("#", "a/b/c", True),
        ("#", "/", True),
        ("#", "$SYS", False),  # [MQTT-4.7.2-1]
        ("+", "$SYS", False),
        ("+/x", "$SYS/x", False),
        ("+/#", "$SYS/x", False),
        ("$SYS/#", "$SYS/x", True),
        ("$SYS/#", "$SYS", True),
        ("$SYS/+", "$SYS/x", True),
        ("a/#", "a", True),
        ("a/#", "a/", True),
        ("a/#", "a/b/c", True),
        ("a/#", "ab", False),
        ("a/+", "a", False),
        ("a/+", "a/", True),
        ("a/+", "a/b", True),
        ("a/+", "a/b/c", False),
        ("+", "a", True),
        ("+", "/a", False),
        ("+/+", "/a", True),
        ("/+", "/a", True),
        ("+/b/#", "a/b", True),
        ("+/b/#", "a/c", False),
        ("a/+/c", "a//c", True),
        ("a/$x", "a/$x", True),
        ("a/+", "a/$x", True),
    ],
)
def test_matches(topic_filter: str, topic: str, expected: bool) -> None:
    assert matches(topic_filter, topic) is expected


levels = st.sampled_from(["", "a", "b", "$c", "+", "#"])


def _by_definition(wanted: list[str], have: list[str]) -> bool:
    if wanted == ["#"]:
        return True
    if not wanted or not have:
        return wanted == have
    if wanted[0] not in ("+", have[0]):
        return False
    return _by_definition(wanted[1:], have[1:])


@given(wanted=st.lists(levels, min_size=1, max_size=5), have=st.lists(levels, min_size=1, max_size=5))
def test_matches_by_definition(wanted: list[str], have: list[str]) -> None:
    topic_filter, topic = "/".join(wanted), "/".join(have)
    try:
        validate_topic_filter(topic_filter)
        check_topic_name(topic)
    except MqttError:
        return
    dollar = topic.startswith("$") and topic_filter[0] in "+#"
    assert matches(topic_filter, topic) is (not dollar and _by_definition(wanted, have))
