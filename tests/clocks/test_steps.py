# SPDX-License-Identifier: Apache-2.0
"""A clock is set, by an hour and a half: what has a time counts from when it began, not by the clock that was set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import Any

import nats
import pytest
from nats.js.client import JetStreamContext

from mqtt_nats.codec import Will
from tests.clocks.test_clocks import PATIENCE, there
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import wall_clock
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer, ProcessNatsServer
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.lifecycle.watchful import WATCHFUL

STEP = 5_400
"""Seconds."""

EARLY = 1.0
"""Seconds by which something may be early: JetStream counts in quarters, and the look at its time takes a moment."""

BOTH = pytest.mark.parametrize("step", [STEP, -STEP], ids=["ahead", "back"])

Connect = Callable[..., Awaitable[RawClient5]]

pytestmark = pytest.mark.skipif(bool(wall_clock.obstacle()), reason=wall_clock.obstacle() or "-")


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
async def js(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(server.url)
    yield client.jetstream()
    await client.close()


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connect clients, and break what is left of them."""
    clients: list[RawClient5] = []

    async def connect(gateway: Gateway, name: str, **options: Any) -> RawClient5:
        clients.append(await RawClient5.connect5(gateway.port, name, **options))
        return clients[-1]

    yield connect
    for client in clients:
        client.drop()


@pytest.fixture
def gateway(server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(server, "--gateway-lease", "4", module=WATCHFUL)


@pytest.fixture
def second(server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(server, "--gateway-lease", "4", module=WATCHFUL)


def set_clock(pid: int, seconds: int) -> None:
    """Set the clock of a process."""
    try:
        wall_clock.step(pid, seconds)
    except OSError as error:
        pytest.skip(f"the clock of a process cannot be set here: {error}")


async def deadlines(gateway: Gateway, js: JetStreamContext, connect: Connect, then: Callable[[], None]) -> None:
    """What has a deadline has it in time; ``then`` is called just before the clients leave."""
    watch = await connect(gateway, "watch")
    await watch.subscribe("will/#", qos=1)
    clients = {}
    for name, delay, expiry in (("delayed", 3, 1000), ("long", 1000, 1000), ("session", 1000, 3)):
        will = Will(f"will/{name}", b"x", 1, False, {"will_delay_interval": delay})
        clients[name] = await connect(gateway, name, session_expiry_interval=expiry, will=will)
    waiting = await connect(gateway, "waiting", session_expiry_interval=1000)
    await waiting.subscribe("expiring/#", qos=1)
    await waiting.disconnect5()
    then()
    began = time.monotonic()
    publisher = await connect(gateway, "publisher")
    for payload, interval in ((b"short", 2), (b"long", 1000)):
        publisher.publish5("expiring/x", payload, 1, packet_id=1, message_expiry_interval=interval)
        await publisher.packet()
    for client in clients.values():
        client.drop()
    found = {}
    for _ in range(2):
        (publish,) = await watch.messages(1, PATIENCE)
        await watch.complete(publish)
        found[bytes(publish.key[2:])] = time.monotonic() - began
    assert set(found) == {b"will/delayed", b"will/session"}
    assert min(found.values()) > 3 - EARLY, "too early"

    async def ended() -> bool:
        return not await there(js, "session")

    await aeventually(ended, PATIENCE)
    for name in ("delayed", "long"):
        assert await there(js, name), "its session ended early"
    waiting = await connect(gateway, "waiting", clean=False, session_expiry_interval=1000)
    assert waiting.session_present
    (publish,) = await waiting.messages(1)
    assert publish.payload == b"long", "what has expired"
    left = (publish.properties or {})["message_expiry_interval"]
    assert 900 < left <= 1000, "what it has left"
    await waiting.complete(publish)
    await waiting.quiet()
    await watch.quiet()


@BOTH
async def test_the_gateways_clock_is_set(gateway: Gateway, js: JetStreamContext, connect: Connect, step: int) -> None:
    """Nothing has looked at nats-server's clock since: it is as if nobody had set this one."""
    stays = await connect(gateway, "stays")
    await deadlines(gateway, js, connect, lambda: set_clock(gateway.pid, step))
    await stays.quiet()
    assert "the clock of nats-server was set" not in gateway.log
    assert "considered dead" not in gateway.log


@BOTH
async def test_the_servers_clock_is_set(
    server: NatsServer, gateway: Gateway, js: JetStreamContext, connect: Connect, step: int
) -> None:
    """The next look finds out; what begins then has its time."""
    assert isinstance(server, ProcessNatsServer)
    stays = await connect(gateway, "stays")
    set_clock(server.process.pid, step)
    told = f"the clock of nats-server was set {STEP} s {'ahead' if step > 0 else 'back'}"
    await aeventually(lambda: told in gateway.log, PATIENCE)
    await deadlines(gateway, js, connect, lambda: None)
    await stays.quiet()


@BOTH
async def test_a_session_that_waits_is_there_after_a_step(
    gateway: Gateway, second: Gateway, js: JetStreamContext, connect: Connect, step: int
) -> None:
    """Both gateways' clocks are set, one after the other; neither takes the other for dead."""
    client = await connect(gateway, "client", session_expiry_interval=20)
    watch = await connect(second, "watch")
    await client.subscribe("x", qos=1)
    await client.disconnect5()
    set_clock(gateway.pid, step)
    await watch.deliver("x", b"1", 1)
    set_clock(second.pid, -step)
    client = await connect(second, "client", clean=False, session_expiry_interval=20)
    assert client.session_present
    await client.complete(await client.message("x", b"1"))
    await watch.quiet()
    assert "considered dead" not in gateway.log + second.log


async def test_a_clock_of_a_process_is_set(server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """The tests here are about that: the log of a gateway has the time that it sees."""
    gateway = gateway_factory(server, "--log-level", "debug")
    set_clock(gateway.pid, STEP)
    async with await RawClient.connect(gateway.port, "one") as client:
        await client.quiet()
    await asyncio.to_thread(gateway.term)
    last = [line for line in gateway.log.splitlines() if line.startswith("20")][-1]
    seen = datetime.strptime(last[:19], "%Y-%m-%d %H:%M:%S").timestamp()
    assert abs(seen - time.time() - STEP) < STEP / 2, last
