# SPDX-License-Identifier: Apache-2.0
"""What regular sessions missed while NATS was away: read from the stream, once, and before what is new."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from mqtt_nats.backbone.connect import NatsLinks
from mqtt_nats.backbone.store_barrier import StoreBarrier
from mqtt_nats.messages.ids import MessageIds
from mqtt_nats.pubsub import backfill
from mqtt_nats.pubsub.backfill import GAP_BEFORE_S, Gaps
from mqtt_nats.pubsub.beginnings import Beginning
from mqtt_nats.pubsub.data_path import Path
from mqtt_nats.pubsub.interest_propagation import Nodes
from mqtt_nats.pubsub.routing_table import PLAIN, Filter
from mqtt_streams.api import NoResponders, RequestTimeout
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


@stands_for(StoreBarrier)
class FakeStoreBarrier:
    """Stands for `StoreBarrier`: calls a function in place of waiting for stores."""

    def __init__(self) -> None:
        self.fake_before: Callable[[], None] = lambda: None

    async def settled(self) -> None:
        self.fake_before()


class Gap:
    """A gateway that has lost the connection of its ordinary subscriptions, and the stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backfill, "BACKFILL_RETRY_S", 0.0)
        services = FakeServices()
        self.js, self.lost, self.other = services.fake_inbox, services.fake_link, FakeLink()
        self.services, self.nats = services, services.nats
        self.nodes, self.store_barrier = services.nodes, FakeStoreBarrier()
        self.bench = Bench()
        self.path = cast(Path, FakeGapPath(self.bench))
        self.member = Subscriber(self.bench, "member")
        self.nats.gaps[as_link(self.lost)] = SINCE
        self.begin(self.nats)

    def begin(self, nats: NatsLinks) -> None:
        """Have gaps of these connections repaired."""
        self.nats = nats
        nodes, store_barrier = cast(Nodes, self.nodes), cast(StoreBarrier, self.store_barrier)
        self.gaps = Gaps(nats, self.path, nodes, self.services.head, store_barrier)

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
        self.gaps.expect(as_link(self.lost))

    async def repair(self) -> None:
        await self.gaps.repair(as_link(self.lost))

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
    gap.store(b"0", SINCE - GAP_BEFORE_S - 1)
    for number in range(1, 4):
        gap.store(b"%d" % number, SINCE - GAP_BEFORE_S + number)
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
    """The queue takes no more memory than it may. They are stored when the stores under way have ended."""
    monkeypatch.setattr(backfill, "BACKLOG_BYTES", 1000)
    gap.subscribe("a/b")
    gap.store(b"0")
    gap.expect()
    rounds = 0

    def bring(subject: str) -> None:
        if rounds == 1 and "DIRECT.GET" in subject and not gap.taken:
            for number in range(1, 10):
                gap.bring(b"%d" % number, f"{number}" * 24)

    def settle() -> None:
        nonlocal rounds
        rounds += 1
        for number in range(1, 10) if rounds == 2 else ():
            gap.store(b"%d" % number, identity=f"{number}" * 24)

    monkeypatch.setattr(gap.js, "before", bring)
    gap.store_barrier.fake_before = settle
    await gap.repair()
    assert (gap.taken, rounds) == (b"0123456789", 2)


