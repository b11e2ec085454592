# SPDX-License-Identifier: Apache-2.0
"""Gateways as micro-services of NATS, seen by the real nats CLI."""

from __future__ import annotations

import subprocess
from pathlib import Path

import orjson
import pytest
from nats.aio.client import Client as NatsClient

from mqtt_nats import __version__
from tests.harness.inprocess import InProcess
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.shell import find_nats_cli

Pair = tuple[InProcess, InProcess]


def cli(nats_server: NatsServer, directory: Path, *arguments: str) -> str:
    env = {"XDG_CONFIG_HOME": str(directory), "HOME": str(directory), "TERM": "dumb"}
    command = [find_nats_cli(), "--server", nats_server.url, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nats_micro(pair: Pair, nats_server: NatsServer, tmp_path: Path, name: str) -> None:
    listed = cli(nats_server, tmp_path, "micro", "ls")
    identity = pair[0].account.services.identity.id
    for one in pair:
        assert one.account.services.identity.id in listed
    assert "mqtt-nats" in listed
    assert __version__ in listed
    info = cli(nats_server, tmp_path, "micro", "info", "mqtt-nats", identity)
    assert "MQTT gateway" in info
    assert f"$MQTT.gateways.status.{identity}" in info
    assert f"127.0.0.1:{pair[0].port}" in info
    stats = cli(nats_server, tmp_path, "micro", "stats", "mqtt-nats")
    for one in pair:
        assert one.account.services.identity.id in stats


async def test_the_endpoint(pair: Pair, nats_client: NatsClient, name: str) -> None:
    gateway = pair[1]
    identity = gateway.account.services.identity.id
    async with await RawClient.connect(gateway.port, name):
        answer = orjson.loads((await nats_client.request(f"$MQTT.gateways.status.{identity}", b"", timeout=30)).data)
        assert (answer["id"], answer["clients"]) == (identity, 1)
        stats = await nats_client.request(f"$SRV.STATS.mqtt-nats.{identity}", b"", timeout=30)
        found = orjson.loads(stats.data)
        assert found["type"] == "io.nats.micro.v1.stats_response"
        (endpoint,) = found["endpoints"]
        assert endpoint["num_requests"] == 1
        assert endpoint["data"]["clients"] == 1


@pytest.mark.parametrize("verb", ["PING", "INFO", "STATS"])
def test_documents_have_what_the_protocol_asks_for(pair: Pair, verb: str) -> None:
    found = pair[0].call(lambda: pair[0].broker.service.answer(verb))
    assert found is not None
    assert found["type"] == f"io.nats.micro.v1.{verb.lower()}_response"
    assert {"name", "id", "version", "metadata"} <= found.keys()
    assert pair[0].broker.service.answer("SCHEMA") is None
