# SPDX-License-Identifier: Apache-2.0
"""Wills (sections 3.1.2.5 to 3.1.2.7, 3.1.3.2 to 3.1.3.4): when they are published, and as what."""

import time
from typing import Any

import pytest

from tests.harness.gateway import Gateway
from tests.harness.raw import Raw, field
from tests.harness.raw5 import (
    AS_PUBLISHED,
    CONTENT_TYPE,
    CORRELATION,
    EXPIRY,
    FORMAT,
    RESPONSE_TOPIC,
    SESSION_EXPIRY,
    USER,
    WILL_DELAY,
    Message,
    Raw5,
    connect,
    disconnect,
    prop,
    will,
)
from tests.v5.conftest import Opener

STORED = prop(SESSION_EXPIRY, 600)
DELAY = 4
"""Seconds of a will's delay within which its client comes back."""

KINDS = pytest.mark.parametrize("session", [[], [STORED]], ids=["regular", "durable"])

PROPERTIES: list[tuple[int, Any]] = [
    (FORMAT, 1),
    (CONTENT_TYPE, "text/é"),
    (RESPONSE_TOPIC, "to/me"),
    (CORRELATION, b"\0\r\n\xff"),
    (USER, ("b", "1")),
    (USER, ("a", "2")),
    (USER, ("b", "1")),
    (USER, ("ü", " x\r\n")),
]


def listen(open5: Opener, name: str) -> Raw5:
    """Who gets the wills on ``name``, with their own RETAIN flag."""
    listener = open5()
    listener.subscribed((f"{name}/#", 2 | AS_PUBLISHED))
    return listener


def fenced(listener: Raw5, publisher: Raw5, name: str) -> list[Message]:
    """What has come to a listener before something that is published now."""
    publisher.deliver(f"{name}/fence", b"fence", qos=2)
    found = []
    while (one := listener.receive_message()).topic != f"{name}/fence":
        found.append(one)
    return found


@KINDS
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("retain", [False, True])
def test_a_will_is_published(open5: Opener, name: str, session: list[bytes], qos: int, retain: bool) -> None:
    """[MQTT-3.1.2-7], [MQTT-3.1.2-8], [MQTT-3.1.2-9], [MQTT-3.1.2-14], [MQTT-3.1.2-15], [MQTT-3.1.3-10] (5.0)"""
    listener = listen(open5, name)
    parts = [prop(id, value) for id, value in PROPERTIES]
    tail = will(f"{name}/will", b"\xe2\x82\xac", *parts, prop(EXPIRY, 1000))
    client = open5(name, *session, flags=4 | qos << 3 | retain << 5, tail=tail)
    client.quiet()
    assert fenced(listener, open5(), name) == []
    closing = time.monotonic()
    client.close()
    found = listener.receive_message(b"\xe2\x82\xac")
    assert (found.topic, found.qos, found.retain) == (f"{name}/will", qos, retain)
    left = found.get(EXPIRY)
    assert [one for one in found.properties if one[0] != EXPIRY] == PROPERTIES
    assert 998 - int(time.monotonic() - closing) <= left <= 1000
    late = open5()
    late.subscribed((f"{name}/will", 2))
    kept = fenced(listener, open5(), name) + late.messages()
    assert [(one.payload, one.qos, one.retain) for one in kept] == [(b"\xe2\x82\xac", qos, True)] * retain
    for one in kept:
        assert [each for each in one.properties if each[0] != EXPIRY] == PROPERTIES


def test_order_of_the_payload(open5: Opener, name: str) -> None:
    """[MQTT-3.1.3-1] (5.0): fields of every kind in one CONNECT, and each is what it is taken for."""
    listener = listen(open5, name)
    tail = will(f"{name}/will", b"\xfepayload", prop(CONTENT_TYPE, "type"), prop(USER, ("a", "b")))
    client = open5(name, STORED, flags=0xCC, tail=tail + field("user") + field(b"\xff\xff"))
    client.close()
    found = listener.receive_message(b"\xfepayload")
    assert (found.topic, found.properties) == (f"{name}/will", [(CONTENT_TYPE, "type"), (USER, ("a", "b"))])
    assert open5(name, clean=False).present


