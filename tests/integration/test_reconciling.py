# SPDX-License-Identifier: Apache-2.0
"""Deliveries that were lost between a consumer and its gateway, and the answer to what only looks like it."""

from collections.abc import AsyncIterator

import nats
import orjson
import pytest
from nats.aio.client import Client

from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio

LOST = "deliveries or acknowledgements were lost"


@pytest.fixture
def local(nats_server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(nats_server, "--max-inflight", "10")


@pytest.fixture
async def nc(nats_server: NatsServer) -> AsyncIterator[Client]:
    client = await nats.connect(nats_server.url)
    yield client
    await client.close()


async def consumer(nc: Client, client_id: str) -> tuple[str, str]:
    """Name and deliver subject of a session's only consumer."""
    answer = orjson.loads((await nc.request("$JS.API.CONSUMER.LIST.$MQTT_msgs")).data)
    (found,) = (one for one in answer["consumers"] if one["name"].startswith(name_hash(client_id)))
    return found["name"], found["config"]["deliver_subject"]


async def forge(nc: Client, client_id: str, place: int, payload: bytes = b"forged") -> None:
    """A delivery with this number of the consumer's, as if those before it had been lost."""
    name, subject = await consumer(nc, client_id)
    headers = {"Nmqtt-Pub": "1"}
    ack = f"$JS.ACK.$MQTT_msgs.{name}.1.{place}.{place}.1.0"
    await nc.publish(subject, payload, ack, headers)
    await nc.flush()


@pytest.mark.parametrize("qos", [1, 2])
async def test_after_a_hole_everything_pending_comes_again(local: Gateway, nc: Client, qos: int) -> None:
    """Nothing that came after it is sent before; what the client has is not sent again."""
    name = f"hole-{qos}"
    async with (
        await RawClient.connect(local.port, name, clean=False) as subscriber,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        await subscriber.subscribe(name, qos=qos)
        for number in range(3):
            await publisher.deliver(name, b"%d" % number, qos)
        kept = (await subscriber.messages(3))[-1]
        _, before = await consumer(nc, name)
        await forge(nc, name, 1000)
        await aeventually(lambda: LOST in local.log)

        async def moved() -> bool:
            return (await consumer(nc, name))[1] != before

        await aeventually(moved)
        for number in range(3, 20):
            await publisher.deliver(name, b"%d" % number, qos)
        await subscriber.complete(kept)
        for number in range(3, 6):
            received = (await subscriber.messages(1))[0]
            assert (received.payload, received.dup) == (b"%d" % number, False)
            await subscriber.complete(received)


async def test_consecutive_numbers_are_no_hole(local: Gateway, nc: Client) -> None:
    """Also over redeliveries to a new connection."""
    async with (
        await RawClient.connect(local.port, "steady", clean=False) as subscriber,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        await subscriber.subscribe("steady", qos=1)
        for number in range(5):
            await publisher.deliver("steady", b"%d" % number, 1)
        await subscriber.messages(5)
        subscriber.drop()
        async with await RawClient.connect(local.port, "steady", clean=False) as again:
            for received in await again.messages(5):
                await again.complete(received)
            for number in range(50):
                await publisher.deliver("steady", b"more %d" % number, 1)
                (received,) = await again.messages(1)
                assert received.payload == b"more %d" % number
                await again.complete(received)
    assert LOST not in local.log
