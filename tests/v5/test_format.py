# SPDX-License-Identifier: Apache-2.0
"""Strings, integers, fixed headers, packet identifiers and property lengths (chapters 1 and 2)."""

from collections.abc import Callable

import pytest

from tests.harness import raw5
from tests.harness.gateway import Gateway
from tests.harness.raw import field, packet
from tests.harness.raw5 import (
    CONNACK,
    CONTENT_TYPE,
    CORRELATION,
    DISCONNECT,
    FORMAT,
    METHOD,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    REASON_STRING,
    RECEIVE_MAXIMUM,
    RESPONSE_TOPIC,
    SESSION_EXPIRY,
    UNSUBACK,
    USER,
    Raw5,
    connect,
    message,
    prop,
    properties,
    publish,
    refused,
    subscribe,
    unsubscribe,
    will,
)
from tests.v5.conftest import Opener

Place = Callable[[bytes], bytes]


def raw_property(id: int, *values: bytes) -> bytes:
    """A property of strings that need not be strings."""
    return bytes((id,)) + b"".join(map(field, values))


IN_CONNECT: dict[str, Place] = {
    "client id": lambda text: connect(text),
    "user property, name": lambda text: connect("", raw_property(USER, text, b"x")),
    "user property, value": lambda text: connect("", raw_property(USER, b"x", text)),
    "user name": lambda text: connect("", flags=0x80, tail=field(text)),
    "will topic": lambda text: connect("", flags=4, tail=will(text, b"x")),
    "will content type": lambda text: connect("", flags=4, tail=will("a", b"x", raw_property(CONTENT_TYPE, text))),
    "will response topic": lambda text: connect("", flags=4, tail=will("a", b"x", raw_property(RESPONSE_TOPIC, text))),
    "will user property": lambda text: connect("", flags=4, tail=will("a", b"x", raw_property(USER, b"x", text))),
}
"""[MQTT-3.1.3-4] (5.0), [MQTT-3.1.3-11] (5.0), [MQTT-3.1.3-12] (5.0), [MQTT-1.5.7-1] (5.0)"""

LATER: dict[str, Place] = {
    "topic": lambda text: publish(text, b"x"),
    "topic, QoS 1": lambda text: publish(text, b"x", qos=1),
    "topic, QoS 2": lambda text: publish(text, b"x", qos=2),
    "content type": lambda text: publish("a", b"x", raw_property(CONTENT_TYPE, text), qos=1),
    "response topic": lambda text: publish("a", b"x", raw_property(RESPONSE_TOPIC, text), qos=2),
    "user property, name": lambda text: publish("a", b"x", raw_property(USER, text, b"x")),
    "user property, value": lambda text: publish("a", b"x", raw_property(USER, b"x", text)),
    "filter": lambda text: subscribe((text, 0)),
    "filter of UNSUBSCRIBE": lambda text: unsubscribe(text),
    "user property of SUBSCRIBE": lambda text: subscribe(("a", 0), parts=raw_property(USER, text, b"x")),
    "user property of UNSUBSCRIBE": lambda text: unsubscribe("a", parts=raw_property(USER, b"x", text)),
    "user property of PUBREL": lambda text: packet(0x62, b"\0\1\x92" + properties(raw_property(USER, text, b""))),
    "reason string of PUBACK": lambda text: packet(0x40, b"\0\1\0" + properties(raw_property(REASON_STRING, text))),
    "reason string of DISCONNECT": lambda text: packet(0xE0, b"\0" + properties(raw_property(REASON_STRING, text))),
}
"""[MQTT-3.3.2-1] (5.0), [MQTT-3.3.2-13] (5.0), [MQTT-3.3.2-19] (5.0), [MQTT-1.5.7-1] (5.0)"""

