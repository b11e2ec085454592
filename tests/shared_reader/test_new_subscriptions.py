# SPDX-License-Identifier: Apache-2.0
"""New subscriptions without consumers: which sessions may have them, and the session's place meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from mqtt_nats.delivery.position_writer import PositionWriter
from mqtt_nats.delivery.receiver import Receiver
from mqtt_nats.delivery.states import DeliveryEvent
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.position import SessionPosition
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_nats.sessions.record import claimed
from mqtt_nats.shared_reader import new_subscriptions
from mqtt_nats.shared_reader.new_subscriptions import may_join_directly, subscribe
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
        self.live.fake_wants_records = True
        self.member = member_of(self.services, "client", *subjects)
        self.side, self.position_writer = self.member.side, FakeKeeper()
        self.side.position_writer = cast(PositionWriter, self.position_writer)
        self.record, self.v5 = claimed(self.member.client.record)
        self.v5.name_position("p")
        if subjects:
            self.side.change(DeliveryEvent.JOINED)
            self.live.interest.put(self.member)
        self.added = live_binding("new", live=False)
        self.added.source.start = 9
        self.stored: list[tuple[int, list[int]]] = []

    def put(self) -> list[ConsumerBinding]:
        self.added.go_on(self.added.source.start - 1)
        self.side.bindings["new"] = self.added
        return [self.added]

    async def _store(self, client: Receiver, epoch: int) -> int:
        assert self.position_writer.fake_flushed == 1  # the position before the record
        self.stored.append((self.live.catching[self.side].position, list(self.live.fake_through)))
        return epoch

    def may_join(self) -> bool:
        return may_join_directly(as_sessions(self.live), self.member.client, self.side)

    async def subscribe(self, place: int = 8) -> None:
        await subscribe(as_sessions(self.live), self.member, place, self.put)


def _end(setup: Setup) -> None:
    setup.side.change(DeliveryEvent.ENDED)


def _plain(setup: Setup) -> None:
    setup.side.bindings["plain"] = live_binding("plain", live=False)


def _doubtful(setup: Setup) -> None:
    setup.side.doubtful.add("a")


def _no_position(setup: Setup) -> None:
    setup.v5.name_position("")


def _refused(setup: Setup) -> None:
    setup.live.reader.refused = 1.0


def _not_allowed(setup: Setup) -> None:
    setup.live.allow(False)


def _with_consumers(setup: Setup) -> None:
    setup.record.cons["a"] = live_binding("a").consumer


CHANGES: list[Callable[[Setup], None]] = [
    _end,
    _plain,
    _doubtful,
    _no_position,
    _refused,
    _not_allowed,
]


@pytest.mark.parametrize("subjects", [(), ("a",), ("a", "b")])
async def test_sessions_that_no_consumer_serves(monkeypatch: pytest.MonkeyPatch, subjects: tuple[str, ...]) -> None:
    assert Setup(monkeypatch, *subjects).may_join()


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("in_records", [True, False])
async def test_sessions_with_and_without_consumers(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, in_records: bool
) -> None:
    """The reader serves both; which of them a session is does not change while its client is connected."""
    setup = Setup(monkeypatch, "a")
    _with_consumers(setup)
    setup.live.fake_wants_records = wanted
    setup.v5.name_position("p")
    if in_records:
        setup.v5.move_to_records()
    assert setup.may_join()


@pytest.mark.parametrize("change", CHANGES)
async def test_sessions_that_need_a_consumer(monkeypatch: pytest.MonkeyPatch, change: Callable[[Setup], None]) -> None:
    setup = Setup(monkeypatch, "a")
    change(setup)
    assert not setup.may_join()


async def test_the_first_subscription_begins_at_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent before that is stored."""
    setup = Setup(monkeypatch)
    assert not setup.side.live
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
    joining = setup.member.joining
    assert joining is not None  # what the shared reader brings by the other filters meanwhile is kept back
    assert joining.since == 10
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
