# SPDX-License-Identifier: Apache-2.0
"""A CONNECT that is refused for a reason that passes: the connection is closed, or CONNACK has the reason."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mqtt_nats.client.connect import TEMPORARY
from mqtt_nats.codec import Connack, Connect, ReasonCode
from mqtt_nats.config.settings import Settings
from mqtt_nats.hooks import CLIENT_CONNECT, Connecting, Stop
from mqtt_nats.transport.listener_settings import ListenerSettings
from tests.conftest import GatewayFactory
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import eventually

UNAVAILABLE = 3
"""The return code of 3.1.1."""

AS_TOLD = {
    ReasonCode.SERVER_SHUTTING_DOWN: 0x88,
    ReasonCode.KEEP_ALIVE_TIMEOUT: 0x89,
    ReasonCode.SESSION_TAKEN_OVER: 0x89,
}
"""Codes of reasons that CONNACK must not have."""

LASTING = (ReasonCode.BANNED, ReasonCode.NOT_AUTHORIZED, ReasonCode.SERVER_MOVED, ReasonCode.UNSPECIFIED_ERROR)

PATIENCE = 40.0


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer) -> Iterator[InProcess]:
    """A gateway with a listener as it is by default, and one that wants CONNACK."""
    listeners: tuple[dict[str, str], ...] = ({}, {"temporary_refusals": "connack"})
    made = tuple(
        ListenerSettings.model_validate({"listen": "127.0.0.1:0", "allow_anonymous": True, **one}) for one in listeners
    )

    def refuse(event: Connecting, reason: ReasonCode) -> Stop[ReasonCode]:
        return Stop(ReasonCode[event.client_id])

    with running(Settings(nats=(nats_server.url,), listeners=made, temporary_refusals="close")) as found:
        found.call(lambda: found.account.services.hooks.add(CLIENT_CONNECT, refuse, owner="test"))
        yield found


def refused(inside: InProcess, reason: ReasonCode) -> int:
    """How often the metrics have counted a refusal."""
    return inside.call(lambda: inside.account.services.counters.refused.get(reason.name.lower(), 0))


def test_the_connection_is_closed_by_default() -> None:
    assert Settings().temporary_refusals == "close"


@pytest.mark.parametrize("reason", sorted(TEMPORARY))
@pytest.mark.parametrize("version", [4, 5])
async def test_a_reason_that_passes(
    inside: InProcess, caplog: pytest.LogCaptureFixture, reason: ReasonCode, version: int
) -> None:
    """The log and the metrics have the reason in either case."""
    caplog.set_level("INFO", "mqtt_nats.broker")
    closing, telling = inside.ports
    before = refused(inside, reason)
    kind = RawClient5 if version == 5 else RawClient
    async with await kind.open(closing) as client:
        client.send(Connect(version, reason.name, True, 0))
        await client.expect_closed()
    async with await kind.open(telling) as client:
        client.send(Connect(version, reason.name, True, 0))
        await client.expect(Connack, code=AS_TOLD.get(reason, reason) if version == 5 else UNAVAILABLE)
        await client.expect_closed()
    assert refused(inside, reason) == before + 2
    assert caplog.text.count("is refused: the connection is not accepted") == 2


@pytest.mark.parametrize("reason", LASTING)
async def test_a_reason_that_does_not_pass(inside: InProcess, reason: ReasonCode) -> None:
    for port in inside.ports:
        async with await RawClient5.open(port) as client:
            client.send(Connect(5, reason.name, True, 0))
            await client.expect(Connack, code=reason)
            await client.expect_closed()


async def test_another_server_is_named(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """Where CONNACK is wanted, and its client takes so much."""
    rate = ("--connect-rate", "0.7", "--rate-burst", "1")
    gateway = gateway_factory(nats_server, "--server-reference", "other:1883", "--temporary-refusals", "connack", *rate)
    with ExitStack() as stack:
        first, second, small = [await RawClient5.open(gateway.port) for _ in range(3)]
        for client in (first, second, small):
            stack.callback(client.drop)
        first.send(Connect(5, "", True, 0))
        await first.expect(Connack, code=0)
        second.send(Connect(5, "", True, 0))
        small.send(Connect(5, "", True, 0, properties={"maximum_packet_size": 25}))
        assert gateway.term() == 0
        for client in (second, small):
            answer = await client.expect(Connack, code=ReasonCode.USE_ANOTHER_SERVER)
            assert answer.properties is not None
            assert answer.properties["server_reference"] == "other:1883"
            assert ("reason_string" in answer.properties) is (client is second)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("version", ["mqttv311", "mqttv5"])
def test_mosquitto_sub_comes_back(
    nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path, version: str
) -> None:
    """It comes back after a closed connection, and ends after CONNACK with an error."""
    program = shutil.which("mosquitto_sub")
    if program is None:
        pytest.skip("mosquitto_sub is not installed")
    gateway = gateway_factory(nats_server, "--temporary-refusals", "close", "--connect-rate", "2", "--rate-burst", "1")
    port = str(gateway.port)
    clients = [
        subprocess.Popen([program, "-p", port, "-t", "x", "-i", f"m{number}", "-V", version]) for number in range(14)
    ]
    try:
        eventually(lambda: all(f"client 'm{number}' " in gateway.log for number in range(14)), PATIENCE)
        eventually(lambda: gateway.log.count("is connected") >= 14, PATIENCE)
        assert "is refused: too many connections in a short time" in gateway.log
        assert [one.poll() for one in clients] == [None] * 14
    finally:
        for one in clients:
            one.kill()
            one.wait()
