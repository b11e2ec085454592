# SPDX-License-Identifier: Apache-2.0
"""What a start that fails, or is broken off, leaves behind."""

import asyncio
from typing import Any, cast

import anyio
import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.client.account import Account
from mqtt_nats.config.accounts import TenantSettings
from mqtt_nats.config.settings import Settings
from mqtt_nats.control.server import Powers
from mqtt_nats.gateway import tenants
from mqtt_nats.gateway.account import SameAccount, Tenant
from mqtt_nats.gateway.broker import Broker
from mqtt_nats.gateway.tenants import Tenants
from mqtt_nats.lifecycle.lease import Lease
from mqtt_streams.gateways import Entry, GatewayStore
from tests.gateway.test_tenants import FakeTenant
from tests.harness.doubles import stands_for

SETTINGS = Settings(nats_user="own", tenants={"acme": TenantSettings(nats_user="acme")})


async def begin(found: Tenants, stop: anyio.Event) -> None:
    async with asyncio.TaskGroup() as tasks:
        try:
            await found.begin(tasks, Powers({}, None), lambda: None, lambda tenant: None, stop)
        finally:
            found.settle()


async def test_an_own_account_that_cannot_be_served_gives_up_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[Tenant] = []

    async def refused(self: Tenants, *_: object) -> None:
        raise StartupError("the gateway cannot be registered in NATS")

    async def drop(tenant: Tenant) -> None:
        dropped.append(tenant)

    monkeypatch.setattr(Tenants, "_open", refused)
    monkeypatch.setattr(tenants, "_drop", drop)
    found = Tenants(SETTINGS, lambda: None, list)
    with pytest.RaisesGroup(pytest.RaisesExc(StartupError, match="registered")):
        await begin(found, anyio.Event())
    assert dropped == [found.own]


async def test_the_end_does_not_wait_for_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    async def served(self: Tenants, *_: object) -> None:
        self.served[""] = self.own

    async def connect(self: FakeTenant, stop: anyio.Event) -> bool:
        await asyncio.Event().wait()
        return True

    monkeypatch.setattr(Tenants, "_open", served)
    monkeypatch.setattr(tenants, "Tenant", FakeTenant)
    monkeypatch.setattr(FakeTenant, "connect", connect)
    stop = anyio.Event()
    stop.set()
    async with asyncio.timeout(10):
        await begin(Tenants(SETTINGS, lambda: None, list), stop)


async def test_two_tenants_of_one_account_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def served(self: Tenants, tenant: Tenant, *_: object) -> None:
        if tenant.name:
            raise SameAccount("tenant 'acme' has the account of the gateway")
        self.served[""] = self.own

    async def connect(self: FakeTenant, stop: anyio.Event) -> bool:
        return True

    monkeypatch.setattr(Tenants, "_open", served)
    monkeypatch.setattr(tenants, "Tenant", FakeTenant)
    monkeypatch.setattr(FakeTenant, "connect", connect)
    found = Tenants(SETTINGS, lambda: None, list)
    with pytest.RaisesGroup(pytest.RaisesExc(SameAccount)):
        await begin(found, anyio.Event())
    assert list(found.served) == [""]
    assert cast("dict[str, object]", found.accounts) == {}


@stands_for(GatewayStore)
class FakeStore:
    """Stands for `GatewayStore`: there is one gateway."""

    def __init__(self, identity: str) -> None:
        self.fake_entry = Entry(identity, 0.0, {}, 1, lapsed=False, reaper="")

    async def entries(self) -> list[Entry]:
        return [self.fake_entry]


@stands_for(Lease)
class FakeLease:
    """Stands for `Lease`."""

    def __init__(self, identity: str) -> None:
        self.store = FakeStore(identity)


@stands_for(Account)
class FakeAccount:
    """Stands for `Account`."""

    def __init__(self, identity: str) -> None:
        self.lease = FakeLease(identity)


@stands_for(Broker)
class FakeBroker:
    """Stands for `Broker`: of an account in which there is one gateway."""

    def __init__(self, identity: str) -> None:
        self.account = FakeAccount(identity)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ("b", "a", "tenant 'b' and tenant 'a' have"),
        ("a", "b", "tenant 'b' and tenant 'a' have"),
        ("", "a", "the gateway and tenant 'a' have"),
    ],
)
async def test_two_tenants_of_one_account_are_named_in_their_order(first: str, second: str, named: str) -> None:
    """Whichever is served first."""
    settings = Settings(nats_user="own", tenants={name: TenantSettings(nats_user="same") for name in "ba"})
    served, other = (Tenant(name, settings.of(name), lambda: None) for name in (first, second))

    broker: Any = FakeBroker(served.identity)
    other.broker = broker
    with pytest.raises(SameAccount, match=named):
        await other.look_for([served])
