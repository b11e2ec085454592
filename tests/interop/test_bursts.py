# SPDX-License-Identifier: Apache-2.0
"""5.0 clients that ignore Receive Maximum: what `receive_maximum = 65535` does for them (docs/compatibility.md)."""

from __future__ import annotations

import threading
from typing import Any, Final

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from tests.conftest import GatewayFactory
from tests.harness.nats import NatsServer
from tests.harness.paho import stop
from tests.harness.waiting import eventually

COUNT: Final = 3000


@pytest.mark.parametrize("qos", [1, 2])
def test_a_burst(nats_server: NatsServer, gateway_factory: GatewayFactory, qos: int) -> None:
    """All of it is on its way at once, and each publish succeeds on the first connection."""
    gateway = gateway_factory(nats_server, "--receive-maximum", "65535")
    client, codes, ended, ready = publisher()
    client.connect("127.0.0.1", gateway.port)
    client.loop_start()
    try:
        assert ready.wait(30)
        for number in range(COUNT):
            client.publish(f"burst/{number}", b"x" * 100, qos)
        eventually(lambda: len(codes) == COUNT, 60)
        assert max(codes) < 0x80
        assert ended == []
    finally:
        client.disconnect()
        stop(client)


def test_a_burst_with_the_default(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory(nats_server)
    client, _, ended, ready = publisher()
    client.connect("127.0.0.1", gateway.port)
    client.loop_start()
    try:
        assert ready.wait(30)
        for number in range(COUNT):
            client.publish(f"burst/{number}", b"x" * 100, 2)
        eventually(lambda: "Receive maximum exceeded" in ended)
    finally:
        client.disconnect()
        stop(client)


def publisher() -> tuple[mqtt.Client, list[int], list[str], threading.Event]:
    """A client that has as many publishes on their way as it is given; reason codes, and reasons of its ends."""
    codes: list[int] = []
    ended: list[str] = []
    ready = threading.Event()

    def published(*given: Any) -> None:
        codes.append(given[3].value)

    def disconnected(*given: Any) -> None:
        ended.append(str(given[3]))

    client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
    client.max_inflight_messages_set(COUNT)
    client.on_publish = published
    client.on_disconnect = disconnected
    client.on_connect = lambda *_: ready.set()
    return client, codes, ended, ready
