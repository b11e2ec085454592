# SPDX-License-Identifier: Apache-2.0
"""What regular sessions missed while NATS was away: read from the stream, once, and before what is new."""

from __future__ import annotations

from typing import cast

import pytest

from mqtt_nats.backbone.connect import NatsLinks
from mqtt_nats.messages.ids import MessageIds
from mqtt_nats.pubsub import backfill
from mqtt_nats.pubsub.backfill import BEFORE, expect_gap, repair
from mqtt_nats.pubsub.data_path import Path
from mqtt_nats.pubsub.routing_table import PLAIN, Filter
from mqtt_streams.api import NoResponders
from mqtt_streams.messages import PREFIX
from mqtt_streams.subjects import filter_to_subjects
from tests.harness.doubles import stands_for
from tests.harness.jetstream import NS
from tests.pubsub.support import Bench, Subscriber
from tests.sessions.fakes import FakeLink, FakeServices, as_link

SINCE = 1000.0
"""Unix time in seconds at which the connection was lost."""


def headers(identity: str = "") -> bytes:
    """Headers of a message at QoS 1; ``identity``: 24 characters."""
    return b"NATS/1.0\r\nNmqtt-Pub:1\r\n%b\r\n" % (f"Nmqtt-Id:{identity}\r\n".encode() if identity else b"")


@stands_for(Path)
class FakeGapPath:
    """Stands for `Path`: the table and the fan-out of a gateway."""

    def __init__(self, bench: Bench) -> None:
        self.table, self.fanout = bench.table, bench.fanout
        self.ids = MessageIds(1)


class Gap:
    """A gateway that has lost the connection of its ordinary subscriptions, and the stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backfill, "RETRY", 0.0)
        services = FakeServices()
        self.js, self.lost, self.other = services.fake_inbox, services.fake_link, FakeLink()
        self.nats = services.nats
        self.bench = Bench()
        self.path = cast(Path, FakeGapPath(self.bench))
        self.member = Subscriber(self.bench, "member")
        self.nats.gaps[as_link(self.lost)] = SINCE

    def subscribe(
        self, text: str, qos: int = 1, *, link: FakeLink | None = None, member: Subscriber | None = None
    ) -> Filter:
        """Subscribe a filter on the lost connection, or on another one."""
        link = link or self.lost
        subjects = filter_to_subjects(text)
        handler = self.bench.fanout.arrival
        return self.bench.table.subscribe(member or self.member, text, qos, subjects, as_link(link), handler, PLAIN)

    def store(self, payload: bytes, at: float = SINCE + 1, topic: str = "a.b", identity: str = "") -> None:
        """Have the stream store a message at a Unix time in seconds."""
        self.js.now = int(at * NS) - NS
        self.js.put(PREFIX + topic, payload, headers(identity))

    def bring(self, payload: bytes, identity: str = "") -> None:
        """NATS brings a new message."""
        self.lost.fake_bring(b"a.b", payload, headers(identity))

    def expect(self) -> None:
        expect_gap(self.nats, self.path, as_link(self.lost))

    async def repair(self) -> None:
        await repair(self.nats, self.path, as_link(self.lost))

    @property
    def taken(self) -> bytes:
        """Payloads that the member got, one after the other."""
        return b"".join(payload for payload, _ in self.member.taken)


@pytest.fixture
def gap(monkeypatch: pytest.MonkeyPatch) -> Gap:
    return Gap(monkeypatch)


def test_new_messages_wait_where_some_may_have_been_missed(gap: Gap) -> None:
    """Those at QoS 0 are not stored, and durable sessions have consumers."""
    durable = Subscriber(gap.bench, "durable", durable=True)
    waits = gap.subscribe("a/b")
    others = [gap.subscribe("c", 0), gap.subscribe("d", member=durable), gap.subscribe("e", link=gap.other)]
    gap.expect()
    gap.bring(b"1")
    assert (gap.taken, waits.backlog is not None) == (b"", True)
    assert [one.backlog for one in others] == [None] * 3


async def test_nothing_waits_or_is_read_without_a_gap(gap: Gap) -> None:
    found = gap.subscribe("a/b")
    gap.nats.gaps.clear()
    gap.expect()
    await gap.repair()
    assert (found.backlog, gap.js.asked) == (None, [])


async def test_what_was_missed_comes_before_what_is_new(gap: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
    gap.subscribe("a/b")
    gap.store(b"0", SINCE - BEFORE - 1)
    for number in range(1, 4):
        gap.store(b"%d" % number, SINCE - BEFORE + number)
    gap.store(b"x", topic="another.topic")
    gap.expect()
    gap.bring(b"4")
    steady: list[bool] = []
    monkeypatch.setattr(gap.js, "before", lambda subject: steady.append(gap.nats.steady))
    await gap.repair()
    gap.bring(b"5")
    assert gap.taken == b"12345"
    assert (set(steady), gap.nats.steady) == ({False}, True)


@pytest.mark.parametrize("count", [255, 256, 257, 600])
async def test_pages_follow_each_other(gap: Gap, count: int) -> None:
    gap.subscribe("a/+")
    for number in range(count):
        gap.store(b"x", SINCE + number, topic=f"a.{number % 7}")
    gap.expect()
    await gap.repair()
    assert len(gap.taken) == count


async def test_what_had_come_before_the_gap_comes_once(gap: Gap) -> None:
    """The gap is taken to have begun earlier than the server was last heard."""
    gap.subscribe("a/b")
    first, second = "1" * 24, "2" * 24
    gap.bring(b"1", first)
    gap.store(b"1", SINCE - 1, identity=first)
    gap.store(b"2", SINCE + 1, identity=second)
    gap.expect()
    gap.bring(b"2", second)
    await gap.repair()
    assert gap.taken == b"12"


async def test_what_this_gateway_published_came_directly(gap: Gap) -> None:
    found = gap.subscribe("a/b")
    assert found.local
    ids = gap.path.ids
    gap.store(b"1", identity=f"{'0' * 16}{ids.own.decode()}")
    gap.store(b"2", identity="2" * 28)
    gap.expect()
    await gap.repair()
    assert gap.taken == b"2"


async def test_too_many_new_messages_are_read_from_the_stream(gap: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue takes no more memory than it may. They are stored too, some only after core NATS has brought them."""
    monkeypatch.setattr(backfill, "BACKLOG_BYTES", 1000)
    gap.subscribe("a/b")
    gap.store(b"0")
    gap.expect()
    requests = 0

    def publish(subject: str) -> None:
        nonlocal requests
        requests += 1
        for number in range(1, 10):
            if requests == 2:  # the answer is the end of the stream
                gap.bring(b"%d" % number, f"{number}" * 24)
            elif requests == 3:
                gap.store(b"%d" % number, identity=f"{number}" * 24)

    monkeypatch.setattr(gap.js, "before", publish)
    await gap.repair()
    assert gap.taken == b"0123456789"


