# SPDX-License-Identifier: Apache-2.0
"""A gateway on the smaller side of a cluster that has fallen apart: it acknowledges nothing, and says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import GatewayFactory
from tests.harness.partition import SplitCluster
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient, topic_of
from tests.harness.waiting import aeventually
from tests.integration.test_ctl import ctl

pytestmark = pytest.mark.anyio

PATIENCE = 40.0
"""Seconds for elections, and for a leader to find out that it leads nobody."""

LEASE = ("--gateway-lease", "300")
"""However long that takes, nobody is taken for dead."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SplitCluster]:
    cluster = SplitCluster(tmp_path)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.discard()


async def taken(subscriber: RawClient, count: int) -> list[bytes]:
    """The payloads of the next messages on the topic that the gateway on the smaller side has published to."""
    found = []
    for _ in range(count):
        (message,) = await subscriber.messages(1)
        await subscriber.complete(message)
        assert topic_of(message) == "apart"
        found.append(message.payload)
    return found


@pytest.mark.parametrize("silently", [False, True], ids=["routes end", "routes are silent"])
async def test_a_gateway_on_the_smaller_side(
    cluster: SplitCluster, gateway_factory: GatewayFactory, silently: bool
) -> None:
    """The leader of the messages is cut off, and the gateway with it."""
    apart = gateway_factory(cluster.servers[0], *LEASE)
    leader = cluster.servers.index(await cluster.leader("$MQTT_msgs"))
    if leader != 0:
        apart.term()
        apart = gateway_factory(cluster.servers[leader], *LEASE)
    url, others = cluster.servers[leader].url, cluster.servers[leader - 1]
    gateway = gateway_factory(others, *LEASE)

    async with (
        await RawClient.connect(gateway.port, "subscriber", clean=False) as subscriber,
        await RawClient.connect(gateway.port, "here") as here,
        await RawClient.connect(apart.port, "apart") as away,
    ):
        await subscriber.subscribe("#", qos=2)
        await away.deliver("before", b"before", 1)
        await subscriber.receive("before", b"before")
        cluster.isolate(leader, silently=silently)
        await aeventually(lambda: "not ready: " in apart.log, PATIENCE)
        await aeventually(lambda: re.search(r"  not ready: ", ctl(url, "status")), PATIENCE)

        sent = [away.publish("apart", b"one", 1), away.publish("apart", b"two", 2), away.publish("apart", b"three", 1)]

        async def goes_on() -> bool:
            return (await cluster.leader_at(others, "$MQTT_msgs")) not in ("", f"n{leader}")

        await aeventually(goes_on, PATIENCE)
        for number in range(20):  # meanwhile the larger side works, after a while also for new clients
            here.publish("here", b"%d" % number, 1, packet_id=number + 1)
            await here.expect_ack(PUBACK, number + 1, timeout=PATIENCE)
            await subscriber.receive("here", b"%d" % number)

        async def comes() -> RawClient:
            return await RawClient.connect(gateway.port, "late")

        async with await aeventually(comes, PATIENCE) as late:
            await late.deliver("late", b"late", 2)
            await subscriber.receive("late", b"late")
        await away.quiet()  # no acknowledgement has come

        cluster.heal()
        await away.expect_ack(PUBACK, sent[0], timeout=90.0)
        await away.expect_ack(PUBREC, sent[1], timeout=PATIENCE)
        await away.expect_ack(PUBACK, sent[2], timeout=PATIENCE)
        away.ack(PUBREL, sent[1])
        await away.expect_ack(PUBCOMP, sent[1], timeout=PATIENCE)
        got = await taken(subscriber, 3)
        assert [one for one in got if one != b"two"] == [b"one", b"three"], "the order of a topic at QoS 1"
        assert b"two" in got
        await subscriber.quiet()
        for each in (apart, gateway):  # the other one may have been without a leader for a moment, too
            await aeventually(lambda each=each: each.ready, PATIENCE)  # type: ignore[misc]
