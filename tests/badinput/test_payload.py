# SPDX-License-Identifier: Apache-2.0
"""Messages that nats-server would not take: it ends the whole NATS connection over one that is too large."""

import secrets
from collections.abc import Iterator

import pytest

from tests.conftest import GatewayFactory, NatsFactory, _gateway_factory, _nats_factory
from tests.harness import raw
from tests.harness.bystanders import Bystanders, Paho
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, connect, packet, publish, subscribe
from tests.harness.waiting import eventually

pytestmark = pytest.mark.usefixtures("unharmed")

MAX_PAYLOAD = 32 * 1024

HEADROOM = 8 * 1024
"""More than the headers of any message of a client with a short id."""


@pytest.fixture(scope="module")
def nats_server(nats_backend: str, monitor_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A nats-server with a small ``max_payload``."""
    start: NatsFactory
    with _nats_factory(nats_backend, tmp_path_factory.mktemp("nats")) as start:
        yield start(config=f'max_payload: {MAX_PAYLOAD}\nhttp: "127.0.0.1:{monitor_port}"')


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    start: GatewayFactory
    with _gateway_factory(tmp_path_factory.mktemp("gateway")) as start:
        yield start(nats_server, "--max-client-id-length", "65535", "--connect-packet-size", "128KiB")


def attempt(client: Raw, data: bytes, qos: int) -> bool:
    """Publish with packet id 1 and complete the handshake; False when the gateway closed instead."""
    client.send(data)
    steps = {0: [], 1: [raw.PUBACK], 2: [raw.PUBREC, raw.PUBCOMP]}[qos]
    for kind in steps:
        answer = client.receive()
        if answer is None:
            return False
        assert (answer.kind, answer.id) == (kind, 1)
        if kind == raw.PUBREC:
            client.send(raw.ack(raw.PUBREL, 1))
    try:
        client.ping()
    except raw.Closed:
        return False
    return True


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("retain", [0, 1])
@pytest.mark.parametrize("size", [MAX_PAYLOAD + 1, 10 * MAX_PAYLOAD])
def test_payload_above_max_payload(gateway: Gateway, bystanders: Bystanders, qos: int, retain: int, size: int) -> None:
    topic = f"payload/{secrets.token_hex(4)}"
    bystanders.regular.subscribe(topic, 2)
    with Raw.connected(gateway.port) as client:
        assert not attempt(client, publish(topic, bytes(size), qos=qos, flags=retain), qos)
    with Raw.connected(gateway.port) as client:
        assert attempt(client, publish(topic, b"end", qos=qos), qos)
        eventually(lambda: bystanders.regular.payloads(topic))
        assert bystanders.regular.payloads(topic) == [b"end"]


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("retain", [0, 1])
@pytest.mark.parametrize("length", [1, 3000])
def test_around_the_limit(gateway: Gateway, bystanders: Bystanders, qos: int, retain: int, length: int) -> None:
    """With its headers a message may be too large though its payload is not: stored, or closed, never in between."""
    topic = f"edge/{secrets.token_hex(4)}/{'t' * length}"
    bystanders.regular.subscribe(topic, 2)
    taken = []
    sizes = [MAX_PAYLOAD - HEADROOM, *range(MAX_PAYLOAD - 4600 * retain - 4600, MAX_PAYLOAD + 1, 97), MAX_PAYLOAD]
    for size in sizes:
        with Raw.connected(gateway.port) as client:
            if attempt(client, publish(topic, bytes(size), qos=qos, flags=retain), qos):
                taken.append(size)
    assert taken[0] == sizes[0]
    assert taken == sizes[: len(taken)], "a larger one was taken, a smaller one not"
    if not qos and not retain:
        assert taken == sizes, "without headers the payload alone counts"
    eventually(lambda: len(bystanders.regular.payloads(topic)) == len(taken))
    assert [len(payload) for payload in bystanders.regular.payloads(topic)] == taken
    bystanders.publisher.publish_acknowledged(topic, b"", 1, retain=True)


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("retain", [0, 1])
@pytest.mark.parametrize(
    "client_id", ["c" * 20_000, "\u00e9" * 10_000, "c" * 32_500, "c" * 60_000], ids=["20k", "30k", "32k", "60k"]
)
def test_a_client_id_that_makes_headers_large(gateway: Gateway, qos: int, retain: int, client_id: str) -> None:
    """A legal id is served, its messages are stored, or refused where there is no room for them beside it."""
    topic = f"id/{secrets.token_hex(4)}"
    taken = []
    if len(client_id.encode()) > MAX_PAYLOAD:  # not even the session record has room
        with Raw(gateway.port) as client:
            client.send(connect(client_id))
            (answer,) = client.expect_closed()
            assert answer.body == b"\0\x03"
        return
    for size in (1, 100, 1000, 5_000, 12_000, 13_000, 30_000, MAX_PAYLOAD):
        with Raw.connected(gateway.port, client_id) as client:
            assert client.subscribe((f"{topic}/{size}", 2)) == [2]
            client.send(publish(f"{topic}/{size}", bytes(size), qos=qos, flags=retain))
            while (one := client.receive()) is not None:
                if one.kind in (raw.PUBACK, raw.PUBCOMP) or (one.kind == raw.PUBLISH and not qos):
                    taken.append(size)
                    break
                if one.kind == raw.PUBREC:
                    client.send(raw.ack(raw.PUBREL, 1))
    if not qos and not retain:
        assert len(taken) == 8
    assert taken == sorted(taken)


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("retain", [0, 1])
@pytest.mark.parametrize("size", [MAX_PAYLOAD - 10, MAX_PAYLOAD + 1, 60_000])
def test_a_will_that_is_too_large(gateway: Gateway, bystanders: Bystanders, qos: int, retain: int, size: int) -> None:
    """Refused at CONNECT, when the client can still be told, or published."""
    topic = f"will/{secrets.token_hex(4)}"
    bystanders.regular.subscribe(topic, 2)
    with Raw(gateway.port) as client:
        client.send(connect(flags=0x06 | qos << 3 | retain << 5, tail=(topic, bytes(size))))
        answer = client.expect(raw.CONNACK)
        if answer.body[1]:
            assert client.expect_closed() == []
            return
    assert size < MAX_PAYLOAD
    eventually(lambda: [len(payload) for payload in bystanders.regular.payloads(topic)] == [size])


@pytest.mark.parametrize("clean", [True, False])
def test_a_session_record_that_is_too_large(gateway: Gateway, clean: bool) -> None:
    """A durable session's subscriptions are stored in one message: what does not fit is refused, the rest works."""
    name = f"record-{secrets.token_hex(4)}"
    with Raw.connected(gateway.port, name, clean=clean) as client:
        filters = [f"record/{number:03}/{'x' * 700}" for number in range(60)]
        codes = client.subscribe(*((text, 1) for text in filters))
        assert (set(codes) == {1}) == clean
        assert codes[0] == 1
        codes += client.subscribe((f"record/one/{'y' * 3700}", 1), ("record/two", 2))
        assert codes[-1] == 2
        granted = [text for text, code in zip(filters, codes, strict=False) if code != 0x80]
        with Raw.connected(gateway.port) as publisher:
            for number, text in enumerate(filters):
                publisher.send(publish(text, b"%d" % number))
        got = [client.expect(raw.PUBLISH).topic for _ in granted]
        assert sorted(got) == granted
        for text in filters[:30]:
            client.send(raw.unsubscribe(text))
            client.expect(raw.UNSUBACK)
        assert client.subscribe(("record/after", 1)) == [1]
    with Raw(gateway.port) as client:
        client.send(connect(name, clean=clean))
        assert client.expect(raw.CONNACK).body == bytes((not clean, 0))
        if not clean:
            client.ping()
            with Raw.connected(gateway.port) as publisher:
                publisher.send(publish("record/after", b"after", qos=1))
            assert client.expect(raw.PUBLISH).payload == b"after"
    Raw.connected(gateway.port, name).close()


def test_subscribe_packets_of_the_largest_size(gateway: Gateway) -> None:
    """As many filters as fit: refused or granted, answered in any case."""
    with Raw.connected(gateway.port, f"many-{secrets.token_hex(4)}", clean=False) as client:
        codes = client.subscribe(*((f"many/{number}/{'z' * 1000}", 2) for number in range(900)))
        assert len(codes) == 900
        assert 0x80 in codes
        assert codes[0] == 2
        client.send(packet(0xE0))
    with Raw.connected(gateway.port) as client:
        client.send(subscribe(*((f"toomany/{number}", 0) for number in range(1001))))
        client.expect_closed()


def test_a_large_message_of_a_nats_publisher(gateway: Gateway, bystanders: Bystanders) -> None:
    """What NATS takes is delivered, though a client could not publish it in one packet of this size."""
    with Paho(gateway.port) as client:
        client.subscribe("large/#", 1)
        payload = bytes(MAX_PAYLOAD - HEADROOM)
        bystanders.publisher.publish_acknowledged("large/x", payload, 1)
        eventually(lambda: client.payloads() == [payload])
