# SPDX-License-Identifier: Apache-2.0
"""How often a gateway attempts to serve a tenant that cannot be served, and what it says."""

import asyncio
import logging

import anyio
import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.accounts import TenantSettings
from mqtt_nats.config.settings import Settings
from mqtt_nats.control.server import Powers
from mqtt_nats.gateway import tenants
from mqtt_nats.gateway.account import Tenant
from mqtt_nats.gateway.tenants import TENANT_RETRY_FIRST_S, TENANT_RETRY_MOST_S, TENANTS_WAIT_MOST_S, Tenants
from tests.harness.doubles import stands_for

ATTEMPTS = 8
ATTEMPTED: list[str] = []
LEFT: list[str] = []


@stands_for(Tenant)
class FakeTenant:
    """Stands for `Tenant`: an account to which there is no way."""

    def __init__(self, name: str, *_: object) -> None:
        self.name, self.broker = name, None

    async def connect(self, stop: anyio.Event) -> bool:
        ATTEMPTED.append(self.name)
        if len(ATTEMPTED) == 3:
            raise ValueError("a text that may quote a password")
        raise StartupError(f"tenant {self.name}: no server answers")

    async def disconnect(self) -> None:
        LEFT.append(self.name)


async def test_attempts_become_rare_and_each_reason_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    enough, pause = asyncio.Event(), asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == ATTEMPTS:
            enough.set()
            await asyncio.Event().wait()
        await pause(0)

    async def served(self: Tenants, *_: object) -> None:
        self.served[""] = self.own

    ATTEMPTED.clear()
    LEFT.clear()
    monkeypatch.setattr(tenants, "Tenant", FakeTenant)
    monkeypatch.setattr(Tenants, "_open", served)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    caplog.set_level(logging.WARNING)
    settings = Settings(nats_user="own", tenants={"acme": TenantSettings(nats_user="acme")})
    found = Tenants(settings, lambda: None, list)
    assert found.refused == {"acme": "it is being connected"}
    async with asyncio.TaskGroup() as tasks:
        await found.begin(tasks, Powers({}, None), lambda: None, lambda tenant: None, anyio.Event())
        assert found.refused == {"acme": "no server answers"}
        await enough.wait()
        found.settle()
    assert waits == [
        TENANT_RETRY_FIRST_S,
        2 * TENANT_RETRY_FIRST_S,
        4 * TENANT_RETRY_FIRST_S,
        8 * TENANT_RETRY_FIRST_S,
        TENANT_RETRY_MOST_S,
        TENANT_RETRY_MOST_S,
        TENANT_RETRY_MOST_S,
        TENANT_RETRY_MOST_S,
    ]
    assert len(LEFT) == ATTEMPTS
    lines = [one.getMessage() for one in caplog.records if "is not served" in one.getMessage()]
    assert lines[0] == lines[2] == "tenant acme is not served, its clients are refused: no server answers"
    assert "ValueError" in lines[1]
    assert "password" not in lines[1]
    assert len(lines) == 3


async def test_a_tenant_that_takes_long_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while its streams are restored."""

    async def connect(self: FakeTenant, stop: anyio.Event) -> bool:
        await stop.wait()
        return False

    async def served(self: Tenants, *_: object) -> None:
        self.served[""] = self.own

    assert TENANTS_WAIT_MOST_S >= 30
    monkeypatch.setattr(tenants, "TENANTS_WAIT_MOST_S", 0.01)
    monkeypatch.setattr(tenants, "Tenant", FakeTenant)
    monkeypatch.setattr(FakeTenant, "connect", connect)
    monkeypatch.setattr(Tenants, "_open", served)
    settings = Settings(nats_user="own", tenants={"acme": TenantSettings(nats_user="acme")})
    found, stop = Tenants(settings, lambda: None, list), anyio.Event()
    async with asyncio.TaskGroup() as tasks:
        await found.begin(tasks, Powers({}, None), lambda: None, lambda tenant: None, stop)
        assert found.refused == {"acme": "it is being connected"}
        stop.set()
