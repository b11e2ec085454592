# SPDX-License-Identifier: Apache-2.0
"""Sessions of the shared reader: what they are given, how they go on, and their dormant consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.delivery.states import DeliveryEvent, DeliveryState
from mqtt_nats.protocol.ack_tokens import TAKEN
from mqtt_nats.protocol.durable_sender import packet_id
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.position import SessionPosition
from mqtt_nats.sessions.record import claimed
from mqtt_nats.shared_reader import new_subscriptions
from mqtt_nats.shared_reader import sessions as live_sessions
from mqtt_nats.shared_reader.reader_session import ReaderHandover, ReaderSession
from mqtt_nats.shared_reader.sessions import DORMANT_RENEWAL_S, QUEUE_MOST, SharedReaderSessions
from mqtt_streams.api import ApiError, NoResponders
from mqtt_streams.sessions import Conflict
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeClient, as_services, as_side
from tests.shared_reader.fakes import FakeReaderServices, FakeReaderSettings, FakeReaderSide, member_of

pytestmark = pytest.mark.sources


@stands_for(PositionWriter)
class FakeKeeper:
    """Stands for `PositionWriter`: a position in memory, whose writes are stored, or refused."""

    def __init__(self, reached: int = 0) -> None:
        self.ledger = SessionPosition()
        self.ledger.reach(reached)
        self.present: set[str] = set()
        self.perhaps = 7
        self.fake_stores = True
        self.fake_hurried = 0
        self.fake_left = False

    async def flush(self) -> bool:
        return self.fake_stores

    def end_if_moved(self) -> None:
        self.fake_left = True

    def hurry(self) -> None:
        self.fake_hurried += 1

    def confirm_sent(self) -> None:
        self.perhaps = 0

    def expect_consumers(self, names: Iterable[str]) -> None:
        self.present.update(names)


class Setup:
    """Sessions of a gateway whose shared reader is at sequence 10."""

    def __init__(self, *, positions: str = "consumers", backlog: int | None = None) -> None:
        self.services = FakeReaderServices(positions)
        cast("FakeReaderSettings", self.services.settings).max_backlog = backlog
        self.live = SharedReaderSessions(as_services(self.services), self.services.registry)
        self.live.reader.position = 10

    def session(self, *subjects: str, served: bool = True) -> tuple[ReaderSession, FakeReaderSide]:
        """A session of which readers bring messages."""
        member = member_of(self.services, f"client{len(self.live.members)}", *subjects)
        client, side = cast("FakeClient", member.client), cast("FakeReaderSide", member.side)
        client.options = 0  # type: ignore[attr-defined]
        client.connection = None  # type: ignore[attr-defined]
        side.position_writer = cast("PositionWriter", FakeKeeper(10))
        for name, binding in side.bindings.items():
            side.overlap.add(name, binding, binding.source)
        self.live.members[member.client] = member
        if served:
            self.live.interest.put(member)
        return member, side

    def message(self, sequence: int, subject: str = "a", qos: int = 1, sender: str = "x") -> Any:
        headers = f"NATS/1.0\r\nNmqtt-Pub:{qos}\r\nNmqtt-Client:{sender}\r\n\r\n".encode()
        payload = b"%d" % sequence
        return self.services.path.recent.message(sequence, b"1", f"$MQTT.msgs.{subject}".encode(), headers, payload)

    def bring(self, sequence: int, subject: str = "a", qos: int = 1, sender: str = "x") -> None:
        """A message of the shared reader."""
        headers = f"NATS/1.0\r\nNmqtt-Pub:{qos}\r\nNmqtt-Client:{sender}\r\n\r\n".encode()
        self.live._dispatch(sequence, b"1", f"$MQTT.msgs.{subject}".encode(), headers, b"%d" % sequence)


def keeper(side: FakeReaderSide) -> FakeKeeper:
    """The position of a session."""
    return cast("FakeKeeper", side.position_writer)


def sent(side: FakeReaderSide) -> list[tuple[object, ...]]:
    """The messages that the machine has sent: sequence and QoS."""
    return [call[1:3] for call in side.fake_ports.calls if call[0] == "publish"]


@pytest.fixture
async def setup() -> Setup:
    return Setup()


# -- messages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("qos", "granted", "expected"), [(1, 1, 1), (2, 1, 1), (2, 2, 2), (1, 2, 1)])
async def test_a_message_is_given_at_the_lower_qos(setup: Setup, qos: int, granted: int, expected: int) -> None:
    """The first one by way of the machine; the next one needs no more checks, and is the same packet for all."""
    _, side = setup.session("a")
    (binding,) = side.bindings.values()
    binding.source.qos = granted
    setup.bring(11, qos=qos)
    assert keeper(side).ledger.pending == {11: expected}
    setup.bring(12, qos=qos)
    assert keeper(side).ledger.pending == {11: expected, 12: expected}
    assert [*sent(side), *((int(payload), at) for payload, at in side.fake_shared)] == [(11, expected), (12, expected)]
    assert side.machine.inflight[packet_id(12)].reply == TAKEN + b"12"
    setup.bring(13, qos=0)
    setup.bring(14, "other")
    assert (list(keeper(side).ledger.pending), setup.live.reader.used) == ([11, 12], 3)


async def test_a_session_that_no_reader_serves_is_given_nothing(setup: Setup) -> None:
    """Its client does not read, or it has no position (yet)."""
    for stalled in (True, False):
        member, side = setup.session("a")
        if stalled:
            side.change(DeliveryEvent.STOPS_READING)
        else:
            side.position_writer = None
        setup.live.give(member, 11, setup.message(11), TAKEN + b"11")
        assert (sent(side), side.fake_shared) == ([], [])


async def test_messages_up_to_a_subscriptions_start_were_brought(setup: Setup) -> None:
    """Those that may have been sent by a dead gateway come all the same."""
    member, side = setup.session("a")
    (binding,) = side.bindings.values()
    binding.pass_over(12, 14)
    for sequence in (11, 12, 13, 14, 15):
        setup.live.put_through(member, sequence, setup.message(sequence), TAKEN + b"%d" % sequence)
    assert list(keeper(side).ledger.pending) == [11, 12, 15]


async def test_what_core_nats_has_brought_is_not_given_again(setup: Setup) -> None:
    """The next gateway does not know that: the position is written at once."""
    _, side = setup.session("a")
    (binding,) = side.bindings.values()
    binding.came = lambda message, sequence: sequence == 12
    for sequence in (11, 12, 13):
        setup.bring(sequence)
    assert (list(keeper(side).ledger.pending), keeper(side).fake_hurried) == ([11, 13], 1)
    for sequence in (11, 13):
        keeper(side).ledger.done(sequence)
    keeper(side).ledger.begin()
    keeper(side).ledger.stored()
    binding.came = lambda message, sequence: True
    before = keeper(side).ledger.dirty
    setup.bring(14)
    assert (before, keeper(side).ledger.dirty) == (False, True)


@pytest.mark.parametrize("gates", [True, False])
async def test_copies_of_core_nats_wait_for_what_readers_bring(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, gates: bool
) -> None:
    """Of a lowered subscription; else nobody looks for them."""
    member, side = setup.session("a")
    noted: list[int] = []
    monkeypatch.setattr(live_sessions, "note_read", lambda side, message, sequence: noted.append(sequence))
    cast("FakeClient", member.client).gates = {cast("Any", "filter"): cast("Any", "gate")} if gates else None
    setup.live.put_through(member, 11, setup.message(11), TAKEN + b"11")
    assert noted == ([11] if gates else [])
    assert side.machine.reached == 11


async def test_of_overlapping_subscriptions_one_gives_a_message(setup: Setup) -> None:
    """At the highest QoS of all that match; for a new subscription only those are taken that are its own."""
    member, side = setup.session("a", "*")
    side.bindings["*"].source.qos = 2
    setup.bring(11, qos=2)
    assert sent(side) == [(11, 2)]
    owner, _ = side.overlap.owner("a", 12)
    other = next(one for one in side.bindings.values() if one is not owner)
    assert owner is not None
    setup.live.put_through(member, 12, setup.message(12), TAKEN + b"12", {other.source})
    setup.live.put_through(member, 13, setup.message(13), TAKEN + b"13", {owner.source})
    assert [sequence for sequence, _ in sent(side)] == [11, 13]


@pytest.mark.parametrize("way", ["sent_at_once", "arrived"])
async def test_a_session_that_fails_keeps_no_message_from_others(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The message stays pending for the next connection of the client."""
    failing, failed = setup.session("a")
    _, other = setup.session("a")

    def fail(*_: object, **__: object) -> None:
        raise ValueError("on purpose")

    cast("FakeClient", failing.client).checks_each = way == "arrived"
    monkeypatch.setattr(failed.machine, way, fail)
    setup.bring(11)
    assert keeper(failed).ledger.pending == {11: 1}
    assert "on purpose" in str(cast("FakeClient", failing.client).fake_ended)
    assert other.fake_shared == [(b"11", 1)]


