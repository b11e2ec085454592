# SPDX-License-Identifier: Apache-2.0
"""A gateway that finds that it was taken for dead; one whose work on a dead one is interrupted."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.client.account import Account
from mqtt_nats.client.client import Client
from mqtt_nats.lifecycle import lease
from mqtt_nats.lifecycle.failover import publish_wills
from mqtt_nats.lifecycle.will import Wills
from mqtt_streams.api import RequestTimeout
from mqtt_streams.gateways import Entry
from tests.base.support import PATIENCE, Inside, running
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import eventually

KEPT = prop(SESSION_EXPIRY, 600)


def account_of(inside: Inside) -> Account:
    account = inside.gateway.account
    assert account is not None
    return account


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("durable", [True, False])
def test_a_client_of_whom_nobody_can_tell_is_let_go(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, version: int, durable: bool
) -> None:
    """Nothing is read from it any more, so it is not to stay connected."""

    async def unknown(client: Client) -> bool:
        return False

    monkeypatch.setattr(lease, "still_owner", unknown)
    with running(nats_server.url) as inside:
        with (
            Raw5.open(inside.ports[0], "x", KEPT if durable else b"")
            if version == 5
            else Raw.connected(inside.ports[0], "x", clean=not durable)
        ) as client:
            held = account_of(inside).lease
            assert held is not None
            inside.call(held._begin_anew)
            client.expect_closed()
        Raw.connected(inside.ports[0], "x").close()


def test_a_succession_that_is_interrupted_goes_on(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is its own when it tries again: wills come before clients are let in, sessions are dealt with."""
    server = nats_factory()
    dead = gateway_factory(server, "--name", "cellar")
    devices = [Raw5(dead.port) for _ in range(3)]
    for number, device in enumerate(devices):
        will = raw5.will(f"devices/{number}", "offline")
        device.send(raw5.connect(f"device-{number}", KEPT, flags=0x2C, tail=will))
        device.answer(raw5.CONNACK, reason=0)
        device.deliver(f"devices/{number}", b"online", flags=1)
    dead.kill()
    for device in devices:
        device.close()
    attempts: list[str] = []

    async def publish_later(wills: Wills, entry: Entry) -> int:
        attempts.append(entry.identity)
        if len(attempts) < 3:
            raise RequestTimeout("the connection is lost")
        return await publish_wills(wills, entry)

    monkeypatch.setattr(lease, "publish_wills", publish_later)
    with running(server.url, name="cellar") as inside:
        assert len(attempts) == 3
        with Raw5.open(inside.ports[0]) as watcher:
            watcher.send(raw5.subscribe(("devices/+", 1)))
            watcher.answer(raw5.SUBACK)
            assert sorted(watcher.message().payload for _ in devices) == [b"offline"] * 3
        own = account_of(inside).lease
        assert own is not None
        store = own.store

        def known() -> list[str]:
            return [
                one.identity for one in asyncio.run_coroutine_threadsafe(store.entries(), inside.loop).result(PATIENCE)
            ]

        eventually(lambda: attempts[0] not in known(), PATIENCE)
        for number in range(3):
            with Raw5.open(inside.ports[0], f"device-{number}", KEPT, clean=False) as back:
                assert back.present
                assert back.ping() == []
