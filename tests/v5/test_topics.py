# SPDX-License-Identifier: Apache-2.0
"""Topic names and topic filters (section 4.7)."""

import pytest

from tests.harness.gateway import Gateway
from tests.harness.raw import Raw
from tests.harness.raw5 import (
    AS_PUBLISHED,
    PUBACK,
    RESPONSE_TOPIC,
    SESSION_EXPIRY,
    UNSUBACK,
    connect,
    prop,
    publish,
    refused,
    subscribe,
    unsubscribe,
    will,
)
from tests.v5.conftest import Opener

STORED = prop(SESSION_EXPIRY, 600)
KINDS = pytest.mark.parametrize("session", [[], [STORED]], ids=["regular", "durable"])


def test_wildcards_in_topics(gateway: Gateway, open5: Opener, name: str) -> None:
    """[MQTT-4.7.0-1] (5.0): of publishes, wills and answers; filters that look the same are told nothing."""
    listener = open5()
    listener.subscribed((f"{name}/+", 1), (f"{name}/#", 1))
    for topic in (f"{name}/+", f"{name}/#", f"{name}/a+", f"+/{name}"):
        for qos in (0, 1, 2):
            client = open5()
            client.send(publish(topic, b"x", qos=qos, flags=1))
            client.ended(0x90)
            client = open5()
            client.send(publish(f"{name}/a", b"x", prop(RESPONSE_TOPIC, topic), qos=qos))
            client.ended(0x82)
        refused(gateway.port, connect("", flags=4, tail=will(topic, b"x")), 0x90)
    listener.quiet()


@KINDS
@pytest.mark.parametrize(
    "topic_filter",
    ["#a", "a#", "a/#/b", "#/a", "##", "a/b#", "a/#b", "+a", "a+", "a/+b/c", "++", "a/b+", "+#"],
)
def test_misplaced_wildcards(open5: Opener, session: list[bytes], topic_filter: str) -> None:
    """[MQTT-4.7.1-1], [MQTT-4.7.1-2], [MQTT-4.13.1-1] (5.0): the packet is malformed, and nothing of it is done."""
    for data in (subscribe(("fine/+/#", 1), (topic_filter, 1)), unsubscribe("fine", topic_filter)):
        client = open5("misplaced", *session)
        client.send(data)
        client.ended(0x81)


MATCHES = {
    # [MQTT-4.7.1-1] (5.0)
    "#": ["a", "a/b", "/", "/a", "a//b", "a/", "A", "é", "a/b/c"],
    "a/#": ["a", "a/b", "a//b", "a/", "a/b/c"],
    "/#": ["/", "/a"],
    # [MQTT-4.7.1-2] (5.0)
    "+": ["a", "A", "é"],
    "+/+": ["a/b", "/", "/a", "a/"],
    "/+": ["/", "/a"],
    "a/+/b": ["a//b"],
    "+/b/#": ["a/b", "a/b/c"],
    # [MQTT-4.7.3-4] (5.0)
    "a": ["a"],
    "A": ["A"],
    "é": ["é"],
    "a/": ["a/"],
    "a//b": ["a//b"],
    " a": [" a"],
    "a/./b": [],
    "e\u0301": [],
    "%61": [],
}
"""What each filter matches of TOPICS, below a name of the test's own."""

TOPICS = ["a", "a/b", "/", "/a", "a//b", "a/", "A", "é", "a/b/c", " a"]


@KINDS
def test_matching(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-4.7.1-1], [MQTT-4.7.1-2], [MQTT-4.7.3-4] (5.0): every pair, and nothing is normalised."""
    publisher = open5()
    clients = {}
    for at, topic_filter in enumerate(MATCHES):
        clients[topic_filter] = open5(f"{name}-{at}", *session)
        assert clients[topic_filter].subscribed((f"{name}{at}/{topic_filter}", 1)) == (1,)
        for topic in TOPICS:
            publisher.deliver(f"{name}{at}/{topic}", topic.encode())
    for at, (topic_filter, client) in enumerate(clients.items()):
        expected = MATCHES[topic_filter] + ([" a"] if topic_filter in ("#", "+") else [])
        found = [client.receive_message() for _ in expected]
        client.quiet()
        assert {one.topic for one in found} == {f"{name}{at}/{topic}" for topic in expected}
        assert all(one.topic.endswith(one.payload.decode()) for one in found)


@KINDS
def test_topics_that_begin_with_a_dollar(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-4.7.2-1] (5.0): neither new nor retained ones come by a filter that begins with a wildcard."""
    client, publisher = open5(name, *session), open5()
    publisher.deliver(f"${name}/a", b"kept", flags=1)
    assert client.subscribed(("+/a", 1 | AS_PUBLISHED), ("#", 0x21), ("+/#", 0x21)) == (1, 1, 1)
    publisher.deliver(f"${name}/a", b"x")
    publisher.deliver(f"{name}/a", b"seen")
    while (one := client.receive_message()).payload != b"seen":
        assert not one.topic.startswith("$")
    client.subscribed((f"${name}/+", 1))
    assert client.receive_message().payload == b"kept"
    publisher.deliver(f"${name}/a", b"y")
    assert client.receive_message().payload == b"y"
    publisher.deliver(f"${name}/a", b"", flags=1)


def test_empty_ones(gateway: Gateway, open5: Opener) -> None:
    """[MQTT-4.7.3-1] (5.0)"""
    for data in (subscribe(("/", 0), ("", 0)), unsubscribe("/", "")):
        client = open5()
        client.send(data)
        client.ended(0x81)
    client = open5()
    client.send(publish("", b"x"))
    client.ended(0x82)
    refused(gateway.port, connect("", flags=4, tail=will("", b"")), 0x90)


@pytest.mark.parametrize("text", ["a\0b", "\0", "a/\0"])
def test_null_characters(gateway: Gateway, open5: Opener, text: str) -> None:
    """[MQTT-4.7.3-2] (5.0)"""
    for data in (publish(text, b"x"), publish(text, b"x", qos=1), subscribe((text, 0)), unsubscribe(text)):
        client = open5()
        client.send(data)
        client.ended(0x81)
    refused(gateway.port, connect("", flags=4, tail=will(text, b"")), 0x81)


@pytest.mark.parametrize("size", [3000, 3800, 3801, 16_000, 65_535])
def test_length(gateway: Gateway, open5: Opener, name: str, size: int) -> None:
    """[MQTT-4.7.3-3] (5.0): up to 65,535 bytes: passed on whole, or refused; nothing is cut off."""
    topic = (name + "é" * size).encode()[: size - 1] + b"z"
    topic = topic if topic.decode(errors="replace").isprintable() and b"\xc3z" not in topic else topic[:-2] + b"zz"
    assert len(topic) == size
    client = open5(name)
    (code,) = client.subscribed((topic, 1))
    client.send(publish(topic, b"x", qos=1))
    if code == 1:
        found = [client.receive(), client.receive()]
        assert {one.kind for one in found if one is not None} == {3, PUBACK}
        (body,) = (one.body for one in found if one is not None and one.kind == 3)
        assert body[: 2 + size] == size.to_bytes(2, "big") + topic
    else:
        assert size > 3000
        assert (code, client.answer(PUBACK, 1).reason) == (0x8F, 0x90)
    client.send(unsubscribe(topic))
    assert client.answer(UNSUBACK, 1).reason in (0, 0x11)
    with Raw(gateway.port) as other:
        other.send(connect("", flags=4, tail=will(topic, b"")))
        accepted = [one.body[1] for one in [other.receive()] if one is not None]
        assert accepted in ([0] if code == 1 else [0x90], [] if size > 8000 else None)