@pytest.mark.parametrize("why", ["served", "stalled", "no position"])
async def test_a_message_that_failed_is_pending_where_readers_serve_the_session(setup: Setup, why: str) -> None:
    """Elsewhere it comes again anyway."""
    member, side = setup.session("a")
    position = keeper(side)
    if why == "stalled":
        side.change(DeliveryEvent.STOPS_READING)
    elif why == "no position":
        side.position_writer = None
    setup.live.failed(member, 11, 2, ValueError("on purpose"))
    assert position.ledger.pending == ({11: 2} if why == "served" else {})
    assert len(cast("FakeClient", member.client).fake_ended) == 1


async def test_messages_during_a_handover_are_kept_back(setup: Setup) -> None:
    member, side = setup.session("a")
    member.begin_handover(handover := ReaderHandover(11))
    for sequence in (11, 12):
        setup.bring(sequence)
    assert ([sequence for sequence, _ in handover.kept], sent(side)) == ([12], [])


# -- how far a session is -----------------------------------------------------------------------------


async def test_how_far_a_session_is(setup: Setup) -> None:
    """Where its catch-up reader is; else where the shared reader is, or further after catching up."""
    member, side = setup.session("a")
    assert setup.live.reached(as_side(side)) == 10
    keeper(side).ledger.reach(15)
    assert setup.live.reached(as_side(side)) == 15
    side.position_writer = None
    assert setup.live.reached(as_side(side)) == 10
    setup.live.catch_up(member, 4)
    assert (setup.live.reached(as_side(side)), side.state) == (4, DeliveryState.CATCHING_UP)
    setup.live.end_catching(as_side(side))
    assert (setup.live.reached(as_side(side)), side.state) == (10, DeliveryState.LIVE)


