# SPDX-License-Identifier: Apache-2.0
"""When the shared reader may be used: every gateway knows positions, and nats-server's listener serves nobody."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, cast

import pytest

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.lifecycle.lease import Lease
from mqtt_nats.sessions.takeover import Claims
from mqtt_nats.shared_reader import eligibility
from mqtt_nats.shared_reader.eligibility import CREATED, LISTENER, PositionSupport, is_wanted
from mqtt_streams.api import RequestTimeout
from mqtt_streams.gateway_subjects import HERE, NAMES_BUCKETS, READS_POSITIONS
from mqtt_streams.gateways import GatewayStore
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.sessions import V5_CONSUMERLESS, V5_POSITION
from tests.harness.doubles import stands_for
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeClient
from tests.shared_reader.fakes import FakeReaderServices, FakeReaderSettings, FakeSessions, as_sessions

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings


@stands_for(Lease)
class FakeLease:
    """Stands for `Lease`: what it would register."""

    def __init__(self, services: FakeReaderServices) -> None:
        self.store = GatewayStore(services.fake_inbox)
        self.fake_versions: list[int] = []
        self.fake_told = 0
        self.fake_watches = False
        self.fake_choices: list[float] = []

    async def writes(self, version: int) -> None:
        self.fake_versions.append(version)

    def may_write(self, version: int) -> None:
        self.fake_versions.append(version)

    async def told(self) -> None:
        self.fake_told += 1

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
    """A gateway, and others that hold leases."""

    def __init__(self, wanted: str = "auto", session_positions: str = "consumers") -> None:
        self.services = FakeReaderServices(wanted, session_positions)
        self.live = FakeSessions(self.services)
        self.live.allowed = False
        self.lease = FakeLease(self.services)
        self.claims = FakeClaims()
        self.support = PositionSupport(as_sessions(self.live), cast("Lease", self.lease), cast("Claims", self.claims))

    async def gateway(self, identity: str, *, positions: bool, alive: bool = True, buckets: bool = False) -> None:
        known = {"positions": positions, "claim_buckets": buckets}
        await self.lease.store.register(identity, 0.0, {key: True for key, value in known.items() if value}, 0)
        if alive:
            await self.lease.store.hold(identity, identity, 0, 20)

    def listener(self, *, bound: bool) -> None:
        """nats-server's MQTT listener has a consumer of retained messages."""
        self.services.fake_inbox.consumers[RETAINED][f"{RETAINED}_x"] = {"push_bound": bound}


@pytest.mark.parametrize("session_positions", ["consumers", "records", "auto"])
async def test_alone(session_positions: str) -> None:
    """Others are told of records of sessions without consumers before the first one."""
    setup = Setup(session_positions=session_positions)
    await setup.support.begin()
    assert setup.live.allowed
    assert setup.lease.fake_versions == [V5_POSITION]
    assert setup.live.fake_announce is not None
    await setup.live.fake_announce()
    assert setup.lease.fake_versions == [V5_POSITION, V5_CONSUMERLESS]


@pytest.mark.parametrize(
    ("identity", "positions", "alive", "allowed"),
    [
        ("other", True, True, True),
        ("other", False, True, False),
        ("other", False, False, True),  # it is dead
        ("gateway0", False, True, True),  # this one
    ],
)
async def test_another_gateway(identity: str, positions: bool, alive: bool, allowed: bool) -> None:
    setup = Setup()
    await setup.gateway(identity, positions=positions, alive=alive)
    await setup.support.begin()
    assert setup.live.allowed is allowed
    assert setup.lease.fake_versions == ([V5_POSITION] if allowed else [])


@pytest.mark.parametrize("session_positions", ["consumers", "records", "auto"])
@pytest.mark.parametrize("buckets", [True, False])
async def test_a_gateway_that_cannot_resume_sessions_without_consumers(session_positions: str, buckets: bool) -> None:
    """It knows positions; where sessions may have no consumers, it has to know that, too."""
    setup = Setup(session_positions=session_positions)
    await setup.gateway("other", positions=True, buckets=buckets)
    await setup.support.begin()
    assert setup.live.allowed is (buckets or session_positions == "consumers")


@pytest.mark.parametrize("bound", [True, False])
async def test_the_listener_of_nats_server(bound: bool) -> None:
    setup = Setup()
    setup.listener(bound=bound)
    await setup.support.begin()
    assert setup.live.allowed is not bound


async def test_always_does_not_look() -> None:
    setup = Setup("always")
    await setup.gateway("other", positions=False)
    setup.services.fake_inbox.asked.clear()
    await setup.support.begin()
    assert setup.live.allowed
    assert setup.services.fake_inbox.asked == []
    await setup.support.keep()  # there is nothing to keep


