# SPDX-License-Identifier: Apache-2.0
"""Held QoS 2 publishes whose connection, session or gateway is gone."""

from __future__ import annotations

import asyncio
import signal
from functools import partial

import pytest

from mqtt_streams.hashing import subject_token
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL
from tests.harness.waiting import aeventually
from tests.integration.conftest import Connector, Stored, until
from tests.integration.test_late_stores import lose

FORGOTTEN = "has forgotten what it has seen before"


async def test_a_session_that_has_ended_leaves_nothing(
    connect: Connector, name: str, stored: Stored, late: Gateway, proxy: NatsProxy
) -> None:
    """Its publish is held, but the PubAck is lost with NATS, and the client leaves meanwhile."""
    client = await connect(name, to=late)
    trap = proxy.set("answer", "$MQTT.qos2.in.", Action.DROP)
    client.publish(name, b"x", 2, packet_id=1)
    await asyncio.wait_for(trap.sprung.wait(), 10)
    await lose(proxy, late)
    client.drop()
    proxy.away = False
    await aeventually(lambda: "connected to NATS again" in late.log)

    async def gone() -> None:
        assert not await stored.traces(name)

    await until(gone)


@pytest.mark.parametrize("subscribed", [False, True], ids=["one record", "two records"])
async def test_what_an_earlier_session_has_left(
    connect: Connector, name: str, stored: Stored, subscribed: bool
) -> None:
    """It is not taken for a publish of the session that the client has now [MQTT-4.3.3-2] (3.1.1)."""
    listener = await connect(f"{name}-listener")
    await listener.subscribe(f"{name}/t", qos=2)
    client = await connect(name, clean=False)
    if subscribed:
        await client.subscribe(f"{name}/other", qos=1)
    await client.disconnect()
    headers = {
        "Nmqtt-Pub": "24",
        "Nmqtt-Subject": f"{name}.t",
        "Nmqtt-Epoch": "1",
        "Nmqtt-Id": "00000000000000000000000001",
    }
    await stored.js.publish(f"$MQTT.qos2.in.{subject_token(name)}.1", b"old", headers=headers)
    client = await connect(name, clean=False)
    assert client.session_present
    client.publish(f"{name}/t", b"new", 2, packet_id=1)
    await client.expect_ack(PUBREC, 1)
    client.ack(PUBREL, 1)
    await client.expect_ack(PUBCOMP, 1)
    await listener.complete(await listener.message(f"{name}/t", b"new", qos=2))


@pytest.mark.long
async def test_a_release_that_only_the_stream_remembers(
    connect: Connector, name: str, nats_server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    """The gateway died between the release and the removal, and the client comes when other gateways have forgotten."""
    doomed: list[Gateway] = []
    proxy = NatsProxy(nats_server.port, lambda: doomed[0].process.send(signal.SIGKILL))
    await proxy.start()
    forgetful = gateway_factory(nats_server, start=False, module="tests.integration.forgetful")
    await asyncio.to_thread(forgetful.start)
    doomed.append(gateway_factory(proxy.url, start=False))
    await asyncio.to_thread(doomed[0].start)
    listener = await connect(f"{name}-listener", to=forgetful)
    await listener.subscribe(name, qos=2)
    client = await connect(name, clean=False, to=doomed[0])
    client.publish(name, b"once", 2, packet_id=1)
    await client.expect_ack(PUBREC, 1)
    trap = proxy.set("up", "$JS.API.STREAM.MSG.DELETE.$MQTT_qos2in", Action.BEFORE)
    client.ack(PUBREL, 1)
    await asyncio.wait_for(trap.sprung.wait(), 10)
    await listener.complete(await listener.message(name, b"once", qos=2))
    client.drop()
    before = forgetful.log.count(FORGOTTEN)
    await aeventually(lambda: forgetful.log.count(FORGOTTEN) > before + 2)
    client = await connect(name, clean=False, to=forgetful)
    assert client.session_present
    client.ack(PUBREL, 1)
    await client.expect_ack(PUBCOMP, 1)
    await listener.quiet()
    await proxy.close()


async def kept(stored: Stored, name: str) -> None:
    """The newer message is retained."""
    assert await stored.count("$MQTT_rmsgs", f"$MQTT.rmsgs.{name}") == 1
    assert (await stored.js.get_last_msg("$MQTT_rmsgs", f"$MQTT.rmsgs.{name}")).data == b"new"


@pytest.mark.parametrize("first", [b"old", b""], ids=["set", "removed"])
async def test_what_is_retained_again(
    connect: Connector,
    name: str,
    stored: Stored,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    first: bytes,
) -> None:
    """The gateway died when both were stored: the first does not take the place of the second."""
    doomed: list[Gateway] = []
    proxy = NatsProxy(nats_server.port, lambda: doomed[0].process.send(signal.SIGKILL))
    await proxy.start()
    doomed.append(gateway_factory(proxy.url, "--gateway-lease", "60", start=False))
    await asyncio.to_thread(doomed[0].start)
    client = await connect(name, clean=False, to=doomed[0])
    client.publish(name, first, 2, retain=True, packet_id=1)
    client.publish(name, b"new", 2, retain=True, packet_id=2)
    await client.expect_ack(PUBREC, 1, 2)
    trap = proxy.set("up", "$JS.API.STREAM.MSG.DELETE.$MQTT_qos2in", Action.BEFORE)
    client.ack(PUBREL, 1, 2)
    await asyncio.wait_for(trap.sprung.wait(), 10)
    await until(partial(kept, stored, name))
    client.drop()
    client = await connect(name, clean=False)
    client.ack(PUBREL, 1, 2)
    await client.expect_ack(PUBCOMP, 1, 2)
    await kept(stored, name)
    await proxy.close()