async def test_a_session_that_no_reader_serves_is_at_its_position(setup: Setup) -> None:
    """Its client does not read: what the shared reader has passed meanwhile was not given to the session."""
    _, side = setup.session("a")
    setup.live.reader.position = 20
    side.change(DeliveryEvent.STOPS_READING)
    assert setup.live.reached(as_side(side)) == 10
    side.position_writer = None
    assert setup.live.reached(as_side(side)) == 0


@pytest.mark.parametrize(("backlog", "most"), [(None, QUEUE_MOST), (3, 3), (10 * QUEUE_MOST, QUEUE_MOST)])
def test_how_many_messages_wait_for_a_session(backlog: int | None, most: int) -> None:
    async def made() -> int:
        return Setup(backlog=backlog).live.queue_most

    assert asyncio.run(made()) == most


async def test_a_session_for_which_too_many_messages_wait_falls_behind() -> None:
    """It takes no more from the shared reader; a catch-up reader goes on where it is."""
    setup = Setup(backlog=2)
    member, side = setup.session("a")
    side.machine.limit = 0
    for sequence in (11, 12):
        setup.live.reader.position = sequence
        setup.bring(sequence)
    assert side.state is DeliveryState.LIVE
    setup.live.reader.position = 13
    setup.bring(13)
    assert (side.state, member.filters) == (DeliveryState.CATCHING_UP, [])
    assert setup.live.catching[as_side(side)].position == 13
    setup.live.fall_behind(member)  # it is behind already
    assert len(setup.services.tasks.fake_spawned) == 1
    setup.live.forget(member.client)
    assert (setup.live.members, setup.live.catching, side.state) == ({}, {}, DeliveryState.LIVE)
    await setup.services.tasks.fake_settle()


