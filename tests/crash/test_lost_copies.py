# SPDX-License-Identifier: Apache-2.0
"""A nats-server dies, and with it live copies that it has not passed on: gateways on other servers miss them."""

import asyncio
from collections.abc import Iterator

import nats
import pytest

from tests.conftest import GatewayFactory
from tests.harness.cluster import Cluster, lead, running_cluster
from tests.harness.rawclient import PUBACK, RawClient

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MESSAGES = "$MQTT_msgs"
RECOVERY = 60.0
"""Seconds in which an election is over."""

PAYLOADS = [b"%0100000d" % number for number in range(110)]
"""Many more bytes than the sockets between two servers take."""


@pytest.fixture(scope="module")
def cluster(nats_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), backend=nats_backend) as cluster:
        yield cluster


async def taken(client: RawClient) -> list[bytes]:
    """Receive all messages, and acknowledge each."""
    found = []
    for _ in range(len(PAYLOADS) + 1):
        (message,) = await client.messages(1, RECOVERY)
        client.ack(PUBACK, message.packet_id)
        found.append(message.payload)
    return found


@pytest.mark.parametrize("leader", [1, 2])
async def test_what_a_dead_server_has_not_passed_on_comes(
    cluster: Cluster, gateway_factory: GatewayFactory, leader: int
) -> None:
    here, there, other = cluster.servers
    near = gateway_factory(here.url, "--stream-replicas", "3")
    far = gateway_factory(there.url, "--stream-replicas", "3")
    client = await nats.connect(other.url)
    await lead(client, f"STREAM.{MESSAGES}", f"n{leader}")
    await client.close()
    try:
        async with (
            await RawClient.connect(near.port, "subscriber") as subscriber,
            await RawClient.connect(near.port, "second") as second,
            await RawClient.connect(far.port, "publisher") as publisher,
        ):
            await subscriber.subscribe("lost/#", qos=1)
            await second.subscribe("+/a", qos=1)
            await publisher.deliver("lost/a", b"first", 1)
            for one in (subscriber, second):
                await one.message("lost/a", b"first", RECOVERY)
            takers = [asyncio.create_task(taken(one)) for one in (subscriber, second)]
            await asyncio.to_thread(here.pause)
            try:
                await publisher.deliver_all("lost/a", PAYLOADS, 1)
                await asyncio.to_thread(there.kill)
            finally:
                await asyncio.to_thread(here.resume)
            await publisher.deliver("lost/a", b"last", 1)
            for came in await asyncio.gather(*takers):
                assert came == [*PAYLOADS, b"last"]
            for one in (subscriber, second):
                await one.quiet()
    finally:
        await asyncio.to_thread(there.start)
        await cluster.settled(MESSAGES)
