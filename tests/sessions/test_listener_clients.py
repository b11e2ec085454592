# SPDX-License-Identifier: Apache-2.0
"""When the shared reader may be used: nats-server's listener serves nobody."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.lifecycle.lease import Lease
from mqtt_nats.sessions.takeover import Claims
from mqtt_nats.shared_reader import eligibility
from mqtt_nats.shared_reader.eligibility import CREATED, LISTENER, PositionSupport, is_wanted
from mqtt_streams.api import RequestTimeout
from mqtt_streams.retained import STREAM as RETAINED
from tests.harness.doubles import stands_for
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeClient
from tests.shared_reader.fakes import FakeReaderServices, FakeReaderSettings, FakeSessions, as_sessions

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings


@stands_for(Lease)
class FakeLease:
    """Stands for `Lease`: whether this gateway looks."""

    def __init__(self) -> None:
        self.fake_watches = False
        self.fake_choices: list[float] = []

    def watches(self, gateways: float) -> bool:
        self.fake_choices.append(gateways)
        return self.fake_watches


@stands_for(Claims)
class FakeClaims:
    """Stands for `Claims`: whether all claims are heard."""

    def __init__(self) -> None:
        self.hears_all = True

    def hear_all(self) -> bool:
        was, self.hears_all = self.hears_all, True
        return not was

    def hear_concerned(self) -> None:
        assert self.hears_all
        self.hears_all = False


class Setup:
    """A gateway, and perhaps clients of nats-server's listener."""

    def __init__(self, wanted: str = "auto") -> None:
        self.services = FakeReaderServices(wanted)
        self.live = FakeSessions(self.services)
        self.live.allowed = False
        self.lease = FakeLease()
        self.claims = FakeClaims()
        self.support = PositionSupport(as_sessions(self.live), cast("Lease", self.lease), cast("Claims", self.claims))

    def listener(self, *, bound: bool) -> None:
        """nats-server's MQTT listener has a consumer of retained messages."""
        self.services.fake_inbox.consumers[RETAINED][f"{RETAINED}_x"] = {"push_bound": bound}


async def test_alone() -> None:
    setup = Setup()
    await setup.support.begin()
    assert setup.live.allowed


@pytest.mark.parametrize("bound", [True, False])
async def test_the_listener_of_nats_server(bound: bool) -> None:
    setup = Setup()
    setup.listener(bound=bound)
    await setup.support.begin()
    assert setup.live.allowed is not bound


async def test_always_does_not_look() -> None:
    setup = Setup("always")
    setup.listener(bound=True)
    setup.services.fake_inbox.asked.clear()
    await setup.support.begin()
    assert setup.live.allowed
    assert setup.services.fake_inbox.asked == []
    await setup.support.check_regularly()  # there is nothing to keep


async def test_the_listener_of_nats_server_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions go back at once, by an advisory; the reader is used again after a while."""
    monkeypatch.setattr(eligibility, "CHECK_IDLE_S", 0.01)
    monkeypatch.setattr(eligibility, "QUIET_BEFORE_USE_S", -1.0)
    setup = Setup()
    await setup.support.begin()
    keeping = asyncio.create_task(setup.support.check_regularly())
    try:
        setup.listener(bound=True)
        setup.services.fake_link.fake_bring(CREATED)
        await aeventually(lambda: not setup.live.allowed)
        setup.listener(bound=False)
        await aeventually(lambda: setup.live.allowed)
    finally:
        keeping.cancel()


async def test_a_few_of_many_look_for_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others look when JetStream tells of a consumer."""
    for seconds in ("CHECK_IDLE_S", "CHECK_SELDOM_S"):
        monkeypatch.setattr(eligibility, seconds, 0.01)
    monkeypatch.setattr(eligibility, "QUIET_BEFORE_USE_S", 0.0)
    setup = Setup()
    inbox, choices = setup.services.fake_inbox, setup.lease.fake_choices
    await setup.support.begin()
    keeping = asyncio.create_task(setup.support.check_regularly())

    async def chosen(times: int) -> None:
        before = choices.count(LISTENER)
        await aeventually(lambda: choices.count(LISTENER) >= before + times)

    try:
        await chosen(1)
        looks = len(inbox.asked)
        await chosen(20)
        assert len(inbox.asked) == looks
        setup.lease.fake_watches = True
        await aeventually(lambda: len(inbox.asked) > looks)
        setup.lease.fake_watches = False
        setup.listener(bound=True)
        setup.services.fake_link.fake_bring(CREATED)
        await aeventually(lambda: not setup.live.allowed)
    finally:
        keeping.cancel()


