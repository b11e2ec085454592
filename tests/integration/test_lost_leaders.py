# SPDX-License-Identifier: Apache-2.0
"""Requests that a leader had when it went: the next advisory has them done again; docs/internals/backbone.md."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from mqtt_nats.codec import Publish, Will
from mqtt_streams.shared import CONSUMER_PREFIX, group_hash
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.integration.conftest import Stored

pytestmark = pytest.mark.anyio

ELECTED = "$JS.EVENT.ADVISORY.CONSUMER.LEADER_ELECTED."

ADVISORY_S = 0.8
"""Seconds between two advisories. None comes in the moment in which a timer of whole seconds fires: a timer that is on
its way to a request that is given up comes again half a minute later."""

PATIENCE = 20.0
"""Seconds, fewer than those after which JetStream or the gateway does it by itself: 30 and more."""


@pytest.fixture
async def proxy(nats_server: NatsServer) -> AsyncIterator[NatsProxy]:
    """Between the gateway and nats-server."""
    between = NatsProxy(nats_server.port, lambda: None)
    await between.start()
    yield between
    await between.close()


@pytest.fixture
async def local(proxy: NatsProxy, gateway_factory: GatewayFactory) -> AsyncIterator[Gateway]:
    gateway = gateway_factory(proxy.url, start=False)
    yield gateway
    await asyncio.to_thread(gateway.term)


async def come(stored: Stored, what: str, *clients: RawClient) -> Publish:
    """The next message to one of the clients, while advisories say that ``what`` has a new leader."""
    waiting = [asyncio.create_task(client.messages(1, PATIENCE)) for client in clients]
    done: set[asyncio.Task[list[Publish]]] = set()
    while not done:
        await stored.nats.publish(f"{ELECTED}{what}", b"{}")
        done, _ = await asyncio.wait(waiting, timeout=ADVISORY_S, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    (found,) = [one for task in done for one in await task]
    return found


@pytest.mark.long
@pytest.mark.parametrize("qos", [1, 2])
async def test_a_message_of_a_group(
    local: Gateway, gateway: Gateway, proxy: NatsProxy, stored: Stored, name: str, qos: int
) -> None:
    """The message comes to some member, and what members of both gateways have for long comes to nobody else."""
    await asyncio.to_thread(local.start)
    async with (
        await RawClient5.connect5(local.port, f"near-{name}", clean=False, session_expiry_interval=60) as near,
        await RawClient5.connect5(gateway.port, f"far-{name}", receive_maximum=1) as far,
        await RawClient.connect(gateway.port, f"publisher-{name}") as publisher,
    ):
        await near.subscribe(f"$share/{name}/{name}", qos=qos)
        await publisher.deliver(name, b"near", qos)
        (first,) = await near.messages(1)
        trap = proxy.set("down", f"$MQTT.msgs.{name}", Action.DROP)
        await publisher.deliver(name, b"lost", qos)
        await trap.sprung.wait()
        await far.subscribe(f"$share/{name}/{name}", qos=1)
        held = [first]
        for number in range(100):  # until the other member has one, too
            await publisher.deliver(name, b"%d" % number, 1)
            tasks = [asyncio.create_task(one.messages(1, PATIENCE)) for one in (near, far)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            held += [one for task in tasks if task.done() for one in await task]
            if tasks[1].done():
                break
        consumer = f"{CONSUMER_PREFIX}{group_hash(name, name)}"
        again = await come(stored, f"$MQTT_msgs.{consumer}", near, far)
        assert (again.payload, again.dup) == (b"lost", False)
        await near.quiet()
        await far.quiet()
        assert max(Counter(one.payload for one in held).values()) == 1

        async def as_before() -> bool:
            info = await stored.js.consumer_info("$MQTT_msgs", consumer)
            return bool(info.config.ack_wait == 30)

        await aeventually(as_before)


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("lost", ["with the leader", "with the connection"])
async def test_an_acknowledgement_of_a_group(
    local: Gateway, gateway: Gateway, proxy: NatsProxy, stored: Stored, name: str, clean: bool, lost: str
) -> None:
    """The acknowledgement is repeated: no member gets again what a client has acknowledged."""
    await asyncio.to_thread(local.start)
    consumer = f"{CONSUMER_PREFIX}{group_hash(name, name)}"
    async with (
        await RawClient.connect(local.port, f"near-{name}", clean=clean) as near,
        await RawClient.connect(gateway.port, f"far-{name}") as far,
        await RawClient.connect(gateway.port, f"publisher-{name}") as publisher,
    ):
        await near.subscribe(f"$share/{name}/{name}", qos=1)
        trap = proxy.set("up", f"$JS.ACK.$MQTT_msgs.{consumer}.", Action.DROP)
        await publisher.deliver(name, b"once", 1)
        await near.receive(name, b"once")
        await trap.sprung.wait()
        await far.subscribe(f"$share/{name}/{name}", qos=1)
        assert (await stored.js.consumer_info("$MQTT_msgs", consumer)).num_ack_pending == 1
        if lost == "with the leader":
            await stored.nats.publish(f"{ELECTED}$MQTT_msgs.{consumer}", b"{}")
        else:
            proxy.cut()

        async def acknowledged() -> bool:
            info = await stored.js.consumer_info("$MQTT_msgs", consumer)
            assert not info.num_redelivered
            return bool(info.num_ack_pending == 0)

        await aeventually(acknowledged)
        await near.quiet()
        await far.quiet()


async def test_a_timer(
    local: Gateway, proxy: NatsProxy, stored: Stored, gateway_factory: GatewayFactory, name: str
) -> None:
    """The request for the next one is lost, which waits for half a minute."""
    lost = proxy.set("up", "$JS.API.CONSUMER.MSG.NEXT.$MQTT_timers.gateways", Action.DROP, nth=2)
    await asyncio.to_thread(local.start)
    await lost.sprung.wait()
    async with await RawClient.connect(local.port, f"watcher-{name}") as watcher:
        await watcher.subscribe(f"wills/{name}", qos=1)
        will = Will(f"wills/{name}", b"dead", 1, False, {"will_delay_interval": 1})
        dying = await RawClient5.connect5(local.port, f"dying-{name}", will=will, session_expiry_interval=60)
        dying.drop()
        assert (await come(stored, "$MQTT_timers.gateways", watcher)).payload == b"dead"
