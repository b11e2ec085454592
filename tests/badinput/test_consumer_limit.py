# SPDX-License-Identifier: Apache-2.0
"""JetStream does not create a consumer of a session: readers serve it all the same."""

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
    return gateway_factory(server, "--session-positions", "consumers")


@pytest.fixture
async def js(server: NatsServer, local: Gateway) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(server.url)
    js = client.jetstream()
    await _allow(js, CONSUMERS)
    yield js
    await client.close()


async def _allow(js: JetStreamContext, consumers: int) -> None:
    config = (await js.stream_info("$MQTT_msgs")).config
    await js.update_stream(config.evolve(max_consumers=consumers))


async def _mine(js: JetStreamContext) -> int:
    return sum(one.name.startswith(name_hash("durable")) for one in await js.consumers_info("$MQTT_msgs"))


@pytest.mark.anyio
async def test_a_consumer_too_many(local: Gateway, js: JetStreamContext) -> None:
    """Its subscription is granted, and served; it is created when the session is resumed, and JetStream allows it."""
    async with (
        await RawClient.connect(local.port, "durable", clean=False) as client,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        for topic in "abc":
            assert await client.subscribe(topic, qos=1) == (1,)
        assert await client.subscribe("d", "e", qos=0) == (0, 0)
        assert await _mine(js) < 3
        for topic in "cab":
            await publisher.deliver(topic, topic.encode(), 1)
            await client.receive(topic, topic.encode(), qos=1)
        assert await client.subscribe("a", "g", qos=1) == (1, 1)
        for topic in "ga":
            await publisher.deliver(topic, b"again", 1)
            await client.receive(topic, b"again", qos=1)
        await settled(js, "durable")
        await client.unsubscribe("a")
        await client.disconnect()
    await _allow(js, 100)
    async with (
        await RawClient.connect(local.port, "durable", clean=False) as client,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        assert client.session_present

        async def created() -> bool:
            return await _mine(js) == 3

        await aeventually(created, what="the consumers")
        for topic in "abcg":
            await publisher.deliver(topic, topic.encode(), 1)
        for topic in "bcg":
            await client.receive(topic, topic.encode(), qos=1)
        await client.quiet()