BAD = {
    "surrogate": b"a\xed\xa0\x80",
    "last surrogate": b"\xed\xbf\xbf",
    "overlong": b"\xc0\xafa",
    "overlong NUL": b"\xc0\x80",
    "cut off": b"a\xe2\x82",
    "beyond Unicode": b"\xf4\x90\x80\x80",
    "stray": b"\x80",
    "NUL": b"a\0b",
}
"""[MQTT-1.5.4-1] (5.0), [MQTT-1.5.4-2] (5.0)"""


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("place", IN_CONNECT.values(), ids=IN_CONNECT.keys())
def test_bad_strings_in_connect(gateway: Gateway, place: Place, text: bytes) -> None:
    refused(gateway.port, place(text), 0x81)


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("place", LATER.values(), ids=LATER.keys())
def test_bad_strings_later(open5: Opener, place: Place, text: bytes) -> None:
    client = open5()
    client.send(place(text))
    client.ended(0x81)


GOOD = ["é", "\ufeffa", "a\ufeff", "\x01\x7f", "￿", "\U0010ffff", "\ud7ff\ue000"]


@pytest.mark.parametrize("place", IN_CONNECT.values(), ids=IN_CONNECT.keys())
def test_good_strings_in_connect(gateway: Gateway, name: str, place: Place) -> None:
    for text in GOOD:
        with Raw5(gateway.port) as client:
            client.send(place((text + name).encode()))
            client.answer(CONNACK, 0, 0)


@pytest.mark.parametrize("place", LATER.values(), ids=LATER.keys())
def test_good_strings_later(open5: Opener, name: str, place: Place) -> None:
    for text in GOOD:
        client = open5()
        client.send(place((text + name).encode()))
        if place is LATER["reason string of DISCONNECT"]:
            assert client.expect_closed() == []
        else:
            assert DISCONNECT not in {one.kind for one in client.ping()}


@pytest.mark.parametrize("mark", ["\ufeff", "￾", "\U0001f321"])
def test_strings_are_passed_on_as_they_are(open5: Opener, name: str, mark: str) -> None:
    """[MQTT-1.5.4-3] (5.0): no byte order mark is taken off, wherever a string begins."""
    topic = f"{mark}{name}/{mark}a{mark}"
    for subscriber in (open5(), open5(mark + name, prop(SESSION_EXPIRY, 60))):
        assert subscriber.subscribed((f"{mark}{name}/+", 1)) == (1,)
        publisher = open5(f"{mark}{name}-p")
        given: list[tuple[int, str | tuple[str, str]]] = [
            (CONTENT_TYPE, mark + "text"),
            (RESPONSE_TOPIC, mark + "to"),
            (USER, (mark + "n", mark + "v")),
            (USER, (mark, "")),
        ]
        publisher.deliver(topic, mark.encode(), *(prop(*one) for one in given))
        found = subscriber.receive_message(mark.encode())
        assert (found.topic, found.properties) == (topic, given)
    assert not open5(name, prop(SESSION_EXPIRY, 60), clean=False).present
    assert open5(mark + name, clean=False).present


@pytest.mark.parametrize(
    "data",
    [
        packet(0x82, b"\0\1" + b"\x80\0" + field("a") + b"\0"),
        packet(0x82, b"\0\1" + b"\x83\x80\0" + b"\x0b\x81\0" + field("a") + b"\0"),
        packet(0x82, b"\0\1" + b"\x03" + b"\x0b\x81\0" + field("a") + b"\0"),
        packet(0x82, b"\0\1" + b"\x03" + b"\x8b\0\x01" + field("a") + b"\0"),
        packet(0x30, field("a") + b"\x80\0" + b"x"),
        b"\xc0\x80\0",
        b"\x32\x87\0" + field("a") + b"\0\1" + b"\0" + b"x",
    ],
)
def test_integers_that_are_longer_than_needed(open5: Opener, data: bytes) -> None:
    """[MQTT-1.5.5-1] (5.0): lengths, identifiers of properties and of subscriptions."""
    client = open5()
    client.send(data)
    client.ended(0x81)


