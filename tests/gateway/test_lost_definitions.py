# SPDX-License-Identifier: Apache-2.0
"""nats-server has lost the definitions of streams, as after a power cut: the gateway says what is gone."""

from __future__ import annotations

import os
from pathlib import Path

import nats
import pytest

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw
from tests.harness.raw import Raw, publish
from tests.harness.waiting import eventually

GONE = "ERROR mqtt_nats.gateway: stream $MQTT_sess was deleted, and is created again: every session is lost"


def test_a_stream_whose_definition_is_lost(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    """At the start of a gateway: JetStream has messages of the stream, but neither its definition nor its consumers."""
    server = nats_factory()
    gateway = gateway_factory(server)
    with Raw.connected(gateway.port, "away", clean=False) as client:
        assert client.subscribe(("t", 1)) == [1]
    with Raw.connected(gateway.port, "publisher") as client:
        client.send(publish("t", b"1", qos=1))
        client.expect(raw.PUBACK)
    gateway.kill()
    server.kill()
    definition = server.directory / "store" / "jetstream" / "$G" / "streams" / "$MQTT_msgs" / "meta.inf"
    assert definition.stat().st_size
    definition.write_bytes(b"")
    server.start()
    gateway.start()
    assert "ERROR mqtt_nats.gateway: nats-server has lost the definition of stream $MQTT_msgs" in gateway.log
    assert "created anew with 1 of its messages" in gateway.log
    assert "definition of stream $MQTT_sess" not in gateway.log


@pytest.mark.long
def test_new_streams_are_flushed_to_the_disk(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """By whoever creates them, before anybody is served; once."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\ndef sync():\n    print('flushed', flush=True)\nos.sync = sync\n", encoding="utf-8"
    )
    server = nats_factory()
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    first = gateway_factory(server, env=environment)
    assert first.log.count("flushed") == 1
    assert first.log.index("flushed") < first.log.index("MQTT  ")
    second = gateway_factory(server, env=environment)
    assert "flushed" not in second.log


async def test_a_stream_that_is_gone_while_the_gateway_runs(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory
) -> None:
    """And with it the session of a connected client, which is told by the end of its connection."""
    server = nats_factory()
    gateway = gateway_factory(server)
    with Raw.connected(gateway.port, "here", clean=False) as client:
        assert client.subscribe(("t", 1)) == [1]
        nats_client = await nats.connect(server.url)
        await nats_client.jetstream().delete_stream("$MQTT_sess")
        await nats_client.close()
        server.restart()
        client.expect_closed()
    eventually(lambda: GONE in gateway.log, 30)
    assert "WARNING mqtt_nats.broker: client 'here'" in gateway.log
    assert "its session is gone" in gateway.log
    with Raw(gateway.port) as client:
        client.send(raw.connect("here", clean=False))
        assert client.expect(raw.CONNACK).body == b"\0\0"


async def test_a_stream_that_is_gone_when_the_gateway_starts(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory
) -> None:
    """Another one that has been used tells that it was there."""
    server = nats_factory()
    gateway = gateway_factory(server)
    assert " was deleted, and is created again" not in gateway.log
    with Raw.connected(gateway.port, "away", clean=False) as client:
        assert client.subscribe(("t", 1)) == [1]
        client.send(publish("t", b"1", qos=1))
        found = [client.receive(), client.receive()]
        assert {one.kind for one in found if one} == {raw.PUBACK, raw.PUBLISH}
    gateway.term()
    nats_client = await nats.connect(server.url)
    await nats_client.jetstream().delete_stream("$MQTT_sess")
    await nats_client.close()
    gateway.start()
    assert GONE in gateway.log
    gateway.restart()
    assert " was deleted, and is created again" not in gateway.log
