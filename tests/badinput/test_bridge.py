# SPDX-License-Identifier: Apache-2.0
"""The protocol levels of mosquitto's bridges: 3.1.1 without one's own messages, and with RETAIN as published."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from mqtt_nats.cli import command
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
    with bridge(gateway.port, f"bridge-{level}", name=name, level=level) as client:
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


def retained_flags(client: Raw, count: int) -> list[tuple[bytes, bool]]:
    """Payload and RETAIN of the next ``count`` messages, acknowledged."""
    found: list[tuple[bytes, bool]] = []
    while len(found) < count:
        one = client.receive()
        assert one is not None
        if one.kind == raw.PUBREL:
            client.send(raw.ack(raw.PUBCOMP, one.id))
        elif one.kind == raw.PUBLISH:
            if one.qos:
                client.send(raw.ack(raw.PUBACK if one.qos == 1 else raw.PUBREC, one.id))
            found.append((one.payload, bool(one.first & 1)))
    return found


AS_PUBLISHED = [(b"set", True), (b"plain", False), (b"", True)]


def publish_all(client: Raw, topic: str, qos: int) -> None:
    """A retained message, one that is not, and the one that removes the first."""
    for payload, retain in AS_PUBLISHED:
        send(client, topic, payload, qos, int(retain))
    client.ping()


@pytest.mark.parametrize("granted", [0, 1, 2])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
@pytest.mark.parametrize("kind", ["literal", "wild", "shared"])
def test_a_bridge_gets_retain_as_it_was_published(
    gateway: Gateway, kind: str, clean: bool, qos: int, granted: int
) -> None:
    token = secrets.token_hex(4)
    topic = f"bridge/{token}/x"
    topic_filter = {"literal": topic, "wild": f"+/{token}/#", "shared": f"$share/{token}/{topic}"}[kind]
    with bridge(gateway.port, f"kept-{token}", clean=clean) as one, Raw.connected(gateway.port) as client:
        assert one.subscribe((topic_filter, granted)) == [granted]
        publish_all(client, topic, qos)
        assert retained_flags(one, 3) == AS_PUBLISHED
    Raw.connected(gateway.port, f"kept-{token}").close()


@pytest.mark.parametrize("qos", [1, 2])
def test_retain_of_what_has_waited(gateway: Gateway, qos: int) -> None:
    """Queued for an absent bridge, brought by a reader of the gateway."""
    token = secrets.token_hex(4)
    with bridge(gateway.port, f"kept-{token}", clean=False) as one:
        assert one.subscribe((f"bridge/{token}/#", 2)) == [2]
    with Raw.connected(gateway.port) as client:
        publish_all(client, f"bridge/{token}/x", qos)
    with bridge(gateway.port, f"kept-{token}", clean=False) as one:
        assert retained_flags(one, 3) == AS_PUBLISHED
        with Raw.connected(gateway.port) as client:
            publish_all(client, f"bridge/{token}/x", qos)
        assert retained_flags(one, 3) == AS_PUBLISHED
    Raw.connected(gateway.port, f"kept-{token}").close()


@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
def test_retain_from_another_gateway_and_in_a_will(
    nats_server: NatsServer, gateway_factory: GatewayFactory, clean: bool
) -> None:
    first, second = gateway_factory(nats_server), gateway_factory(nats_server)
    token = secrets.token_hex(4)
    topic = f"bridge/{token}/x"
    with bridge(first.port, f"kept-{token}", clean=clean) as one:
        assert one.subscribe((topic, 1)) == [1]
        for qos in (0, 1, 2):
            with Raw.connected(second.port) as client:
                publish_all(client, topic, qos)
            assert retained_flags(one, 3) == AS_PUBLISHED
        with Raw(second.port) as client:
            client.send(connect("", flags=0x2E, tail=[topic, b"gone"]))  # a retained will at QoS 1
            client.expect(raw.CONNACK)
        assert retained_flags(one, 1) == [(b"gone", True)]
    Raw.connected(first.port, f"kept-{token}").close()


def test_who_is_no_bridge_gets_retain_clear(gateway: Gateway) -> None:
    topic = f"bridge/{secrets.token_hex(4)}"
    with Raw.connected(gateway.port) as one, Raw.connected(gateway.port) as client:
        assert one.subscribe((topic, 2)) == [2]
        for qos in (0, 1, 2):
            publish_all(client, topic, qos)
            assert retained_flags(one, 3) == [(payload, False) for payload, _ in AS_PUBLISHED]


# -- the state of a bridge's connection ------------------------------------------------------------------


def state_of(client_id: str) -> str:
    """Where a bridge of mosquitto says whether it is connected."""
    return f"$SYS/broker/connection/{client_id}/state"


def notifying(port: int, client_id: str, *, qos: int = 1, level: int = 0x84, clean: bool = True) -> Raw:
    """A bridge with the will that it has by default."""
    client = Raw(port)
    flags = 0x24 | qos << 3 | (2 if clean else 0)
    properties = [b"\0", b"\0"] if level == 5 else [b"", b""]
    body = raw.field(b"MQTT") + bytes((level, flags)) + (60).to_bytes(2, "big") + properties[0]
    body += raw.field(client_id) + properties[1] + raw.field(state_of(client_id)) + raw.field(b"0")
    client.send(raw.packet(0x10, body))
    answer = client.expect(raw.CONNACK)
    assert answer.body[1] == 0, answer
    return client


def publish_of(level: int, topic: str, payload: bytes, qos: int) -> bytes:
    identifier = b"\0\7" if qos else b""
    properties = b"\0" if level == 5 else b""
    return raw.packet(0x31 | qos << 1, raw.field(topic) + identifier + properties + payload)


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("level", [4, 5, 0x83, 0x84])
def test_a_bridge_says_whether_it_is_connected(
    nats_server: NatsServer, gateway_factory: GatewayFactory, level: int, qos: int
) -> None:
    """Live and retained, here and at another gateway, through wildcards and without, and by its will."""
    first, second = gateway_factory(nats_server), gateway_factory(nats_server)
    client_id = f"core.{secrets.token_hex(4)}"
    topic = state_of(client_id)
    filters = ["$SYS/broker/connection/+/state", "$SYS/broker/#", topic]
    watching = [Raw.connected(gateway.port) for gateway in (first, second) for _ in filters]
    try:
        for one, wanted in zip(watching, filters * 2, strict=True):
            assert one.subscribe((wanted, 2)) == [2]
        client = notifying(first.port, client_id, qos=qos, level=level)
        client.send(publish_of(level, topic, b"1", qos))
        if qos == 1:
            until(client, raw.PUBACK)
        elif qos == 2:
            until(client, raw.PUBREC)
            client.send(raw.ack(raw.PUBREL, 7))
            until(client, raw.PUBCOMP)
        for one in watching:
            assert mine(one, topic, [b"1"]) == [b"1"]
        for gateway in (first, second):
            for wanted in filters:
                with Raw.connected(gateway.port) as late:
                    late.subscribe((wanted, 1))
                    assert mine(late, topic, [b"1"]) == [b"1"], "retained"
        client.close()
        for one in watching:
            assert mine(one, topic, [b"0"]) == [b"0"]
        with Raw.connected(second.port) as late:
            late.subscribe((topic, 1))
            assert mine(late, topic, [b"0"]) == [b"0"]
    finally:
        for one in watching:
            one.close()


@pytest.mark.long
def test_the_operator_removes_what_a_bridge_has_left(gateway: Gateway) -> None:
    """The gateways' own topics are nothing that is retained."""
    client_id = f"core-{secrets.token_hex(4)}"
    topic = state_of(client_id)
    with notifying(gateway.port, client_id) as client:
        client.send(publish_of(4, topic, b"1", 1))
        until(client, raw.PUBACK)
        ctl = ("ctl", "--nats", gateway.nats_url, "retained", "delete")
        assert CliRunner().invoke(command, [*ctl, topic]).exit_code == 0
        with Raw.connected(gateway.port) as late:
            late.subscribe((topic, 1))
            assert [one for one in late.ping() if one.kind == raw.PUBLISH] == []