@pytest.mark.parametrize("size", [127, 128, 16_383, 16_384, 60_000])
def test_integers_are_sent_in_few_bytes(open5: Opener, name: str, size: int) -> None:
    """[MQTT-1.5.5-1] (5.0): remaining length, property length and subscription identifier around their borders."""
    lengths = {127: b"\x7f", 128: b"\x80\x01", 16_383: b"\xff\x7f", 16_384: b"\x80\x80\x01", 60_000: b"\xe0\xd4\x03"}
    client = open5()
    client.subscribed((name, 0), parts=b"\x0b" + lengths[size])
    identifier = b"\x0b" + lengths[size]
    key = field(name)
    content = b"c" * (size - 3 - len(identifier))
    rest = lengths[size] + raw_property(CONTENT_TYPE, content) + identifier
    client.send(publish(name, b"payload", raw_property(CONTENT_TYPE, content)))
    one = client.expect(raw5.PUBLISH)
    assert one.body in (
        key + rest + b"payload",
        key + lengths[size] + identifier + raw_property(CONTENT_TYPE, content) + b"payload",
    )
    client.send(unsubscribe(name))
    client.answer(UNSUBACK)
    client.subscribed((name, 0))
    payload = b"p" * (size - len(key) - 1)
    client.send(publish(name, payload))
    client.send(b"\xc0\0")
    expected = b"\x30" + lengths[size] + key + b"\0" + payload + b"\xd0\0"
    received = bytes(client._buffer[client._start :])
    while len(received) < len(expected):
        received += client.socket.recv(100_000)
    assert received == expected


RESERVED = [
    *((0x40 | low, b"\0\1") for low in range(1, 16)),
    *((0x50 | low, b"\0\1") for low in (1, 2, 8)),
    *((0x60 | low, b"\0\1") for low in range(16) if low != 2),
    *((0x70 | low, b"\0\1") for low in (1, 2, 4)),
    *((0x80 | low, b"\0\1\0" + field("a") + b"\0") for low in range(16) if low != 2),
    *((0xA0 | low, b"\0\1\0" + field("a")) for low in range(16) if low != 2),
    *((0xC0 | low, b"") for low in range(1, 16)),
    *((0xE0 | low, b"\0") for low in range(1, 16)),
    (0x00, b""),
    (0x0F, b""),
]
"""[MQTT-2.1.3-1] (5.0)"""


@pytest.mark.parametrize(("first", "body"), RESERVED, ids=[f"{first:02x}" for first, _ in RESERVED])
def test_reserved_flags(open5: Opener, first: int, body: bytes) -> None:
    client = open5()
    client.send(packet(first, body))
    client.ended(0x81)


def test_every_packet_of_the_gateway(open5: Opener, name: str) -> None:
    """[MQTT-2.1.3-1], [MQTT-2.2.1-2], [MQTT-2.2.1-5], [MQTT-2.2.1-6], [MQTT-2.2.2-1] (5.0)"""
    topic = field(name)
    client = open5(name)

    def exchange(data: bytes, count: int = 1) -> list[tuple[int, bytes]]:
        client.send(data)
        found = []
        for _ in range(count):
            one = client.receive()
            assert one is not None
            found.append((one.first, one.body))
        return sorted(found)

    assert exchange(subscribe((name, 2), id=0x1234)) == [(0x90, b"\x12\x34\0\x02")]
    assert exchange(publish(name, b"\xab\xcd zero")) == [(0x30, topic + b"\0\xab\xcd zero")]
    (first, body), puback = exchange(publish(name, b"one", qos=1, id=0x2345), 2)
    identifier = body[len(topic) : len(topic) + 2]
    assert (first, body) == (0x32, topic + identifier + b"\0one")
    assert puback == (0x40, b"\x23\x45")
    client.send(packet(0x40, identifier))
    assert exchange(publish(name, b"two", qos=2, id=0xFFFF)) == [(0x50, b"\xff\xff")]
    (first, body), pubcomp = exchange(packet(0x62, b"\xff\xff"), 2)
    identifier = body[len(topic) : len(topic) + 2]
    assert (first, body) == (0x34, topic + identifier + b"\0two")
    assert pubcomp == (0x70, b"\xff\xff")
    assert exchange(packet(0x50, identifier)) == [(0x62, identifier)]
    client.send(packet(0x70, identifier))
    assert exchange(unsubscribe(name, "never", id=0xFEDC)) == [(0xB0, b"\xfe\xdc\0\0\x11")]
    assert exchange(packet(0xC0)) == [(0xD0, b"")]
    client.send(packet(0xE0))
    assert client.expect_closed() == []


