# SPDX-License-Identifier: Apache-2.0
"""A nats-server that wants to join the cluster of deploy/nats with the certificate of somebody else."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import nats
import pytest

from mqtt_nats.gateway.embedded import find_binary
from tests.harness.installation import CLUSTER, Secrets, SecuredCluster, SecuredNats
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.waiting import aeventually, free_port

PATIENCE: Final = 30.0


class ClusterOfDeploy:
    """Two servers as deploy/nats/cluster.conf has them, and the place of a third one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.secrets = Secrets(directory / "secrets")
        cluster = SecuredCluster(directory, self.secrets)
        self.routes = cluster.routes
        self.stranger_port = free_port()
        self.strangers: list[LoggedProcess] = []
        self.servers = cluster.servers[:2]

    def stranger(self, certificate: str) -> LoggedProcess:
        """Start a nats-server without users in the third place, with a certificate of the installation."""
        place = self.directory / f"stranger-{certificate}"
        place.mkdir()
        others = ", ".join(f'"nats://127.0.0.1:{self.routes[name]}"' for name in CLUSTER[:2])
        files = self.secrets.directory
        (place / "nats.conf").write_text(
            f"""
server_name: "stranger"
listen: "127.0.0.1:{self.stranger_port}"
jetstream {{ store_dir: "{place}" }}
cluster {{
  name: "mqtt", listen: "127.0.0.1:{self.routes[CLUSTER[2]]}", routes: [ {others} ]
  tls {{
    cert_file: "{files}/{certificate}.pem", key_file: "{files}/{certificate}-key.pem"
    ca_file: "{files}/routes-ca.pem", insecure: true
  }}
}}
""",
            encoding="utf-8",
        )
        process = LoggedProcess("nats-server", place / "nats-server.log")
        self.strangers.append(process)
        process.start([str(find_binary()), "-c", str(place / "nats.conf")])
        wait_ready(process, "(Listening for route connections)", PATIENCE)
        return process


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterOfDeploy]:
    found = ClusterOfDeploy(tmp_path)
    try:
        for server in found.servers:
            server.launch()
        for server in found.servers:
            server.wait()
        yield found
    finally:
        for process in (*found.strangers, *(server.process for server in found.servers)):
            process.discard()


def _has_refused(server: SecuredNats) -> bool:
    return "TLS route handshake error" in server.log


async def publish(cluster: ClusterOfDeploy) -> None:
    """Publish a message at a server of the cluster."""
    server = cluster.servers[0]
    context = ssl.create_default_context(cafile=str(cluster.secrets.authority))
    client = await nats.connect(
        server.url, user="gateway", password=cluster.secrets.text("gateway-password"), tls=context
    )
    await client.publish("plant.secret", b"secret")
    await client.flush()
    await client.close()


@pytest.mark.processes
@pytest.mark.parametrize("certificate", ["device", "nats", "gateway"])
async def test_only_a_certificate_of_the_authority_of_routes_makes_a_route(
    cluster: ClusterOfDeploy, certificate: str
) -> None:
    """Whoever is a route reads every subject, and publishes for everybody, without a login."""
    stranger = cluster.stranger(certificate)
    client = await nats.connect(f"nats://127.0.0.1:{cluster.stranger_port}")
    heard = await client.subscribe(">")
    await client.flush()
    for server in cluster.servers:
        await aeventually(partial(_has_refused, server), PATIENCE)
    await publish(cluster)
    await client.publish("end", b"")
    assert (await heard.next_msg(PATIENCE)).subject == "end"
    assert "Router connection closed" in stranger.text
    await client.close()


@pytest.mark.processes
async def test_a_certificate_of_the_authority_of_routes_makes_one(cluster: ClusterOfDeploy) -> None:
    """So the test above could fail."""
    cluster.stranger("route")
    client = await nats.connect(f"nats://127.0.0.1:{cluster.stranger_port}")
    heard = await client.subscribe("plant.>")
    await client.flush()

    async def arrives() -> bool:
        await publish(cluster)
        return heard.pending_msgs > 0

    await aeventually(arrives, PATIENCE)
    await client.close()
