# SPDX-License-Identifier: Apache-2.0
"""What an ended subscription has left in flight is read again at the next connection, and an answer is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mqtt_nats.codec import Publish, Unsubscribe
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.rawclient import RawClient
from tests.integration.conftest import Connector, Stored
from tests.integration.test_lowering import come, completing

pytestmark = pytest.mark.anyio

READ = "$JS.API.STREAM.MSG.GET.$MQTT_msgs"


@pytest.fixture
async def local(proxy: NatsProxy, gateway_factory: GatewayFactory) -> AsyncIterator[Gateway]:
    """A gateway behind the proxy."""
    gateway = gateway_factory(proxy.url, start=False)
    await asyncio.to_thread(gateway.start)
    yield gateway
    await asyncio.to_thread(gateway.term)


async def left(connect: Connector, name: str, stored: Stored, local: Gateway, qos: int, ended: bool) -> list[Publish]:
    """A client has got three messages and completed none, has unsubscribed or not, and is gone."""
    client = await connect(name, clean=False, to=local)
    await client.subscribe(name, qos=qos)
    await client.subscribe("another", qos=1)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver_all(name, [b"1", b"2", b"3"], qos)
    found = await client.messages(3)
    if ended:
        await client.unsubscribe(name)
    client.drop()
    await stored.detached(name)
    return found


async def resumed(connect: Connector, name: str, local: Gateway, proxy: NatsProxy, nth: int) -> RawClient:
    """Resume the session when an answer was lost: the client may have to connect once more."""
    lost = proxy.set("answer", READ, Action.DROP, nth)
    client = await connect(name, clean=False, to=local)
    await asyncio.wait_for(lost.sprung.wait(), 10)
    await client.expect_closed()
    return await connect(name, clean=False, to=local)


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_what_was_sent_is_completed(
    connect: Connector, name: str, stored: Stored, proxy: NatsProxy, local: Gateway, nth: int, qos: int
) -> None:
    """[MQTT-3.10.4-3] (3.1.1): the client may have it as received."""
    before = await left(connect, name, stored, local, qos, ended=True)
    client = await resumed(connect, name, local, proxy, nth)
    async with completing(client) as found:
        await come(found, b"1", b"2", b"3")
        assert [(one.packet_id, one.dup) for one in found] == [(one.packet_id, True) for one in before]
        await stored.settled(name)


@pytest.mark.long
@pytest.mark.parametrize("qos", [1, 2])
async def test_what_was_sent_before_is_completed(
    connect: Connector, name: str, stored: Stored, proxy: NatsProxy, local: Gateway, qos: int
) -> None:
    """[MQTT-3.10.4-3] (3.1.1): the subscription ends at the next connection, before anything of it is acknowledged."""
    before = await left(connect, name, stored, local, qos, ended=False)
    client = await resumed(connect, name, local, proxy, 3)
    client.send(Unsubscribe(99, (name,)))
    async with completing(client) as found:
        await come(found, b"1", b"2", b"3")
        assert [(one.packet_id, one.dup) for one in found] == [(one.packet_id, True) for one in before]
        await stored.settled(name)