async def test_the_reader_is_not_used_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "CHECK_IDLE_S", 0.01)
    setup = Setup()
    setup.listener(bound=True)
    await setup.support.begin()
    setup.services.fake_inbox.consumers[RETAINED].clear()
    keeping = asyncio.create_task(setup.support.check_regularly())
    try:
        looks = len(setup.services.fake_inbox.asked)
        await aeventually(lambda: len(setup.services.fake_inbox.asked) > looks + 4)
        assert not setup.live.allowed
    finally:
        keeping.cancel()


async def test_without_an_answer_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "CHECK_IDLE_S", 0.01)
    setup = Setup()
    await setup.support.begin()
    failures: list[str] = []

    def fail(subject: str) -> None:
        failures.append(subject)
        raise RequestTimeout("no answer")

    setup.services.fake_inbox.before = fail
    keeping = asyncio.create_task(setup.support.check_regularly())
    try:
        await aeventually(lambda: len(failures) > 1)
        assert setup.live.allowed
    finally:
        keeping.cancel()


async def test_after_a_reconnect_it_is_looked_at_at_once() -> None:
    setup = Setup()
    await setup.support.begin()
    setup.services.nats.reconnect.renew(Phase.REQUESTS)
    assert setup.services.fake_link.fake_renewed == [(b"1", CREATED)]
    setup.listener(bound=True)
    keeping = asyncio.create_task(setup.support.check_regularly())
    try:
        await aeventually(lambda: not setup.live.allowed)
    finally:
        keeping.cancel()


@pytest.mark.parametrize("lost", [False, True])
async def test_owners_are_looked_at_once_nats_server_has_the_subscription(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """A server that is slow to answer misses no claim; after a reconnect all records are read anyway."""
    setup = Setup()
    setup.claims.hears_all = False
    client = FakeClient(setup.services)
    fences = 0

    async def fence(link: object) -> None:
        nonlocal fences
        fences += 1
        if fences < 3:
            raise TimeoutError
        if lost:
            setup.services.fake_link.wire = None
            raise TimeoutError

    monkeypatch.setattr(setup.services.nodes, "fence", fence)
    await setup.support.begin()
    setup.services.fake_link.fake_bring(CREATED)
    await aeventually(lambda: fences == 3)
    await asyncio.sleep(0)
    assert len(client.fake_jobs) == (0 if lost else 1)
    for job in client.fake_jobs:
        job.close()


async def test_the_listener_of_nats_server_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "CHECK_IDLE_S", 0.01)
    monkeypatch.setattr(eligibility, "QUIET_BEFORE_USE_S", 0.0)
    setup = Setup()

    def all_are_heard() -> bool:
        return setup.claims.hears_all

    await setup.support.begin()
    keeping = asyncio.create_task(setup.support.check_regularly())
    try:
        await aeventually(lambda: not all_are_heard())
        setup.listener(bound=True)
        setup.services.fake_link.fake_bring(CREATED)
        assert all_are_heard()
        looks = len(setup.services.fake_inbox.asked)
        await aeventually(lambda: len(setup.services.fake_inbox.asked) > looks + 20)
        assert all_are_heard()
        setup.listener(bound=False)
        await aeventually(lambda: not all_are_heard())
    finally:
        keeping.cancel()


@pytest.mark.parametrize(("wanted", "used"), [("never", False), ("auto", True), ("always", True)])
def test_whether_a_gateway_has_a_shared_reader(wanted: str, used: bool) -> None:
    assert is_wanted(cast("Settings", FakeReaderSettings(wanted))) is used
