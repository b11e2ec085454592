# SPDX-License-Identifier: Apache-2.0
"""SUBACK in a cluster: whoever publishes after it, on whichever server, is heard."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg

from mqtt_streams.gateway_subjects import ECHO, HERE
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually

pytestmark = [pytest.mark.anyio, pytest.mark.processes]

ROUNDS = 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@contextlib.contextmanager
def started(cluster: Cluster, directory: Path) -> Iterator[list[Gateway]]:
    """One gateway on each server."""
    gateways = [
        Gateway(directory / f"gateway{number}.log", server.url, arguments=["--gateway-lease", "60"])
        for number, server in enumerate(cluster.servers)
    ]
    try:
        for gateway in gateways:
            gateway.start()
        yield gateways
        for gateway in gateways:
            assert "Traceback" not in gateway.log
    finally:
        for gateway in gateways:
            gateway.process.discard()


@pytest.fixture(scope="module")
def gateways(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Gateway]]:
    with started(cluster, tmp_path_factory.mktemp("gateways")) as found:
        yield found


@contextlib.asynccontextmanager
async def clients(gateways: list[Gateway]) -> AsyncIterator[list[RawClient]]:
    """One client at each gateway, as soon as streams whose leader has died have another one."""

    async def connect(number: int) -> RawClient:
        return await RawClient.connect(gateways[number].port, f"c{number}")

    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(await aeventually(partial(connect, number), 40.0))
            for number in range(len(gateways))
        ]


async def heard_at_once(gateways: list[Gateway], filter_of: str, topic_of: str, rounds: int) -> None:
    """Subscribe at the first gateway, publish at the others as soon as SUBACK is there."""
    async with clients(gateways) as (subscriber, *publishers):
        for number in range(rounds):
            topic = topic_of.format(number)
            await subscriber.subscribe(filter_of.format(number))
            for publisher in publishers:
                publisher.publish(topic, b"%d" % number)
            for _ in publishers:
                await subscriber.message(topic, b"%d" % number)


@pytest.mark.parametrize("filter_of", ["round/{}/#", "+/{}/x"], ids=["plain", "leading wildcard"])
async def test_what_is_published_at_once_on_another_server_arrives(gateways: list[Gateway], filter_of: str) -> None:
    await heard_at_once(gateways, filter_of, "round/{}/x", ROUNDS)


async def test_with_retained_messages(gateways: list[Gateway], cluster: Cluster) -> None:
    """Their requests take the place of the PING, but not of the echo."""
    topics = [f"kept/{number}" for number in range(ROUNDS // 3)]
    async with clients(gateways) as (subscriber, publisher, _):
        for topic in topics:
            await publisher.deliver(topic, b"old", 1, retain=True)
        await cluster.settled("$MQTT_rmsgs")
        for topic in topics:
            await subscriber.subscribe(topic)
            publisher.publish(topic, b"new")
            await subscriber.message(topic, b"old", retain=True)
            await subscriber.message(topic, b"new")


async def test_a_resumed_shared_subscription(gateways: list[Gateway]) -> None:
    """It is in force when CONNACK comes."""
    async with clients(gateways) as (_, *publishers):
        async with await RawClient.connect(gateways[0].port, "worker", clean=False) as worker:
            await worker.subscribe("$share/workers/work/#")
        for number in range(ROUNDS // 10):
            async with await RawClient.connect(gateways[0].port, "worker", clean=False) as worker:
                for publisher in publishers:
                    publisher.publish(f"work/{number}", b"%d" % number)
                for _ in publishers:
                    await worker.message(f"work/{number}", b"%d" % number)


async def test_a_gateway_that_moves_to_another_server(gateways: list[Gateway], cluster: Cluster) -> None:
    """Its new server is known at once, its old one is not waited for."""
    cluster.servers[2].kill()
    try:
        await aeventually(lambda: "connected to NATS again" in gateways[2].log, 30.0)
        await heard_at_once(gateways, "moved/{}", "moved/{}", ROUNDS // 3)
    finally:
        cluster.servers[2].start()


async def test_servers_without_an_answer_are_not_waited_for_again(gateways: list[Gateway], cluster: Cluster) -> None:
    """One has no gateway any more; on the other one the gateway is stopped, or cut off."""
    asked: list[bytes] = []

    async def hear(message: Msg) -> None:
        asked.append(message.data)

    client = await nats.connect(cluster.servers[0].url)
    try:
        await client.subscribe(ECHO.decode() + "SILENT", cb=hear)
        for name in (b"SILENT", b"GONE"):
            await client.publish(HERE.decode(), name)
        await fence(client)
        async with clients(gateways[:1]) as (subscriber,):
            begun = time.monotonic()
            for number in range(60):
                await subscriber.subscribe(f"quick/{number}")
            assert time.monotonic() - begun < 45  # a second each, otherwise
        assert len(asked) == 1
        # What is no name of a server is not remembered, or could be a subject with a wildcard.
        await client.publish(HERE.decode(), b"*")
        await fence(client)
    finally:
        await client.close()
    await heard_at_once(gateways, "after/{}", "after/{}", 20)
