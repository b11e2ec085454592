# SPDX-License-Identifier: Apache-2.0
"""The checks twice a second: who falls behind, whose dormant consumers are renewed, and whose follow the position."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, cast

import pytest

from mqtt_nats.delivery.states import DeliveryEvent
from mqtt_nats.shared_reader import session_checks
from mqtt_nats.shared_reader.reader_session import ReaderSession
from mqtt_nats.shared_reader.session_checks import CROWD_MOST, FOLLOWED_MOST, keep_up, look
from mqtt_nats.shared_reader.sessions import DORMANT_RENEWAL_S
from tests.delivery.fakes import FakeDelivery, FakePositionWriter
from tests.sessions.fakes import FakeClient
from tests.shared_reader.fakes import (
    FakeReaderServices,
    FakeReaderSide,
    FakeSessions,
    as_sessions,
    live_binding,
    member_of,
)

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.position_writer import PositionWriter
    from mqtt_nats.protocol.position import SessionPosition


class Setup:
    """Sessions that are live, and others."""

    def __init__(self) -> None:
        self.services = FakeReaderServices()
        self.services.nats.online.set()
        self.live = FakeSessions(self.services, position=50)
        self.waiting: set[DurableDelivery] = set()
        self.followed: dict[str, int] = {}
        self.delivery = FakeDelivery(cast("Any", self.services))

    def session(self, name: str, *, live: bool = True, waiting: int = 0) -> ReaderSession:
        member = member_of(self.services, name, "a")
        side = member.side
        if not live:
            side.change(DeliveryEvent.STOPS_READING)
        side.machine.limit = 0
        (source,) = (one.source for one in side.bindings.values())
        for sequence in range(1, waiting + 1):
            side.machine.arrived(source, sequence, 1, b"@%d" % sequence, None, 1)
        assert side.machine.crowd == waiting
        if waiting:
            self.waiting.add(side)
        self.live.members[member.client] = member
        return member

    def positioned(self, *names: str) -> list[ReaderSession]:
        """Sessions with a position, while nats-server's listener has clients."""
        self.live.listener = True
        members = [self.session(name) for name in names]
        for member in members:
            cast("FakeReaderSide", member.side).position_writer = cast("PositionWriter", FakePositionWriter())
            cast("Any", member.client).delivery = self.delivery
            for one in member.side.bindings.values():
                one.lie_dormant()
        return members

    async def follow(self) -> dict[str, int]:
        """Look once; returns the sequences to which consumers are set, by client, in the order of the jobs."""
        self.look()
        found = {}
        for client in [cast("FakeClient", one) for one in self.live.members]:
            if client.fake_jobs:
                await client.fake_work()
                found[client.client_id] = self.followed.pop(client.client_id)
        assert self.followed == {}
        return found

    def look(self) -> None:
        look(as_sessions(self.live), self.waiting)

    @property
    def behind(self) -> list[str]:
        return [client.client_id for client in self.live.fake_behind]


def fake(member: ReaderSession) -> FakeClient:
    return cast("FakeClient", member.client)


def ledger(member: ReaderSession) -> SessionPosition:
    assert member.side.position_writer is not None
    return member.side.position_writer.ledger


@pytest.fixture
async def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    found = Setup()

    async def follow(client: FakeClient, side: object, first: int) -> None:
        assert client.durable_side is side
        found.followed[client.client_id] = first

    monkeypatch.setattr(session_checks, "follow_position", follow)
    return found


async def test_of_too_many_waiting_messages_those_with_most_fall_behind(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_checks, "CROWD_MOST", 10)
    assert CROWD_MOST > 10
    setup.session("few", waiting=2)
    setup.session("many", waiting=9)
    setup.look()
    assert setup.behind == ["many"]


@pytest.mark.parametrize(("waiting", "back"), [((10, 10), []), ((9, 11), ["live"])])
async def test_who_is_behind_already_leaves_others_where_they_are(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, waiting: tuple[int, int], back: list[str]
) -> None:
    """Much may wait in a session that has fallen behind, until its client has acknowledged it."""
    monkeypatch.setattr(session_checks, "CROWD_MOST", 10)
    setup.session("stalled", live=False, waiting=waiting[0])
    setup.session("live", waiting=waiting[1])
    setup.look()
    assert setup.behind == back


async def test_dormant_consumers_are_renewed_in_time(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_checks, "RENEWED_MOST", 2)
    now = asyncio.get_running_loop().time()
    for name in ("busy", "one", "two", "three"):
        member = setup.session(name)
        fake(member).busy = name == "busy"
        setup.live.renewals.put(member.client, now - 1)
    regular = setup.session("regular")
    fake(regular).durable_side = None
    for member in (setup.session("stalled", live=False), regular):
        setup.live.renewals.put(member.client, now - 1)
    setup.live.renewals.put(setup.session("later").client, now + 1000)
    setup.look()
    jobs = {client.client_id: client for client in setup.services.registry.clients.values()}
    renewed = [name for name, client in jobs.items() if client.fake_jobs]
    assert renewed == ["one", "two"]
    for name in renewed:
        jobs[name].fake_jobs.pop().close()
    again = [[client.client_id for client in setup.live.renewals.due(at)] for at in (now + 1, now + 1001)]
    assert again == [["busy", "three", "stalled"], ["later"]]
    assert [client.client_id for client in setup.live.renewals.due(now + DORMANT_RENEWAL_S + 1)] == renewed


async def test_a_crowded_session_that_fails(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_checks, "CROWD_MOST", 10)
    one, other = setup.session("one", waiting=12), setup.session("other", waiting=12)
    for failing, back in ((one, "other"), (other, "one")):
        setup.live.fake_fails = {fake(failing)}
        setup.look()
        assert setup.behind == [back]
        setup.live.fake_behind.clear()


