# SPDX-License-Identifier: Apache-2.0
"""Topics and filters <-> subjects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_streams import subjects
from mqtt_streams.subjects import (
    ESCAPES,
    MAX_SUBJECT_BYTES,
    ReservedSubject,
    SubjectTooLong,
    encode_topic,
    filter_to_subjects,
    is_reserved,
    readable_topic,
    subject_to_filter,
    subject_to_topic,
    system_subject,
    topic_to_subject,
    visible_to_wildcard,
    wire_topic,
)

# nats-server's own results, read from a running 2.15.1.
NATIVE = [
    ("a/b", "a.b"),
    ("/a", "/.a"),
    ("a/", "a./"),
    ("a//b", "a./.b"),
    ("a///b", "a././.b"),
    ("//a", "/./.a"),
    ("a//", "a././"),
    ("/", "/./"),
    ("//", "/././"),
    ("/a//b/", "/.a./.b./"),
    ("a.b", "a//b"),
    (".", "//"),
    ("a/./b", "a.//.b"),
    ("spBv1.0/x", "spBv1//0.x"),
]

# Any text that MQTT allows as a topic name, with the awkward characters made frequent.
topics = st.text(
    st.one_of(
        st.sampled_from("/././ab" + "".join(ESCAPES) + "_~tnvfrdsg$\x01\x1c\x85\xa0\u2028\u3000\ufeff\U0001f600"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\0+#"),
    ),
    min_size=1,
    max_size=40,
)
plain_topics = topics.filter(lambda topic: not set(topic) & set(ESCAPES))
nats_subjects = st.text(st.sampled_from("/.._~tnabg"), max_size=12)


def native_encode(topic: str) -> str:
    """nats-server's rule, byte by byte, from its description."""
    out = ""
    for index, char in enumerate(topic):
        if char == "/":
            if index == 0 or out.endswith("."):
                out += "/."
            elif index == len(topic) - 1 or topic[index + 1] == "/":
                out += "./"
            else:
                out += "."
        elif char == ".":
            out += "//"
        else:
            out += char
    return out + "/" if out.endswith(".") else out


def native_decode(subject: str) -> str:
    out, index = "", 0
    while index < len(subject):
        pair = subject[index : index + 2]
        if pair == "/.":
            out += "/"
            index += 2
        elif pair == "//":
            out += "."
            index += 2
        else:
            out += {"/": "", ".": "/"}.get(subject[index], subject[index])
            index += 1
    return out


@pytest.mark.parametrize(("topic", "subject"), NATIVE)
def test_nats_server_table(topic: str, subject: str) -> None:
    assert encode_topic(topic) == subject
    assert native_encode(topic) == subject
    assert subject_to_topic(subject) == topic


@given(topics)
def test_every_topic_comes_back(topic: str) -> None:
    assert subject_to_topic(encode_topic(topic)) == topic
    assert wire_topic(encode_topic(topic).encode()) == topic


@given(topics, topics)
def test_different_topics_have_different_subjects(one: str, other: str) -> None:
    assert (encode_topic(one) == encode_topic(other)) == (one == other)


@given(topics)
def test_subjects_are_literal_and_legal(topic: str) -> None:
    subject = encode_topic(topic)
    assert all(subject.split("."))
    assert not set(subject) & set(" \t\r\n\f\v\x7f*>\0")


@given(plain_topics)
def test_same_as_nats_server_without_escapes(topic: str) -> None:
    assert encode_topic(topic) == native_encode(topic)


@given(topics)
def test_nats_server_reads_our_subjects(topic: str) -> None:
    assert native_decode(encode_topic(topic)) == readable_topic(topic)


@given(nats_subjects)
def test_foreign_subjects_read_as_nats_server_does(subject: str) -> None:
    if not any(code in subject for code in ESCAPES.values()):
        assert subject_to_topic(subject) == native_decode(subject)
    else:
        subject_to_topic(subject)


@pytest.mark.parametrize(
    ("subject", "topic"),
    [("x/y", "xy"), ("/a", "a"), ("a.b/", "a/b"), ("esc.a/_b", "esc/a b"), ("a/~", "a~"), ("a/~z", "a~z"), ("", "")],
)
def test_lone_slashes(subject: str, topic: str) -> None:
    assert subject_to_topic(subject) == topic


@pytest.mark.parametrize("char", list(ESCAPES))
def test_each_escape(char: str) -> None:
    subject = encode_topic(f"a{char}/{char}b")
    assert subject == f"a{ESCAPES[char]}.{ESCAPES[char]}b"
    assert subject_to_topic(subject) == f"a{char}/{char}b"


@pytest.mark.parametrize("subject", [b"a.\xff", b"a+b", b"a.#", b"a\0b", b"", b"/", b"a" * 65536])
def test_no_topic_for_what_mqtt_cannot_carry(subject: bytes) -> None:
    assert wire_topic(subject) is None


def test_longest_wire_topic() -> None:
    assert wire_topic("é".encode() * 32767) == "é" * 32767
    assert wire_topic("é".encode() * 32768) is None