def test_a_durable_session_gets_the_states_too(gateway: Gateway) -> None:
    token = secrets.token_hex(4)
    client_id = f"core-{token}"
    with Raw.connected(gateway.port, f"watch-{token}", clean=False) as one:
        assert one.subscribe((f"$SYS/broker/connection/{client_id}/+", 1)) == [1]
    with notifying(gateway.port, client_id, clean=False) as client:
        client.send(publish_of(4, state_of(client_id), b"1", 1))
        until(client, raw.PUBACK)
    with Raw.connected(gateway.port, f"watch-{token}", clean=False) as one:
        assert list(arrivals(one, 2)) == [(b"1", 1), (b"0", 1)]
    for name in (client_id, f"watch-{token}"):
        Raw.connected(gateway.port, name).close()


@pytest.mark.parametrize("client_id", ["", "other", "a/b", "+", "#"])
def test_only_the_state_of_its_own(gateway: Gateway, client_id: str) -> None:
    """The topic of another client, and everything else below `$SYS`, is refused as before."""
    for topic in (state_of(client_id), state_of("me") + "/x", "$SYS/broker/connection/me", "$SYS/broker/uptime"):
        with Raw.connected(gateway.port, "me") as one:
            one.send(publish(topic, b"1", qos=1))
            assert one.receive() is None, topic
        with Raw(gateway.port) as one:
            one.send(connect("me", flags=0x2E, tail=[topic, b"0"]))
            answer = one.receive()
            assert answer is None or answer.body[1], topic


@pytest.mark.parametrize("level", [4, 5])
def test_rules_that_say_nothing_of_it(
    nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path, level: int
) -> None:
    """The bridge connects all the same; what it says there is dropped, and its will too."""
    acl = tmp_path / "acl.toml"
    acl.write_text(
        '[[rules]]\neffect = "allow"\ntopics = "bridge/#"\n'
        '[[rules]]\neffect = "allow"\naccess = "subscribe"\ntopics = "$SYS/#"\n'
    )
    gateway = gateway_factory(nats_server, env={"MQTT_NATS_ACL_FILE": str(acl)})
    client_id = f"core-{secrets.token_hex(4)}"
    with Raw.connected(gateway.port) as one:
        assert one.subscribe((state_of(client_id), 1), ("bridge/end", 1)) == [1, 1]
        with notifying(gateway.port, client_id, level=level) as client:
            client.send(publish_of(level, state_of(client_id), b"1", 1))
            until(client, raw.PUBACK)
        with Raw.connected(gateway.port) as other:
            send(other, "bridge/end", b"end", 1)
        found = one.receive()
        assert found is not None
        assert found.topic == "bridge/end"
