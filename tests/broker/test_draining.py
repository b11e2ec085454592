# SPDX-License-Identifier: Apache-2.0
"""Consumers of ended subscriptions are removed."""

import nats
import orjson

from mqtt_streams.hashing import name_hash
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually


async def test_a_subscription_that_has_brought_nothing(gateway: Gateway, nats_server: NatsServer) -> None:
    """Another one, which matches the same, had brought all there was when it began."""
    control = await nats.connect(nats_server.url)

    async def consumers() -> int:
        answer = await control.request("$JS.API.CONSUMER.NAMES.$MQTT_msgs", timeout=10)
        names = orjson.loads(answer.data)["consumers"] or []
        return sum(name.startswith(f"{name_hash('drained')}_") for name in names)

    async def only_one() -> bool:
        return await consumers() == 1

    try:
        async with (
            await RawClient.connect(gateway.port, "drained", clean=False) as client,
            await RawClient.connect(gateway.port, "publisher") as publisher,
        ):
            await client.subscribe("drained/topic", qos=1)
            for number in range(3):
                await publisher.deliver("drained/topic", b"%d" % number, 1)
                await client.receive("drained/topic", b"%d" % number)
            await client.subscribe("drained/#", qos=1)
            assert await consumers() == 3
            await client.unsubscribe("drained/#")
            await aeventually(only_one, 30, what="one consumer")
    finally:
        await control.close()
