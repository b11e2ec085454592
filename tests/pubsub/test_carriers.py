# SPDX-License-Identifier: Apache-2.0
"""Filters of one session that overlap: nats-server sends a message a few times, however many of them there are."""

from __future__ import annotations

import random

import pytest

from mqtt_nats.codec.topics import matches
from mqtt_nats.pubsub.granted_options import Options
from mqtt_nats.pubsub.subscribers import OVERLAPS_MOST, cover
from mqtt_streams.subjects import topic_to_subject
from tests.pubsub.support import Bench, FakeLink, Subscriber
from tests.pubsub.support import _matches as nats_matches

CARRIERS = 3
"""`#`, and the first one or two levels of a topic."""


def copies(link: FakeLink, topic: str) -> int:
    """How often nats-server sends a message on a topic."""
    subject = topic_to_subject(topic).split(".")
    return sum(nats_matches(pattern.decode().split("."), subject) for pattern in link.subjects)


def overlapping(count: int, first: str = "a+") -> list[str]:
    numbers = random.Random(count)
    found: dict[str, None] = {}
    while len(found) < count:
        found["/".join([numbers.choice(first), *numbers.choices("a+", k=11)])] = None
    return list(found)


@pytest.mark.parametrize("first", ["a", "+", "a+"])
def test_copies_are_bounded(first: str) -> None:
    bench = Bench()
    one = Subscriber(bench, "one")
    filters = overlapping(1000, first)
    for text in filters:
        bench.subscribe(one, text, 0)
    topic = "/".join("a" * 12)
    assert copies(bench.main, topic) + copies(bench.wild, topic) <= OVERLAPS_MOST + CARRIERS
    bench.from_nats(topic_to_subject(topic).encode())
    assert _count(one) == 1


def test_filters_that_do_not_overlap_have_their_own() -> None:
    """Else a gateway would be sent what nobody wants."""
    bench = Bench()
    one = Subscriber(bench, "one")
    for number in range(200):
        bench.subscribe(one, f"site/{number}/+/state", 0)
    bench.subscribe(one, "other/#", 0)
    assert len(bench.main.subjects) == 202
    assert not bench.table.carriers


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1])
def test_everybody_gets_each_message_once(version: int, qos: int) -> None:
    """Whichever filters come and go, their own or carried, with options or without."""
    numbers = random.Random(version * 2 + qos)
    bench = Bench()
    members = [Subscriber(bench, f"m{number}", version=version) for number in range(3)]
    pool = ["#", "a/#", "+/+", *("/".join(numbers.choices(["a", "b", "+"], k=3)) for _ in range(60))]
    pool += [f"{text}/#" for text in pool if "#" not in text][:30]
    present: dict[Subscriber, dict[str, None]] = {member: {} for member in members}
    headers = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:%024d\r\n\r\n"
    carried = 0
    for turn in range(400):
        member = numbers.choice(members)
        text = numbers.choice(pool)
        if text in present[member] and numbers.random() < 0.5:
            assert bench.table.unsubscribe(member, text)
            del present[member][text]
        else:
            options = Options(identifier=turn + 1) if version == 5 and numbers.random() < 0.3 else Options()
            bench.subscribe(member, text, qos, options=options)
            present[member][text] = None
        topic = "/".join(numbers.choices("ab", k=numbers.randint(1, 4)))
        bench.from_nats(topic_to_subject(topic).encode(), headers % turn if qos else b"")
        for one in members:
            assert _count(one) == any(matches(text, topic) for text in present[one]), (turn, topic)
            _forget(one)
        carried += len(bench.table.carriers)
    assert carried
    for member in members:
        bench.table.leave(member)
    assert not bench.table.carriers
    assert not bench.main.subjects
    assert not bench.wild.subjects


def _count(member: Subscriber) -> int:
    """Messages of one byte that have come since the last look."""
    return len(member.bytes) + len(member.taken) + len(member.guarded)


def _forget(member: Subscriber) -> None:
    member.bytes.clear()
    member.taken.clear()
    member.guarded.clear()


def test_a_reconnect_and_a_denial() -> None:
    bench = Bench()
    one = Subscriber(bench, "one")
    for text in overlapping(40, "a"):
        bench.subscribe(one, text, 0)
    carrier = bench.table.carriers["a/a/#"]
    assert list(bench.table.carriers) == ["a/a/#", "a/#"] or list(bench.table.carriers) == ["a/#", "a/a/#"]
    bench.table.renew(bench.main)  # type: ignore[arg-type]
    assert sorted(bench.main.renewed) == sorted(bench.main.subjects)
    bench.table.deny(bench.main, carrier.subjects[0])  # type: ignore[arg-type]
    denied = [found for found in bench.table.filters.values() if found.denied]
    assert denied == list(carrier.carried)
    bench.main.renewed.clear()
    bench.subscribe(one, denied[0].text, 0)
    assert bench.main.renewed == list(carrier.subjects)
    assert not denied[0].denied


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b/+", "a/b/#"),
        ("a/+/b", "a/#"),
        ("+/a", "#"),
        ("a/b/c/#", "a/b/#"),
        ("#", "#"),
        ("a/#", "a/#"),
        ("//+", "//#"),
    ],
)
def test_what_a_carrier_subscribes(text: str, expected: str) -> None:
    assert cover(text.split("/")) == expected
