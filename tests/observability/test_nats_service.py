# SPDX-License-Identifier: Apache-2.0
"""Gateways as micro-services of NATS, seen by the real nats CLI."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest
from nats.aio.client import Client as NatsClient

from mqtt_nats import __version__
from mqtt_nats.observability.nats_service import Service, Statistics
from tests.harness.inprocess import InProcess
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.shell import find_nats_cli
from tests.sessions.fakes import FakeServices, as_identity, as_tasks

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


# -- requests, without nats-server ----------------------------------------------------------------------

ABOUT = {"name": "edge", "listen": ["127.0.0.1:1883", "[::1]:1883"]}
NUMBERS = Statistics(1_700_000_000.25, 5, 4, 30, 20, 1)
EVERY, NAMED, ONE = b"$SRV.*", b"$SRV.*.mqtt-nats", b"$SRV.*.mqtt-nats.*"
STATUS = b"$MQTT.gateways.status."


class Asked:
    """A service with connections that only note frames, and its answers."""

    def __init__(self) -> None:
        self.services = FakeServices()
        self.link = self.services.fake_link
        identity, tasks = as_identity(self.services.identity), as_tasks(self.services.tasks)
        self.service = Service(self.services.nats, identity, tasks, ABOUT, lambda: NUMBERS, self.snapshot)

    async def snapshot(self) -> dict[str, Any]:
        return {"id": self.services.identity.id, "clients": 4}

    def ask(self, pattern: bytes, subject: bytes, reply: bytes = b"_INBOX.me") -> list[Any]:
        """Bring a request to whoever subscribes the pattern; return the answers since the last request."""
        sids = [sid for sid, one in self.link.fake_subjects.items() if one == pattern]
        for sid in sids:
            self.link.handlers[sid](subject, reply, b"", b"")
        return self.answers()

    def answers(self) -> list[Any]:
        frames = [one.split(b"\r\n") for one in self.link.out]
        self.link.out.clear()
        assert all(head == b"PUB _INBOX.me %d" % len(body) for head, body, _ in frames)
        return [orjson.loads(body) for _, body, _ in frames]


async def test_a_request_for_every_service_for_this_name_or_for_this_gateway_is_answered_once() -> None:
    asked = Asked()
    for pattern, end in ((EVERY, b""), (NAMED, b".mqtt-nats"), (ONE, b".mqtt-nats.gateway0")):
        (answer,) = asked.ask(pattern, b"$SRV.PING" + end)
        assert (answer["type"], answer["id"]) == ("io.nats.micro.v1.ping_response", "gateway0")
        assert answer["metadata"] == {"listen": "127.0.0.1:1883, [::1]:1883", "name": "edge"}


@pytest.mark.parametrize(
    ("pattern", "subject", "reply"),
    [
        (ONE, b"$SRV.PING.mqtt-nats.gateway1", b"_INBOX.me"),
        (EVERY, b"$SRV.PING", b""),
        (EVERY, b"$SRV.SCHEMA", b"_INBOX.me"),
        (EVERY, b"$SRV.\xff", b"_INBOX.me"),
        (STATUS + b"*", STATUS + b"gateway1", b"_INBOX.me"),
        (STATUS + b"*", STATUS + b"gateway0", b""),
    ],
)
async def test_requests_for_others_without_a_reply_subject_or_of_another_kind_have_no_answer(
    pattern: bytes, subject: bytes, reply: bytes
) -> None:
    asked = Asked()
    assert asked.ask(pattern, subject, reply) == []
    assert asked.services.tasks.fake_spawned == []


async def test_info_names_the_endpoint() -> None:
    (info,) = Asked().ask(EVERY, b"$SRV.INFO")
    (endpoint,) = info["endpoints"]
    assert (endpoint["name"], endpoint["subject"]) == ("status", "$MQTT.gateways.status.gateway0")
    assert info["version"] == __version__


async def test_stats_count_the_requests_for_the_counters() -> None:
    asked = Asked()
    for number in range(3):
        (stats,) = asked.ask(EVERY, b"$SRV.STATS")
        (endpoint,) = stats["endpoints"]
        assert endpoint["num_requests"] == number
        assert asked.ask(STATUS + b"*", STATUS + b"gateway0") == []  # the answer takes a while
        await asked.services.tasks.fake_settle()
        assert asked.answers() == [{"id": "gateway0", "clients": 4}]
    assert stats["started"] == "2023-11-14T22:13:20.250Z"
    assert endpoint["data"] == {"connections": 5, "clients": 4, "received": 30, "sent": 20, "dropped": 1}
    (stats,) = asked.ask(EVERY, b"$SRV.STATS")
    (endpoint,) = stats["endpoints"]
    assert 0 < endpoint["average_processing_time"] <= endpoint["processing_time"] // 3 + 1
