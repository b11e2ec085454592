# SPDX-License-Identifier: Apache-2.0
"""PUBLISH (section 3.3): flags, topics, aliases of clients, properties on their way to subscribers."""

import time
from typing import Any

import pytest

from tests.harness.gateway import Gateway
from tests.harness.raw import field, packet
from tests.harness.raw5 import (
    ALIAS,
    ALIAS_MAXIMUM,
    CONTENT_TYPE,
    CORRELATION,
    EXPIRY,
    FORMAT,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    RESPONSE_TOPIC,
    SESSION_EXPIRY,
    SUBSCRIPTION_ID,
    USER,
    ack,
    disconnect,
    prop,
    publish,
)
from tests.integration.conftest import Stored
from tests.v5.conftest import Opener

STORED = prop(SESSION_EXPIRY, 600)


def left(interval: int, since: float, slept: float = 0.0) -> range:
    """What may be told of an expiry interval that began after ``since`` and at least ``slept`` seconds ago.

    Clocks of the gateways may differ by half a second.
    """
    return range(interval - int(time.monotonic() - since + 0.5), interval - int(slept) + 1)


@pytest.mark.parametrize("first", [0x36, 0x37, 0x3E, 0x3F])
def test_qos_3(open5: Opener, first: int) -> None:
    """[MQTT-3.3.1-4] (5.0)"""
    client = open5()
    client.send(packet(first, field("a") + b"\0\1\0x"))
    client.ended(0x81)


@pytest.mark.parametrize("flags", [8, 9])
def test_dup_at_qos_0(open5: Opener, flags: int) -> None:
    """[MQTT-3.3.1-2] (5.0): refused from a client."""
    client = open5()
    client.send(publish("a", b"x", flags=flags))
    client.ended(0x81)


async def test_dup_of_the_gateway(
    open5: Opener, name: str, second_gateway: Gateway, gateway: Gateway, stored: Stored
) -> None:
    """[MQTT-3.3.1-1], [MQTT-3.3.1-2], [MQTT-3.3.1-3] (5.0): set when, and only when, a PUBLISH is sent again."""
    client = open5(name, STORED)
    regular = open5()
    for subscriber in (client, regular):
        subscriber.subscribed((f"{name}/0", 0), (f"{name}/1", 1), (f"{name}/2", 2))
    publisher = open5()
    publisher.deliver(f"{name}/0", b"zero", qos=0)
    publisher.deliver(f"{name}/1", b"again", qos=1, flags=8)
    publisher.deliver(f"{name}/2", b"again", qos=2, flags=8)
    for subscriber in (client, regular):
        found = [subscriber.message() for _ in range(3)]
        if subscriber is client:  # a durable session has no order between topics
            found.sort(key=lambda one: one.topic)
        assert [(one.topic, one.qos, one.dup) for one in found] == [(f"{name}/{qos}", qos, False) for qos in range(3)]
        assert len({one.id for one in found[1:]}) == 2
    client.close()
    await stored.detached(name)
    publisher.deliver(f"{name}/1", b"new", qos=1)
    client = open5(name, STORED, clean=False, to=second_gateway)
    found = [client.message() for _ in range(3)]
    assert [(one.payload, one.qos, one.dup) for one in found] == [
        (b"again", 1, True),
        (b"again", 2, True),
        (b"new", 1, False),
    ]
    client.close()
    client = open5(name, STORED, clean=False, to=gateway)
    assert [client.message().dup for _ in range(3)] == [True] * 3


@pytest.mark.parametrize("topic", ["a/+", "+", "#", "a/#", "a+b", "a#"])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_wildcards_in_a_topic(open5: Opener, topic: str, qos: int) -> None:
    """[MQTT-3.3.2-2] (5.0)"""
    client = open5()
    client.send(publish(topic, b"x", qos=qos))
    client.ended(0x90)


def test_topics_match_the_subscription(open5: Opener, name: str) -> None:
    """[MQTT-3.3.2-1], [MQTT-3.3.2-3] (5.0): the topic comes first and as it was; others do not come."""
    client = open5(name)
    client.subscribed((f"{name}/+/b", 1), (f"{name}/é/#", 0), (f"{name}//", 2))
    publisher = open5(f"{name}-p", STORED)
    matching = [f"{name}/a/b", f"{name}//b", f"{name}/é", f"{name}/é/c", f"{name}//", f"{name}/é/b"]
    for topic in [f"{name}/a", f"{name}/a/b/c", f"{name}/e", f"{name}/", f"{name}/A/B", *matching]:
        publisher.deliver(topic, b"x", qos=1)
    assert [client.receive_message().topic for _ in matching] == matching
    client.quiet()


