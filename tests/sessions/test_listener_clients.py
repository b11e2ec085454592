# SPDX-License-Identifier: Apache-2.0
"""Whether nats-server's MQTT listener serves clients, so that the claims of all sessions are heard."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.lifecycle.lease import Lease
from mqtt_nats.sessions import listener_clients
from mqtt_nats.sessions.listener_clients import CREATED, LISTENER, ListenerClients
from mqtt_nats.sessions.takeover import Claims
from mqtt_streams.api import RequestTimeout
from mqtt_streams.retained import STREAM as RETAINED
from tests.harness.doubles import stands_for
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeClient, FakeServices, as_services


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

    def __init__(self) -> None:
        self.services = FakeServices()
        self.lease = FakeLease()
        self.claims = FakeClaims()
        self.told: list[bool] = []
        """What was told about clients of the listener."""
        claims = cast("Claims", self.claims)
        self.found = ListenerClients(as_services(self.services), self.lease, claims, self.told.append)

    def listener(self, *, bound: bool) -> None:
        """nats-server's MQTT listener has a consumer of retained messages."""
        self.services.fake_inbox.consumers[RETAINED][f"{RETAINED}_x"] = {"push_bound": bound}


@pytest.mark.parametrize("bound", [None, False, True])
async def test_the_first_look(bound: bool | None) -> None:
    """A consumer to which nobody listens is left of a client that has gone."""
    setup = Setup()
    setup.claims.hears_all = False
    if bound is not None:
        setup.listener(bound=bound)
    await setup.found.begin()
    assert (setup.found.present, setup.claims.hears_all) == (bound is True, bound is True)


async def test_the_listener_of_nats_server_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is seen at once, by an advisory; all claims are heard until it has no clients for a while."""
    monkeypatch.setattr(listener_clients, "CHECK_IDLE_S", 0.01)
    monkeypatch.setattr(listener_clients, "QUIET_BEFORE_USE_S", -1.0)
    setup = Setup()
    await setup.found.begin()
    keeping = asyncio.create_task(setup.found.check_regularly())
    try:
        setup.listener(bound=True)
        setup.services.fake_link.fake_bring(CREATED)
        await aeventually(lambda: setup.found.present)
        setup.listener(bound=False)
        await aeventually(lambda: not setup.claims.hears_all)
    finally:
        keeping.cancel()


async def test_a_few_of_many_look_for_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others look when JetStream tells of a consumer."""
    for seconds in ("CHECK_IDLE_S", "CHECK_SELDOM_S"):
        monkeypatch.setattr(listener_clients, seconds, 0.01)
    monkeypatch.setattr(listener_clients, "QUIET_BEFORE_USE_S", 0.0)
    setup = Setup()
    inbox, choices = setup.services.fake_inbox, setup.lease.fake_choices
    await setup.found.begin()
    keeping = asyncio.create_task(setup.found.check_regularly())

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
        await aeventually(lambda: setup.found.present)
    finally:
        keeping.cancel()


async def test_a_change_is_told_once() -> None:
    """That there are none is the state at the start."""
    setup = Setup()
    told = []
    for bound in (False, True, True, False, False, True):
        setup.listener(bound=bound)
        await setup.found._look()
        told.append(list(setup.told))
        setup.told.clear()
    assert told == [[], [True], [], [False], [], [True]]


async def test_all_claims_are_heard_for_a_while_after_the_last_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_clients, "CHECK_IDLE_S", 0.01)
    setup = Setup()
    setup.listener(bound=True)
    await setup.found.begin()
    setup.services.fake_inbox.consumers[RETAINED].clear()
    keeping = asyncio.create_task(setup.found.check_regularly())
    try:
        looks = len(setup.services.fake_inbox.asked)
        await aeventually(lambda: len(setup.services.fake_inbox.asked) > looks + 4)
        assert (setup.found.present, setup.claims.hears_all) == (False, True)
    finally:
        keeping.cancel()


async def test_without_an_answer_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_clients, "CHECK_IDLE_S", 0.01)
    setup = Setup()
    setup.listener(bound=True)
    await setup.found.begin()
    setup.listener(bound=False)
    failures: list[str] = []

    def fail(subject: str) -> None:
        failures.append(subject)
        raise RequestTimeout("no answer")

    setup.services.fake_inbox.before = fail
    keeping = asyncio.create_task(setup.found.check_regularly())
    try:
        await aeventually(lambda: len(failures) > 1)
        assert (setup.found.present, setup.claims.hears_all) == (True, True)
    finally:
        keeping.cancel()


async def test_after_a_reconnect_it_is_looked_at_at_once() -> None:
    setup = Setup()
    await setup.found.begin()
    setup.services.nats.reconnect.renew(Phase.REQUESTS)
    assert setup.services.fake_link.fake_renewed == [(b"1", CREATED)]
    setup.listener(bound=True)
    keeping = asyncio.create_task(setup.found.check_regularly())
    try:
        await aeventually(lambda: setup.found.present)
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
    await setup.found.begin()
    setup.services.fake_link.fake_bring(CREATED)
    await aeventually(lambda: fences == 3)
    await asyncio.sleep(0)
    assert len(client.fake_jobs) == (0 if lost else 1)
    for job in client.fake_jobs:
        job.close()


async def test_the_listener_of_nats_server_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_clients, "CHECK_IDLE_S", 0.01)
    monkeypatch.setattr(listener_clients, "QUIET_BEFORE_USE_S", 0.0)
    setup = Setup()

    def all_are_heard() -> bool:
        return setup.claims.hears_all

    await setup.found.begin()
    keeping = asyncio.create_task(setup.found.check_regularly())
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
