# SPDX-License-Identifier: Apache-2.0
"""Mutated topic names, topic filters, subjects, and subject mappings of an account."""

from __future__ import annotations

from typing import Final

import mqtt_nats.codec.topics
import mqtt_nats.pubsub.subject_mapping
import mqtt_streams.subjects
from mqtt_nats.codec import MqttError, check_topic_name, matches, validate_topic_filter, validate_topic_name
from mqtt_nats.pubsub.subject_mapping import Transform, mapped
from mqtt_streams import subjects
from mqtt_streams.subjects import MAX_SUBJECT_BYTES, ReservedSubject, SubjectTooLong
from tests.codec.support import key
from tests.fuzz.engine import Input, Target, Unexpected, expect
from tests.fuzz.mutation import of_pieces

TOPIC, FILTER, SUBJECT, MAPPING = range(4)
"""Variants: a topic name; a filter, and behind NUL a topic name; a subject; source, target and subject with NUL."""

_NOT_IN_SUBJECTS: Final = frozenset(" \t\r\n\f\v\0\x7f")

_PIECES: Final = (
    *(
        b"/",
        b"//",
        b".",
        b"+",
        b"#",
        b"$",
        b"\0",
        b"*",
        b">",
        b" ",
        b"/_",
        b"/~t",
        b"/~s",
        b"~",
        b"_",
        b"$SYS",
        b"$share/g/",
    ),
    *(
        b"$MQTT_SYS",
        b"$MQTT",
        b"_INBOX",
        b"$JS",
        b"$reply",
        b"{{wildcard(1)}}",
        b"$1",
        b"$2",
        b"a",
        b"\xff",
        b"\xc3\xa9",
    ),
    *(b"\xf0\x9f\x98\x80", b"\xed\xa0\x80", b"\t", b"\n", b"\r", b"\x0b", b"\x0c", b"\x7f", b"a" * 400, b"a/" * 200),
)


def seeds() -> list[Input]:
    """Names, filters with a name that some match, subjects, mappings."""
    names = ("a", "a/b/c", "/", "a//b", " a.b/*>", "$SYS/x", "$MQTT_SYS/x", "a/$MQTT_SYS/b", "é/€", "_INBOX/x", "a_/~s")
    filters = ("a\0a", "+/b\0a/b", "a/#\0a", "#\0$SYS/a", "$SYS/#\0$SYS/a", "+\0", "a/+/c\0a//c", "a b/#\0a b/.")
    others = ("a", "a.b", "a./.b", "a//b", "/_", "/~t/", "$MQTT_SYS.a", "a.>", "*.b", ">", "a.$MQTT_SYS.b", "a/b")
    mappings = ("a.*\0b.$1\0a.x", "a.>\0b.c.>\0a.x.y", "*.*\0{{wildcard(2)}}.$1\0p.q", "a\0b\0a")
    return [
        (variant, text.encode()) for variant, texts in enumerate((names, filters, others, mappings)) for text in texts
    ]


def check(one: Input, number: int) -> tuple[int, bool]:
    """A legal topic name has one subject, which is legal in NATS and gives the name back.

    A legal filter gives subjects that give the filter back. These subjects match the subject of a topic name where
    the filter matches the name. Filters that are reserved or too long are refused, and no others. Any subject gives
    a legal topic name, or none. A mapping of subjects is refused, or makes legal subjects of legal subjects.
    """
    variant, data = one
    try:
        if variant == SUBJECT:
            return _subject(data)
        parts = data.split(b"\0")
        if variant == TOPIC:
            return _topic(parts[0])
        if variant == FILTER:
            return _filter(parts[0], parts[-1])
        return _mapping([part.decode() for part in parts])
    except UnicodeDecodeError:
        return 0, True
    except Unexpected:
        raise
    except Exception as error:
        raise Unexpected(f"{type(error).__name__}: {error}") from error


def _name(raw: bytes) -> str | None:
    """The topic name, None for bytes that are none."""
    try:
        return validate_topic_name(len(raw).to_bytes(2, "big") + raw)
    except MqttError:
        return None


def _encoded(name: str) -> str | None:
    """The subject of a topic name, also of those that gateways publish; None for one that is refused."""
    try:
        return subjects.system_subject(name) if name.startswith("$SYS/") else subjects.topic_to_subject(name)
    except ReservedSubject:
        root = name.partition("/")[0]
        expect(root in subjects.RESERVED_ROOTS, f"{root!r} is not reserved")
    except SubjectTooLong:
        grown = len(subjects.SYSTEM_ROOT) - len(subjects.SYSTEM_LEVEL) if name.startswith("$SYS/") else 0
        expect(len(subjects._levels(name).encode()) + grown > MAX_SUBJECT_BYTES, f"{name!r} is not too long")
    return None


