# SPDX-License-Identifier: Apache-2.0
"""A tenant that cannot be served is refused alone, and served when it can be."""

import asyncio
import logging
from typing import Any

import nats
import pytest
from nats.js.api import StreamConfig

from mqtt_nats.access import passwords
from mqtt_nats.access.passwords import set_password
from mqtt_nats.admin.metrics import collect
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl.commands import gateways
from mqtt_nats.ctl.nats_connection import connected
from mqtt_nats.gateway import tenants
from tests.access.test_passwords import CHEAP
from tests.admin.fakes import FakeListener, as_listener
from tests.conftest import NatsFactory
from tests.harness import raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, connect, field
from tests.harness.raw5 import CONNACK, Raw5
from tests.harness.waiting import eventually
from tests.integration.inprocess import PATIENCE, Running, running
from tests.integration.test_tenants import ACCOUNTS, CONFIG, given

UNAVAILABLE, UNAVAILABLE_OLD = 0x88, 3
USERS = {"joe": None, "ann": "acme", "dan": "duck"}


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory(config=CONFIG)


@pytest.fixture
def more(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Users of each tenant, and a listener for all, one of `acme`."""
    monkeypatch.setattr(passwords, "DEVICE_COST", CHEAP)
    for user, tenant in USERS.items():
        set_password(tmp_path / "passwords", user, "pw", tenant)
    listeners = ({"listen": "127.0.0.1:0"}, {"listen": "127.0.0.1:0", "tenant": "acme", "allow_anonymous": True})
    return {"password_file": tmp_path / "passwords", "listeners": listeners}


def packet(user: str, **more: Any) -> bytes:
    return raw5.connect(f"client of {user}", flags=0xC0, tail=field(user) + field("pw"), **more)


def admitted(port: int, data: bytes, user: str) -> bool:
    with Raw5(port, patience=PATIENCE) as client:
        client.send(data)
        client.answer(CONNACK, reason=0)
        client.deliver("kept", user.encode(), flags=1)
        client.subscribed(("kept", 1))
        return client.receive_message().payload == user.encode()


def seen(found: Running, server: NatsServer) -> tuple[dict[str, str], str, str]:
    """Tenants that are refused, as `ctl status` says; its text; the metrics."""

    async def ask() -> dict[str, Any]:
        async with connected(Settings(nats=(server.url,), **ACCOUNTS["own"])) as inbox:  # type: ignore[arg-type]
            return await gateways.status(inbox, gateways.Where())

    fake = FakeListener(found.gateway.settings)
    fake.gateway = found.gateway
    assert found.loop is not None
    text, _ = asyncio.run_coroutine_threadsafe(collect(as_listener(fake), False, ""), found.loop).result(PATIENCE)
    status = asyncio.run(ask())
    return status["gateways"][0]["refused_tenants"], gateways.shown(status), text.decode()


def spoil(server: NatsServer, account: str, *, mend: bool = False) -> None:
    """Give an account a stream that no gateway can use, or take it away."""

    async def run() -> None:
        login = ACCOUNTS[account]
        client = await nats.connect(server.url, user=login["nats_user"], password=login["nats_password"])
        if mend:
            await client.jetstream().delete_stream("MQTT")
        else:
            await client.jetstream().add_stream(StreamConfig(name="MQTT", subjects=["$MQTT.>"]))
        await client.close()

    asyncio.run(run())


def test_a_changed_stream_of_one_tenant(
    server: NatsServer, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Everybody else is served. Its clients are told so at each listener, until it is served, without a new start."""
    monkeypatch.setattr(tenants, "TENANT_RETRY_FIRST_S", 0.2)
    monkeypatch.setattr(tenants, "TENANT_RETRY_MOST_S", 0.2)
    caplog.set_level(logging.INFO)
    spoil(server, "acme")
    with running(**given(server, **more)) as found:
        shared, own = (one.port for one in found.addresses)
        assert admitted(shared, packet("joe"), "joe")
        assert admitted(shared, packet("dan"), "dan")
        raw5.refused(shared, packet("ann"), UNAVAILABLE)
        raw5.refused(own, raw5.connect("anybody"), UNAVAILABLE)
        with Raw(own) as client:
            client.send(connect("old"))
            assert client.expect(CONNACK).body == bytes([0, UNAVAILABLE_OLD])
        refused, status, metrics = seen(found, server)
        assert list(refused) == ["acme"]
        assert "MQTT" in refused["acme"]
        assert f"acme, at {found.gateway.identity}" in status
        assert 'mqtt_nats_tenants_refused{name="acme",worker="1"} 1.0' in metrics
        assert 'tenant="duck"' in metrics
        (line,) = [one.message for one in caplog.records if "acme is not served" in one.message]
        assert line.startswith("tenant acme is not served, its clients are refused: ")

        spoil(server, "acme", mend=True)
        eventually(lambda: admitted(own, raw5.connect("anybody"), "anybody"), PATIENCE)
        assert admitted(shared, packet("ann"), "ann")
        assert "tenant acme is served now" in caplog.messages
        refused, status, metrics = seen(found, server)
        assert not refused
        assert "not served" not in status
        assert "mqtt_nats_tenants_refused{" not in metrics
        assert found.gateway.tenants.accounts["acme"].lease.info["listen"] == [str(one) for one in found.addresses]


def test_an_account_that_refuses_the_gateway(server: NatsServer, more: dict[str, Any]) -> None:
    """Each gateway of the others starts, and ends in good order while it still attempts."""
    wrong = {"acme": {"nats_user": "acme", "nats_password": "x"}, "duck": ACCOUNTS["duck"]}
    with running(**{**given(server, **more), "tenants": wrong}) as found:
        shared, own = (one.port for one in found.addresses)
        assert admitted(shared, packet("dan"), "dan")
        raw5.refused(shared, packet("ann"), UNAVAILABLE)
        raw5.refused(own, raw5.connect("anybody"), UNAVAILABLE)
        refused, _, _ = seen(found, server)
        assert "refuses the credentials" in refused["acme"]


def test_one_tenant_learns_nothing_of_the_others(server: NatsServer, more: dict[str, Any]) -> None:
    spoil(server, "acme")

    async def ask() -> dict[str, Any]:
        async with connected(Settings(nats=(server.url,), **ACCOUNTS["duck"])) as inbox:  # type: ignore[arg-type]
            return await gateways.status(inbox, gateways.Where())

    with running(**given(server, **more)):
        (one,) = asyncio.run(ask())["gateways"]
        assert one["refused_tenants"] == {}
