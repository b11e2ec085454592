# SPDX-License-Identifier: Apache-2.0
"""The table of claims at other gateways, in small; and the stub that stands for another gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nats
import orjson
import pytest
from nats.aio.msg import Msg

from benchmarks import claims
from mqtt_nats.sessions.listener_clients import QUIET_BEFORE_USE_S
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.fence import fence
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.processes


def shape(subject: str, reply: str, headers: dict[str, str], payload: bytes) -> tuple[Any, ...]:
    """The parts of a claim, whoever claims which session."""
    record = orjson.loads(payload)
    lengths = [[len(token) for token in one.split(".")] for one in (subject, reply)]
    return lengths, reply.split(".")[:2], reply.split(".")[3], headers, record.keys(), record["v5"].keys()


async def test_the_stub_claims_as_a_gateway_does(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    server = nats_factory()
    gateway = gateway_factory(server)
    client = await nats.connect(server.url)
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    await client.subscribe("$MQTT.sess.*", cb=hear)
    await fence(client)
    async with await RawClient.connect(gateway.port, "client"):
        await aeventually(lambda: heard)
    await client.close()
    one = heard[0]
    stub = claims.claim("client", "stub0000", "0" * 22)
    assert shape(*stub) == shape(one.subject, one.reply, one.headers or {}, one.data)
    assert stub[0] == one.subject


@pytest.mark.soak
def test_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert claims.APART_S > 2 * QUIET_BEFORE_USE_S
    report = tmp_path / "growth.md"
    claims.main(["--sessions", "3", "--claims", "200", "--report", str(report)])
    assert "## Claims of sessions at other gateways" in capsys.readouterr().out
    (row,) = [line.split("|") for line in report.read_text().splitlines() if line.startswith("| 3")]
    assert 1 < int(row[2]) <= 4  # that of all second keys, and those of the sessions
