# SPDX-License-Identifier: Apache-2.0
"""PUBACK, PUBREC, PUBREL and PUBCOMP (sections 3.4 to 3.7): reason codes, and what is left out for small clients."""

import pytest

from tests.harness.raw import Received
from tests.harness.raw5 import (
    MAXIMUM_PACKET_SIZE,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    REASON_STRING,
    SESSION_EXPIRY,
    Raw5,
    ack,
    answer,
    prop,
    publish,
)
from tests.v5.conftest import Opener

ASKED = {
    "PUBACK": (publish("$JS/API/INFO", b"x", qos=1, id=7), PUBACK, 0x87),
    "PUBREC": (publish("$JS/API/INFO", b"x", qos=2, id=7), PUBREC, 0x87),
    "PUBREL": (ack(PUBREC, 7), PUBREL, 0x92),
    "PUBCOMP": (ack(PUBREL, 7), PUBCOMP, 0x92),
}
"""What is answered with an acknowledgement of an error, which, and its reason code."""


def received(client: Raw5, data: bytes) -> Received:
    """The answer to a packet."""
    client.send(data)
    one = client.receive()
    assert one is not None
    return one


@pytest.mark.parametrize(("data", "kind", "reason"), ASKED.values(), ids=ASKED.keys())
def test_reason_strings_fit_the_client(open5: Opener, data: bytes, kind: int, reason: int) -> None:
    """[MQTT-3.4.2-2], [MQTT-3.5.2-2], [MQTT-3.6.2-2], [MQTT-3.7.2-2] (5.0), and of user properties:

    [MQTT-3.4.2-3], [MQTT-3.5.2-3], [MQTT-3.6.2-3], [MQTT-3.7.2-3] (5.0)
    """
    whole = received(open5("a"), data)
    told = answer(whole)
    assert (told.kind, told.id, told.reason) == (kind, 7, reason)
    if kind in (PUBACK, PUBREC):
        assert told.get(REASON_STRING)
    size = len(whole.body) + 2
    for limit in (20, size - 1, size, size + 1, 10_000):
        one = received(open5("a", prop(MAXIMUM_PACKET_SIZE, max(limit, 16))), data)
        if limit >= size:
            assert one.body == whole.body
        else:
            assert one.body == bytes((0, 7, reason))


@pytest.mark.parametrize("expiry", [0, 600], ids=["regular", "durable"])
def test_reason_codes_of_the_gateway(open5: Opener, name: str, expiry: int) -> None:
    """[MQTT-3.4.2-1], [MQTT-3.5.2-1], [MQTT-3.6.2-1], [MQTT-3.7.2-1] (5.0)

    Success; nobody is subscribed (where that is told); not authorized; not a topic; an identifier that is not known.
    """
    subscriber, client = open5(f"{name}-s", prop(SESSION_EXPIRY, expiry)), open5(name)
    subscriber.subscribed((name, 2))
    client.deliver(name, b"x", qos=1)
    client.deliver(name, b"x", qos=2)
    client.send(publish(f"{name}/nobody", b"x", qos=1, id=2) + publish(f"{name}/nobody", b"x", qos=2, id=3))
    assert client.answer(PUBACK, 2).reason in (0, 0x10)
    assert client.answer(PUBREC, 3).reason in (0, 0x10)
    client.send(ack(PUBREL, 3))
    client.answer(PUBCOMP, 3, 0)
    for topic, reason in (("$MQTT/x", 0x87), ("$JS/API/INFO", 0x87), ("a/" * 2000, 0x90), ("x" * 4000, 0x90)):
        client.send(publish(topic, b"x", qos=1, id=4) + publish(topic, b"x", qos=2, id=5))
        client.answer(PUBACK, 4, reason)
        client.answer(PUBREC, 5, reason)
    client.send(ack(PUBREL, 5) + ack(PUBREC, 6))  # what was refused is not held
    client.answer(PUBCOMP, 5, 0x92)
    client.answer(PUBREL, 6, 0x92)
    for _ in range(2):
        subscriber.receive_message(b"x")
    subscriber.quiet()


@pytest.mark.parametrize("qos", [1, 2])
def test_any_reason_code_of_the_tables(open5: Opener, name: str, qos: int) -> None:
    """[MQTT-3.4.2-1], [MQTT-3.5.2-1] (5.0): from a client; each of 0x80 and more completes the message."""
    subscriber, publisher = open5(name, b"\x21\0\1"), open5()
    subscriber.subscribed((name, qos))
    for reason in (0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99, 0):
        publisher.deliver(name, b"%d" % reason, qos=qos)
        one = subscriber.message(b"%d" % reason)
        subscriber.send(ack(PUBACK if qos == 1 else PUBREC, one.id, reason, prop(REASON_STRING, "why")))
        if qos == 2 and reason < 0x80:
            subscriber.answer(PUBREL, one.id, 0)
            subscriber.send(ack(PUBCOMP, one.id, 0))
    subscriber.quiet()
    for reason in (0x01, 0x11, 0x81, 0x92, 0xFF):
        client = open5()
        client.send(ack(PUBACK if qos == 1 else PUBREC, 1, reason))
        client.ended(0x82)


@pytest.mark.parametrize("kind", [PUBREL, PUBCOMP])
def test_other_reason_codes_of_release(open5: Opener, kind: int) -> None:
    """[MQTT-3.6.2-1], [MQTT-3.7.2-1] (5.0): 0x00 and 0x92 are all there are."""
    for reason in (0x10, 0x80, 0x91, 0x93):
        client = open5()
        client.send(ack(kind, 1, reason))
        client.ended(0x82)
    client = open5()
    client.send(ack(kind, 1, 0x92) + ack(kind, 2, 0))
    assert {one.kind for one in client.ping()} <= {PUBCOMP}
