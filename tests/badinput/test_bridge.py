# SPDX-License-Identifier: Apache-2.0
"""The protocol levels of mosquitto's bridges: 3.1.1 without one's own messages."""

import secrets
from collections.abc import Iterator

import pytest

from tests.conftest import GatewayFactory
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, connect, publish

pytestmark = pytest.mark.usefixtures("unharmed")

LEVELS = [(b"MQTT", 0x84), (b"MQTT", 0x83), (b"MQIsdp", 0x83)]


def bridge(port: int, client_id: str, *, clean: bool = True, name: bytes = b"MQTT", level: int = 0x84) -> Raw:
    client = Raw(port)
    client.send(connect(client_id, clean=clean, name=name, level=level))
    answer = client.expect(raw.CONNACK)
    assert answer.body[1] == 0
    return client


def send(client: Raw, topic: str, payload: bytes, qos: int, retain: int = 0) -> list[raw.Received]:
    """Publish and complete the handshake; what came in between."""
    client.send(publish(topic, payload, qos=qos, id=100, flags=retain))
    if qos == 2:
        found = until(client, raw.PUBREC)
        client.send(raw.ack(raw.PUBREL, 100))
        return found + until(client, raw.PUBCOMP)
    return until(client, raw.PUBACK) if qos else []


def until(client: Raw, kind: int) -> list[raw.Received]:
    found: list[raw.Received] = []
    while True:
        one = client.receive()
        assert one is not None
        if one.kind == kind:
            return found
        found.append(one)


def arrivals(client: Raw, count: int) -> Iterator[tuple[bytes, int]]:
    """The next ``count`` messages, acknowledged."""
    while count:
        one = client.receive()
        assert one is not None
        if one.kind == raw.PUBREL:
            client.send(raw.ack(raw.PUBCOMP, one.id))
            continue
        if one.kind != raw.PUBLISH:
            continue
        count -= 1
        if one.qos:
            client.send(raw.ack(raw.PUBACK if one.qos == 1 else raw.PUBREC, one.id))
        yield one.payload, one.qos


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_bridge_levels_are_served_as_311(gateway: Gateway, name: bytes, level: int) -> None:
    with bridge(gateway.port, "", name=name, level=level) as client:
        assert client.subscribe(("bridge/levels", 1)) == [1]
        assert client.ping() == []


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
@pytest.mark.parametrize("kind", ["literal", "level", "all"])
@pytest.mark.parametrize("client_id", ["bridge", "br\u00fccke %2F\r\n: *"])
def test_a_bridge_does_not_get_its_own_messages(
    gateway: Gateway, qos: int, clean: bool, kind: str, client_id: str
) -> None:
    token = secrets.token_hex(4)
    topic = f"bridge/{token}/x"
    topic_filter = {"literal": topic, "level": f"+/{token}/x", "all": "#"}[kind]
    client_id += token
    with (
        bridge(gateway.port, client_id, clean=clean) as one,
        bridge(gateway.port, f"other-{token}", clean=clean) as two,
        Raw.connected(gateway.port) as client,
    ):
        for subscriber in (one, two):
            assert subscriber.subscribe((topic_filter, 2)) == [2]
        wanted = [b"mine", b"client", b"end"]
        send(one, topic, b"mine", qos)
        one.ping()
        send(client, topic, b"client", qos)
        client.ping()
        send(client, topic, b"end", qos)
        seen = mine(one, topic, wanted[1:])
        assert seen == wanted[1:]
        assert mine(two, topic, wanted) == wanted
    for name in (client_id, f"other-{token}"):
        Raw.connected(gateway.port, name).close()


def mine(client: Raw, topic: str, wanted: list[bytes]) -> list[bytes]:
    """Payloads on ``topic`` up to the last wanted one; ``#`` brings the bystanders' messages too."""
    got: list[bytes] = []
    while wanted[-1] not in got:
        one = client.receive()
        assert one is not None
        if one.kind == raw.PUBLISH:
            if one.qos:
                client.send(raw.ack(raw.PUBACK if one.qos == 1 else raw.PUBREC, one.id))
            if one.topic == topic:
                got.append(one.payload)
        elif one.kind == raw.PUBREL:
            client.send(raw.ack(raw.PUBCOMP, one.id))
    return got


@pytest.mark.parametrize("qos", [1, 2])
def test_what_a_bridge_sent_is_not_waiting_for_it(gateway: Gateway, qos: int) -> None:
    """A durable session that resumes gets what others sent meanwhile, and nothing of its own."""
    token = secrets.token_hex(4)
    with bridge(gateway.port, f"away-{token}", clean=False) as client:
        assert client.subscribe((f"bridge/{token}/#", 2)) == [2]
        send(client, f"bridge/{token}/a", b"own", qos)
    with Raw.connected(gateway.port) as other:
        send(other, f"bridge/{token}/a", b"others", qos)
    with bridge(gateway.port, f"away-{token}", clean=False) as client:
        assert list(arrivals(client, 1)) == [(b"others", qos)]
        assert [one for one in client.ping() if one.kind == raw.PUBLISH] == []
    Raw.connected(gateway.port, f"away-{token}").close()


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_through_another_gateway_and_without_client_ids(
    nats_server: NatsServer, gateway_factory: GatewayFactory, qos: int
) -> None:
    """A bridge is known by its id even where publishers are not named to NATS clients otherwise."""
    env = {"MQTT_NATS_PUBLISH_CLIENT_ID": "false", "MQTT_NATS_LOCAL_DISPATCH": "false"}
    gateway = gateway_factory(nats_server, env=env)
    topic = f"bridge/{secrets.token_hex(4)}"
    with bridge(gateway.port, "nameless") as one, Raw.connected(gateway.port) as client:
        assert one.subscribe((topic, 2)) == [2]
        assert client.subscribe((topic, 2)) == [2]
        send(one, topic, b"own", qos)
        one.ping()
        assert list(arrivals(client, 1)) == [(b"own", qos)]
        send(client, topic, b"other", qos)
        assert list(arrivals(one, 1)) == [(b"other", qos)]
