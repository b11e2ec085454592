# SPDX-License-Identifier: Apache-2.0
"""Who makes the streams: nats-server's listener or the gateway, and moving from one to the other."""

from typing import Any

import nats as nats_py

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.waiting import aeventually
from tests.interop.support import Message, Paho

SHARED = ("$MQTT_sess", "$MQTT_msgs", "$MQTT_rmsgs", "$MQTT_qos2in", "$MQTT_out")


async def configurations(url: str) -> dict[str, Any]:
    """The configuration of every stream that both sides use."""
    client = await nats_py.connect(url)
    try:
        js = client.jetstream()
        return {stream: (await js.stream_info(stream)).config.as_dict() for stream in SHARED}
    finally:
        await client.close()


async def test_streams_of_nats_servers_listener(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    """The migration: everything that clients of nats-server's listener had is there at the gateway."""
    nats = nats_factory(mqtt=True)
    old = Paho(nats.mqtt_port, "sub", clean=False)
    old.connect()
    old.subscribe("mig/+", 2)
    old.close()
    publisher = Paho(nats.mqtt_port, "pub")
    publisher.connect()
    for number in range(50):
        publisher.publish("mig/queued", b"%d" % number, 1 + number // 25)
    publisher.publish("mig/kept", b"retained", 2, retain=True)
    publisher.close()
    assert (await configurations(nats.url))["$MQTT_msgs"]["retention"] == "interest"

    gateway = gateway_factory(nats)
    subscriber = Paho(gateway.port, "sub", clean=False)
    subscriber.connect()
    assert subscriber.session_present
    subscriber.expect(
        *(Message("mig/queued", b"%d" % number, 1 + number // 25, False) for number in range(50)),
        Message("mig/kept", b"retained", 2, False),
    )
    subscriber.close()
    late = Paho(gateway.port, "late")
    late.connect()
    late.subscribe("mig/kept", 2)
    late.expect(Message("mig/kept", b"retained", 2, True))
    late.close()

    # And nats-server's listener goes on with the streams as the gateway has changed them.
    again = Paho(nats.mqtt_port, "sub", clean=False)
    again.connect()
    assert again.session_present
    publisher = Paho(gateway.port, "pub")
    publisher.connect()
    publisher.publish("mig/new", b"x", 2)
    again.expect(Message("mig/new", b"x", 2, False))
    again.close()
    publisher.close()


async def test_streams_of_the_gateway(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    nats = nats_factory(mqtt=True)
    gateway = gateway_factory(nats)
    before = await configurations(nats.url)
    assert before["$MQTT_msgs"]["retention"] == "limits"
    publisher = Paho(gateway.port, "pub")
    publisher.connect()
    subscriber = Paho(nats.mqtt_port, "sub", clean=False)
    subscriber.connect()
    subscriber.subscribe("first/#", 2)
    for qos in (0, 1, 2):
        publisher.publish("first/x", b"%d" % qos, qos, retain=True)
    subscriber.expect(*(Message("first/x", b"%d" % qos, qos, False) for qos in (0, 1, 2)))
    late = Paho(nats.mqtt_port, "late")
    late.connect()
    late.subscribe("first/x", 2)
    late.expect(Message("first/x", b"2", 2, True))
    for client in (publisher, subscriber, late):
        client.close()
    for stream in ("$MQTT_sess", "$MQTT_rmsgs"):  # the listener removes a record by its sequence alone
        before[stream]["max_msgs_per_subject"] = 1

    async def adapted() -> bool:
        return await configurations(nats.url) == before

    await aeventually(adapted)