async def test_a_session_that_has_caught_up(setup: Setup) -> None:
    """What the shared reader has kept back is given; all that an earlier owner may have sent has come."""
    member, side = setup.session("a")
    setup.live.catch_up(member, 4)
    member.begin_handover(handover := ReaderHandover())
    for sequence in (11, 12, 13):
        setup.bring(sequence)
    setup.live.caught_up(member, handover, 11)
    assert (side.state, member.handover, setup.live.catching) == (DeliveryState.LIVE, None, {})
    assert [sequence for sequence, _ in sent(side)] == [12, 13]
    (binding,) = side.bindings.values()
    assert (binding.since, keeper(side).ledger.reached, keeper(side).perhaps) == (11, 11, 0)
    assert binding.source.last == 13
    setup.bring(14)
    assert list(keeper(side).ledger.pending) == [12, 13, 14]


async def test_a_session_that_has_caught_up_knows_how_far_it_is(setup: Setup) -> None:
    member, side = setup.session("a")
    setup.live.catch_up(member, 4)
    setup.live.caught_up(member, ReaderHandover(), 11)
    assert [one.source.last for one in side.bindings.values()] == [11]


async def test_a_session_that_is_behind_again_when_it_has_caught_up() -> None:
    setup = Setup(backlog=1)
    member, side = setup.session("a")
    side.machine.limit = 0
    setup.live.catch_up(member, 4)
    member.begin_handover(handover := ReaderHandover())
    for sequence in (11, 12):
        setup.bring(sequence)
    setup.live.reader.position = 12
    setup.live.caught_up(member, handover, 10)
    assert (side.state, setup.live.catching[as_side(side)].position) == (DeliveryState.CATCHING_UP, 12)
    setup.live.forget(member.client)
    await setup.services.tasks.fake_settle()


# -- filters and connections --------------------------------------------------------------------------


async def test_filters_of_a_session_whose_subscriptions_have_ended(setup: Setup) -> None:
    member, side = setup.session("a", "b")
    del side.bindings["b"]
    setup.live.refresh(member.client)
    assert member.filters == ["a"]
    reader = setup.live.catch_up(member, 4, missed=False)
    setup.live.remove(member.client)
    setup.live.refresh(member.client)
    assert (member.filters, reader.waits) == ([], True), "it reads with the present filters"
    stranger, _ = setup.session("a", served=False)
    setup.live.refresh(stranger.client)
    assert stranger.filters == [], "no reader has its filters"


async def test_messages_are_kept_back_while_it_is_not_known_whose_a_session_is(setup: Setup) -> None:
    """NATS was lost; messages that come again come in order, from a reader that is created again."""
    (_, side), (_, stalled) = setup.session("a"), setup.session("a")
    behind_member, behind = setup.session("a")
    stalled.change(DeliveryEvent.STOPS_READING)
    reader = setup.live.catch_up(behind_member, 4, missed=False)
    setup.live.reader._broken = False
    setup.services.nats.reconnect.renew(Phase.REQUESTS)
    held = [one.bindings["a"].source.held for one in (side, stalled, behind)]
    assert held == [SubscriptionState.RETURNING, 0, SubscriptionState.RETURNING]
    assert (reader.waits, setup.live.reader._broken) == (True, True)


