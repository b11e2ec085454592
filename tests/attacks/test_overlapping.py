# SPDX-License-Identifier: Apache-2.0
"""A session whose filters all match one topic: nats-server sends a message a few times, not once for each of them."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator

import pytest

from mqtt_nats.pubsub.subscribers import OVERLAPS_MOST
from tests.conftest import NatsFactory, _gateway_factory, _nats_factory
from tests.harness import raw, raw5
from tests.harness.gateway import Gateway
from tests.harness.monitor import Monitor
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually, free_port

LEVELS = 12
FILTERS = 1000
MESSAGES = 20


@pytest.fixture(scope="module")
def monitor_port() -> int:
    """For the monitoring of this module's nats-server."""
    return free_port()


@pytest.fixture(scope="module")
def nats_server(nats_backend: str, monitor_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    start: NatsFactory
    with _nats_factory(nats_backend, tmp_path_factory.mktemp("nats")) as start:
        yield start(config=f'http: "127.0.0.1:{monitor_port}"')


@pytest.fixture(scope="module")
def gateways(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Gateway]]:
    with _gateway_factory(tmp_path_factory.mktemp("gateways")) as start:
        yield [start(nats_server), start(nats_server)]


def sent(monitor: Monitor) -> int:
    """Messages that nats-server has sent to everybody."""
    return int(monitor.get("varz")["out_msgs"])


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("first", ["a", "+"])
def test_copies(gateways: list[Gateway], monitor_port: int, version: int, first: str) -> None:
    """At QoS 0, from another gateway; filters that begin with a wildcard are on another connection."""
    monitor = Monitor(monitor_port)
    numbers = random.Random(version)
    name = secrets.token_hex(4)
    beginning = name if first == "a" else "+"
    filters: dict[str, None] = {}
    while len(filters) < FILTERS:
        filters["/".join([beginning, *numbers.choices("a+", k=LEVELS - 1)])] = None
    texts = list(filters)
    with (
        Raw5.open(gateways[0].port) if version == 5 else Raw.connected(gateways[0].port) as reader,
        Raw.connected(gateways[1].port) as writer,
    ):
        for start in range(0, FILTERS, 100):
            wanted = [(text, 0) for text in texts[start : start + 100]]
            if isinstance(reader, Raw5):
                assert reader.subscribed(*wanted, id=start + 1) == (0,) * 100
            else:
                assert reader.subscribe(*wanted, id=start + 1) == [0] * 100
        topic = "/".join([name, *["a"] * (LEVELS - 1)])
        before = sent(monitor)
        for _ in range(MESSAGES):
            writer.send(raw.publish(topic, b"x"))
        for _ in range(MESSAGES):
            assert reader.expect(raw.PUBLISH).payload[-1:] == b"x"
        assert reader.ping() == []
        eventually(lambda: sent(monitor) > before, what="the count of nats-server")
        each = (sent(monitor) - before) / MESSAGES
        print(f"{first}, version {version}: {each:.1f} messages of nats-server each")
        assert each < OVERLAPS_MOST + 20
        ended = texts[:990]
        for start in range(0, 990, 99):
            some = ended[start : start + 99]
            reader.send(
                raw5.unsubscribe(*some, id=2000 + start) if version == 5 else raw.unsubscribe(*some, id=2000 + start)
            )
            reader.expect(raw.UNSUBACK)
        writer.send(raw.publish(topic, b"y"))
        assert reader.expect(raw.PUBLISH).payload[-1:] == b"y"
        assert reader.ping() == []
