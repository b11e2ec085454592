# SPDX-License-Identifier: Apache-2.0
"""One outage of NATS is one warning in the log, and its end is another, however much waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw
from tests.harness.raw import Raw, publish
from tests.harness.waiting import eventually

TOPICS = 14

HELD_UP = "the gateway process did not run for "
"""What the log says where the machine has held the gateway up."""


@contextmanager
def publishing(port: int) -> Iterator[threading.Event]:
    """Retained messages at QoS 1 on many topics, one behind the other on each; yields that all were acknowledged."""
    stop, acknowledged = threading.Event(), threading.Event()

    def run(client: Raw) -> None:
        number = 0
        with client:
            while not stop.is_set():
                for topic in range(TOPICS):
                    client.send(publish(f"t/{topic}", b"%d" % number, qos=1, id=topic + 1, flags=1))
                for _ in range(TOPICS):
                    client.expect(raw.PUBACK)
                number += 1
                acknowledged.set()

    thread = threading.Thread(target=run, args=(Raw.connected(port, "publisher", patience=60.0),))
    thread.start()
    try:
        yield acknowledged
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_one_warning_for_the_outage_and_one_for_its_end(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, kill: bool
) -> None:
    server = nats_factory()
    gateway = gateway_factory(server)
    with publishing(gateway.port) as acknowledged, Raw.connected(gateway.port, "durable", clean=False) as client:
        client.subscribe(("other", 1))
        eventually(acknowledged.is_set)
        (server.kill if kill else server.stop)()
        eventually(lambda: "not ready: " in gateway.log)
        acknowledged.clear()
        server.start()
        eventually(lambda: "ready again" in gateway.log)
        eventually(acknowledged.is_set)
    lines = [line for line in gateway.log.splitlines() if HELD_UP not in line]
    warnings = [line for line in lines if " WARNING " in line or " ERROR " in line]
    assert len(warnings) == 2, warnings
    assert "does not store" in warnings[0] or "the connection to NATS is lost" in warnings[0]
    assert "connected to NATS again" in warnings[1]