@KINDS
def test_disconnect_discards_the_will(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-3.1.2-8], [MQTT-3.1.2-10] (5.0): with 0x00, in both its forms; 0x04 and other reasons publish it."""
    listener, publisher = listen(open5, name), open5()
    for number, data in enumerate((b"\xe0\0", b"\xe0\x01\0", disconnect(0), disconnect(0, prop(USER, ("a", "b"))))):
        client = open5(f"{name}-{number}", *session, flags=4, tail=will(f"{name}/will", b"never"))
        client.send(data)
        assert client.expect_closed() == []
    for reason in (0x04, 0x80, 0x83):
        client = open5(f"{name}-{reason}", *session, flags=4, tail=will(f"{name}/will", b"%d" % reason))
        client.send(disconnect(reason))
        assert client.expect_closed() == []
        assert listener.receive_message(b"%d" % reason).topic == f"{name}/will"
    assert fenced(listener, publisher, name) == []


def test_a_will_is_published_once(open5: Opener, name: str) -> None:
    """[MQTT-3.1.2-10] (5.0): the session's next connections have none unless they bring one."""
    listener, publisher = listen(open5, name), open5()
    client = open5(name, STORED, flags=0x0C, tail=will(f"{name}/will", b"first"))
    client.close()
    listener.receive_message(b"first")
    for _ in range(3):
        open5(name, STORED, clean=False).close()
    client = open5(name, STORED, clean=False, flags=4, tail=will(f"{name}/will", b"second"))
    client.close()
    listener.receive_message(b"second")
    assert fenced(listener, publisher, name) == []


@KINDS
def test_violations_and_takeover_publish_the_will(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-3.1.2-8] (5.0): every end but DISCONNECT 0x00."""
    listener = listen(open5, name)
    client = open5(name, *session, flags=4, tail=will(f"{name}/will", b"violation"))
    client.send(b"\xc1\0")
    client.ended(0x81)
    listener.receive_message(b"violation")
    client = open5(name, *session, flags=4, tail=will(f"{name}/will", b"taken over"))
    open5(name, *session)
    client.ended(0x8E)
    listener.receive_message(b"taken over")


def test_a_refused_connect_leaves_no_will(gateway: Gateway, open5: Opener, name: str) -> None:
    """[MQTT-3.1.2-7] (5.0): only an accepted one does."""
    listener = listen(open5, name)
    tail = will(f"{name}/will", b"never")
    for data in (
        connect(name, b"\x27\0\0\0\x05", flags=4, tail=tail),  # it takes no CONNACK
        connect(name, flags=4, tail=tail + b"\0"),
    ):
        with Raw(gateway.port) as client:
            client.send(data)
            (one,) = client.expect_closed()
            assert one.body[1] >= 0x80
    assert fenced(listener, open5(), name) == []


@pytest.mark.long
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize("qos", [0, 1])
def test_will_delay(
    open5: Opener, name: str, qos: int, elsewhere: bool, second_gateway: Gateway, gateway: Gateway
) -> None:
    """[MQTT-3.1.2-8], [MQTT-3.1.3-9] (5.0): not before the delay is over, and not at all for who is back in time."""
    listener = listen(open5, name)
    there = second_gateway if elsewhere else gateway
    closing = []
    for number in range(2):
        tail = will(f"{name}/{number}", b"%d" % number, prop(WILL_DELAY, DELAY), prop(USER, ("a", "b")))
        client = open5(f"{name}-{number}", STORED, flags=4 | qos << 3, tail=tail)
        closing.append(time.monotonic())
        client.close()
    back = open5(f"{name}-1", STORED, clean=False, to=there)
    assert back.present
    found = listener.receive_message(b"0")
    assert time.monotonic() - closing[0] > DELAY - 0.4
    assert (found.topic, found.qos, found.properties) == (f"{name}/0", qos, [(USER, ("a", "b"))])
    time.sleep(max(1.0, closing[1] + DELAY + 1.0 - time.monotonic()))  # the other delay is over as well
    back.close()
    assert fenced(listener, open5(), name) == []


def test_the_end_of_the_session_ends_the_delay(open5: Opener, name: str) -> None:
    """[MQTT-3.1.2-8] (5.0): no session, a session that expires before, a clean start, DISCONNECT with expiry 0."""
    listener = listen(open5, name)
    delay = prop(WILL_DELAY, 600)
    started = time.monotonic()
    open5(f"{name}-1", flags=4, tail=will(f"{name}/1", b"no session", delay)).close()
    listener.receive_message(b"no session")
    open5(f"{name}-2", STORED, flags=4, tail=will(f"{name}/2", b"clean start", delay)).close()
    open5(f"{name}-2", STORED)
    listener.receive_message(b"clean start")
    client = open5(f"{name}-3", STORED, flags=4, tail=will(f"{name}/3", b"expiry 0", delay))
    client.send(disconnect(0x04, prop(SESSION_EXPIRY, 0)))
    listener.receive_message(b"expiry 0")
    assert time.monotonic() - started < 60
    open5(f"{name}-4", prop(SESSION_EXPIRY, 1), flags=4, tail=will(f"{name}/4", b"expired", delay)).close()
    listener.receive_message(b"expired")
    assert time.monotonic() - started > 0.9