async def test_a_renewal_that_fails(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    """The others that were due with it follow, and it is tried again as all are."""

    def fail(work: Coroutine[Any, Any, None]) -> None:
        work.close()
        raise ValueError("on purpose")

    now = asyncio.get_running_loop().time()
    members = [setup.session(name) for name in ("failing", "one")]
    fake(members[0]).do = fail  # type: ignore[method-assign]
    for member in members:
        setup.live.renewals.put(member.client, now - 1)
    setup.look()
    assert len(fake(members[1]).fake_jobs) == 1
    fake(members[1]).fake_jobs.pop().close()
    assert "on purpose" in caplog.text
    again = [client.client_id for client in setup.live.renewals.due(now + DORMANT_RENEWAL_S + 1)]
    assert again == ["failing", "one"]


async def test_a_look_that_fails_is_not_the_last(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = asyncio.Event()
    failures = [ValueError("on purpose")]

    def fail(live: object, waiting: object) -> None:
        if failures:
            raise failures.pop()
        looks.set()

    monkeypatch.setattr(session_checks, "EVERY", 0.0)
    monkeypatch.setattr(session_checks, "look", fail)
    task = asyncio.create_task(keep_up(as_sessions(setup.live), setup.waiting))
    await asyncio.wait_for(looks.wait(), 5)
    task.cancel()
    assert "on purpose" in caplog.text


# -- the positions of connected clients ------------------------------------------------------------------


async def test_consumers_follow_positions_that_have_moved(setup: Setup) -> None:
    """To the first message that is not complete; one that is where it has to be is not set again."""
    one, two = setup.positioned("one", "two")
    ledger(one).reach(10)
    ledger(two).reach(20)
    ledger(two).add_pending(15, 1)
    assert await setup.follow() == {"one": 11, "two": 15}
    assert await setup.follow() == {}
    ledger(two).done(15)
    assert await setup.follow() == {"two": 21}


@pytest.mark.parametrize("why", ["no listener", "nats-server before 2.14"])
async def test_consumers_need_not_follow(setup: Setup, why: str) -> None:
    """Nobody but nats-server's listener takes a session over by its consumers, and old ones cannot be set."""
    setup.positioned("one")
    setup.live.listener, setup.delivery.resets = why != "no listener", why == "no listener"
    assert await setup.follow() == {}
    setup.live.listener = setup.delivery.resets = True
    assert await setup.follow() == {"one": 1}


@pytest.mark.parametrize("why", ["busy", "stalled", "no position"])
async def test_whose_consumers_do_not_follow(setup: Setup, why: str) -> None:
    """A job that is under way may be one that waits for JetStream: the next look comes back to the session."""
    one, _ = setup.positioned("one", "two")
    side = cast("FakeReaderSide", one.side)
    writer = side.position_writer
    fake(one).busy = why == "busy"
    if why == "stalled":
        side.change(DeliveryEvent.STOPS_READING)
    elif why == "no position":
        side.position_writer = None
    assert await setup.follow() == {"two": 1}
    fake(one).busy = False
    side.position_writer = writer
    if why == "stalled":
        side.change(DeliveryEvent.READS_AGAIN)
    assert await setup.follow() == {"one": 1}


async def test_a_message_whose_pubrel_is_owed_is_not_passed(setup: Setup) -> None:
    """The position has that PUBREL, and nats-server's listener finds no record of it: the message has to come again."""
    one, two = setup.positioned("one", "two")
    for member in (one, two):
        ledger(member).reach(20)
    ledger(one).add_pending(15, 2)
    ledger(one).released[7] = 12
    ledger(two).add_pending(15, 2)
    ledger(two).released[7] = 18
    assert await setup.follow() == {"one": 12, "two": 15}
    del ledger(one).released[7]
    assert await setup.follow() == {"one": 15}


async def test_sessions_without_consumers_take_no_turn(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have some would wait for them; one consumer is enough."""
    monkeypatch.setattr(session_checks, "FOLLOWED_MOST", 2)
    members = setup.positioned("one", "two", "three", "four")
    for member in members[:2]:
        for binding in member.side.bindings.values():
            binding.remove()
    members[2].side.bindings["gone"] = live_binding("gone")
    assert await setup.follow() == {"three": 1, "four": 1}
    assert members[0].show(1), "it is set once it has consumers"


async def test_consumers_follow_in_turns(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session has its turn, also where those before it move on all the time."""
    monkeypatch.setattr(session_checks, "FOLLOWED_MOST", 2)
    members = setup.positioned("one", "two", "three", "four", "five")
    turns = []
    for reached in range(1, 6):
        for member in members:
            ledger(member).reach(reached)
        turns.append(list(await setup.follow()))
    assert turns == [["one", "two"], ["three", "four"], ["five", "one"], ["two", "three"], ["four", "five"]]
    assert {client.client_id for client in setup.live.members} == {"one", "two", "three", "four", "five"}


async def test_64_sessions_follow_in_one_look(setup: Setup) -> None:
    setup.positioned(*(f"client{number}" for number in range(100)))
    assert [len(await setup.follow()) for _ in range(3)] == [64, 36, 0]
    assert FOLLOWED_MOST == 64


async def test_a_session_that_cannot_follow_keeps_no_other_from_it(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(work: Coroutine[Any, Any, None]) -> None:
        work.close()
        raise ValueError("on purpose")

    one, _ = setup.positioned("one", "two")
    fake(one).do = fail  # type: ignore[method-assign]
    assert await setup.follow() == {"two": 1}
    assert "on purpose" in caplog.text
