# SPDX-License-Identifier: Apache-2.0
"""Messages whose headers JetStream would not store: that is found before anybody is given them."""

from __future__ import annotations

import secrets

import pytest

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import PUBACK, PUBREC, UNSUBACK, Raw
from tests.harness.raw5 import (
    CORRELATION,
    MAXIMUM_PACKET_SIZE,
    SESSION_EXPIRY,
    USER,
    Raw5,
    connect,
    prop,
    publish,
    refused,
    unsubscribe,
    will,
)

pytestmark = pytest.mark.usefixtures("unharmed")

LARGE = prop(CORRELATION, bytes(60_000))
"""More than 64 KiB in the header, where it is text."""
FITS = prop(CORRELATION, bytes(40_000))


@pytest.fixture
def topic() -> str:
    return f"headers/{secrets.token_hex(4)}"


@pytest.mark.parametrize("session", [[], [prop(SESSION_EXPIRY, 60)]], ids=["regular", "durable"])
@pytest.mark.parametrize("retain", [0, 1])
@pytest.mark.parametrize("qos", [1, 2])
def test_it_is_refused_alone(gateway: Gateway, topic: str, session: list[bytes], retain: int, qos: int) -> None:
    """PUBACK or PUBREC say so; the connection goes on, and what follows is delivered."""
    with Raw5.open(gateway.port, f"l-{topic[8:]}", *session) as listener, Raw5.open(gateway.port) as publisher:
        listener.subscribed((topic, 2))
        publisher.send(publish(topic, b"large", LARGE, qos=qos, id=7, flags=retain))
        publisher.answer(PUBACK if qos == 1 else PUBREC, 7, 0x97)
        publisher.deliver(topic, b"fits", FITS, qos=qos)
        assert listener.receive_message().payload == b"fits"
        listener.quiet()
        if retain:
            assert listener.subscribed((topic, 0)) == (0,)
            listener.quiet()
        listener.send(unsubscribe(topic))
        listener.answer(UNSUBACK, 1, 0)


def test_what_is_not_stored_has_no_such_limit(gateway: Gateway, topic: str) -> None:
    with Raw5.open(gateway.port) as listener, Raw5.open(gateway.port) as publisher:
        listener.subscribed((topic, 0))
        publisher.send(publish(topic, b"large", LARGE))
        assert listener.receive_message().payload == b"large"
        publisher.send(publish(topic, b"large", LARGE, flags=1))  # it is to be retained
        publisher.ended(0x97)
        listener.quiet()


def test_a_will(nats_server: NatsServer, gateway_factory: GatewayFactory, topic: str) -> None:
    gateway = gateway_factory(nats_server, "--connect-packet-size", "1MiB")
    refused(gateway.port, connect("w", flags=4, tail=will(topic, b"x", LARGE)), 0x95)
    with Raw5.open(gateway.port) as listener:
        listener.subscribed((topic, 1))
        with Raw5(gateway.port) as client:
            client.send(connect("w", flags=0x0C, tail=will(topic, b"x", FITS)))
            client.answer(raw.CONNACK, 0, 0)
        assert listener.receive_message().payload == b"x"


def test_a_client_id_in_the_headers(gateway: Gateway, topic: str) -> None:
    """A bridge's messages name it; 3.1.1 has no words for a refusal."""
    long = "\u00e9" * 20_000
    with Raw5.open(gateway.port) as listener:
        listener.subscribed((topic, 2))
        with Raw(gateway.port) as client:
            client.send(raw.connect(long, level=0x84))
            answers = client.receive()
            if answers is not None and answers.body[1] == 0:
                client.send(raw.publish(topic, b"x", qos=1))
                assert client.expect_closed() == []
        listener.quiet()


@pytest.mark.parametrize("most", [32 * 1024, 1024 * 1024])
def test_what_connack_announces_can_be_stored(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, topic: str, most: int
) -> None:
    """[MQTT-3.2.2-15] (5.0): Maximum Packet Size leaves room for what a stored message has besides."""
    gateway = gateway_factory(nats_factory(config=f"max_payload: {most}"))
    for length in (1, 3000):
        name = topic + "/" + "." * (length // 2)
        with (
            Raw5.open(gateway.port, "announced" * 20, prop(SESSION_EXPIRY, 60)) as client,
            Raw5.open(gateway.port, "publisher" * 20) as publisher,
        ):
            limit = publisher.connack.get(MAXIMUM_PACKET_SIZE)
            assert most - 8192 < limit < most
            assert client.subscribed((name, 1)) == (1,)
            for qos, retain in ((1, 0), (1, 1), (2, 1)):
                payload = bytes(limit - len(publish(name, bytes(20_000), qos=qos, flags=retain)) + 19_999)
                publisher.send(publish(name, payload, qos=qos, flags=retain, id=9))
                publisher.answer(PUBACK if qos == 1 else PUBREC, 9, 0)
                if qos == 2:
                    publisher.send(raw.ack(raw.PUBREL, 9))
                    publisher.answer(raw.PUBCOMP, 9)
                assert client.receive_message().payload == payload


def test_properties_that_grow(gateway: Gateway, topic: str) -> None:
    """User properties that have to be encoded take three times their bytes as headers."""
    some = [prop(USER, ("\u00e9" * 60, "\u00e9" * 400)) for _ in range(40)]
    with Raw5.open(gateway.port) as listener, Raw5.open(gateway.port) as publisher:
        listener.subscribed((topic, 1))
        publisher.send(publish(topic, b"x", *some, qos=1, id=3))
        answer = publisher.answer(PUBACK, 3)
        assert answer.reason == 0x97
        listener.quiet()
