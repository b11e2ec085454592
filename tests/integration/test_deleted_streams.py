# SPDX-License-Identifier: Apache-2.0
"""Somebody deletes what the gateway has in JetStream: it goes on with what is created again."""

from collections.abc import AsyncIterator

import nats
import pytest
from nats.js.client import JetStreamContext

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio

STREAMS = ("$MQTT_sess", "$MQTT_msgs", "$MQTT_rmsgs", "$MQTT_qos2in", "$MQTT_out")


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
def local(server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(server, env={"MQTT_NATS_SESSION_EXPIRY_INTERVAL": "1"})


@pytest.fixture
async def js(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(server.url)
    yield client.jetstream()
    await client.close()


@pytest.mark.parametrize("stream", STREAMS)
async def test_a_stream(local: Gateway, js: JetStreamContext, stream: str) -> None:
    async with (
        await RawClient.connect(local.port, "publisher") as publisher,
        await RawClient.connect(local.port, "subscriber") as subscriber,
    ):
        await subscriber.subscribe("a/#", qos=2)
        await js.delete_stream(stream)
        for qos in (1, 2):
            await publisher.deliver("a/b", b"x", qos, retain=True)
            await subscriber.receive("a/b", b"x", qos=qos)

        async def subscribes() -> bool:
            async with await RawClient.connect(local.port, "durable", clean=False) as durable:
                return await durable.subscribe("c", qos=2) == (2,)

        assert await aeventually(subscribes)
        async with await RawClient.connect(local.port, "durable", clean=False) as durable:
            await publisher.deliver("c", b"y", 2)
            await durable.receive("c", b"y", qos=2)
        assert await aeventually(lambda: f"stream {stream} was gone" in local.log)


async def test_the_consumer_of_the_timers(local: Gateway, js: JetStreamContext) -> None:
    await js.delete_consumer("$MQTT_timers", "gateways")
    await (await RawClient.connect(local.port, "durable", clean=False)).disconnect()

    async def expired() -> bool:
        return (await js.stream_info("$MQTT_sess")).state.messages == 0

    assert await aeventually(expired)
