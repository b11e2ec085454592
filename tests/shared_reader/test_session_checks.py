# SPDX-License-Identifier: Apache-2.0
"""The checks twice a second: who falls behind, who learns how far the reader is, whose consumers are renewed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, cast

import pytest

from mqtt_nats.delivery.states import DeliveryEvent
from mqtt_nats.shared_reader import session_checks
from mqtt_nats.shared_reader.reader_session import ReaderSession
from mqtt_nats.shared_reader.session_checks import CROWD_MOST, keep_up, look
from mqtt_nats.shared_reader.sessions import DORMANT_RENEWAL_S
from tests.sessions.fakes import FakeClient
from tests.shared_reader.fakes import FakeReaderServices, FakeSessions, as_sessions, member_of

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery


class Setup:
    """Sessions that are live, and others."""

    def __init__(self) -> None:
        self.services = FakeReaderServices()
        self.services.nats.online.set()
        self.live = FakeSessions(self.services, position=50)
        self.waiting: set[DurableDelivery] = set()

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

    def look(self) -> None:
        look(as_sessions(self.live), self.waiting)

    @property
    def behind(self) -> list[str]:
        return [client.client_id for client in self.live.fake_behind]


def fake(member: ReaderSession) -> FakeClient:
    return cast("FakeClient", member.client)


@pytest.fixture
async def setup() -> Setup:
    return Setup()


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
    assert again == [["busy", "three"], ["later"]]
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
