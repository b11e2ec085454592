# SPDX-License-Identifier: Apache-2.0
"""A connection ends while messages wait in its gateway: who goes on knows what was sent, and what was not."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from mqtt_nats.codec import Subscribe, Subscription
from mqtt_streams.gateway_subjects import LEFT
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK
from tests.integration.conftest import Connector, Connector5, Stored, position

WINDOW = 5


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same gateway", "other gateway"])
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("lost", [False, True], ids=["taken over", "lost"])
async def test_what_waits_is_sent_without_dup(
    connect5: Connector5,
    name: str,
    stored: Stored,
    gateway: Gateway,
    second_gateway: Gateway,
    elsewhere: bool,
    qos: int,
    lost: bool,
) -> None:
    """What was in flight comes again; what had no place comes for the first time [MQTT-3.3.1-1] [MQTT-3.3.1-3]."""
    client = await connect5(name, clean=False, session_expiry_interval=300, receive_maximum=WINDOW)
    await client.subscribe(name, qos=qos)
    await stored.live(name)
    publisher = await connect5(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(4 * WINDOW)]
    await publisher.deliver_all(name, payloads, qos)
    got = await client.messages(WINDOW)
    assert not any(one.dup for one in got)
    for step in range(3):
        if lost:
            client.drop()
            await stored.detached(name)
        to = second_gateway if elsewhere and not step % 2 else gateway
        client = await connect5(name, clean=False, to=to, session_expiry_interval=300, receive_maximum=WINDOW)
        got = await client.messages(WINDOW)
        assert [(one.payload, one.dup) for one in got] == [(one, True) for one in payloads[:WINDOW]], step
        await client.quiet()
    for number, payload in enumerate(payloads):
        one = got[number] if number < WINDOW else (await client.messages(1))[0]
        assert (one.payload, one.dup) == (payload, number < WINDOW)
        await client.complete(one)
    await client.quiet()
    await stored.settled(name)


async def test_connections_that_end_while_the_session_is_resumed(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, second_gateway: Gateway
) -> None:
    """What was not fetched yet when they ended has not been sent by them either."""
    options: dict[str, Any] = {"clean": False, "session_expiry_interval": 300, "receive_maximum": WINDOW}
    client = await connect5(name, **options)
    await client.subscribe(name, qos=1)
    await stored.live(name)
    publisher = await connect5(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(20 * WINDOW)]
    await publisher.deliver_all(name, payloads, 1)
    await client.messages(WINDOW)
    for step in range(12):
        client.drop()
        await asyncio.sleep(step % 4 * 0.003)
        client = await connect5(name, to=second_gateway if step % 3 == 0 else gateway, **options)
    for number, payload in enumerate(payloads):
        (one,) = await client.messages(1)
        assert (one.payload, one.dup) == (payload, number < WINDOW)
        await client.complete(one)
    await client.quiet()
    await stored.settled(name)


async def test_a_connection_ends_when_consumers_have_brought_everything(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """It is stopped before it has sent anything: most of it is new to the client when it comes again."""
    options: dict[str, Any] = {"clean": False, "session_expiry_interval": 300, "receive_maximum": WINDOW}
    client = await connect5(name, **options)
    await client.subscribe(name, qos=1)
    await stored.live(name)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver_all(name, [b"%d" % number for number in range(WINDOW)], 1)
    await client.messages(WINDOW)
    client.drop()
    await stored.detached(name)
    payloads = [b"%d" % number for number in range(4 * WINDOW)]
    await publisher.deliver_all(name, payloads[WINDOW:], 1)
    trap = proxy.set("answer", "$JS.API.STREAM.MSG.GET.$MQTT_msgs", Action.HOLD)
    connecting = asyncio.create_task(connect5(name, to=late, **options))
    await trap.sprung.wait()
    client = await connecting
    client.drop()
    trap.release()
    client = await connect5(name, **options)
    for number, payload in enumerate(payloads):
        (one,) = await client.messages(1)
        assert (one.payload, one.dup) == (payload, number < WINDOW)
        await client.complete(one)
    await client.quiet()
    await stored.settled(name)


async def test_a_gateway_answers_when_it_has_left_a_session(connect: Connector, name: str, stored: Stored) -> None:
    """At once where it has none, else when the position is in order."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    subject = LEFT + (await stored.live(name)).gateway
    await stored.nats.request(subject, b"nobody", timeout=30)
    asked = asyncio.create_task(stored.nats.request(subject, name.encode(), timeout=30))
    await client.quiet()
    assert not asked.done()
    client.drop()
    await asked
    at = await position(stored.js, name)
    assert at.clean
    assert at.live


async def test_a_gateway_that_stands_still_is_not_waited_for_long(
    connect: Connector,
    name: str,
    stored: Stored,
    gateway: Gateway,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
) -> None:
    """What it may have sent has DUP."""
    still = gateway_factory(nats_server)
    client = await connect(name, clean=False, to=still)
    await client.subscribe(name, qos=1)
    await stored.live(name)
    publisher = await connect(f"{name}-publisher")
    os.kill(still.pid, signal.SIGSTOP)
    try:
        await publisher.deliver(name, b"x", 1)
        client = await connect(name, clean=False, to=gateway)
        await client.complete(await client.message(name, b"x", dup=True))
        await client.quiet()
        await stored.settled(name)
    finally:
        os.kill(still.pid, signal.SIGCONT)
    await publisher.deliver(name, b"y", 1)
    await client.complete(await client.message(name, b"y", dup=False))
    await client.quiet()


@pytest.mark.long
async def test_a_connection_ends_while_its_gateway_waits_for_an_answer(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """What comes after it has not been sent by the shared reader.

    [MQTT-3.3.1-1] [MQTT-3.3.2-5] (5.0)
    """
    options: dict[str, Any] = {"clean": False, "session_expiry_interval": 300}
    client = await connect5(name, to=late, **options)
    await client.subscribe(name, qos=1)
    await stored.live(name)
    trap = proxy.set("answer", "$JS.API.CONSUMER.DURABLE.CREATE.$MQTT_msgs.", Action.DROP)
    client.send(Subscribe(7, (Subscription(f"{name}/more", 1),)))
    await asyncio.wait_for(trap.sprung.wait(), 30)
    client.drop()  # DISCONNECT would wait for the SUBSCRIBE before it
    publisher = await connect5(f"{name}-publisher", to=late)
    ids = [
        publisher.publish5(name, b"short", 1, message_expiry_interval=1),
        publisher.publish5(name, b"long", 1),
    ]
    await publisher.expect_ack(PUBACK, *ids)
    await asyncio.sleep(1.1)  # until the first one has expired
    await stored.detached(name)
    client = await connect5(name, to=gateway, **options)
    await client.complete(await client.message(name, b"long", dup=False))
    await client.quiet()
    await stored.settled(name)