async def test_jetstream_is_asked_again(gap: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
    gap.subscribe("a/b")
    gap.store(b"1")
    gap.expect()
    fail(gap, monkeypatch, 3)
    gap.bring(b"2")
    await gap.repair()
    assert gap.taken == b"12"


async def test_new_messages_do_not_wait_for_ever(
    gap: Gap, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backfill, "PATIENCE", 0.0)
    gap.subscribe("a/b")
    gap.store(b"1")
    gap.expect()
    fail(gap, monkeypatch, 1000)
    gap.bring(b"2")
    await gap.repair()
    assert gap.taken == b"2"
    assert "messages of 'a/b' may have been missed: no leader" in caplog.text
    assert gap.nats.gaps == {}


@pytest.mark.parametrize("later", [None, SINCE + 50])
async def test_a_connection_that_is_lost_again_begins_where_the_first_one_ended(
    gap: Gap, monkeypatch: pytest.MonkeyPatch, later: float | None
) -> None:
    found = gap.subscribe("a/b")
    gap.expect()
    fail(gap, monkeypatch, 1000)
    gap.lost.online = False
    link = as_link(gap.lost)

    def lost_again(subject: str) -> None:
        if later is not None:
            gap.nats.gaps[link] = later
        raise NoResponders("no leader")

    monkeypatch.setattr(gap.js, "before", lost_again)
    await gap.repair()
    assert gap.nats.gaps == {link: SINCE}
    assert found.backlog is not None


async def test_the_connection_for_requests_may_be_lost_too(gap: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its return is waited for, however long it takes."""
    monkeypatch.setattr(backfill, "PATIENCE", 0.0)
    requests, nats = FakeLink(), gap.nats
    gap.nats = NatsLinks(as_link(requests), nats.wild, nats.shared, nats.inbox, nats.store)
    gap.nats.gaps.update(nats.gaps)
    gap.subscribe("a/b")
    gap.store(b"1")
    gap.expect()
    requests.online = False
    asked = 0

    def lost(subject: str) -> None:
        nonlocal asked
        asked += 1
        requests.online = asked > 3
        if asked <= 3:
            raise NoResponders("the connection was lost")

    monkeypatch.setattr(gap.js, "before", lost)
    await gap.repair()
    assert gap.taken == b"1"


def fail(gap: Gap, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Have JetStream not answer so many requests."""
    left = iter(range(times))

    def silent(subject: str) -> None:
        if next(left, None) is not None:
            raise NoResponders("no leader")

    monkeypatch.setattr(gap.js, "before", silent)
