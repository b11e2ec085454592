# SPDX-License-Identifier: Apache-2.0
"""The checks twice a second: who becomes live, who goes back, whose dormant consumers are renewed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from mqtt_nats.delivery.states import DeliveryEvent
from mqtt_nats.shared_reader import session_checks
from mqtt_nats.shared_reader.promotion import DORMANT_RENEWAL_S, ReaderSession
from mqtt_nats.shared_reader.session_checks import CROWD_MOST, EVERY, REFUSED, keep_up, look
from tests.sessions.fakes import FakeClient
from tests.shared_reader.fakes import FakeReaderServices, FakeSessions, as_sessions, live_binding, member_of

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
        if live:
            side.change(DeliveryEvent.JOINED)
        side.machine.limit = 0
        (source,) = (one.source for one in side.bindings.values())
        for sequence in range(1, waiting + 1):
            side.machine.arrived(source, sequence, 1, b"@%d" % sequence, None, 1)
        assert side.machine.crowd == waiting
        if waiting:
            self.waiting.add(side)
        self.live.members[member.client] = member
        self.live.candidates.put(member.client, 0.0)
        return member

    def look(self) -> None:
        look(as_sessions(self.live), self.waiting)

    @property
    def back(self) -> list[str]:
        return [client.client_id for client in self.live.fake_back]

    @property
    def behind(self) -> list[str]:
        return [client.client_id for client in self.live.fake_behind]

    @property
    def begun(self) -> list[str]:
        return [client.client_id for client in self.live.fake_begun]


def fake(member: ReaderSession) -> FakeClient:
    return cast("FakeClient", member.client)


@pytest.fixture
async def setup() -> Setup:
    return Setup()


async def test_a_session_is_tried_until_it_is_live(setup: Setup) -> None:
    """A session that is wholly live, or has no subscriptions, is looked at no more."""
    setup.session("live")
    setup.session("empty", live=False).side.bindings.clear()
    partly, plain, gone = setup.session("partly"), setup.session("plain", live=False), setup.session("gone", live=False)
    partly.side.bindings["b"] = live_binding("b", live=False)
    fake(gone).alive = False
    setup.look()
    assert (setup.begun, setup.back) == (["partly", "plain"], [])
    now = asyncio.get_running_loop().time()
    assert setup.live.candidates.due(now + EVERY) == [partly.client, plain.client]


async def test_a_session_that_could_not_keep_up_is_tried_after_a_while(setup: Setup) -> None:
    member = setup.session("one", live=False)
    member.put_off(asyncio.get_running_loop().time())
    setup.look()
    assert setup.begun == ["one"]  # `begin` itself waits for `retry`, too
    setup.look()
    assert (setup.begun, setup.live.candidates.due(member.retry)) == (["one"], [member.client])


async def test_nobody_is_tried_without_nats(setup: Setup) -> None:
    setup.session("one", live=False)
    setup.services.nats.online.clear()
    setup.look()
    setup.services.nats.online.set()
    setup.live.reader.refused = asyncio.get_running_loop().time()
    setup.look()
    assert setup.begun == []
    setup.live.reader.refused = 0.0
    setup.look()
    assert setup.begun == ["one"]


@pytest.mark.parametrize("refused", [False, True])
async def test_when_the_reader_may_not_be_used_live_sessions_go_back(setup: Setup, refused: bool) -> None:
    """Other gateways are too old for it, or JetStream refuses it for long."""
    if refused:
        setup.live.reader.refused = asyncio.get_running_loop().time() - REFUSED - 1
    else:
        setup.live.allowed = False
    setup.session("one")
    setup.session("other", live=False)
    setup.look()
    assert (setup.begun, setup.back) == ([], ["one"])


async def test_a_reader_that_is_refused_for_a_moment(setup: Setup) -> None:
    setup.live.reader.refused = asyncio.get_running_loop().time() - REFUSED / 2
    setup.session("one")
    setup.look()
    assert setup.back == []


async def test_so_many_go_back_at_a_time(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_checks, "RETURNING_MOST", 2)
    setup.live.allowed = False
    setup.live.returning = {setup.session("returning", live=False).client, setup.session("also", live=False).client}
    setup.session("one")
    setup.look()
    assert setup.back == []


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
    setup.session("behind", live=False, waiting=waiting[0])
    setup.session("live", waiting=waiting[1])
    setup.look()
    assert setup.behind == back


async def test_waiting_messages_learn_how_far_the_reader_is(setup: Setup) -> None:
    """A message whose identifier an older one might have waits for that."""
    member = setup.session("one", waiting=1)
    assert member.side.machine.reached == 0
    setup.look()
    assert member.side.machine.reached == 50
    setup.live.reader.position = 40
    setup.look()
    assert member.side.machine.reached == 50


async def test_dormant_consumers_are_renewed_in_time(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_checks, "settled", lambda client: client.client_id != "busy")
    monkeypatch.setattr(session_checks, "RENEWED_MOST", 2)
    now = asyncio.get_running_loop().time()
    for name in ("busy", "one", "two", "three"):
        setup.live.renewals.put(setup.session(name).client, now - 1)
    setup.live.renewals.put(setup.session("plain", live=False).client, now - 1)
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


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_session_that_fails_does_not_keep_others_from_their_check(
    setup: Setup, allowed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that were due with it would never be looked at again."""
    setup.live.allowed = allowed
    for name in ("one", "failing", "other"):
        member = setup.session(name, live=not allowed)
        if name == "failing":
            setup.live.fake_fails.add(fake(member))
    setup.look()
    assert (setup.begun if allowed else setup.back) == ["one", "other"]
    assert [client.client_id for client in setup.live.fake_later] == (["failing"] if allowed else [])
    assert "on purpose" in caplog.text


async def test_a_crowded_session_that_fails(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_checks, "CROWD_MOST", 10)
    one, other = setup.session("one", waiting=12), setup.session("other", waiting=12)
    for failing, back in ((one, "other"), (other, "one")):
        setup.live.fake_fails = {fake(failing)}
        setup.look()
        assert setup.behind == [back]
        setup.live.fake_behind.clear()


async def test_a_renewal_that_fails(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def settled(client: FakeClient) -> bool:
        if client.client_id == "failing":
            raise ValueError("on purpose")
        return False

    monkeypatch.setattr(session_checks, "settled", settled)
    now = asyncio.get_running_loop().time()
    for name in ("failing", "one"):
        setup.live.renewals.put(setup.session(name).client, now - 1)
    setup.look()
    assert [client.client_id for client in setup.live.renewals.due(now + 1)] == ["one"]
    assert [client.client_id for client in setup.live.renewals.due(now + DORMANT_RENEWAL_S + 1)] == ["failing"]


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