async def test_the_reader_begins_anew_in_a_stream_that_was_replaced(setup: Setup) -> None:
    """Old sequences mean nothing there."""
    (replaced,) = setup.services.stream.fake_replaced
    replaced()
    assert setup.live.reader._anew


async def test_a_session_whose_connection_has_ended_is_forgotten(setup: Setup) -> None:
    member, _ = setup.session("a")
    setup.live.renewals.put(member.client, 1.0)
    setup.live.forget(member.client)
    assert (setup.live.members, list(setup.live.renewals.due(2.0)), setup.live.reader.wanted) == ({}, [], {})
    setup.live.forget(member.client)


@pytest.mark.parametrize(("name", "suspected"), [("", True), ("reader", True), ("other", False)])
async def test_a_new_leader_may_have_lost_the_reader(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, name: str, suspected: bool
) -> None:
    found: list[str] = []
    monkeypatch.setattr(setup.live.reader, "suspect", lambda: found.append(name))
    setup.live.reader.name = "reader"
    setup.live.elected(name)
    assert bool(found) is suspected


# -- how a session goes on ----------------------------------------------------------------------------


class Consumers:
    """What is done with the dormant consumers of sessions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.creates = True
        self.refusal: Exception | None = None
        monkeypatch.setattr(new_subscriptions, "limit_in_flight", lambda _: None)
        for name in ("check_dormant", "remove_dormant", "attach_pubrels", "write_changed_record"):
            monkeypatch.setattr(live_sessions, name, self._note(name))
        monkeypatch.setattr(live_sessions, "store_position_name", self._note("store_position_name"))
        monkeypatch.setattr(live_sessions, "create_dormant", self._create)

    def _note(self, name: str) -> Callable[..., Any]:
        async def noted(*_: object) -> None:
            if self.refusal is not None:
                raise self.refusal
            self.done.append(name)

        return noted

    async def _create(self, *_: object) -> bool:
        self.done.append("create_dormant")
        return self.creates


def record_of(member: ReaderSession, *, consumerless: bool, qos: int = 1) -> Any:
    """The record of a session with one subscription."""
    record, v5 = claimed(member.client.record)
    v5.name_position("p")
    (binding,) = member.side.bindings.values()
    record.cons, record.subs = {"a": binding.consumer}, {"a": qos}
    if consumerless:
        v5.move_to_records()
    else:
        binding.lie_dormant()
    return v5


@pytest.fixture
def consumers(monkeypatch: pytest.MonkeyPatch) -> Consumers:
    return Consumers(monkeypatch)


@pytest.mark.parametrize("lost", [False, True])
async def test_new_messages_wait_when_nats_was_lost_during_a_resume(consumers: Consumers, lost: bool) -> None:
    """The session may have moved meanwhile: the check after the reconnect lets its messages go."""
    setup = Setup()
    member, side = setup.session("a", served=False)
    record_of(member, consumerless=False)
    # A former reader was ended, as its client did not read, while it waited for the shared reader's filters.
    member.begin_handover(ReaderHandover(5))
    (binding,) = side.bindings.values()
    binding.begin_after(10, removed=True)
    if lost:
        setup.services.registry.unchecked.add(member.client)
    setup.live.go_on(member.client, as_side(side))
    assert side.state is DeliveryState.CATCHING_UP
    assert not setup.live.catching[as_side(side)].reads, "it is asked first whether anything was missed"
    assert member.handover is None, "the former reader would end the handover of the new one"
    assert bool(binding.source.held) is lost
    setup.live.forget(member.client)
    await setup.services.tasks.fake_settle()
    await cast("FakeClient", member.client).fake_work()


@pytest.mark.parametrize("why", ["no subscriptions", "no position"])
async def test_a_session_that_needs_no_reader(consumers: Consumers, why: str) -> None:
    setup = Setup()
    member, side = setup.session("a", served=False)
    if why == "no subscriptions":
        side.bindings.clear()
    else:
        side.position_writer = None
    setup.live.go_on(member.client, as_side(side))
    assert (side.state, setup.live.catching) == (DeliveryState.LIVE, {})
    assert cast("FakeClient", member.client).fake_jobs == []


@pytest.mark.parametrize(
    ("consumerless", "wanted", "left", "counted", "done"),
    [
        (False, "consumers", False, 0, ["check_dormant", "write_changed_record"]),
        (False, "records", False, -1, ["store_position_name", "remove_dormant"]),
        (True, "consumers", False, 1, ["create_dormant", "write_changed_record"]),
        (True, "records", False, 0, []),
        (True, "records", True, 0, ["remove_dormant"]),
    ],
    ids=["has them", "loses them", "gets them", "has none", "some may be left"],
)
async def test_consumers_of_a_session_that_goes_on(
    consumers: Consumers, consumerless: bool, wanted: str, left: bool, counted: int, done: list[str]
) -> None:
    """Those that it gets are counted with the decision: many sessions may decide at a time."""
    setup = Setup(positions=wanted)
    member, side = setup.session("a", served=False)
    client = cast("FakeClient", member.client)
    v5 = record_of(member, consumerless=consumerless)
    if left:
        keeper(side).present.add("hash_n")
    setup.live.go_on(member.client, as_side(side))
    assert (client.fake_jobs, setup.services.stream.consumers) == ([], 0), "a client that reads again goes on, too"
    setup.live.settle_consumers(member.client, as_side(side))
    if counted > 0:
        assert setup.services.stream.consumers == counted
    assert len(client.fake_jobs) == bool(done)
    renewed = list(setup.live.renewals.due(setup.services.clock.now + DORMANT_RENEWAL_S + 1))
    assert renewed == [member.client] * bool(done)
    await client.fake_work()
    assert (consumers.done, setup.services.stream.consumers) == (done, counted)
    assert v5.consumerless is (wanted == "records" or consumerless), "`create_dormant` changes it"
    if wanted == "records" and done:
        assert keeper(side).present >= {"hash_n"}
    setup.live.forget(member.client)
    await setup.services.tasks.fake_settle()


@pytest.mark.parametrize("why", ["no subscriptions", "no position"])
async def test_a_session_that_needs_no_consumers(consumers: Consumers, why: str) -> None:
    setup = Setup()
    member, side = setup.session("a", served=False)
    record_of(member, consumerless=False)
    if why == "no subscriptions":
        side.bindings.clear()
    else:
        side.position_writer = None
    setup.live.settle_consumers(member.client, as_side(side))
    assert cast("FakeClient", member.client).fake_jobs == []
    assert list(setup.live.renewals.due(setup.services.clock.now + DORMANT_RENEWAL_S + 1)) == []


@pytest.mark.parametrize("consumerless", [True, False])
async def test_consumers_of_a_first_connection_are_renewed(monkeypatch: pytest.MonkeyPatch, consumerless: bool) -> None:
    """It may last for longer than the consumers live unused; no resume has noted the session."""

    async def subscribe(*_: object) -> list[object]:
        return []

    monkeypatch.setattr(live_sessions, "subscribe", subscribe)
    setup = Setup()
    member, _ = setup.session("a", served=False)
    record_of(member, consumerless=consumerless)
    await setup.live.subscribe(member.client, 8, list)
    due = setup.services.clock.now + DORMANT_RENEWAL_S
    assert list(setup.live.renewals.due(due - 1)) == []
    assert list(setup.live.renewals.due(due + 1)) == ([] if consumerless else [member.client])


@pytest.mark.parametrize(("why", "done"), [("moved", ["store_position_name"]), ("stalled", []), ("left", [])])
async def test_consumers_that_stay_as_they_are(consumers: Consumers, why: str, done: list[str]) -> None:
    setup = Setup(positions="records")
    member, side = setup.session("a", served=False)
    record_of(member, consumerless=False)
    keeper(side).fake_stores = why != "moved"
    if why == "stalled":
        side.change(DeliveryEvent.STOPS_READING)
    elif why == "left":
        side.change(DeliveryEvent.ENDED)
    await setup.live._settle_consumers(member.client, as_side(side), in_records=True)
    assert (consumers.done, keeper(side).fake_left) == (done, why == "moved")


@pytest.mark.parametrize(
    ("refusal", "ended"),
    [(NoResponders("no leader"), []), (ApiError(503, 10077, "no space"), []), (Conflict("client"), ["taken over"])],
)
async def test_a_record_that_is_refused(consumers: Consumers, refusal: Exception, ended: list[str]) -> None:
    """The session keeps its consumers."""
    setup = Setup(positions="records")
    member, side = setup.session("a", served=False)
    v5 = record_of(member, consumerless=False)
    consumers.refusal = refusal
    await setup.live._settle_consumers(member.client, as_side(side), in_records=True)
    assert (v5.consumerless, consumers.done) == (False, [])
    assert cast("FakeClient", member.client).fake_ended == ended


@pytest.mark.parametrize(
    ("qos", "present", "creates", "attached"),
    [(2, False, True, 1), (2, True, True, 0), (1, False, True, 0), (2, False, False, 0)],
)
@pytest.mark.parametrize("consumerless", [True, False])
async def test_with_its_consumers_a_session_keeps_that_of_its_pubrels(
    consumers: Consumers, qos: int, present: bool, creates: bool, attached: int, consumerless: bool
) -> None:
    """Nats-server's listener needs it; a session that has moved gets none."""
    setup = Setup()
    member, side = setup.session("a", served=False)
    record_of(member, consumerless=consumerless, qos=qos)
    consumers.creates = creates
    if present:
        side.listen_for_pubrels(b"pubrels")
    await setup.live._settle_consumers(member.client, as_side(side), in_records=False)
    if consumerless and not creates:
        assert consumers.done == ["create_dormant"]
    else:
        here = attached or (qos == 2 and not present)
        assert consumers.done[0] == ("create_dormant" if consumerless else "check_dormant")
        assert consumers.done[1:] == ["attach_pubrels"] * bool(here) + ["write_changed_record"]


