# SPDX-License-Identifier: Apache-2.0
"""A session whose filters all match one topic: nats-server sends a message a few times, not once for each of them."""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Iterator

import pytest

from mqtt_nats.pubsub.filter_index import OVERLAPS_MAX
from mqtt_nats.pubsub.subscribers import OVERLAPS_MOST
from tests.conftest import NatsFactory, _gateway_factory, _nats_factory
from tests.harness import raw, raw5
from tests.harness.gateway import Gateway
from tests.harness.monitor import Monitor
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
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


REFUSED = {4: 0x80, 5: 0x97}


def opened(port: int, version: int, client_id: str, *, durable: bool = True) -> Raw | Raw5:
    if version == 5:
        return Raw5.open(port, client_id, prop(SESSION_EXPIRY, 600 if durable else 0), clean=False)
    return Raw.connected(port, client_id, clean=not durable)


def codes(client: Raw | Raw5, *wanted: tuple[str, int], id: int = 1) -> list[int]:
    """What SUBACK says; messages that come before it are passed over."""
    client.send((raw5 if isinstance(client, Raw5) else raw).subscribe(*wanted, id=id))
    found = client.expect(raw.SUBACK)
    return list(found.body[-len(wanted) :])


def patterns(name: str) -> list[str]:
    """32 filters of which a topic matches each."""
    return ["/".join([name, *("a" if number >> bit & 1 else "+" for bit in range(5))]) for number in range(32)]


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [1, 2])
def test_consumers(gateways: list[Gateway], version: int, qos: int) -> None:
    """Of a durable session, in one packet and in many; what is ended makes room, and a message comes once."""
    name = f"consumers-{secrets.token_hex(4)}"
    wanted = patterns(name)
    most, no = OVERLAPS_MAX, REFUSED[version]
    with opened(gateways[0].port, version, name) as client:
        assert codes(client, *((text, qos) for text in wanted[:24])) == [qos] * most + [no] * (24 - most)
        assert codes(client, (wanted[24], qos), id=2) == [no]
        assert codes(client, (wanted[0], qos), id=3) == [qos]  # it is there
        assert codes(client, (wanted[24], 0), id=4) == [0]
        assert codes(client, (wanted[24], qos), id=5) == [no]  # it has no consumer yet
        assert codes(client, (f"{name}/elsewhere/#", qos), (f"{name}/a/a/a/a/a", qos), id=6) == [qos, qos]
        assert re.search(r"filters are refused by limits \(overlapping_filters \d+\)", gateways[0].log)
        client.send(raw5.unsubscribe(wanted[0], id=7) if version == 5 else raw.unsubscribe(wanted[0], id=7))
        client.expect(raw.UNSUBACK)
        assert codes(client, (wanted[25], qos), (wanted[26], qos), id=8) == [qos, no]
        with Raw.connected(gateways[1].port) as writer:
            writer.send(raw.publish(f"{name}/a/a/a/a/a", b"x", qos=1))
            writer.expect(raw.PUBACK)
        found = client.expect(raw.PUBLISH)
        assert found.payload[-1:] == b"x"
        assert client.ping() == []
    with opened(gateways[1].port, version, name) as client:  # all of it goes on elsewhere
        assert client.expect(raw.PUBLISH).payload[-1:] == b"x"
        assert codes(client, (wanted[27], qos), (wanted[25], qos)) == [no, qos]
    (Raw5.open(gateways[1].port, name) if version == 5 else Raw.connected(gateways[1].port, name)).close()


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("durable", [True, False])
def test_groups(gateways: list[Gateway], version: int, qos: int, durable: bool) -> None:
    """Each group has a consumer, also of a session that ends with its connection, and of a filter without wildcards."""
    name = f"groups-{secrets.token_hex(4)}"
    groups = [(f"$share/{number}/{name}/a", qos) for number in range(OVERLAPS_MAX + 4)]
    with opened(gateways[0].port, version, name, durable=durable) as client:
        assert codes(client, *groups) == [qos] * OVERLAPS_MAX + [REFUSED[version]] * 4
        assert codes(client, (f"$share/x/{name}/b", qos), groups[0], id=2) == [qos, qos]
        assert codes(client, (f"{name}/+", 1), id=3) == [REFUSED[version] if durable else 1]
    Raw.connected(gateways[0].port, name).close()


@pytest.mark.parametrize("version", [4, 5])
def test_filters_that_have_no_consumers(gateways: list[Gateway], version: int) -> None:
    """Those of a session that ends with its connection, and those at QoS 0, have a bound of their own."""
    name = f"without-{secrets.token_hex(4)}"
    wanted = patterns(name)
    with opened(gateways[0].port, version, name, durable=False) as client:
        assert codes(client, *((text, 1) for text in wanted)) == [1] * len(wanted)
    with opened(gateways[0].port, version, f"{name}-durable") as client:
        assert codes(client, *((text, 0) for text in wanted)) == [0] * len(wanted)
    Raw.connected(gateways[0].port, f"{name}-durable").close()


def test_one_filter_over_many(gateways: list[Gateway]) -> None:
    """It overlaps all others, and a topic matches it and one of them."""
    name = f"over-{secrets.token_hex(4)}"
    with opened(gateways[0].port, 5, name) as client:
        others = [(f"{name}/{number}/+", 1) for number in range(100)]
        assert codes(client, *others) == [1] * 100
        assert codes(client, (f"{name}/#", 1), ("#", 1), id=2) == [1, 1]
    Raw5.open(gateways[0].port, name).close()
