# SPDX-License-Identifier: Apache-2.0
"""A connection takes a session over, and is refused after all: what the former one has left is seen to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mqtt_nats.codec import Connack, Connect, Disconnect, ReasonCode, Will
from tests.chaos.points.proxy import Action, NatsProxy
from tests.harness.gateway import Gateway
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector5, Stored

GET = "$JS.API.STREAM.MSG.GET."
SCENES = [
    pytest.param(0, True, f"{GET}$MQTT_wills", id="regular, wills"),
    pytest.param(0, True, f"{GET}$MQTT_qos2in", id="regular, held publishes"),
    pytest.param(300, False, f"{GET}$MQTT_wills", id="continued, wills"),
    pytest.param(300, False, f"{GET}$MQTT_timers", id="continued, timers"),
    pytest.param(300, True, f"{GET}$MQTT_wills", id="clean start, wills"),
    pytest.param(300, True, f"{GET}$MQTT_pos", id="clean start, positions"),
]
"""Session expiry interval, Clean Start, and the request after the claim that is not answered."""


async def refused(
    name: str, late: Gateway, proxy: NatsProxy, request: str, first: RawClient5, *, clean: bool, expiry: int
) -> None:
    """Connect a second time: the first connection ends, and the second is refused since JetStream does not answer."""
    second = await RawClient5.open(late.port)
    properties: Any = {"session_expiry_interval": expiry}
    trap = proxy.set("up", request, Action.DROP)
    try:
        second.send(Connect(5, name, clean, 0, properties=properties))
        await asyncio.wait_for(trap.sprung.wait(), 10)
        await first.expect(Disconnect, reason=ReasonCode.SESSION_TAKEN_OVER)
        await second.expect(Connack, timeout=20, code=ReasonCode.SERVER_UNAVAILABLE)
    finally:
        first.drop()
        second.drop()


@pytest.mark.parametrize(("expiry", "clean", "request_"), SCENES)
async def test_the_will_of_the_former_connection(
    connect5: Connector5,
    name: str,
    stored: Stored,
    late: Gateway,
    proxy: NatsProxy,
    expiry: int,
    clean: bool,
    request_: str,
) -> None:
    """It is published although nobody comes back."""
    watch = await connect5(f"{name}-watch")
    await watch.subscribe(f"{name}/will", qos=2)
    will = Will(f"{name}/will", b"gone", 2, False)
    first = await connect5(name, to=late, will=will, session_expiry_interval=expiry)
    await refused(name, late, proxy, request_, first, clean=clean, expiry=expiry)
    await watch.complete(await watch.message(f"{name}/will", b"gone", timeout=20))
    back = await connect5(name, to=late, clean=clean, session_expiry_interval=0)
    assert back.session_present is not clean
    await back.disconnect5()
    await stored.gone(name)
    assert not await stored.count("$MQTT_wills", "$MQTT.wills.>")
    await watch.quiet()


async def test_a_later_connection_elsewhere_is_not_given_a_deadline(
    connect5: Connector5, name: str, stored: Stored, late: Gateway, proxy: NatsProxy
) -> None:
    """The session has come and gone at another gateway before the wills of the refused claim are settled."""
    watch = await connect5(f"{name}-watch")
    await watch.subscribe(f"{name}/will", qos=2)
    will = Will(f"{name}/will", b"gone", 2, False)
    first = await connect5(name, to=late, will=will, session_expiry_interval=300)
    trap = proxy.set("up", "$JS.API.STREAM.PURGE.$MQTT_wills", Action.HOLD)
    try:
        await refused(name, late, proxy, f"{GET}$MQTT_pos", first, clean=True, expiry=300)
        await watch.complete(await watch.message(f"{name}/will", b"gone", timeout=20))
        await asyncio.wait_for(trap.sprung.wait(), 10)
        back = await connect5(name, clean=True, session_expiry_interval=0)
        await back.disconnect5()
        await stored.gone(name)
    finally:
        trap.release()
    later = await connect5(f"{name}-later", to=late)
    for number in range(1, 11):  # each is stored behind what the gateway has sent before
        await later.deliver(f"{name}/later", b"%d" % number, 1)
    await later.disconnect5()
    await stored.gone(name)
    assert not await stored.count("$MQTT_wills", "$MQTT.wills.>")
    await watch.quiet()


async def test_a_delayed_will_waits_for_its_delay(
    connect5: Connector5, name: str, stored: Stored, late: Gateway, proxy: NatsProxy
) -> None:
    """The session goes on when the client is back in time [MQTT-3.1.3-9] (5.0)."""
    watch = await connect5(f"{name}-watch")
    await watch.subscribe(f"{name}/#", qos=1)
    options: dict[str, Any] = {"session_expiry_interval": 300}
    for delay in (300, 2):
        will = Will(f"{name}/{delay}", b"gone", 1, False, {"will_delay_interval": delay})
        first = await connect5(name, to=late, clean=False, will=will, **options)
        request = f"{GET}$MQTT_timers"
        await refused(name, late, proxy, request, first, clean=False, expiry=300)
    await watch.complete(await watch.message(f"{name}/2", b"gone", timeout=20))
    await watch.quiet()


async def test_a_session_that_is_left_ends_in_time(
    connect5: Connector5, name: str, stored: Stored, late: Gateway, proxy: NatsProxy
) -> None:
    """The claim has made its deadline void: it has a new one."""
    first = await connect5(name, to=late, clean=False, session_expiry_interval=300)
    await first.subscribe(f"{name}/x", qos=1)
    request = f"{GET}$MQTT_timers"
    await refused(name, late, proxy, request, first, clean=False, expiry=1)
    await stored.gone(name)
