# SPDX-License-Identifier: Apache-2.0
"""A gateway on a cluster that becomes large enough for replicas, and on one that is not as large as it was told."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import GatewayFactory
from tests.harness.cluster import Cluster
from tests.harness.gateway import Gateway
from tests.harness.nats import make_server
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually


@pytest.mark.slow
async def test_streams_get_replicas_while_the_gateway_runs(tmp_path: Path, gateway_factory: GatewayFactory) -> None:
    cluster = Cluster(tmp_path / "cluster", size=2)
    try:
        await asyncio.to_thread(cluster.start)
        refused = gateway_factory(cluster.url, "--stream-replicas", "3", start=False)
        refused.launch()
        assert refused.wait(60) == 1
        assert "the cluster has too few JetStream servers for stream_replicas" in refused.log
        gateway = gateway_factory(cluster.servers[0].url)
        (created,) = [
            line for line in gateway.log.splitlines() if "created " in line and "streams, replicas: 1" in line
        ]
        assert int(created.partition("created ")[2].split()[0]) >= 12  # one record for all of them
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in cluster.routes)
        cluster.servers.append(
            make_server(
                "process",
                tmp_path / "cluster" / "n2",
                config=f'server_name: "n2"\ncluster {{ name: "c", listen: "127.0.0.1:-1", routes: [{routes}] }}',
            )
        )
        async with (
            await RawClient.connect(gateway.port, "subscriber", clean=False) as subscriber,
            await RawClient.connect(gateway.port, "publisher") as publisher,
        ):
            await subscriber.subscribe("grown", qos=1)
            cluster.servers[2].start()
            for stream in ("$MQTT_sess", "$MQTT_msgs", "KV_MQTT_gateways"):
                line = f"changed stream {stream}: num_replicas = 3"
                await aeventually(partial(_says, gateway, line), 90.0)
                await cluster.settled(stream)
            await publisher.deliver("grown", b"more", 1)
            await subscriber.receive("grown", b"more")
    finally:
        cluster.discard()


def _says(gateway: Gateway, line: str) -> bool:
    return line in gateway.log