def test_aliases_of_a_client(open5: Opener, name: str) -> None:
    """[MQTT-3.3.2-12] (5.0): an alias stands for the topic that it was given last, at every QoS."""
    client, subscriber = open5(), open5()
    subscriber.subscribed((f"{name}/#", 2))
    alias = prop(ALIAS, 7)
    client.send(publish(f"{name}/a", b"1", alias) + publish("", b"2", alias) + publish("", b"3", prop(ALIAS, 7)))
    client.send(publish(f"{name}/b", b"4", prop(ALIAS, 32)) + publish("", b"5", alias))
    client.send(publish(f"{name}/c", b"6", alias) + publish("", b"7", alias) + publish("", b"8", prop(ALIAS, 32)))
    client.quiet()
    told = [(one.topic, one.payload) for one in subscriber.messages()]
    assert told == [(f"{name}/{letter}", b"%d" % (at + 1)) for at, letter in enumerate("aaabaccb")]
    for qos in (1, 2):
        client.deliver("", b"more", alias, prop(CONTENT_TYPE, "t"), qos=qos)
        assert subscriber.receive_message(b"more").topic == f"{name}/c"


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_bad_aliases(open5: Opener, name: str, qos: int) -> None:
    """[MQTT-3.3.2-7], [MQTT-3.3.2-8], [MQTT-3.3.2-9] (5.0): 0, too large, unknown, or another connection's."""
    client = open5(name, STORED)
    for alias in range(1, 33):
        client.deliver(f"{name}/a", b"x", prop(ALIAS, alias), qos=qos)
    client.send(disconnect())
    assert client.expect_closed() == []
    for topic, alias in ((f"{name}/a", 0), ("", 0), (f"{name}/a", 33), ("", 33), ("", 1), ("", 32)):
        client = open5(name, STORED, clean=False)
        assert client.present
        client.deliver(f"{name}/b", b"x", prop(ALIAS, 2), qos=qos)
        client.send(publish(topic, b"x", prop(ALIAS, alias), qos=qos))
        client.ended(0x94)


def test_an_empty_topic_needs_an_alias(open5: Opener) -> None:
    """[MQTT-3.3.2-1] (5.0)"""
    for qos in (0, 1, 2):
        client = open5()
        client.send(publish("", b"x", qos=qos))
        client.ended(0x82)


@pytest.mark.parametrize("topic", ["a/+", "#", "+/b", ""])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_wildcards_in_a_response_topic(open5: Opener, topic: str, qos: int) -> None:
    """[MQTT-3.3.2-14] (5.0)"""
    client = open5()
    client.send(publish("a", b"x", prop(RESPONSE_TOPIC, topic), qos=qos))
    client.ended(0x82)


ALL: list[tuple[int, Any]] = [
    (FORMAT, 1),
    (CONTENT_TYPE, "text/plain; charset=é"),
    (RESPONSE_TOPIC, "answers/ü/1"),
    (CORRELATION, bytes(range(256))),
    (USER, ("b", "1")),
    (USER, ("a", "2")),
    (USER, ("b", "1")),
    (USER, ("b", "3")),
    (USER, ("", "")),
    (USER, ("Ünïcode name", " edge spaces ")),
    (USER, ("Nats-TTL", "1s")),
    (USER, ("Nmqtt-Pub", "2\r\nX: y")),
]
GIVEN = {
    "format 0": [(FORMAT, 0)],
    "format 1": [(FORMAT, 1)],
    "content type": [(CONTENT_TYPE, "application/x")],
    "content type, empty": [(CONTENT_TYPE, "")],
    "response topic": [(RESPONSE_TOPIC, "to/me")],
    "correlation, empty": [(CORRELATION, b"")],
    "correlation": [(CORRELATION, b"\r\n\0\xff")],
    "plain user properties": [(USER, ("b", "2")), (USER, ("a", "1")), (USER, ("b", "2")), (USER, ("B", "3"))],
    "all": ALL,
}
"""[MQTT-3.3.2-4], [MQTT-3.3.2-15], [MQTT-3.3.2-16], [MQTT-3.3.2-17], [MQTT-3.3.2-18], [MQTT-3.3.2-20] (5.0)"""


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN.keys())
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("way", ["here", "elsewhere", "durable", "away", "retained", "alias"])
def test_properties_reach_every_subscriber(
    open5: Opener,
    name: str,
    second_gateway: Gateway,
    gateway: Gateway,
    given: list[tuple[int, Any]],
    qos: int,
    way: str,
) -> None:
    if way == "away" and qos == 0:
        qos = 1  # QoS 0 is not kept for those who are away
    there = second_gateway if way == "elsewhere" else gateway
    session = [STORED] if way in ("durable", "away") else [prop(ALIAS_MAXIMUM, 9)] if way == "alias" else []
    clients = [open5(f"{name}-{number}", *session, to=there) for number in range(2)]
    if way != "retained":
        for client in clients:
            client.subscribed((f"{name}/#", qos))
    if way == "away":
        for client in clients:
            client.close()
    publisher = open5()
    parts = [prop(id, value) for id, value in given]
    for _ in range(2):
        publisher.deliver(f"{name}/t", b"text", *parts, qos=qos, flags=1 if way == "retained" else 0)
    if way == "away":
        clients = [open5(f"{name}-{number}", STORED, clean=False) for number in range(2)]
    elif way == "retained":
        for client in clients:
            client.subscribed((f"{name}/#", qos))
    for client in clients:
        for _ in range(1 if way == "retained" else 2):
            found = client.receive_message(b"text")
            assert found.qos == qos
            assert [one for one in found.properties if one[0] != ALIAS] == given
        client.quiet()