async def test_an_older_gateway_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions go back at once, by an advisory; the reader is used again after a while, and only if told to others."""
    monkeypatch.setattr(eligibility, "EVERY", 0.01)
    monkeypatch.setattr(eligibility, "QUIET", -1.0)
    setup = Setup()
    await setup.support.begin()
    keeping = asyncio.create_task(setup.support.keep())
    try:
        await setup.gateway("old", positions=False)
        setup.services.fake_link.fake_bring(CREATED)
        await aeventually(lambda: not setup.live.allowed)
        setup.lease.fake_watches = True
        await setup.lease.store.hold("old", "", 2, 20)
        for subject in ("lease.old", "gateway.old"):
            messages = setup.services.fake_inbox.messages["KV_MQTT_gateways"]
            messages[:] = [one for one in messages if not one.subject.endswith(subject)]
        await aeventually(lambda: setup.live.allowed)
        assert setup.lease.fake_told >= 1
    finally:
        keeping.cancel()


async def test_only_the_older_gateway_is_looked_at_until_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All registrations are read again when the last older gateway that was seen has gone, and not before."""
    monkeypatch.setattr(eligibility, "EVERY", 0.01)
    monkeypatch.setattr(eligibility, "QUIET", -1.0)
    setup = Setup()
    inbox = setup.services.fake_inbox
    for name in ("old1", "old2", "new"):
        await setup.gateway(name, positions=name == "new", buckets=name == "new")
    await setup.support.begin()
    reads: list[str] = []
    inbox.before = lambda subject: reads.append(subject) if ".DIRECT.GET." in subject else None
    keeping = asyncio.create_task(setup.support.keep())
    try:
        await setup.lease.store.remove("old1")
        looks = len(inbox.asked)
        await aeventually(lambda: len(inbox.asked) > looks + 20)
        assert reads == []
        assert not setup.live.allowed
        await setup.lease.store.remove("old2")
        await aeventually(lambda: setup.live.allowed)
        assert reads
    finally:
        keeping.cancel()


async def test_a_few_of_many_look_for_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others look when JetStream tells of a consumer."""
    for seconds in ("EVERY", "SELDOM"):
        monkeypatch.setattr(eligibility, seconds, 0.01)
    monkeypatch.setattr(eligibility, "QUIET", 0.0)
    setup = Setup()
    inbox, choices = setup.services.fake_inbox, setup.lease.fake_choices
    await setup.support.begin()
    keeping = asyncio.create_task(setup.support.keep())

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
    monkeypatch.setattr(eligibility, "EVERY", 0.01)
    setup = Setup()
    setup.listener(bound=True)
    await setup.support.begin()
    setup.services.fake_inbox.consumers[RETAINED].clear()
    keeping = asyncio.create_task(setup.support.keep())
    try:
        looks = len(setup.services.fake_inbox.asked)
        await aeventually(lambda: len(setup.services.fake_inbox.asked) > looks + 4)
        assert not setup.live.allowed
    finally:
        keeping.cancel()


async def test_without_an_answer_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eligibility, "EVERY", 0.01)
    setup = Setup()
    await setup.support.begin()
    failures: list[str] = []

    def fail(subject: str) -> None:
        failures.append(subject)
        raise RequestTimeout("no answer")

    setup.services.fake_inbox.before = fail
    keeping = asyncio.create_task(setup.support.keep())
    try:
        await aeventually(lambda: len(failures) > 1)
        assert setup.live.allowed
    finally:
        keeping.cancel()


async def test_after_a_reconnect_it_is_looked_at_at_once() -> None:
    setup = Setup()
    await setup.support.begin()
    setup.services.nats.reconnect.renew(Phase.REQUESTS)
    assert setup.services.fake_link.fake_renewed == [(b"1", CREATED), (b"2", HERE)]
    setup.listener(bound=True)
    keeping = asyncio.create_task(setup.support.keep())
    try:
        await aeventually(lambda: not setup.live.allowed)
    finally:
        keeping.cancel()


async def test_claims_of_others_are_heard_while_they_do_not_name_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """All claims are heard from an older gateway's question on, and until it has gone."""
    monkeypatch.setattr(eligibility, "EVERY", 0.01)
    monkeypatch.setattr(eligibility, "QUIET", 0.0)
    setup = Setup()

    def all_are_heard() -> bool:
        return setup.claims.hears_all

    await setup.gateway("other", positions=True, buckets=True)
    await setup.support.begin()
    assert all_are_heard()  # an older gateway may have come just before
    setup.lease.fake_watches = True
    keeping = asyncio.create_task(setup.support.keep())
    try:
        await aeventually(lambda: not all_are_heard())
        bring = partial(setup.services.fake_link.fake_bring, HERE, reply=b"r")
        bring(headers=b"NATS/1.0\r\n%b\r\n%b\r\n\r\n" % (READS_POSITIONS, NAMES_BUCKETS))
        assert not all_are_heard()
        client = FakeClient(setup.services)
        await setup.gateway("old", positions=True)
        bring(headers=b"NATS/1.0\r\n%b\r\n\r\n" % READS_POSITIONS)
        assert all_are_heard()
        await aeventually(lambda: client.fake_jobs)  # a claim may have been missed
        client.fake_jobs.pop().close()
        looks = len(setup.services.fake_inbox.asked)
        await aeventually(lambda: len(setup.services.fake_inbox.asked) > looks + 20)
        assert all_are_heard()
        messages = setup.services.fake_inbox.messages["KV_MQTT_gateways"]
        messages[:] = [one for one in messages if not one.subject.endswith(".old")]
        await aeventually(lambda: not all_are_heard())
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
    monkeypatch.setattr(eligibility, "EVERY", 0.01)
    monkeypatch.setattr(eligibility, "QUIET", 0.0)
    setup = Setup()

    def all_are_heard() -> bool:
        return setup.claims.hears_all

    await setup.support.begin()
    keeping = asyncio.create_task(setup.support.keep())
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


@pytest.mark.parametrize(
    ("wanted", "retention", "used"),
    [("never", "limits", False), ("auto", "interest", False), ("auto", "limits", True), ("always", "limits", True)],
)
def test_whether_a_gateway_has_a_shared_reader(wanted: str, retention: str, used: bool) -> None:
    """Nobody may acknowledge for a stream that removes what all have acknowledged."""
    settings = cast("Settings", FakeReaderSettings(wanted))
    assert is_wanted(settings, {"retention": retention}) is used
