# SPDX-License-Identifier: Apache-2.0
"""Consumers are set by whoever leaves a session or goes on with it, and by nobody else later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.aio.msg import Msg

from mqtt_nats.broker.keeping import FRESH
from mqtt_nats.broker.leaving import LEFT
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector5, Stored, position, until

WINDOW = 5
PAYLOADS = [b"%d" % number for number in range(4 * WINDOW)]
OPTIONS: dict[str, Any] = {"clean": False, "session_expiry_interval": 300, "receive_maximum": WINDOW}
RESET = "$JS.API.CONSUMER.RESET.$MQTT_msgs."


@pytest.fixture
async def proxy(nats_server: NatsServer) -> AsyncIterator[NatsProxy]:
    """Between the gateway that is late and nats-server."""
    between = NatsProxy(nats_server.port, lambda: None)
    await between.start()
    yield between
    await between.close()


@pytest.fixture
async def late(proxy: NatsProxy, gateway_factory: GatewayFactory) -> AsyncIterator[Gateway]:
    """A gateway whose words to nats-server are held up."""
    gateway = gateway_factory(proxy.url, start=False)
    await asyncio.to_thread(gateway.start)
    yield gateway
    await asyncio.to_thread(gateway.term)


async def take_all(client: RawClient5, stored: Stored, name: str, payloads: list[bytes], again: int) -> None:
    """Each comes once; the first ``again`` of them were sent before."""
    for number, payload in enumerate(payloads):
        (one,) = await client.messages(1)
        assert (one.payload, one.dup) == (payload, number < again)
        await client.complete(one)
    await client.quiet()
    await stored.settled(name)


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_gateway_that_has_left_a_session_sets_its_consumers_late(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy, qos: int
) -> None:
    """Whoever goes on waits for that, though the position is in order: what it has completed would come again."""
    client = await connect5(name, to=late, **OPTIONS)
    await client.subscribe(name, qos=qos)
    await stored.live(name)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(name, PAYLOADS, qos)
    await client.messages(WINDOW)
    trap = proxy.set("up", RESET, Action.HOLD)
    client.drop()
    await trap.sprung.wait()
    assert (await position(stored.js, name)).clean
    asked = await stored.nats.subscribe(f"{LEFT}*")
    await stored.nats.flush()
    client = await connect5(name, to=gateway, **OPTIONS)
    request = await asked.next_msg(timeout=30)
    assert request.data == name.encode()
    trap.release()
    await take_all(client, stored, name, PAYLOADS, WINDOW)


async def test_a_gateway_that_goes_on_with_a_session_sets_its_consumers_late(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """The position names it before it does, and who comes next waits for it."""
    client = await connect5(name, to=gateway, **OPTIONS)
    await client.subscribe(name, qos=1)
    former = (await stored.live(name)).gateway
    client.drop()
    await stored.detached(name)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(name, PAYLOADS, 1)
    trap = proxy.set("up", RESET, Action.HOLD)
    await connect5(name, to=late, **OPTIONS)
    await trap.sprung.wait()
    at = await position(stored.js, name)
    assert at.gateway not in ("", former)
    assert (at.clean, len(at.live)) == (True, 1)
    asked = await stored.nats.subscribe(LEFT + at.gateway)
    await stored.nats.flush()
    client = await connect5(name, to=gateway, **OPTIONS)
    await asked.next_msg(timeout=30)
    trap.release()
    await take_all(client, stored, name, PAYLOADS, 0)


async def test_a_gateway_that_hears_late_whose_the_session_is_sets_nothing(
    connect5: Connector5, name: str, stored: Stored, late: Gateway, proxy: NatsProxy
) -> None:
    """Somebody else may not have waited for it any longer."""
    resets: list[str] = []

    async def note(message: Msg) -> None:
        resets.append(message.subject)

    client = await connect5(name, to=late, **OPTIONS)
    await client.subscribe(name, qos=1)
    at = await stored.live(name)
    await stored.nats.subscribe(f"{RESET}>", cb=note)
    await stored.nats.flush()
    trap = proxy.set("answer", "$JS.API.STREAM.MSG.GET.$MQTT_sess", Action.HOLD)
    client.drop()
    await trap.sprung.wait()
    await asyncio.sleep(FRESH * 1.1)  # what is tested is that time passes
    trap.release()
    await stored.nats.request(LEFT + at.gateway, name.encode(), timeout=30)
    assert (await position(stored.js, name)).clean
    assert resets == []
    client = await connect5(name, to=late, **OPTIONS)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(name, PAYLOADS, 1)
    await take_all(client, stored, name, PAYLOADS, 0)
    assert len(resets) == 1


async def test_a_gateway_whose_write_was_answered_late_writes_again_before_it_sets_consumers(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """The answer says whose the session was when it was written."""
    client = await connect5(name, to=gateway, **OPTIONS)
    await client.subscribe(name, qos=1)
    await stored.live(name)
    client.drop()
    await stored.detached(name)
    writes: list[str] = []

    async def note(message: Msg) -> None:
        writes.append(message.subject.split(".")[1])  # "pos" or "API"

    await stored.nats.subscribe("$MQTT.pos.>", cb=note)
    await stored.nats.subscribe(f"{RESET}>", cb=note)
    await stored.nats.flush()
    trap = proxy.set("answer", "$MQTT.pos.", Action.HOLD)
    client = await connect5(name, to=late, **OPTIONS)
    await trap.sprung.wait()
    await asyncio.sleep(FRESH * 1.1)  # what is tested is that time passes
    trap.release()

    async def attached() -> None:
        assert "API" in writes

    await until(attached)
    assert writes[: writes.index("API")] == ["pos", "pos"]
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(name, PAYLOADS, 1)
    await take_all(client, stored, name, PAYLOADS, 0)
