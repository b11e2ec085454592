# SPDX-License-Identifier: Apache-2.0
"""The QoS of a subscription changes before ``$MQTT_msgs`` has had a message: sequence 0 is a place like any other."""

from __future__ import annotations

import pytest

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.raw import Raw, ack, connect, field, packet, publish

ENV = {"records": "--session-positions=records", "consumers": "--session-positions=consumers"}


@pytest.fixture(params=ENV)
def empty(request: pytest.FixtureRequest, nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> Gateway:
    """A gateway whose stream of messages has never had one."""
    return gateway_factory(nats_factory(), ENV[request.param])


class Client:
    """A client of either version; the session is durable unless ``clean``."""

    def __init__(self, gateway: Gateway, name: str, version: int, *, clean: bool) -> None:
        self.version = version
        self.raw = Raw(gateway.port)
        if version == 5:
            properties = b"" if clean else b"\x11" + (600).to_bytes(4, "big")
            body = field("MQTT") + bytes((5, 2 if clean else 0)) + (60).to_bytes(2, "big")
            self.raw.send(packet(0x10, body + bytes((len(properties),)) + properties + field(name)))
        else:
            self.raw.send(connect(name, clean=clean))
        self.raw.expect(raw.CONNACK)

    def subscribe(self, topic_filter: str, qos: int) -> None:
        properties = b"\0" if self.version == 5 else b""
        self.raw.send(packet(0x82, b"\0\1" + properties + field(topic_filter) + bytes((qos,))))
        assert self.raw.expect(raw.SUBACK).body[-1] == qos

    def unsubscribe(self, topic_filter: str) -> None:
        properties = b"\0" if self.version == 5 else b""
        self.raw.send(packet(0xA2, b"\0\1" + properties + field(topic_filter)))
        self.raw.expect(raw.UNSUBACK)

    def received(self, number: int) -> list[tuple[bytes, int]]:
        """Payload and QoS of so many messages, each acknowledged, and of all others before the answer to a ping."""
        found: list[tuple[bytes, int]] = []
        asked = False
        while True:
            if len(found) >= number and not asked:
                self.raw.send(packet(raw.PINGREQ << 4))
                asked = True
            one = self.raw.receive()
            assert one is not None
            if one.kind == raw.PINGRESP:
                return found
            if one.kind == raw.PUBREL:
                self.raw.send(ack(raw.PUBCOMP, one.id))
                continue
            assert one.kind == raw.PUBLISH
            payload = one.payload[1:] if self.version == 5 else one.payload
            found.append((payload, one.qos))
            if one.qos:
                self.raw.send(ack(raw.PUBACK if one.qos == 1 else raw.PUBREC, one.id))


def store(publisher: Raw, payload: bytes, id: int) -> None:
    publisher.send(publish("a/b", payload, qos=1, id=id))
    publisher.expect(raw.PUBACK)


CASES = [(4, True), (4, False), (5, True), (5, False)]


@pytest.mark.parametrize(("version", "clean"), CASES)
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("topic_filter", ["a/b", "a/#"])
def test_lowered(empty: Gateway, version: int, clean: bool, qos: int, topic_filter: str) -> None:
    """[MQTT-3.8.4-3] (3.1.1, 5.0): all messages come at QoS 0, once."""
    client = Client(empty, "client", version, clean=clean)
    client.subscribe(topic_filter, qos)
    client.subscribe(topic_filter, 0)
    with Raw.connected(empty.port, "publisher") as publisher:
        for number in range(1, 4):
            store(publisher, b"%d" % number, number)
    assert client.received(3) == [(b"1", 0), (b"2", 0), (b"3", 0)]
    client.raw.close()


@pytest.mark.parametrize(("version", "clean"), CASES)
@pytest.mark.parametrize("qos", [1, 2])
def test_raised(empty: Gateway, version: int, clean: bool, qos: int) -> None:
    """All messages come at the QoS that is granted now, or at the publisher's lower one."""
    client = Client(empty, "client", version, clean=clean)
    client.subscribe("a/b", 0)
    client.subscribe("a/b", qos)
    with Raw.connected(empty.port, "publisher") as publisher:
        for number in range(1, 4):
            store(publisher, b"%d" % number, number)
    assert client.received(3) == [(b"1", 1), (b"2", 1), (b"3", 1)]
    client.raw.close()


@pytest.mark.parametrize(("version", "clean"), CASES)
def test_changed_again_and_again(empty: Gateway, version: int, clean: bool) -> None:
    client = Client(empty, "client", version, clean=clean)
    for qos in (1, 0, 2, 0, 1, 0):
        client.subscribe("a/b", qos)
    with Raw.connected(empty.port, "publisher") as publisher:
        for number in range(1, 4):
            store(publisher, b"%d" % number, number)
    assert client.received(3) == [(b"1", 0), (b"2", 0), (b"3", 0)]
    client.raw.close()


@pytest.mark.parametrize(("version", "clean"), CASES)
def test_ended(empty: Gateway, version: int, clean: bool) -> None:
    """No message comes by a subscription that has ended; another one at QoS 0 goes on."""
    client = Client(empty, "client", version, clean=clean)
    client.subscribe("a/+", 1)
    client.subscribe("a/b", 0)
    client.unsubscribe("a/+")
    with Raw.connected(empty.port, "publisher") as publisher:
        for number in range(1, 4):
            store(publisher, b"%d" % number, number)
    assert client.received(3) == [(b"1", 0), (b"2", 0), (b"3", 0)]
    client.raw.close()


@pytest.mark.parametrize("version", [4, 5])
def test_lowered_and_absent(empty: Gateway, version: int) -> None:
    """The next connection of a session gets what is new at QoS 0 only."""
    client = Client(empty, "client", version, clean=False)
    client.subscribe("a/b", 1)
    client.subscribe("a/b", 0)
    client.raw.close()
    client = Client(empty, "client", version, clean=False)
    with Raw.connected(empty.port, "publisher") as publisher:
        for number in range(1, 4):
            store(publisher, b"%d" % number, number)
    assert client.received(3) == [(b"1", 0), (b"2", 0), (b"3", 0)]
    client.raw.close()
