# SPDX-License-Identifier: Apache-2.0
"""New subscriptions: the session's place meanwhile, and that position and record are stored first."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.delivery.receiver import Receiver
from mqtt_nats.delivery.states import DeliveryEvent, DeliveryState
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.position import SessionPosition
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.sessions.record import claimed
from mqtt_nats.shared_reader import new_subscriptions
from mqtt_nats.shared_reader.catch_up import CatchUpReader
from mqtt_nats.shared_reader.new_subscriptions import let_go, subscribe
from mqtt_nats.shared_reader.reader_session import ReaderHandover
from mqtt_streams.api import ApiError
from tests.harness.doubles import stands_for
from tests.shared_reader.fakes import FakeReaderServices, FakeSessions, as_sessions, live_binding, member_of

pytestmark = pytest.mark.sources


@stands_for(PositionWriter)
class FakeKeeper:
    """Stands for `PositionWriter`: a position in memory."""

    def __init__(self, reached: int = 0) -> None:
        self.ledger = SessionPosition()
        self.ledger.reach(reached)
        self.live: set[str] = set()
        self.lost = False
        self.fake_flushed = 0

    async def flush(self) -> bool:
        return await self.begin_flush()

    def begin_flush(self) -> asyncio.Future[bool]:
        self.fake_flushed += 1
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        done.set_result(True)
        return done


class Setup:
    """A session with subscriptions that the shared reader serves at sequence 10, and one more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *subjects: str) -> None:
        monkeypatch.setattr(new_subscriptions, "limit_in_flight", lambda side: None)
        monkeypatch.setattr(new_subscriptions, "save_record", self._store)
        self.services = FakeReaderServices()
        self.live = FakeSessions(self.services, position=10)
        self.member = member_of(self.services, "client", *subjects)
        self.side, self.position_writer = self.member.side, FakeKeeper()
        self.side.position_writer = cast(PositionWriter, self.position_writer)
        self.record, self.v5 = claimed(self.member.client.record)
        self.v5.name_position("p")
        if subjects:
            self.live.interest.put(self.member)
        self.added = live_binding("new")
        self.added.source.start = 9
        self.stored: list[tuple[int, list[int]]] = []

    def put(self) -> list[ConsumerBinding]:
        self.added.begin_after(self.added.source.start - 1, removed=True)
        self.side.bindings["new"] = self.added
        return [self.added]

    async def _store(self, client: Receiver, epoch: int) -> int:
        assert self.position_writer.fake_flushed == 1  # the position before the record
        self.stored.append((self.live.catching[self.side].position, list(self.live.fake_through)))
        return epoch

    async def subscribe(self, place: int = 8) -> None:
        await subscribe(as_sessions(self.live), self.member, place, self.put)


async def test_the_first_subscription_begins_at_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent before that is stored."""
    setup = Setup(monkeypatch)
    await setup.subscribe(8)
    assert setup.stored == [(8, [])]
    assert setup.position_writer.live == {setup.added.consumer.durable_name}
    assert setup.position_writer.ledger.reached == 8
    assert not setup.added.source.held
    await setup.services.tasks.fake_settle()
    assert [since for _, since in setup.live.fake_caught_up] == [10]  # nothing is stored between


async def test_a_first_subscription_at_the_end_of_the_stream_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is stored between its mark and the place where the shared reader has the filter."""
    setup = Setup(monkeypatch)
    setup.added.source.start = 11
    await setup.subscribe(10)
    await setup.services.tasks.fake_settle()
    assert [since for _, since in setup.live.fake_caught_up] == [10]
    assert setup.services.fake_inbox.asked == []