@pytest.mark.parametrize(
    "data",
    [
        publish("a", b"x", qos=1, id=0),
        publish("a", b"x", qos=2, id=0),
        subscribe(("a", 0), id=0),
        unsubscribe("a", id=0),
    ],
    ids=["PUBLISH 1", "PUBLISH 2", "SUBSCRIBE", "UNSUBSCRIBE"],
)
def test_no_packet_identifier_is_0(open5: Opener, data: bytes) -> None:
    """[MQTT-2.2.1-3] (5.0)"""
    client = open5()
    client.send(data)
    client.ended(0x82)


@pytest.mark.parametrize("expiry", [0, 600], ids=["regular", "durable"])
def test_packet_identifiers_of_the_gateway(open5: Opener, name: str, expiry: int) -> None:
    """[MQTT-2.2.1-4] (5.0): never 0, never one that is in use, also not by a message that waits for PUBCOMP."""
    client = open5(name, prop(SESSION_EXPIRY, expiry), prop(RECEIVE_MAXIMUM, 60))
    client.subscribed((f"{name}/1", 1), (f"{name}/2", 2))
    publisher = open5()
    for number in range(40):
        publisher.deliver(f"{name}/{1 + number % 2}", b"%d" % number, qos=1 + number % 2)
    found = [client.message() for _ in range(40)]
    used = {one.id for one in found}
    assert len(used) == 40
    assert 0 not in used
    for one in found:
        if one.qos == 1 and int(one.payload) % 4 == 0:
            client.send(raw5.ack(PUBACK, one.id))
            used.remove(one.id)
        elif one.qos == 2:
            client.send(raw5.ack(PUBREC, one.id))
            client.answer(PUBREL, one.id, 0)
    for number in range(40, 60):
        publisher.deliver(f"{name}/{1 + number % 2}", b"%d" % number, qos=1 + number % 2)
    for _ in range(10):
        one = client.message()
        assert int(one.payload) in range(40, 60)
        assert one.id
        assert one.id not in used
        used.add(one.id)


@pytest.mark.parametrize(
    "data",
    [
        packet(0x30, field("a")),
        packet(0x32, field("a") + b"\0\1"),
        packet(0x82, b"\0\1" + field("a") + b"\0"),
        packet(0xA2, b"\0\1"),
        packet(0xA2, b"\0\1" + field("a")),
    ],
    ids=["PUBLISH 0", "PUBLISH 1", "SUBSCRIBE", "UNSUBSCRIBE", "UNSUBSCRIBE with filter"],
)
def test_without_property_length(open5: Opener, data: bytes) -> None:
    """[MQTT-2.2.2-1] (5.0)"""
    client = open5()
    client.send(data)
    client.ended(0x81)


def test_a_zero_property_length_is_no_property(open5: Opener, name: str) -> None:
    """[MQTT-2.2.2-1] (5.0): with nothing else in the packet, with a payload that looks like properties, in acks."""
    client = open5()
    client.subscribed((name, 1))
    client.send(packet(0x30, field(name) + b"\0"))
    found = client.message(b"")
    assert found.properties == []
    looks = properties(prop(FORMAT, 1), prop(CORRELATION, b"x"))
    client.send(packet(0x30, field(name) + b"\0" + looks))
    assert client.message(looks).properties == []
    client.send(publish(name, b"one", qos=1, id=9))
    both = [client.receive(), client.receive()]
    (one,) = [message(found) for found in both if found is not None and found.kind == raw5.PUBLISH]
    client.send(packet(0x40, one.id.to_bytes(2, "big") + b"\0\0"))
    client.send(packet(0x50, b"\0\x07\0\0") + packet(0x62, b"\0\x08\x92\0"))
    answers = [raw5.answer(found) for found in client.ping()]
    assert [(one.kind, one.id, one.reason) for one in answers] == [(PUBREL, 7, 0x92), (PUBCOMP, 8, 0x92)]


def test_an_authentication_method_is_a_string(gateway: Gateway) -> None:
    """[MQTT-1.5.4-1], [MQTT-1.5.4-2] (5.0)"""
    for text in BAD.values():
        refused(gateway.port, connect("", raw_property(METHOD, text)), 0x81)
