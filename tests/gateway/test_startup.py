# SPDX-License-Identifier: Apache-2.0
"""A nats-server that cannot be used: one line that says what to do, exit status 1, no traceback."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import nats
import pytest
from nats.js.api import RetentionPolicy, StreamConfig

from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.settings import Settings
from mqtt_nats.ctl.nats_connection import connected
from mqtt_streams.gateways import PREFIX, STREAM, GatewayStore
from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.waiting import free_port


@pytest.fixture
def old_server() -> Iterator[str]:
    """URL of something that speaks as nats-server 2.11.0 does when a client connects."""
    information = {
        "server_id": "OLD",
        "server_name": "old",
        "version": "2.11.0",
        "proto": 1,
        "headers": True,
        "jetstream": True,
        "max_payload": 1048576,
        "host": "127.0.0.1",
        "port": 4222,
    }

    def serve(client: socket.socket) -> None:
        with client, client.makefile("rwb") as stream:
            stream.write(b"INFO " + json.dumps(information).encode() + b"\r\n")
            stream.flush()
            for line in stream:
                if line.upper().startswith(b"PING"):
                    stream.write(b"PONG\r\n")
                    stream.flush()

    def accept(listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        yield f"nats://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def refusal(gateway_factory: GatewayFactory, nats_url: NatsServer | str, *arguments: str, **env: str) -> str:
    gateway = gateway_factory(nats_url, *arguments, env=env, start=False)
    gateway.launch()
    assert gateway.wait(30) == 1
    return complaint(gateway)


def complaint(gateway: Gateway) -> str:
    """The one line that is not news of the work done so far."""
    (line,) = [line for line in gateway.log.splitlines() if " INFO " not in line]
    assert line.startswith("mqtt-nats: ")
    return line


def test_unreachable(gateway_factory: GatewayFactory) -> None:
    port = free_port()
    line = refusal(gateway_factory, f"nats://127.0.0.1:{port}")
    assert f"nats://127.0.0.1:{port}" in line
    assert "--nats" in line


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.9\r\n"])
async def test_what_answers_is_no_nats_server(greeting: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an MQTT broker, which waits for CONNECT, or something else that begins to speak."""
    for module in ("link", "connect"):
        monkeypatch.setattr(f"mqtt_nats.backbone.{module}.CONNECT_TIMEOUT", 0.2)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(StartupError, match=f"at {url}: what answers there did not greet as a nats-server does"):
            async with connected(Settings(nats=(url,))):
                pass


def test_without_jetstream(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    line = refusal(gateway_factory, nats_factory(config="jetstream: disabled"))
    assert "JetStream" in line


def test_too_old(old_server: str, gateway_factory: GatewayFactory) -> None:
    line = refusal(gateway_factory, old_server)
    assert "2.11.0" in line
    assert "2.12" in line


def test_wrong_password_is_refused_and_not_shown(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    server = nats_factory(config='authorization { user: "gateway", password: "right" }')
    line = refusal(gateway_factory, server, "--nats-user", "gateway", MQTT_NATS_NATS_PASSWORD="hunter2")
    assert "hunter2" not in line
    assert "credentials" in line


def test_a_password_in_the_url_is_not_shown(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    server = nats_factory(config='authorization { user: "gateway", password: "right" }')
    line = refusal(gateway_factory, server.url.replace("://", "://gateway:hunter2@"))
    assert "hunter2" not in line
    assert "credentials" in line


async def test_the_files_of_a_stream_that_was_just_removed_are_still_there(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory
) -> None:
    proxy = NatsProxy(nats_factory().port, lambda: None)
    await proxy.start()
    trap = proxy.set("answer", "$JS.API.STREAM.CREATE.$MQTT_sess", Action.ALTER)

    def refuse(answer: dict[str, Any]) -> None:
        answer.clear()
        answer["error"] = {"code": 500, "err_code": 10049, "description": "error creating store for stream"}

    trap.alter = refuse
    gateway = gateway_factory(proxy.url, start=False)
    await asyncio.to_thread(gateway.start)
    assert trap.sprung.is_set()
    assert "$MQTT_sess cannot be created: error creating store for stream" in gateway.log
    await asyncio.to_thread(gateway.term)
    await proxy.close()


async def test_a_stream_that_contradicts_ours(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    server = nats_factory()
    client = await nats.connect(server.url)
    await client.jetstream().add_stream(
        StreamConfig(name="$MQTT_msgs", subjects=["$MQTT.msgs.>"], retention=RetentionPolicy.WORK_QUEUE)
    )
    await client.close()
    line = refusal(gateway_factory, server)
    assert "$MQTT_msgs" in line
    assert "retention" in line


async def test_a_stream_that_takes_our_subjects(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    server = nats_factory()
    client = await nats.connect(server.url)
    await client.jetstream().add_stream(StreamConfig(name="greedy", subjects=["$MQTT.msgs.home.>"]))
    await client.close()
    line = refusal(gateway_factory, server)
    assert "greedy" in line


def test_the_address_for_mqtt_is_in_use(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gateway = gateway_factory(nats_server, port=port, start=False)
        gateway.launch()
        assert gateway.wait(30) == 1
    line = complaint(gateway)
    assert f"127.0.0.1:{port}" in line
    assert "--listen" in line


async def test_a_start_that_fails_leaves_no_lease(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """Nor a registration: others would take it for a gateway that is silent."""
    first = gateway_factory(nats_server)
    async with connected(Settings(nats=(nats_server.url,))) as inbox:
        (only,) = await GatewayStore(inbox).entries()
    second = gateway_factory(nats_server, port=first.port, start=False)
    second.launch()
    assert await asyncio.to_thread(second.wait, 30) == 1
    assert "cannot listen on" in complaint(second)
    client = await nats.connect(nats_server.url)
    keys = (await client.jetstream().stream_info(STREAM, subjects_filter=">")).state.subjects
    await client.close()
    assert set(keys or ()) == {f"{PREFIX}{kind}.{only.identity}" for kind in ("gateway", "lease")}
