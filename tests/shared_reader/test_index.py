# SPDX-License-Identifier: Apache-2.0
"""Which sessions get a message of the shared reader, and which filters the reader needs for them."""

from __future__ import annotations

from collections import Counter

import pytest

from mqtt_nats.shared_reader import index
from mqtt_nats.shared_reader.index import ServedFilters, shown
from mqtt_nats.shared_reader.reader_session import ReaderSession
from tests.sessions.fakes import FakeServices
from tests.shared_reader.fakes import live_binding, member_of

pytestmark = pytest.mark.sources

PREFIX = "$MQTT.msgs."


class Setup:
    """An index, and what it counts."""

    def __init__(self) -> None:
        self.services = FakeServices()
        self.wanted: Counter[str] = Counter()
        self.index = ServedFilters(self.wanted)

    def put(self, client_id: str, *subjects: str) -> ReaderSession:
        member = member_of(self.services, client_id, *subjects)
        self.index.put(member)
        return member

    def find(self, subject: str) -> list[ReaderSession]:
        return self.index.find((PREFIX + subject).encode())


@pytest.mark.parametrize(
    ("filters", "subject", "found"),
    [
        (("a.b",), "a.b", True),
        (("a.b",), "a.c", False),
        (("a.*",), "a.b", True),
        (("a.*",), "a.b.c", False),
        (("a.>",), "a.b.c", True),
        ((">",), "a", True),
        (("*.b", "a.>"), "a.b", True),
        (("a/b.c",), "a/b.c", True),  # an empty level or a dot is a slash in a token
        (("a/b.*",), "a.b.c", False),
    ],
)
def test_a_session_is_found_once_by_its_filters(filters: tuple[str, ...], subject: str, found: bool) -> None:
    setup = Setup()
    member = setup.put("client", *filters)
    assert setup.find(subject) == ([member] if found else [])


def test_filters_are_counted_by_sessions() -> None:
    setup = Setup()
    one, other = setup.put("one", "a", "b"), setup.put("other", "a")
    assert setup.wanted == {PREFIX + "a": 2, PREFIX + "b": 1}
    setup.index.put(one)  # nothing is counted twice
    assert setup.wanted == {PREFIX + "a": 2, PREFIX + "b": 1}
    setup.index.remove(one)
    assert setup.wanted == {PREFIX + "a": 1}
    assert (setup.find("a"), setup.find("b")) == ([other], [])
    setup.index.remove(other)
    assert setup.wanted == {}
    setup.index.remove(other)
    assert setup.wanted == {}


def test_only_subscriptions_whose_messages_the_reader_brings() -> None:
    """Not those that have ended; of one that was lowered to QoS 0 messages are still sent."""
    setup = Setup()
    member = member_of(setup.services, "client")
    side = member.side
    side.bindings = {
        "ended": live_binding("ended", end=5),
        "lowered": live_binding("lowered", end=5, whole=True),
        "live": live_binding("live"),
    }
    setup.index.put(member)
    assert member.filters == ["lowered", "live"]


def test_what_is_remembered_of_a_subject_is_forgotten_when_filters_change() -> None:
    setup = Setup()
    one = setup.put("one", "a")
    assert setup.find("a") == [one]
    assert setup.index.targets == {b"$MQTT.msgs.a": [one]}
    other = setup.put("other", "*")
    assert setup.index.targets == {}
    assert set(setup.find("a")) == {one, other}
    setup.index.remove(one)
    assert setup.find("a") == [other]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "TOPICS_MOST", 2)
    setup = Setup()
    for subject in "abc":
        setup.find(subject)
    assert len(setup.index.targets) == 1


@pytest.mark.parametrize(
    ("subject", "seen"), [("a", True), ("$SYS.x", True), ("_INBOX.x", False), ("$MQTT_SYS.x", True)]
)
def test_inboxes_are_nobodys(subject: str, seen: bool) -> None:
    setup = Setup()
    setup.put("client", subject, ">")
    assert shown(subject) is seen
    assert bool(setup.find(subject)) is seen
