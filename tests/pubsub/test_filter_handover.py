# SPDX-License-Identifier: Apache-2.0
"""A member is served through another filter than before, and the two bring the same messages at different times."""

from __future__ import annotations

import pytest

from mqtt_nats.messages.message import Message
from mqtt_nats.pubsub import filter_handover as module
from mqtt_nats.pubsub.filter_handover import Parting
from mqtt_nats.pubsub.routing_table import Choice, Filter
from tests.pubsub.support import Bench, Subscriber
from tests.pubsub.test_fanout import headers

EXACT, WILD = "a/t", "+/t"
SUBJECT = b"a.t"


class Taker(Subscriber):
    """Writes down the payloads of what it gets, whatever the way."""

    def __init__(self, bench: Bench, name: str = "taker") -> None:
        super().__init__(bench, name)
        self.got: list[bytes] = []

    def send_or_queue(self, message: Message, qos: int) -> None:
        self.got.append(message.payload)

    def guard(self, choice: Choice, message: Message, known: bytes = b"") -> None:
        self.got.append(message.payload)


class Change:
    """One filter of a member is to take the place of another one; another client has subscribed both."""

    def __init__(self, first: str = WILD, heir: str = EXACT) -> None:
        self.bench = Bench()
        self.taker, self.other = Taker(self.bench), Taker(self.bench, "other")
        self.filters = {text: self.bench.subscribe(self.taker, text, 2) for text in (first, heir)}
        for text in (heir, first):
            self.bench.subscribe(self.other, text, 2)
        self.first, self.heir = self.filters.values()
        self.parting: Parting | None = None

    def bring(self, found: Filter, *names: str, qos: int = 2) -> None:
        """A filter's connection brings messages."""
        for link in (self.bench.main, self.bench.wild):
            for pattern, handler in list(link.subscribed.values()):
                if pattern in found.subjects:
                    for name in names:
                        handler(SUBJECT, b"", headers(qos, name.encode() if qos else b""), name.encode())

    def begin(self) -> Parting:
        self.parting = Parting(self.bench.table, self.taker, {self.first})
        return self.parting

    def end(self) -> None:
        assert self.parting is not None
        self.bench.table.unsubscribe(self.taker, self.first.text)
        self.parting.filters_ended()

    def got(self) -> str:
        return b"".join(self.taker.got).decode()


@pytest.fixture(params=[(WILD, EXACT), (EXACT, WILD), ("#", WILD)], ids=["wild ends", "exact ends", "both wild"])
def change(request: pytest.FixtureRequest) -> Change:
    return Change(*request.param)


@pytest.mark.parametrize(
    "course",
    [
        "Fa Ha n Fb Hb k Fc Hc e Hd x He",  # never apart
        "Fa n Ha k e Hb x Hc",  # the first is ahead before it begins
        "Ha n Fa k e Hb x Hc",
        "n Fa Ha k Fb e Hb x Hc",
        "n Fa k Ha e Hb x Hc",
        "n Ha k Fa e Hb x Hc",
        "n Ha k Hb Fa Fb e Hc x Hd",  # in the order in which they were published
        "n Fa Fb k Fc e Ha Hb Hc Hd x He",
        "n k Ha Hb Fa e Hc x Hd",
        "n k Ha Hb e Fc Hc x Hd",
    ],
)
def test_nothing_is_lost_or_doubled_whichever_is_ahead(change: Change, course: str) -> None:
    """F and H: the first and the heir bring a message; n, k, e, x: noting, keeping, ended, finished."""
    for word in course.split():
        match word:
            case "n":
                parting = change.begin()
            case "k":
                parting.keep_filter()
            case "e":
                change.end()
            case "x":
                parting.finish()
            case _:
                change.bring(change.first if word[0] == "F" else change.heir, word[1])
    assert change.got() == "abcde"[: len(change.got())]
    assert change.got()[-1] == course[-1]
    assert change.bench.table.partings == {}


def test_what_the_heir_has_brought_alone_comes_when_the_first_has_ended(change: Change) -> None:
    parting = change.begin()
    parting.keep_filter()
    change.bring(change.heir, "a", "b", "c")
    change.bring(change.first, "a")
    assert change.got() == "a"
    change.end()
    assert change.got() == "abc"
    change.bring(change.heir, "d")
    assert change.got() == "abcd"


def test_others_are_served_as_before(change: Change) -> None:
    parting = change.begin()
    change.bring(change.first, "a")
    change.bring(change.heir, "a")
    parting.keep_filter()
    change.bring(change.heir, "b")
    change.bring(change.first, "b")
    change.end()
    for found in change.filters.values():
        change.bring(found, "c")
    parting.finish()
    assert b"".join(change.other.got) == b"abc"


def test_messages_without_an_id_come_through_one_of_the_filters(change: Change) -> None:
    parting = change.begin()
    parting.keep_filter()
    for found in change.filters.values():
        change.bring(found, "a", qos=0)
        for link in (change.bench.main, change.bench.wild):
            for pattern, handler in list(link.subscribed.values()):
                if pattern in found.subjects:
                    handler(SUBJECT, b"", headers(1), b"b")
    assert sorted(change.got()) == ["a", "b"]
    change.end()
    change.bring(change.heir, "c", qos=0)
    assert sorted(change.got()) == ["a", "b", "c"]


def test_this_gateways_own_messages_are_known_by_their_ids() -> None:
    """They do not come through NATS where the filter has no wildcard at its beginning."""
    change = Change(WILD, EXACT)
    bench = change.bench
    parting = change.begin()
    parting.keep_filter()
    for name in "ab":
        route = bench.route("a/t")
        bench.fanout.local(route, Message(route.key, name.encode(), 1), name.encode())
    change.bring(change.first, "a", qos=1)
    assert change.got() == "a"
    change.end()
    assert change.got() == "ab"


@pytest.mark.parametrize("limit", ["NOTED_IDS_MOST", "MOST_KEPT"])
def test_what_is_kept_has_a_limit_beyond_which_it_comes_early(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(module, limit, 2)
    change = Change()
    parting = change.begin()
    parting.keep_filter()
    change.bring(change.heir, "a", "b", "c")
    assert change.got() == "abc"
    change.bring(change.first, "a" if limit == "MOST_KEPT" else "c")
    assert change.got() == "abc"


def test_topics_of_one_filter_are_served_as_before() -> None:
    change = Change()
    change.begin()
    change.bench.from_nats(b"b.t", headers(1, b"x"), b"x")  # matches the one that ends, and no other
    assert change.got() == "x"
    change.end()
    change.bench.from_nats(b"b.t", headers(1, b"y"), b"y")
    assert change.got() == "x"


def test_who_leaves_meanwhile_is_forgotten() -> None:
    change = Change()
    parting = change.begin()
    change.bench.table.leave(change.taker)
    assert change.bench.table.partings == {}
    version = change.bench.table.version
    parting.finish()
    assert change.bench.table.version == version
