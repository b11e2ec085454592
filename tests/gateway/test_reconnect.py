# SPDX-License-Identifier: Apache-2.0
"""After NATS was lost: when what was sent again has been handled."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from mqtt_nats.backbone import retry as patience
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.client.account import Account
from mqtt_nats.client.client import Client
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway import reconnect as recovery
from mqtt_nats.gateway.account import Tenant
from mqtt_nats.gateway.broker import Broker
from mqtt_nats.lifecycle.lease import Lease
from tests.delivery.fakes import FakeDeliveryServices, FakeReceiver, as_receiver
from tests.harness.doubles import stands_for
from tests.harness.waiting import aeventually
from tests.ingress.fakes import FakeIngress, FakePublishingServices
from tests.sessions.fakes import FakeSide


@stands_for(NatsConnection)
class FakeSlowLink:
    """Stands for `NatsConnection`, whose server answers after some fences, or is lost after some."""

    def __init__(self, fences: int, lost: bool) -> None:
        self.wire: object | None = object()
        self.fake_fences = fences
        self.fake_lost = lost

    async def fence(self) -> None:
        self.fake_fences -= 1
        if self.fake_fences:
            raise TimeoutError("a test")
        if self.fake_lost:
            self.wire = object()  # and there is another connection already
            raise TimeoutError("a test")


@stands_for(Lease)
class FakeLease:
    """Stands for `Lease`, which is to be renewed."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()


@stands_for(Account)
class FakeAccount:
    """Stands for `Account`, whose connection to NATS was lost."""

    def __init__(self) -> None:
        self.services = FakePublishingServices()
        self.registry = self.services.registry
        self.ingress = FakeIngress(self.services)
        self.lease = FakeLease()


@stands_for(Broker)
class FakeBroker:
    """Stands for `Broker`, which serves an account."""

    def __init__(self) -> None:
        self.account = FakeAccount()


@pytest.mark.parametrize("fences", [1, 3])
@pytest.mark.parametrize("lost", [True, False])
async def test_a_server_that_answers_late_is_waited_for(fences: int, lost: bool) -> None:
    """Nothing begins where recovery gives up while the connection lives."""
    link = FakeSlowLink(fences, lost)
    assert await recovery._passed(cast(NatsConnection, link)) is not lost
    assert not link.fake_fences


async def test_a_reconnect_is_known_before_the_connection_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the records of groups' messages would be removed, whose acknowledgements a killed server has forgotten."""
    tenant = Tenant("", Settings(), lambda: None)
    broker = FakeBroker()
    services = broker.account.services
    tenant.broker, tenant.store, tenant.inbox = cast(Broker, broker), services.nats.store, services.nats.inbox
    online: list[bool] = []
    monkeypatch.setattr(services.nats, "relink", lambda: online.append(tenant.link.online))
    await tenant._online()
    assert online == [False]
    assert tenant.link.online
    (recovering,) = services.tasks.fake_spawned
    recovering.cancel()
    await asyncio.wait([recovering])


@pytest.mark.parametrize("owner", [True, False])
@pytest.mark.parametrize("durable", [True, False])
async def test_a_session_that_is_here_still_goes_on(
    monkeypatch: pytest.MonkeyPatch, owner: bool, durable: bool
) -> None:
    """New messages of others wait: another gateway may send them."""
    client = FakeReceiver(FakeDeliveryServices())
    client.services.registry.unchecked.add(client)
    done: list[object] = []

    async def still_owner(_: Client) -> bool:
        return owner

    async def go_on(_: Client, side: FakeSide) -> None:
        done.append(side)

    monkeypatch.setattr(recovery, "still_owner", still_owner)
    monkeypatch.setattr(recovery, "go_on", go_on)
    if durable:
        client.durable_side = FakeSide(client)
    await recovery._check(as_receiver(client))
    assert done == ([client.durable_side] if owner and durable else [])
    assert (client in client.services.registry.unchecked) is not owner


