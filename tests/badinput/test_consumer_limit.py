# SPDX-License-Identifier: Apache-2.0
"""JetStream does not create a consumer: only what could not be subscribed fails, and nothing of it stays."""

from collections.abc import AsyncIterator

import nats
import pytest
from nats.js.client import JetStreamContext

from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually
from tests.integration.conftest import settled

CONSUMERS = 2


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
def local(server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(server)  # whose reader would be one consumer more


@pytest.fixture
async def js(server: NatsServer, local: Gateway) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(server.url)
    js = client.jetstream()
    config = (await js.stream_info("$MQTT_msgs")).config
    await js.update_stream(config.evolve(max_consumers=CONSUMERS))
    yield js
    await client.close()


@pytest.mark.anyio
async def test_a_consumer_too_many(local: Gateway, js: JetStreamContext) -> None:
    async with (
        await RawClient.connect(local.port, "durable", clean=False) as client,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        assert await client.subscribe("a", qos=1) == (1,)
        assert await client.subscribe("b", qos=1) == (1,)
        assert await client.subscribe("c", qos=1) == (0x80,)
        assert await client.subscribe("c", qos=1) == (0x80,), "the second attempt was granted without a consumer"
        assert await client.subscribe("d", "e", qos=0) == (0, 0)
        for topic in "cab":
            await publisher.deliver(topic, topic.encode(), 1)
        await client.receive("a", b"a", qos=1)
        await client.receive("b", b"b", qos=1)
        await client.quiet()

        # An existing subscription keeps its QoS 1 when it is named together with one that fails.
        assert await client.subscribe("a", "g", qos=1) == (1, 0x80)
        await publisher.deliver("a", b"again", 1)
        await client.receive("a", b"again", qos=1)

        await settled(js, "durable")
        await client.unsubscribe("a")
        await aeventually(lambda: _free(js), what="room for a consumer")
        assert await client.subscribe("g", qos=1) == (1,)
        await client.disconnect()
    async with (
        await RawClient.connect(local.port, "durable", clean=False) as client,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        assert client.session_present
        for name in ("a", "c", "g"):
            await publisher.deliver(name, name.encode(), 1)
        await client.receive("g", b"g", qos=1)
        await client.quiet()


async def _free(js: JetStreamContext) -> bool:
    mine = [one for one in await js.consumers_info("$MQTT_msgs") if one.name.startswith(name_hash("durable"))]
    return len(mine) < CONSUMERS
