# SPDX-License-Identifier: Apache-2.0
"""A gateway dies: another one publishes its wills, ends its regular sessions and sets the deadlines of the others."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats
import pytest

from mqtt_nats.codec import Disconnect, Subscription, Will
from mqtt_streams.gateway_subjects import LEFT
from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.integration.conftest import live
from tests.lifecycle.watchful import WATCHFUL

LEASE = 2
"""Seconds of the lease of the gateway that dies, and after which the others find it dead."""

SOON = 30.0
"""Seconds in which that is found and dealt with, on a slow machine."""

Connect = Callable[..., Awaitable[RawClient5]]


@pytest.fixture
def cluster(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> tuple[NatsServer, list[Gateway]]:
    """A nats-server, a gateway with a short lease, and two that soon find it dead."""
    server = nats_factory()
    return server, [gateway_factory(server, "--gateway-lease", str(LEASE), module=one) for one in ("", *[WATCHFUL] * 2)]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Connect 5.0 clients to a gateway."""
    clients: list[RawClient] = []

    async def connect(gateway: Gateway, client_id: str, **options: Any) -> RawClient5:
        client = await RawClient5.connect5(gateway.port, client_id, **options)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.drop()


async def watcher(connect: Connect, gateway: Gateway, name: str) -> RawClient5:
    """A client that sees all wills."""
    client = await connect(gateway, name)
    await client.subscribe5(Subscription("wills/#", 2))
    return client


async def seen(client: RawClient5, count: int, timeout: float = SOON) -> dict[str, tuple[int, bytes]]:
    """QoS and payload of the next ``count`` messages by their topics, each of which comes once."""
    found = {}
    for publish in await client.messages(count, timeout):
        await client.complete(publish)
        assert topic_of(publish) not in found, "a will was published twice"
        found[topic_of(publish)] = (publish.qos, publish.payload)
    return found


async def stored(server: NatsServer, stream: str, subject: str = ">") -> int:
    """Messages of a stream."""
    client = await nats.connect(server.url)
    try:
        info = await client.jetstream().stream_info(stream, subjects_filter=subject)
        return sum((info.state.subjects or {}).values())
    finally:
        await client.close()


async def test_wills_of_a_killed_gateway(cluster: tuple[NatsServer, list[Gateway]], connect: Connect) -> None:
    """Once, at every QoS, retained ones too, for receivers on every gateway. [MQTT-3.1.2-8] (3.1.1)"""
    server, (first, second, third) = cluster
    watchers = [await watcher(connect, second, "near"), await watcher(connect, third, "far")]
    old = await RawClient.connect(first.port, "old", will=Will("wills/old", b"old", 1, False))
    for qos in range(3):
        properties: Any = {"content_type": "text/plain", "user_property": [("why", "dead")]}
        will = Will(f"wills/{qos}", b"%d" % qos, qos, qos == 1, properties)
        await connect(first, f"client-{qos}", will=will)
    left = await connect(first, "left", will=Will("wills/left", b"", 1, False))
    left.send(Disconnect())
    await left.expect_closed()
    first.kill()
    expected = {"wills/0": (0, b"0"), "wills/1": (1, b"1"), "wills/2": (2, b"2"), "wills/old": (1, b"old")}
    for each in watchers:
        assert await seen(each, 4) == expected

    async def dealt_with() -> bool:
        """Only the sessions of the watchers are left."""
        return await stored(server, "$MQTT_wills") == 0 and await stored(server, "$MQTT_sess") == 2

    await aeventually(dealt_with)
    for each in watchers:
        await each.quiet()
    late = await connect(second, "late")
    await late.subscribe5(Subscription("wills/#", 1))
    kept = await late.receive("wills/1", b"1", retain=True)
    assert kept.properties == {"content_type": "text/plain", "user_property": [("why", "dead")]}
    old.drop()


@pytest.mark.parametrize("kept", [None, False, True], ids=["", "not retained yet", "retained"])
@pytest.mark.parametrize("qos", [1, 2])
async def test_a_will_that_was_published_before_the_gateway_died(
    cluster: tuple[NatsServer, list[Gateway]], connect: Connect, qos: int, kept: bool | None
) -> None:
    """It had yet to be removed: nobody gets it twice, however long ago that was, but where it had to be retained yet.

    [MQTT-4.3.3-2] [MQTT-3.1.2-17] (3.1.1)
    """
    server, (first, second, _) = cluster
    watching = await watcher(connect, second, "near")
    await connect(first, "client", will=Will("wills/client", b"x", qos, kept is not None))
    client = await nats.connect(server.url)
    try:
        js = client.jetstream()
        record = await js.get_last_msg("$MQTT_wills", f"$MQTT.wills.*.{name_hash('client')}")
        epoch = (record.headers or {})["Nmqtt-Epoch"]
        first.kill()
        # What it has sent to those who subscribe came so long ago that their gateways do not know any more.
        headers = {"Nmqtt-Pub": str(qos), "Nats-Msg-Id": f"will-{epoch}", "Nmqtt-Id": "1"}
        await js.publish("$MQTT.msgs.wills.client", b"x", headers=headers)
        if kept:
            retained = {"Nmqtt-RTopic": "wills/client", "Nmqtt-RFlags": "3", "Nmqtt-ROrigin": "somebody"}
            await js.publish("$MQTT.rmsgs.wills.client", b"x", headers=retained)
    finally:
        await client.close()

    async def gone() -> bool:
        return await stored(server, "$MQTT_wills") == 0

    assert await aeventually(gone, SOON)
    if kept is False:  # nothing else would bring it there
        await watching.receive("wills/client", b"x", qos=qos)
    await watching.quiet()
    assert await stored(server, "$MQTT_msgs") == 1
    assert await stored(server, "$MQTT_rmsgs") == (kept is not None)