class Advisories:
    """A gateway that hears which consumers are deleted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        account: Any = FakeAccount()
        account.gaps, account.presence = Nothing(), Nothing()
        self.services = account.services
        self.live = FakeLive()
        self.client = FakeReceiver(FakeDeliveryServices())
        self.side = self.client.durable_side = FakeSide(self.client)
        self.services.registry.attached["name"] = self.client
        self.done: list[str] = []
        for name in ("check_dormant", "write_changed_record"):
            monkeypatch.setattr(recovery, name, self._note(name))
        monkeypatch.setattr(recovery, "MEND_AFTER_S", 0.0)
        recovery.register(account, cast("Any", self.live))

    def _note(self, name: str) -> Any:
        async def noted(client: object, side: object) -> None:
            assert (client, side) == (self.client, self.side)
            self.done.append(name)

        return noted

    def deleted(self, name: str) -> None:
        """Bring the advisory that a consumer was deleted."""
        link = self.services.fake_link
        (sid,) = [sid for sid, one in link.fake_subjects.items() if one == recovery.DELETED]
        link.handlers[sid](recovery.DELETED[:-1] + name.encode(), b"", b"", b"")


class Nothing:
    """In place of what is told of a new connection to NATS."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class FakeLive:
    """In place of `SharedReaderSessions`: whether the reader is to be created again."""

    def __init__(self) -> None:
        self.reader = self
        self.name = "reader"
        self.fake_broken = 0

    def broken(self) -> None:
        self.fake_broken += 1


async def test_deleted_consumers_of_a_session_are_created_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that are deleted before the check are found by it."""
    bench = Advisories(monkeypatch)
    for _ in range(2):
        bench.deleted("name")
    await asyncio.sleep(0.01)
    assert len(bench.client.fake_jobs) == 1
    await bench.client.fake_work()
    assert bench.done == ["check_dormant", "write_changed_record"]
    bench.deleted("name")
    await aeventually(lambda: len(bench.client.fake_jobs) == 1)
    await bench.client.fake_work()
    assert bench.live.fake_broken == 0


async def test_a_deleted_reader_is_created_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Advisories(monkeypatch)
    bench.deleted("reader")
    bench.deleted("of nobody")
    assert (bench.live.fake_broken, bench.client.fake_jobs) == (1, [])
    bench.client.durable_side = None
    bench.deleted("name")
    assert bench.client.fake_jobs == []


async def test_sessions_that_wait_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their consumers, or the stream of PUBRELs, have no leader, and get none."""
    account = FakeAccount()
    services = FakeDeliveryServices()
    clients = [FakeReceiver(services, f"client {number}") for number in range(recovery.SESSIONS_CHECKED_AT_ONCE * 3)]
    account.registry.clients = services.registry.clients
    waiting = {client.client_id for client in clients[: recovery.SESSIONS_CHECKED_AT_ONCE]}
    checked: list[str] = []
    stuck, others = asyncio.Event(), asyncio.Event()

    async def check(client: Client) -> None:
        if client.client_id in waiting:
            await stuck.wait()
        checked.append(client.client_id)
        if len(checked) == recovery.SESSIONS_CHECKED_AT_ONCE * 2:
            others.set()

    monkeypatch.setattr(recovery, "_check", check)
    monkeypatch.setattr(patience, "UNANSWERED_PLACE_MOST_S", 0.05)
    recovery._check_all(cast(Account, account))
    tasks = [asyncio.create_task(job) for client in clients for job in client.fake_jobs]
    async with asyncio.timeout(10):
        await others.wait()
        stuck.set()
        await asyncio.gather(*tasks)
    assert len(checked) == recovery.SESSIONS_CHECKED_AT_ONCE * 3


async def test_a_connection_that_is_lost_is_not_waited_for() -> None:
    link = FakeSlowLink(1, False)
    link.wire = None
    assert not await recovery._passed(cast(NatsConnection, link))