def _legal(subject: str, *, wildcards: bool = False) -> bool:
    """Whether NATS takes it, by other means than the code under test."""
    if any(character in _NOT_IN_SUBJECTS for character in subject) or len(subject.encode()) > MAX_SUBJECT_BYTES:
        return False
    tokens = subject.split(".")
    if not wildcards:
        return all(tokens) and not any("*" in token or ">" in token for token in tokens)
    return all(
        token and (token == "*" or "*" not in token) and (">" not in token or (token == ">" and at == len(tokens) - 1))
        for at, token in enumerate(tokens)
    )


def _topic(raw: bytes) -> tuple[int, bool]:
    name = _name(raw)
    if name is None or (subject := _encoded(name)) is None:
        return 0, True
    expect(_legal(subject), f"{subject!r} is not a subject")
    expect(subjects.subject_to_topic(subject) == name, f"{subject!r} is {subjects.subject_to_topic(subject)!r}")
    expect(subjects.wire_topic(subject.encode()) == name, f"clients are sent {subjects.wire_topic(subject.encode())!r}")
    return 1, False


def _filter(raw: bytes, other: bytes) -> tuple[int, bool]:
    text = raw.decode()
    try:
        validate_topic_filter(text)
        legal = True
    except MqttError:
        legal = False
    try:
        found = subjects.filter_to_subjects(text)
    except ReservedSubject:
        expect(text.partition("/")[0] in subjects.RESERVED_ROOTS, f"{text!r} is not reserved")
        return 0, True
    except SubjectTooLong:
        expect(len(text.encode()) * 3 > MAX_SUBJECT_BYTES, f"{text!r} is not too long")
        return 0, True
    except ValueError:
        expect(not legal, f"the legal filter {text!r} is refused")
        return 0, True
    expect(legal, f"the filter {text!r} has subjects")
    for one in found:
        expect(_legal(one, wildcards=True), f"{one!r} is not a subject")
    expect(subjects.subject_to_filter(found[0]) == text, f"{found[0]!r} is {subjects.subject_to_filter(found[0])!r}")
    name = _name(other)
    if name is not None:
        _matched(text, found, name)
    return 1, False


def _matched(text: str, found: tuple[str, ...], name: str) -> None:
    """That a filter matches a name where its subjects match the name's."""
    subject = _encoded(name)
    if subject is None:
        return
    by_nats = any(_nats_matches(one, subject) for one in found)
    hidden = subjects.starts_with_wildcard(found[0]) and not subjects.visible_to_wildcard(subject)
    expect(
        (by_nats and not hidden) == matches(text, name),
        f"{text!r} matches {name!r}: {matches(text, name)}, {found} {subject!r}: {by_nats}, hidden: {hidden}",
    )


def _nats_matches(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(given) >= len(wanted) and all(a in ("*", b) for a, b in zip(wanted[:-1], given, strict=False))
    return len(given) == len(wanted) and all(a in ("*", b) for a, b in zip(wanted, given, strict=True))


def _subject(raw: bytes) -> tuple[int, bool]:
    name = subjects.wire_topic(raw)
    if name is not None:
        check_topic_name(name)
        expect("\0" not in name and len(key(name)) <= 65_537, f"{name!r} is no topic name")
    text = raw.decode()
    subjects.subject_to_topic(text)
    subjects.subject_to_filter(text)
    expect(not subjects.is_reserved(text) or subjects.root_of(text) in subjects.RESERVED_ROOTS, "it is not reserved")
    return 1, name is None


def _mapping(parts: list[str]) -> tuple[int, bool]:
    source, goal, subject = (*parts, "", "")[:3]
    try:
        one = Transform(source, goal)
    except ValueError:
        return 0, True
    if not _legal(subject):
        return 0, True
    found = mapped((one,), subject)
    applies = _nats_matches(source, subject)
    expect(applies or found == subject, f"{source!r} is not about {subject!r}, and makes {found!r} of it")
    if _legal(goal.replace("$", "").replace("{{", "").replace("}}", ""), wildcards=True):
        expect(not found or _legal(found) or len(found) > MAX_SUBJECT_BYTES, f"{found!r} is not a subject")
    return 1, False


TARGET: Final = Target(
    "topics",
    (mqtt_nats.codec.topics, mqtt_nats.pubsub.subject_mapping, mqtt_streams.subjects),
    seeds,
    check,
    variants=4,
    mutate=of_pieces(*_PIECES),
)