# -- which sessions have consumers --------------------------------------------------------------------


@pytest.mark.parametrize(("consumers", "wanted"), [(999, False), (1000, True)])
@pytest.mark.parametrize("listener", [False, True])
async def test_which_new_sessions_have_no_consumers(consumers: int, wanted: bool, listener: bool) -> None:
    """By the number of consumers; a session of nats-server's listener has some."""
    setup = Setup(positions="auto")
    setup.services.stream.count_consumers(consumers)
    member, _ = setup.session()
    _, v5 = claimed(member.client.record)
    v5.listener = listener
    assert setup.live.without_consumers(member.client) is (wanted and not listener)


@pytest.mark.parametrize("consumerless", [True, False])
async def test_a_session_does_not_change_while_its_client_is_connected(consumerless: bool) -> None:
    """New subscriptions have consumers if the others have."""
    setup = Setup(positions="consumers" if consumerless else "records")
    member, _ = setup.session("a")
    record_of(member, consumerless=consumerless)
    assert setup.live.without_consumers(member.client) is consumerless


# -- a session's place in the index -------------------------------------------------------------------


async def test_a_further_connection_of_a_session_begins_anew(setup: Setup) -> None:
    member, _ = setup.session("a")
    assert setup.live._member(member.client) is member
    client = cast("FakeClient", member.client)
    client.durable_side = other = FakeReaderSide(client)
    found = setup.live._member(member.client)
    assert found is not None
    assert found.side is as_side(other)
    assert found.filters == []
    client.durable_side = None
    assert setup.live._member(member.client) is None
