# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats ctl cluster``: what it shows, and how it ends a dead gateway's claims."""

import re
import subprocess
import sys
import time
from typing import Any

import orjson
import pytest

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.raw5 import Raw5, will
from tests.harness.waiting import eventually, free_port

LEASE = 60  # seconds, longer than any test


def ctl(url: str, *arguments: str, status: int = 0) -> str:
    """Run a command; what it prints, or complains."""
    command = [sys.executable, "-m", "mqtt_nats", "ctl", "--nats", url, "cluster", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


def look(server: NatsServer) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(ctl(server.url, "status", "--json"))
    return found


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


def start(server: NatsServer, gateway_factory: GatewayFactory, lease: int = LEASE) -> Gateway:
    return gateway_factory(server, "--gateway-lease", str(lease))


@pytest.mark.long
def test_status(server: NatsServer, gateway_factory: GatewayFactory) -> None:
    gateways = [start(server, gateway_factory) for _ in range(2)]
    with Raw5.open(gateways[0].port), Raw5.open(gateways[0].port), Raw5.open(gateways[1].port):
        found = look(server)
        assert {one["listen"][0]: one["connections"] for one in found["gateways"]} == {
            f"127.0.0.1:{gateways[0].port}": 2,
            f"127.0.0.1:{gateways[1].port}": 1,
        }
        assert {one["state"] for one in found["gateways"]} == {"running"}
        assert all(one["memory"] > 10_000_000 and one["tasks"] > 0 for one in found["gateways"])
        text = ctl(server.url, "status")
    assert found["nats"]["connected"] == "test"
    assert {"$MQTT_sess", "$MQTT_msgs", "KV_MQTT_gateways"} <= {one["name"] for one in found["streams"]}
    for one in found["gateways"]:
        assert re.search(rf"^{one['id']}  {one['name']} +running  {one['listen'][0]} .* test$", text, re.MULTILINE), (
            text
        )
    assert re.search(r"^\$MQTT_msgs +1 ", text, re.MULTILINE), text


@pytest.mark.long
def test_a_dead_gateway_is_removed(server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """Its will is published now, a minute before its lease ends."""
    watching = start(server, gateway_factory, lease=1)
    dying = start(server, gateway_factory)
    identities = {one["listen"][0]: one["id"] for one in look(server)["gateways"]}
    dead = identities[f"127.0.0.1:{dying.port}"]
    with Raw5.open(watching.port) as watcher:
        watcher.subscribed(("wills/#", 0))
        client = Raw5.open(dying.port, "bereaved", flags=4, tail=will("wills/bereaved", b"gone"))
        assert "runs, and is not removed" in ctl(server.url, "remove", dead, status=1)
        dying.kill()
        client.close()
        begun = time.monotonic()
        assert {one["id"]: one["state"] for one in look(server)["gateways"]}[dead] == "silent"
        assert "has ended: its wills are published" in ctl(server.url, "remove", dead)
        watcher.message(b"gone")
        assert time.monotonic() - begun < LEASE / 2
    eventually(lambda: dead not in {one["id"] for one in look(server)["gateways"]})
    assert f"there is no gateway {dead}" in ctl(server.url, "remove", dead, status=1)


@pytest.mark.long
def test_nobody_is_there_to_take_over(server: NatsServer, gateway_factory: GatewayFactory) -> None:
    gateway = start(server, gateway_factory)
    (only,) = look(server)["gateways"]
    gateway.kill()
    assert "no gateway runs" in ctl(server.url, "remove", only["id"])
    assert [one["state"] for one in look(server)["gateways"]] == ["dead"]


@pytest.mark.long
def test_where_nothing_is(server: NatsServer) -> None:
    assert "no gateway has run there yet" in ctl(server.url, "status", status=1)
    assert "cannot connect to nats-server" in ctl(f"nats://127.0.0.1:{free_port()}", "status", status=1)
