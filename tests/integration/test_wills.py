# SPDX-License-Identifier: Apache-2.0
"""Wills: published at every end without DISCONNECT, and only then."""

import pytest

from mqtt_nats.codec import Will
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient, topic_of
from tests.integration.conftest import Connector

ENDS = ["drop", "half-close", "keepalive", "protocol error", "malformed", "takeover", "takeover elsewhere"]


async def end(how: str, client: RawClient, connect: Connector, client_id: str, second: Gateway, clean: bool) -> None:
    """End a connection without DISCONNECT."""
    match how:
        case "drop":
            client.drop()
        case "half-close":
            client.half_close()
            await client.expect_closed()
        case "keepalive":
            await client.expect_closed()
        case "protocol error":
            client.write(b"\x20\x02\x00\x00")  # CONNACK is not a client's to send
            await client.expect_closed()
        case "malformed":
            client.write(b"\x36\x05\x00\x01a\x00\x01")  # QoS 3 [MQTT-3.3.1-4]
            await client.expect_closed()
        case "takeover":
            await connect(client_id, clean=clean)
            await client.expect_closed()
        case _:
            await connect(client_id, clean=clean, to=second)
            await client.expect_closed()


@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
@pytest.mark.parametrize("how", ENDS)
async def test_will_at_abnormal_end(
    connect: Connector, name: str, second_gateway: Gateway, how: str, clean: bool
) -> None:
    """[MQTT-3.1.2-8], [MQTT-3.1.2-10]: once, with its QoS, not retained [MQTT-3.1.2-16]."""
    listener = await connect(f"{name}-listener")
    await listener.subscribe(f"{name}/#", qos=2)
    far = await connect(f"{name}-far", to=second_gateway)
    await far.subscribe(f"{name}/#", qos=2)
    stays = await connect(f"{name}-stays", clean=False)
    await stays.subscribe(f"{name}/#", qos=2)
    will = Will(f"{name}/will", b"farewell", 1, False)
    client = await connect(name, clean=clean, will=will, keepalive=1 if how == "keepalive" else 0)
    await end(how, client, connect, name, second_gateway, clean)
    for receiver in (listener, far, stays):
        await receiver.receive(f"{name}/will", b"farewell", qos=1, retain=False, dup=False)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(f"{name}/last", b"", 2)
    for receiver in (listener, far, stays):
        await receiver.receive(f"{name}/last", b"")
    late = await connect(f"{name}-late")
    await late.subscribe(f"{name}/#", qos=2)
    await late.quiet()


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_will_at_each_qos(connect: Connector, name: str, qos: int, retain: bool) -> None:
    """[MQTT-3.1.2-9], [MQTT-3.1.2-16], [MQTT-3.1.2-17]"""
    listener = await connect(f"{name}-listener")
    await listener.subscribe(name, qos=2)
    client = await connect(f"{name}-client", will=Will(name, b"farewell", qos, retain))
    client.drop()
    await listener.receive(name, b"farewell", qos=qos, retain=False)  # [MQTT-3.3.1-9]
    await listener.deliver(f"{name}/fence", b"", 1)
    late = await connect(f"{name}-late")
    await late.subscribe(name, qos=2)
    if retain:
        await late.receive(name, b"farewell", qos=qos, retain=True)
    await late.quiet()


async def test_empty_retained_will_clears(connect: Connector, name: str) -> None:
    """[MQTT-3.3.1-10] holds for a will, too."""
    listener = await connect(f"{name}-listener")
    await listener.deliver(name, b"online", 1, retain=True)
    await listener.subscribe(name, qos=1)
    await listener.receive(name, b"online", retain=True)
    client = await connect(f"{name}-client", will=Will(name, b"", 1, True))
    client.drop()
    await listener.receive(name, b"", retain=False)
    await listener.deliver(f"{name}/fence", b"", 1)
    late = await connect(f"{name}-late")
    await late.subscribe(name, qos=1)
    await late.quiet()


@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
async def test_no_will_after_disconnect(connect: Connector, name: str, clean: bool) -> None:
    """[MQTT-3.1.2-10], [MQTT-3.14.4-3]: nor when the session is taken up again, without a will, and breaks."""
    listener = await connect(f"{name}-listener")
    await listener.subscribe(f"{name}/#", qos=1)
    client = await connect(name, clean=clean, will=Will(f"{name}/will", b"never", 1, True))
    await client.disconnect()
    client = await connect(name, clean=clean)
    client.drop()
    client = await connect(name, clean=clean)  # [MQTT-3.1.2-12]
    await client.deliver(f"{name}/last", b"", 1)
    await listener.receive(f"{name}/last", b"")


async def test_will_of_a_reconnect_is_the_new_one(connect: Connector, name: str) -> None:
    """A will belongs to its network connection [MQTT-3.1.2-8]."""
    listener = await connect(f"{name}-listener")
    await listener.subscribe(f"{name}/#", qos=1)
    first = await connect(name, clean=False, will=Will(f"{name}/one", b"", 1, False))
    second = await connect(name, clean=False, will=Will(f"{name}/two", b"", 1, False))
    await first.expect_closed()
    await listener.receive(f"{name}/one", b"")
    second.drop()
    await listener.receive(f"{name}/two", b"")


async def test_will_reaches_the_client_that_takes_over(connect: Connector, name: str) -> None:
    """A durable session that is subscribed to its own will gets it, from the connection that took it over."""
    first = await connect(name, clean=False, will=Will(f"{name}/will", b"farewell", 1, False))
    await first.subscribe(f"{name}/will", qos=1)
    second = await connect(name, clean=False)
    await first.expect_closed()
    await second.receive(f"{name}/will", b"farewell")


async def test_wills_at_orderly_shutdown(
    connect: Connector, name: str, nats_server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    """[MQTT-3.1.2-8]: a gateway that ends closes the connections itself, so it publishes the wills."""
    leaving = gateway_factory(nats_server)
    listener = await connect(f"{name}-listener")
    await listener.subscribe(f"{name}/+", qos=2)
    for index in range(3):
        will = Will(f"{name}/{index}", b"farewell", index, False)
        await connect(f"{name}-{index}", clean=index != 1, will=will, to=leaving)
    assert leaving.term() == 0
    wills = await listener.messages(3)
    assert {(topic_of(one), one.qos, one.payload) for one in wills} == {
        (f"{name}/{qos}", qos, b"farewell") for qos in range(3)
    }