async def test_a_session_stops_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of the new filter that are behind that place are taken before the position is stored."""
    setup = Setup(monkeypatch, "a")
    for subject in ("$MQTT.msgs.a",) * 8 + ("$MQTT.msgs.new", "$MQTT.msgs.new", "$MQTT.msgs.new"):
        setup.services.fake_inbox.put(subject, b"x", b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n")
    await setup.subscribe(8)
    assert setup.stored == [(10, [9, 10])]
    handover = setup.member.handover
    assert handover is not None  # what the shared reader brings by the other filters meanwhile is kept back
    assert handover.since == 10
    as_sessions(setup.live).end_catching(setup.side)


async def test_a_record_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session goes on; its subscription is ended by the caller."""
    setup = Setup(monkeypatch, "a")

    async def refuse(client: Receiver, epoch: int) -> int:
        raise ApiError(503, 10077, "no space")

    monkeypatch.setattr(new_subscriptions, "save_record", refuse)
    with pytest.raises(ApiError):
        await subscribe(as_sessions(setup.live), setup.member, 10, setup.put)
    await setup.services.tasks.fake_settle()
    assert [since for _, since in setup.live.fake_caught_up] == [10]
    assert isinstance(setup.added.source, SubscriptionState)


@pytest.mark.parametrize("missed", [False, True])
async def test_a_session_that_is_catching_up_goes_on_where_it_is(monkeypatch: pytest.MonkeyPatch, missed: bool) -> None:
    """With the new filter, too: its former reader ends, and the next one need not ask what is known."""
    setup = Setup(monkeypatch, "a")
    former = setup.live.catch_up(setup.member, 4, missed=missed)
    monkeypatch.setattr(setup.live, "reached", lambda _: 4)
    setup.member.begin_handover(ReaderHandover())
    removed: list[object] = []
    monkeypatch.setattr(setup.live, "remove", removed.append)
    begun: list[tuple[int, bool]] = []

    def begin(reader: CatchUpReader) -> None:
        begun.append((reader.position, reader.reads))

    monkeypatch.setattr(CatchUpReader, "begin", begin)
    await setup.subscribe(8)
    assert setup.live.catching[setup.side] is not former
    assert (begun, setup.member.handover, removed) == ([(4, missed)], None, [setup.member.client])


async def test_a_session_that_is_stalled_when_its_subscription_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader serves it before its client reads again; the position is where the session stopped."""
    setup = Setup(monkeypatch, "a")
    setup.side.change(DeliveryEvent.STOPS_READING)
    setup.position_writer.ledger.reach(4)
    monkeypatch.setattr(setup.live, "reached", lambda _: 4)
    stored: list[int] = []

    async def store(client: Receiver, epoch: int) -> int:
        stored.append(setup.position_writer.ledger.reached)
        return epoch

    monkeypatch.setattr(new_subscriptions, "save_record", store)
    await setup.subscribe(8)
    assert (stored, setup.position_writer.fake_flushed) == ([4], 1)
    assert (setup.side.state, setup.live.catching) == (DeliveryState.NOT_READING, {})
    assert setup.added.source.held == SubscriptionState.RETURNING
    assert setup.added.consumer.durable_name in setup.position_writer.live


@pytest.mark.parametrize("why", ["stalled", "lost"])
async def test_a_session_that_readers_serve_no_more(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Its client stopped to read while the record was stored, or another gateway has the session."""
    setup = Setup(monkeypatch, "a")

    async def store(client: Receiver, epoch: int) -> int:
        if why == "lost":
            setup.position_writer.lost = True
        else:
            as_sessions(setup.live).end_catching(setup.side)
            setup.side.change(DeliveryEvent.STOPS_READING)
        return epoch

    begun: list[object] = []
    monkeypatch.setattr(CatchUpReader, "begin", lambda reader: begun.append(reader))
    monkeypatch.setattr(new_subscriptions, "save_record", store)
    await setup.subscribe(10)
    assert setup.added.source.held == SubscriptionState.RETURNING
    assert len(begun) == (why == "stalled"), "it does nothing, since it has ended"


@pytest.mark.parametrize("unchecked", [True, False])
async def test_new_messages_wait_where_a_session_may_have_moved(
    monkeypatch: pytest.MonkeyPatch, unchecked: bool
) -> None:
    """NATS was lost meanwhile: the check of the session lets them go."""
    setup = Setup(monkeypatch)
    setup.put()
    if unchecked:
        setup.services.registry.unchecked.add(setup.member.client)
    let_go(as_sessions(setup.live), setup.side, [setup.added])
    assert bool(setup.added.source.held) is unchecked