async def test_a_member_that_joined_before_its_messages_had_no_room_gets_them(
    gap: Gap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence that was read for its subscription is behind them; they had come, and were dropped."""
    monkeypatch.setattr(backfill, "BACKLOG_BYTES", 300)
    found = gap.subscribe("a/b")
    gap.expect()
    later = Subscriber(gap.bench, "later")
    gap.subscribe("a/b", member=later)
    begun(gap, found, later, 3, SINCE, exact=True)
    for number in range(1, 4):
        gap.bring(b"%d" % number, f"{number}" * 24)
        gap.store(b"%d" % number, SINCE + number, identity=f"{number}" * 24)
    await gap.repair()
    assert gap.taken == b"123"
    assert [payload for payload, _ in later.taken] == [b"1", b"2", b"3"]


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
    """What was missed comes late then, and not never: the gap stays open until JetStream answers."""
    monkeypatch.setattr(backfill, "BACKFILL_TIMEOUT", 0.0)
    gap.subscribe("a/b")
    gap.store(b"1")
    gap.expect()
    fail(gap, monkeypatch, 1000)
    gap.bring(b"2")
    await gap.repair()
    assert gap.taken == b"21"
    assert caplog.text.count("messages of 1 filters may have been missed, and come late: no leader") == 1
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
    monkeypatch.setattr(backfill, "BACKFILL_TIMEOUT", 0.0)
    requests, nats = FakeLink(), gap.nats
    gap.begin(NatsLinks(as_link(requests), as_link(gap.lost), nats.shared, nats.inbox, nats.store))
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


def begun(gap: Gap, found: Filter, member: Subscriber, last: int | None, at: float, *, exact: bool) -> None:
    """Have a member's subscription begin behind a sequence, at a Unix time in seconds."""
    gaps = gap.nats.lost_count
    beginning = Beginning()
    beginning.confirm(gaps)
    beginning.at = at  # the clock of nats-server then
    if last is not None:
        beginning.read(last, gaps if exact else gaps + 1)
    found.begin(member, beginning)


async def test_nothing_comes_from_before_a_subscription(gap: Gap) -> None:
    """The sequence tells, whatever the clocks say. Others in the same filter get all that they have missed."""
    found = gap.subscribe("a/b")
    later = Subscriber(gap.bench, "later")
    gap.subscribe("a/b", member=later)
    for number in range(1, 5):
        gap.store(b"%d" % number, SINCE - 5 + number)
    begun(gap, found, later, 2, SINCE - 100, exact=True)
    gap.expect()
    await gap.repair()
    assert gap.taken == b"1234"
    assert [payload for payload, _ in later.taken] == [b"3", b"4"]


async def test_a_subscription_may_begin_before_the_first_message(gap: Gap) -> None:
    found = gap.subscribe("a/b")
    begun(gap, found, gap.member, 0, SINCE, exact=True)
    gap.store(b"1", SINCE + 1)
    gap.expect()
    await gap.repair()
    assert gap.taken == b"1"


@pytest.mark.parametrize(("last", "wanted"), [(None, b"34"), (2, b"34"), (3, b"34"), (1, b"234"), (0, b"1234")])
async def test_where_the_sequence_was_not_read_in_time_the_clock_tells(
    gap: Gap, last: int | None, wanted: bytes
) -> None:
    """It was read in or after a gap: messages up to it may have been missed. Behind it everything is for the member."""
    found = gap.subscribe("a/b")
    for number in range(1, 5):
        gap.store(b"%d" % number, SINCE - 5 + number)
    begun(gap, found, gap.member, last, SINCE - 2.5, exact=False)
    gap.expect()
    await gap.repair()
    assert gap.taken == wanted


async def test_many_members_that_joined_at_different_times_get_what_is_theirs(gap: Gap) -> None:
    """Some beginnings are exact, others are times; members join and messages come in no order of these."""
    found = gap.subscribe("a/b")
    members = [Subscriber(gap.bench, f"{number}") for number in range(12)]
    for number, member in enumerate(members):
        gap.subscribe("a/b", member=member)
        if number % 3:
            begun(gap, found, member, number, SINCE, exact=True)
        else:
            begun(gap, found, member, None, SINCE - 5 + number / 2 + 0.25, exact=False)
    for number in range(1, 13):
        gap.store(b"%x" % number, SINCE - 5 + number / 2)
    gap.expect()
    await gap.repair()
    for number, member in enumerate(members):
        assert [int(payload, 16) for payload, _ in member.taken] == list(range(number + 1, 13))
    assert gap.taken == b"123456789abc"


async def test_a_member_that_has_left_has_no_beginning(gap: Gap) -> None:
    found = gap.subscribe("a/b")
    begun(gap, found, gap.member, 1, SINCE, exact=True)
    gap.bench.table.unsubscribe(gap.member, "a/b")
    assert found.beginnings == {}


async def test_what_is_older_than_all_subscriptions_is_not_delivered_later_either(gap: Gap) -> None:
    found = gap.subscribe("a/b")
    gap.store(b"1", SINCE - 1, identity="1" * 24)
    begun(gap, found, gap.member, 1, SINCE, exact=True)
    gap.expect()
    await gap.repair()
    found.forget_beginnings(SINCE + 1000)
    gap.nats.gaps[as_link(gap.lost)] = SINCE
    gap.expect()
    await gap.repair()
    assert gap.taken == b""


async def test_the_subscriptions_are_in_force_and_stores_have_ended_before_the_leader_is_asked(gap: Gap) -> None:
    """What a gateway was storing then is missed by nobody: its live copy is gone."""
    gap.subscribe("a/b")
    gap.expect()
    order: list[str] = []

    def settle() -> None:
        order.append(f"settled, fences: {gap.nodes.fake_fences}, requests: {len(gap.js.asked)}")
        gap.store(b"1")

    gap.store_barrier.fake_before = settle
    await gap.repair()
    assert (order, gap.taken) == (["settled, fences: 1, requests: 0"], b"1")


async def test_stores_that_do_not_end_are_waited_for(gap: Gap) -> None:
    gap.subscribe("a/b")
    gap.expect()
    rounds = iter(range(5))

    def settle() -> None:
        if next(rounds) < 3:
            raise RequestTimeout("1 other gateways are storing messages")
        gap.store(b"1")

    gap.store_barrier.fake_before = settle
    gap.bring(b"2")
    await gap.repair()
    assert gap.taken == b"12"


async def test_a_replica_that_is_behind_does_not_close_the_gap(gap: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct gets are answered by any replica; the leader has the last word."""
    gap.js.replicas = 3
    gap.subscribe("a/b")
    for number in range(1, 7):
        gap.store(b"%d" % number, SINCE + number)
    gap.expect()
    hidden = gap.js.messages["$MQTT_msgs"]
    behind = iter([2, 4])

    def before(subject: str) -> None:
        gap.js.messages["$MQTT_msgs"] = hidden[: next(behind, 6)] if "DIRECT.GET" in subject else hidden

    monkeypatch.setattr(gap.js, "before", before)
    await gap.repair()
    assert gap.taken == b"123456"


async def test_messages_behind_the_leaders_word_come_by_themselves(gap: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their live copies have left when the subscriptions were in force."""
    gap.subscribe("a/b")
    gap.store(b"1")
    gap.expect()

    def publish(subject: str) -> None:
        if "DIRECT.GET" in subject and len(gap.js.messages["$MQTT_msgs"]) == 1:
            gap.store(b"2", identity="2" * 24)

    monkeypatch.setattr(gap.js, "before", publish)
    await gap.repair()
    assert gap.taken == b"1"
    gap.bring(b"2", "2" * 24)
    assert gap.taken == b"12"


async def test_what_waits_is_not_for_members_that_join_later(gap: Gap) -> None:
    """It has come before they subscribed."""
    found = gap.subscribe("a/b")
    gap.expect()
    gap.bring(b"1", "1" * 24)
    gap.bring(b"2", "2" * 24)
    later, left = Subscriber(gap.bench, "later"), Subscriber(gap.bench, "left")
    for member in (later, left):
        gap.subscribe("a/b", member=member)
        begun(gap, found, member, 0, SINCE, exact=True)
    gap.bring(b"3", "3" * 24)
    gap.bench.table.unsubscribe(left, "a/b")
    await gap.repair()
    assert gap.taken == b"123"
    assert ([payload for payload, _ in later.taken], left.taken) == ([b"3"], [])


async def test_one_gap_is_repaired_at_a_time(gap: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is lost during the repair begins where the first gap began."""
    gap.subscribe("a/b")
    gap.store(b"1", SINCE + 1, identity="1" * 24)
    gap.expect()
    lost = False

    def lose(subject: str) -> None:
        nonlocal lost
        if not lost and "DIRECT.GET" in subject:
            lost = True
            gap.lost.wire = object()
            gap.nats.gaps[as_link(gap.lost)] = SINCE + 100
            gap.expect()

    monkeypatch.setattr(gap.js, "before", lose)
    await asyncio.gather(gap.repair(), gap.repair())
    assert (gap.taken, gap.nats.gaps) == (b"1", {})
    found = gap.bench.table.filters["a/b"]
    assert found.backlog is None


async def test_a_live_copy_that_is_sent_again_comes_once(gap: Gap) -> None:
    gap.subscribe("a/b")
    gap.nats.gaps.clear()
    again = b"$MQTT.again.a.b"
    gap.bring(b"1", "1" * 24)
    for number in (1, 2):
        for sid, subject in list(gap.lost.fake_subjects.items()):
            if subject == b"$MQTT.again.>":
                gap.lost.handlers[sid](again, b"", headers(f"{number}" * 24), b"%d" % number)
                gap.lost.handlers[sid](again, b"", b"NATS/1.0\r\n\r\n", b"mark")
    gap.bring(b"2", "2" * 24)
    assert gap.taken == b"12"


async def test_a_live_copy_that_is_sent_again_waits_as_others_do(gap: Gap) -> None:
    found = gap.subscribe("a/b")
    gap.store(b"1")
    gap.expect()
    gap.gaps.path.fanout.again(as_link(gap.lost), b"a.b", headers("2" * 24), b"2")
    gap.gaps.path.fanout.again(as_link(gap.other), b"a.b", headers("3" * 24), b"3")  # for another connection
    assert (gap.taken, found.backlog is not None) == (b"", True)
    await gap.repair()
    assert gap.taken == b"12"


def fail(gap: Gap, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Have JetStream not answer so many requests."""
    left = iter(range(times))

    def silent(subject: str) -> None:
        if next(left, None) is not None:
            raise NoResponders("no leader")

    monkeypatch.setattr(gap.js, "before", silent)


async def test_messages_for_some_sessions_are_left_out(gap: Gap) -> None:
    """They are for durable sessions, which read them by consumers of their own."""
    gap.subscribe("a/b")
    gap.expect()
    gap.js.now = int(SINCE * NS)
    gap.js.put(PREFIX + "a.b", b"1", b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-For:lamp\r\n\r\n")
    gap.store(b"2")
    await gap.repair()
    assert gap.taken == b"2"
