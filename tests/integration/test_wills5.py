# SPDX-License-Identifier: Apache-2.0
"""Wills of 5.0 clients: delay, properties, and the ways in which a connection ends."""

import asyncio
import time
from typing import Any

import pytest

from mqtt_nats.codec import Subscribe, Subscription, Will
from tests.harness.gateway import Gateway
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector5, Stored, until


def will_of(name: str, delay: int = 0, qos: int = 1) -> Will:
    """A will with a delay in seconds."""
    properties: Any = {"will_delay_interval": delay} if delay else None
    return Will(f"{name}/will", b"farewell", qos, False, properties)


async def watcher(connect5: Connector5, name: str) -> RawClient5:
    """A client that sees the wills of a test."""
    client = await connect5(f"{name}-watcher")
    await client.subscribe5(Subscription(f"{name}/#", 2))
    return client


async def no_will(stored: Stored, name: str) -> None:
    """Nothing of a will is left."""

    async def gone() -> None:
        assert await stored.count("$MQTT_wills") == 0
        assert await stored.count("$MQTT_timers", "$MQTT.timers.will.>") == 0

    await until(gone)


async def test_properties(connect5: Connector5, name: str) -> None:
    """All but the delay go with the message."""
    watch = await watcher(connect5, name)
    properties: Any = {
        "payload_format_indicator": 1,
        "message_expiry_interval": 30,
        "content_type": "text/plain",
        "response_topic": f"{name}/answer",
        "correlation_data": b"\x00\xff",
        "user_property": [("a", "1"), ("a", "2")],
    }
    client = await connect5(name, will=Will(f"{name}/will", b"x", 2, False, properties))
    client.drop()
    received = await watch.receive(f"{name}/will", b"x", qos=2, retain=False)
    assert received.properties == properties


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_delay(connect5: Connector5, name: str, qos: int, stored: Stored) -> None:
    watch = await watcher(connect5, name)
    client = await connect5(name, session_expiry_interval=60, will=will_of(name, 1, qos))
    ended = time.monotonic()
    client.drop()
    await watch.receive(f"{name}/will", b"farewell", qos=qos)
    assert time.monotonic() - ended > 0.7
    await no_will(stored, name)
    await watch.quiet()


async def test_a_job_that_ends_after_the_connection(connect5: Connector5, name: str, stored: Stored) -> None:
    """What it writes to the session record does not make the timer of the will one of an earlier connection."""
    watch = await watcher(connect5, name)
    client = await connect5(name, session_expiry_interval=300, will=will_of(name, 1))
    client.send(Subscribe(1, (Subscription(f"{name}/x", 1),), None))
    client.drop()
    await watch.receive(f"{name}/will", b"farewell")
    await no_will(stored, name)
    await watch.quiet()


async def test_session_ends_before_the_delay(connect5: Connector5, name: str, stored: Stored) -> None:
    """[MQTT-3.1.2-8] (5.0): whichever comes first."""
    watch = await watcher(connect5, name)
    client = await connect5(name, session_expiry_interval=1, will=will_of(name, 60))
    client.drop()
    await watch.receive(f"{name}/will", b"farewell")
    await no_will(stored, name)
    await watch.quiet()


async def test_no_delay_without_a_session(connect5: Connector5, name: str) -> None:
    watch = await watcher(connect5, name)
    client = await connect5(name, will=will_of(name, 60))
    client.drop()
    await watch.receive(f"{name}/will", b"farewell")


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("connected", [False, True], ids=["after the end", "takeover"])
async def test_session_resumed_within_the_delay(
    connect5: Connector5,
    name: str,
    second_gateway: Gateway,
    gateway: Gateway,
    connected: bool,
    elsewhere: bool,
    stored: Stored,
) -> None:
    """[MQTT-3.1.3-9] (5.0)"""
    to = second_gateway if elsewhere else gateway
    for delay in (1, 3, 9):  # a longer one if resuming takes too long for the shorter one
        client_id = f"{name}-{delay}"
        watch = await watcher(connect5, client_id)
        client = await connect5(client_id, session_expiry_interval=60, will=will_of(client_id, delay))
        begun = time.monotonic()
        if not connected:
            client.drop()
        again = await connect5(client_id, to=to, clean=False, session_expiry_interval=60)
        assert again.session_present
        if time.monotonic() - begun < delay - 0.3:
            break
    if connected:
        await client.expect_disconnect(0x8E)
    await no_will(stored, name)
    await asyncio.sleep(delay + 0.7)  # longer than the delay
    await watch.quiet()


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("connected", [False, True], ids=["after the end", "takeover"])
async def test_clean_start_within_the_delay(
    connect5: Connector5,
    name: str,
    second_gateway: Gateway,
    gateway: Gateway,
    connected: bool,
    elsewhere: bool,
    stored: Stored,
) -> None:
    """The former session has ended, and with it the delay."""

    async def delayed() -> None:
        """Else the timer may be stored when the will has been dealt with, and be there until it fires."""
        assert await stored.count("$MQTT_timers", "$MQTT.timers.will.>") == 1

    watch = await watcher(connect5, name)
    client = await connect5(name, session_expiry_interval=60, will=will_of(name, 30))
    if not connected:
        client.drop()
        await until(delayed)
    to = second_gateway if elsewhere else gateway
    await connect5(name, to=to, session_expiry_interval=60)
    await watch.receive(f"{name}/will", b"farewell")
    await no_will(stored, name)
    await watch.quiet()


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_takeover_without_delay(
    connect5: Connector5, name: str, second_gateway: Gateway, gateway: Gateway, elsewhere: bool, stored: Stored
) -> None:
    watch = await watcher(connect5, name)
    await connect5(name, session_expiry_interval=60, will=will_of(name))
    to = second_gateway if elsewhere else gateway
    again = await connect5(name, to=to, clean=False, session_expiry_interval=60, will=will_of(f"{name}/new"))
    assert again.session_present
    await watch.receive(f"{name}/will", b"farewell")
    again.drop()
    await watch.receive(f"{name}/new/will", b"farewell")
    await no_will(stored, name)
    await watch.quiet()


@pytest.mark.parametrize("delay", [0, 1])
async def test_disconnect(connect5: Connector5, name: str, delay: int, stored: Stored) -> None:
    """0x00 removes the will; 0x04 does not. [MQTT-3.14.4-3] (5.0)"""
    watch = await watcher(connect5, name)
    client = await connect5(name, session_expiry_interval=60, will=will_of(name, delay))
    await client.disconnect5()
    await no_will(stored, name)
    client = await connect5(name, clean=False, session_expiry_interval=60, will=will_of(name, delay))
    await asyncio.sleep(1.3)
    await watch.quiet()
    await client.disconnect5(4)
    await watch.receive(f"{name}/will", b"farewell")
    await no_will(stored, name)
    await watch.quiet()
