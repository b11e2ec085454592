# SPDX-License-Identifier: Apache-2.0
"""A group's message at QoS 2 is being assigned to a member when JetStream loses its majority."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import nats
import pytest
from nats.aio.client import Client

from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory
from tests.harness.cluster import Cluster, lead, running_cluster
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ASSIGNED: Final = "$MQTT.shared.assigned."
TEXT: Final = "$share/group/work"
OPTIONS: Final[dict[str, Any]] = {"session_expiry_interval": 1000}

RECOVERY: Final = 90.0
"""Seconds in which leaders are elected, and the group's message is delivered once more if nobody has it."""


@pytest.fixture
def cluster(nats_backend: str, tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path, backend=nats_backend) as cluster:
        yield cluster


@pytest.fixture
async def survivor(cluster: Cluster) -> AsyncIterator[Client]:
    """A connection to the server that is not killed."""
    client = await nats.connect(cluster.servers[2].url)
    yield client
    await client.close()


@pytest.fixture
async def proxy(cluster: Cluster) -> AsyncIterator[NatsProxy]:
    """Between a gateway and the server that is not killed."""
    between = NatsProxy(cluster.servers[2].port, lambda: None)
    await between.start()
    yield between
    await between.close()


async def count_assigned(client: Client) -> int:
    """Number of assignments; raises while nobody can tell."""
    info = await client.jetstream().stream_info("$MQTT_shared", subjects_filter=f"{ASSIGNED}>")
    return len(info.state.subjects or {})


@pytest.mark.parametrize("outage", [7.0, 25.0], ids=["the leader stays", "the leader steps down"])
@pytest.mark.parametrize("lost", [False, True], ids=["", "NATS is lost too"])
async def test_the_leader_of_the_assignments_loses_its_followers(
    cluster: Cluster, survivor: Client, proxy: NatsProxy, gateway_factory: GatewayFactory, outage: float, lost: bool
) -> None:
    """It has the assignment in its log, and has it stored when they are back: the member gets the message then."""
    gateway, other = (
        gateway_factory(proxy.url, "--gateway-lease", "300", start=False),
        gateway_factory(cluster.servers[2].url),
    )
    await asyncio.to_thread(gateway.start)
    await cluster.settled("$MQTT_shared")
    await lead(survivor, "STREAM.$MQTT_shared", "n2")
    now = asyncio.get_running_loop().time
    async with (
        await RawClient5.connect5(gateway.port, "member", **OPTIONS) as member,
        await RawClient5.connect5(other.port, "publisher") as publisher,
    ):
        await member.subscribe(TEXT, qos=2)
        trap = proxy.set("up", ASSIGNED, Action.HOLD)
        await publisher.deliver("work", b"1", 2)
        await asyncio.wait_for(trap.sprung.wait(), RECOVERY)
        for server in cluster.servers[:2]:
            server.kill()
        trap.release()
        begun = now()
        if lost:  # whether nats-server has had the assignment by then does not matter
            proxy.lose()
        await aeventually(lambda: now() > begun + outage, outage + 1)
        for server in cluster.servers[:2]:
            server.start()
        proxy.away = False
        await member.complete(await member.message("work", b"1", timeout=RECOVERY, qos=2, dup=False))
        await aeventually(lambda: _none(survivor), RECOVERY, what="no assignment")
        await member.quiet()


async def _none(survivor: Client) -> bool:
    return not await count_assigned(survivor)