def test_nothing_is_added_to_properties(open5: Opener, name: str) -> None:
    """[MQTT-3.3.2-17] (5.0): a message without properties arrives without any, at every QoS and retained."""
    client, publisher = open5(), open5()
    client.subscribed((name, 2))
    for qos in (0, 1, 2):
        publisher.deliver(name, b"x", qos=qos, flags=1)
        assert client.receive_message(b"x").properties == []
    client.subscribed((name, 2))
    assert client.receive_message(b"x").properties == []


@pytest.mark.long
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize("qos", [1, 2])
async def test_expiry(
    open5: Opener, name: str, qos: int, elsewhere: bool, second_gateway: Gateway, gateway: Gateway, stored: Stored
) -> None:
    """[MQTT-3.3.2-5], [MQTT-3.3.2-6] (5.0): what is left is told, and what has expired does not come."""
    there = second_gateway if elsewhere else gateway
    durable, regular = open5(f"{name}-durable", STORED), open5(f"{name}-regular")
    for client in (durable, regular):
        client.subscribed((f"{name}/#", qos))
    durable.close()
    await stored.detached(f"{name}-durable")
    publisher = open5(to=there)
    begun = time.monotonic()
    for number, seconds in enumerate((3, 100, 3, 0xFFFFFFFF)):
        since = time.monotonic()
        publisher.deliver(f"{name}/{number}", b"%d" % seconds, prop(EXPIRY, seconds), qos=qos, flags=1)
        assert regular.receive_message(b"%d" % seconds).get(EXPIRY) in left(seconds, since)
    publisher.deliver(f"{name}/none", b"none", qos=qos)
    assert regular.receive_message(b"none").get(EXPIRY) is None
    time.sleep(3.6)
    durable = open5(f"{name}-durable", STORED, clean=False, to=there)
    told = {one.payload: one.get(EXPIRY) for one in (durable.receive_message() for _ in range(3))}
    assert told.pop(b"none") is None
    rests_told(told, begun)
    durable.quiet()
    late = open5(to=there)
    late.subscribed((f"{name}/#", qos))
    rests_told({one.payload: one.get(EXPIRY) for one in (late.receive_message(), late.receive_message())}, begun)
    late.quiet()


def rests_told(told: dict[bytes, int], begun: float) -> None:
    """The two messages that have not expired came, and the rest of their time was told."""
    assert {*told} == {b"100", b"4294967295"}
    for payload, rest in told.items():
        assert rest in left(int(payload), begun, 3.6)


def test_expiry_while_a_session_is_at_its_limit(open5: Opener, name: str) -> None:
    """[MQTT-3.3.2-5], [MQTT-3.3.2-6] (5.0): a wait in the gateway counts as any other."""
    client = open5(name, b"\x21\0\1")
    client.subscribed((name, 1))
    publisher = open5()
    begun = time.monotonic()
    for payload, parts in ((b"first", []), (b"short", [prop(EXPIRY, 1)]), (b"long", [prop(EXPIRY, 50)]), (b"no", [])):
        publisher.deliver(name, payload, *parts)
    first = client.message(b"first")
    time.sleep(2.1)
    client.quiet()
    client.send(ack(PUBACK, first.id))
    assert client.receive_message(b"long").get(EXPIRY) in left(50, begun, 2.1)
    assert client.receive_message(b"no").get(EXPIRY) is None
    client.quiet()


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_subscription_identifier_from_a_client(open5: Opener, qos: int) -> None:
    """[MQTT-3.3.4-6] (5.0)"""
    client = open5()
    client.send(publish("a", b"x", prop(SUBSCRIPTION_ID, 1), qos=qos))
    client.ended(0x82)


def test_answers_by_qos(open5: Opener, name: str) -> None:
    """[MQTT-3.3.4-1] (5.0): byte by byte; 0x10 (no matching subscribers) may be told at QoS 1 and 2."""
    client = open5()
    client.send(publish(name, b"x"))
    client.quiet()
    client.send(publish(name, b"x", qos=1, id=0x1234))
    one = client.expect(PUBACK)
    assert one.body in (b"\x12\x34", b"\x12\x34\x10")
    client.send(publish(name, b"x", qos=2, id=0x1234))
    one = client.expect(PUBREC)
    assert one.body in (b"\x12\x34", b"\x12\x34\x10")
    client.send(ack(PUBREL, 0x1234))
    assert client.expect(PUBCOMP).body == b"\x12\x34"
    client.quiet()