async def test_sessions_of_a_killed_gateway(cluster: tuple[NatsServer, list[Gateway]], connect: Connect) -> None:
    server, (first, second, _) = cluster
    await connect(first, "short", session_expiry_interval=4)
    await connect(first, "long", session_expiry_interval=3600)
    regular = await connect(first, "regular")
    await regular.subscribe5(Subscription("a", 1))
    first.kill()
    killed = time.monotonic()

    async def gone(client: str) -> bool:
        return await stored(server, "$MQTT_sess", f"$MQTT.sess.{name_hash(client)}") == 0

    await aeventually(lambda: gone("regular"), SOON)
    await aeventually(lambda: gone("short"), 4 + SOON)
    assert time.monotonic() - killed > 4 - LEASE
    client = await connect(second, "long", clean=False, session_expiry_interval=3600)
    assert client.session_present


async def test_no_false_wills_after_an_outage(cluster: tuple[NatsServer, list[Gateway]], connect: Connect) -> None:
    """nats-server is away for longer than a lease: that of the first gateway has lapsed, and it is not dead."""
    server, (first, second, _) = cluster
    watch = await watcher(connect, second, "watch")
    client = await connect(first, "client", will=Will("wills/false", b"", 1, False))
    server.kill()
    await asyncio.sleep(LEASE * 1.5)
    server.start()
    await asyncio.sleep(LEASE * 3)
    await client.quiet()
    client.publish5("wills/alive", b"", 1)
    await client.packet()
    await watch.receive("wills/alive", b"")
    await watch.quiet()


async def test_gateway_that_was_taken_for_dead(cluster: tuple[NatsServer, list[Gateway]], connect: Connect) -> None:
    """A stopped gateway comes back: it lets go of clients that others have dealt with, and serves new ones."""
    server, (first, second, _) = cluster
    watch = await watcher(connect, second, "watch")
    client = await connect(first, "client", will=Will("wills/stopped", b"x", 0, False))
    os.kill(first.pid, signal.SIGSTOP)
    try:
        await watch.message("wills/stopped", b"x", SOON)
    finally:
        os.kill(first.pid, signal.SIGCONT)
    # Which reason it is told depends on how far the other gateway has got with its session.
    assert (await client.expect(Disconnect, SOON)).reason in (0x8E, 0x89)
    await client.expect_closed()
    await aeventually(lambda: "was considered dead" in first.log)
    again = await connect(first, "client", will=Will("wills/stopped", b"y", 0, False))
    await watch.quiet()
    again.drop()
    await watch.message("wills/stopped", b"y", SOON)
    durable = await connect(first, "durable", clean=False, session_expiry_interval=300)
    await durable.subscribe("durable", qos=1)
    control = await nats.connect(server.url)
    name = (await live(control, "durable")).gateway
    await control.request(LEFT + name, b"nobody", timeout=SOON)  # under the name that it has now
    await control.close()


@pytest.mark.parametrize("how", ["resumed", "clean start", "nobody", "session ends"])
async def test_delayed_will_of_a_killed_gateway(
    cluster: tuple[NatsServer, list[Gateway]], connect: Connect, how: str
) -> None:
    """[MQTT-3.1.3-9] (5.0), counted from when the gateway was last alive."""
    _, (first, second, third) = cluster
    watch = await watcher(connect, second, "watch")
    delay = 3 if how == "nobody" else 60
    expiry = 3 if how == "session ends" else 3600
    properties: Any = {"will_delay_interval": delay}
    will = Will("wills/delayed", b"x", 1, False, properties)
    await connect(first, "client", session_expiry_interval=expiry, will=will)
    first.kill()
    if how == "resumed":
        client = await connect(third, "client", clean=False, session_expiry_interval=3600)
        assert client.session_present
        await asyncio.sleep(LEASE * 3)
        await watch.quiet()
        return
    if how == "clean start":
        await connect(third, "client", session_expiry_interval=3600)
    await watch.complete(await watch.message("wills/delayed", b"x", 3 + SOON))
    await asyncio.sleep(LEASE * 2)
    await watch.quiet()


async def test_gateway_that_was_taken_for_dead_and_dies(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, connect: Connect
) -> None:
    """It accepts nobody under a name that is no longer looked after: the will of its first new client is published."""
    server = nats_factory(config='ping_interval: "1s"\nping_max: 1')  # gives up who does not answer
    first, second = (gateway_factory(server, "--gateway-lease", str(LEASE), module=one) for one in ("", WATCHFUL))
    watch = await watcher(connect, second, "watch")
    await connect(first, "client", will=Will("wills/stopped", b"", 1, False))
    os.kill(first.pid, signal.SIGSTOP)
    try:
        await watch.complete(await watch.message("wills/stopped", b"", SOON))
        await aeventually(lambda: "wills and 1 sessions were taken over" in second.log)
    finally:
        os.kill(first.pid, signal.SIGCONT)
    await connect(first, "new", will=Will("wills/new", b"", 1, False))
    first.kill()
    await watch.message("wills/new", b"", SOON)