@pytest.mark.parametrize(
    ("topic_filter", "expected"),
    [
        ("#", (">",)),
        ("+", ("*",)),
        ("a/#", ("a.>", "a")),
        ("/#", ("/.>", "/")),
        ("+/#", ("*.>", "*")),
        ("a/b/#", ("a.b.>", "a.b")),
        ("a//#", ("a./.>", "a./")),
        ("+/+/c", ("*.*.c",)),
        ("dev/+/temp", ("dev.*.temp",)),
        ("/+", ("/.*",)),
        ("+/", ("*./",)),
        ("a.b/+", ("a//b.*",)),
        ("a b/*/>/+", ("a/_b./~s./~g.*",)),
        ("$SYS/#", ("$MQTT_SYS.>", "$MQTT_SYS")),
        ("$SYS", ("$MQTT_SYS",)),
        ("$SYS/broker/+", ("$MQTT_SYS.broker.*",)),
        ("$foo/#", ("$foo.>", "$foo")),
        ("$MQTT.x", ("$MQTT//x",)),
        ("a/$MQTT_SYS/b", ("a.$MQTT_SYS.b",)),
        ("+/$MQTT_SYS", ("*.$MQTT_SYS",)),
        ("a/$SYS/#", ("a.$SYS.>", "a.$SYS")),
        ("$SYS/$MQTT_SYS/+", ("$MQTT_SYS.$MQTT_SYS.*",)),
        ("/$MQTT_SYS/#", ("/.$MQTT_SYS.>", "/.$MQTT_SYS")),
        ("$MQTT_SYS.a/$MQTT_SYS", ("$MQTT_SYS//a.$MQTT_SYS",)),
        ("a/$MQTT_SYS/+", ("a.$MQTT_SYS.*",)),
        ("+/$SYS", ("*.$SYS",)),
    ],
)
def test_filters(topic_filter: str, expected: tuple[str, ...]) -> None:
    assert filter_to_subjects(topic_filter) == expected
    assert subject_to_filter(expected[0]) == topic_filter


@pytest.mark.parametrize("topic_filter", ["", "a+", "+a", "a/b+/c", "a#", "#/a", "a/#/b", "a/b#", "##", "++"])
def test_illegal_filters(topic_filter: str) -> None:
    with pytest.raises(ValueError, match=r"filter|wildcard") as caught:
        filter_to_subjects(topic_filter)
    assert type(caught.value) is ValueError


@given(st.lists(st.one_of(st.just("+"), topics.map(lambda t: t.replace("/", ""))), min_size=1), st.booleans())
def test_filters_come_back(levels: list[str], multi: bool) -> None:
    topic_filter = "/".join([*levels, "#"] if multi else levels)
    if not topic_filter or topic_filter.split("/")[0] in subjects.RESERVED_ROOTS:
        return
    mapped = filter_to_subjects(topic_filter)
    assert subject_to_filter(mapped[0]) == topic_filter
    assert len(mapped) == (2 if multi and len(levels) > 0 else 1)
    if "+" not in levels:
        assert mapped[-1] == encode_topic("/".join(levels)) or levels == [""]


@pytest.mark.parametrize("root", sorted(subjects.RESERVED_ROOTS))
def test_reserved_roots(root: str) -> None:
    for topic in (root, f"{root}/a", f"{root}/a/b c"):
        assert is_reserved(encode_topic(topic))
        with pytest.raises(ReservedSubject):
            topic_to_subject(topic)
    if root != "$SYS":
        for topic_filter in (root, f"{root}/#", f"{root}/+"):
            with pytest.raises(ReservedSubject):
                filter_to_subjects(topic_filter)
    assert not visible_to_wildcard(root)
    assert not visible_to_wildcard(f"{root}.a")


@pytest.mark.parametrize("topic", ["$foo/bar", "$MQTT.x", "$SYSx/a", "a/$MQTT", "_INBOXES/a", "_", "$", "/$SYS/a"])
def test_other_roots_are_open(topic: str) -> None:
    subject = topic_to_subject(topic)
    assert not is_reserved(subject)
    assert visible_to_wildcard(subject) == (not topic.startswith("$"))


def test_system_topics_have_their_own_root() -> None:
    assert system_subject("$SYS/broker/up time") == "$MQTT_SYS.broker.up/_time"
    assert subject_to_topic("$MQTT_SYS.broker.up/_time") == "$SYS/broker/up time"
    assert subject_to_topic("$MQTT_SYS") == "$SYS"
    assert subject_to_topic("$MQTT_SYSx.a") == "$MQTT_SYSx/a"
    with pytest.raises(ValueError, match="SYS"):
        system_subject("a/b")


@pytest.mark.parametrize("topic", ["a/$MQTT_SYS/b", "a/$MQTT_SYS", "/$MQTT_SYS", "a/$SYS/b", "$SYSx/$MQTT_SYS"])
def test_the_system_root_is_a_root_in_the_first_level_only(topic: str) -> None:
    subject = topic_to_subject(topic)
    assert subject_to_topic(subject) == topic
    assert filter_to_subjects(topic) == (subject,)
    assert subject_to_filter(subject) == topic


@pytest.mark.parametrize("char", ["a", ".", " ", "é", "/", "\U0001f600"])
def test_length_is_counted_in_encoded_bytes(char: str) -> None:
    width = len(encode_topic("x" + char * 2 + "x").encode()) - len(encode_topic("x" + char + "x").encode())
    fits = (MAX_SUBJECT_BYTES - 2) // width - 1
    assert len(topic_to_subject("x" + char * fits + "x").encode()) <= MAX_SUBJECT_BYTES
    for call in (topic_to_subject, filter_to_subjects):
        with pytest.raises(SubjectTooLong):
            call("x" + char * (fits + 3) + "x")


def test_longest_subject_exactly() -> None:
    assert len(topic_to_subject("a" * MAX_SUBJECT_BYTES)) == MAX_SUBJECT_BYTES
    with pytest.raises(SubjectTooLong):
        topic_to_subject("a" * (MAX_SUBJECT_BYTES + 1))
