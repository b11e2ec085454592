# SPDX-License-Identifier: Apache-2.0
"""CONNACK (section 3.2), and what a client has asked for in CONNECT (section 3.1.2.11)."""

import itertools

import pytest

from tests.conftest import GatewayFactory
from tests.harness import raw5
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, field, packet
from tests.harness.raw5 import (
    ALIAS,
    ALIAS_MAXIMUM,
    CONNACK,
    CONTENT_TYPE,
    DISCONNECT,
    MAXIMUM_PACKET_SIZE,
    PINGRESP,
    PROBLEM_INFORMATION,
    PUBACK,
    PUBREC,
    REASON_STRING,
    RECEIVE_MAXIMUM,
    REQUEST_RESPONSE,
    RESPONSE_INFORMATION,
    SESSION_EXPIRY,
    SUBACK,
    USER,
    Message,
    ack,
    answer,
    connect,
    disconnect,
    prop,
    publish,
    refused,
    subscribe,
    unsubscribe,
    will,
)
from tests.integration.conftest import Stored
from tests.v5.conftest import Opener

STORED = prop(SESSION_EXPIRY, 600)


def on_reserved(client_id: str, *parts: bytes, clean: bool = True) -> bytes:
    """A CONNECT whose will nobody may publish."""
    return connect(client_id, *parts, clean=clean, flags=4, tail=will("$JS/API/INFO", b""))


def test_connack_comes_first_and_once(gateway: Gateway, open5: Opener, name: str) -> None:
    """[MQTT-3.2.0-1], [MQTT-3.2.0-2] (5.0): before what waits for the session, and what answers early packets."""
    client = open5(name, STORED)
    client.subscribed((f"{name}/#", 2))
    client.close()
    publisher = open5()
    for number in range(10):
        publisher.deliver(f"{name}/{number}", b"x", qos=number % 3, flags=number % 2)
    with Raw(gateway.port) as again:
        data = connect(name, STORED, clean=False) + packet(0xC0) + publish("x", b"", qos=1, id=500)
        # Not what it is subscribed to: that would end what waits for it, however much of it has been sent by then.
        again.send(data + subscribe((f"{name}/#", 1), id=501) + unsubscribe(f"{name}/other", id=502))
        kinds: list[int] = []
        while not {PUBACK, SUBACK, raw5.UNSUBACK, PINGRESP, raw5.PUBLISH} < {*kinds}:
            one = again.receive()
            assert one is not None, kinds
            kinds.append(one.kind)
        again.send(connect(name, STORED, clean=False))
        kinds += [one.kind for one in again.expect_closed()]
        assert kinds[0] == CONNACK
        assert kinds.count(CONNACK) == 1
        assert kinds[-1] == DISCONNECT


def test_acknowledge_flags(gateway: Gateway, open5: Opener, name: str) -> None:
    """[MQTT-3.2.2-1], [MQTT-3.2.2-2], [MQTT-3.2.2-3], [MQTT-3.2.2-6], [MQTT-3.2.2-7] (5.0)"""
    assert open5(name, STORED, clean=False).connack.id == 0  # a new session
    assert open5(name, STORED, clean=False).connack.id == 1
    assert open5(name, STORED, clean=False).connack.id == 1
    # Session present is 0 beside an error, though there is a session.
    assert refused(gateway.port, on_reserved(name, STORED, clean=False), 0x87).id == 0
    assert refused(gateway.port, connect(name, STORED, clean=False, flags=1), 0x81).id == 0
    assert open5(name, STORED, clean=False).connack.id == 1
    assert open5(name, STORED).connack.id == 0
    assert open5(name, clean=False).connack.id == 1
    assert open5(name).connack.id == 0


REFUSALS = {
    "malformed": (connect("a", flags=1), 0x81),
    "protocol error": (connect("a", STORED, STORED), 0x82),
    "not authorized": (on_reserved("a"), 0x87),
    "bad topic": (connect("a", flags=4, tail=will("a/+", b"")), 0x90),
    "empty topic": (connect("a", flags=4, tail=will("", b"")), 0x90),
    "too much": (connect("a", *[prop(USER, ("", ""))] * 1000), 0x97),
}


@pytest.mark.parametrize(("data", "reason"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals(gateway: Gateway, data: bytes, reason: int) -> None:
    """[MQTT-3.2.2-7], [MQTT-3.2.2-8] (5.0): a reason code of the table, and the end."""
    found = refused(gateway.port, data, reason)
    assert found.id == 0
    assert found.get(REASON_STRING)


@pytest.mark.parametrize("limit", [16, 20, 30])
def test_connack_fits_the_client(gateway: Gateway, limit: int) -> None:
    """[MQTT-3.1.2-24], [MQTT-3.2.2-19], [MQTT-3.2.2-20] (5.0): reason string and user properties are left out."""
    refusal = on_reserved("a")
    assert refused(gateway.port, refusal, 0x87).get(REASON_STRING)
    with Raw(gateway.port) as client:
        client.send(on_reserved("a", prop(MAXIMUM_PACKET_SIZE, limit)))
        assert [(one.kind, one.body) for one in client.expect_closed()] == [(CONNACK, b"\0\x87\0")]


@pytest.mark.parametrize("limit", range(1, 40))
def test_a_client_that_takes_only_small_packets(gateway: Gateway, limit: int) -> None:
    """[MQTT-3.1.2-24] (5.0): it gets a whole CONNACK that fits, a short one that refuses, or nothing."""
    with Raw(gateway.port) as client:
        client.send(connect("a", prop(MAXIMUM_PACKET_SIZE, limit)) + packet(0xC0))
        one = client.receive()
        if one is None:
            assert limit < 5
            return
        assert 2 + len(one.body) <= limit
        found = answer(one)
        assert found.kind == CONNACK
        if found.reason:
            assert (found.reason, found.properties) == (0x95, [])
            assert client.receive() is None
        else:
            assert found.get(RECEIVE_MAXIMUM) == 1024
            client.expect(PINGRESP)


def test_no_packet_is_larger_than_the_client_takes(open5: Opener, name: str) -> None:
    """[MQTT-3.1.2-24] (5.0): answers too; a SUBACK cannot be left out, so its connection ends."""
    limited = prop(MAXIMUM_PACKET_SIZE, 40)
    client = open5(name, limited)
    filters = [(f"{name}/{number}", 0) for number in range(40)]
    assert client.subscribed(*filters[:35]) == (0,) * 35  # 40 bytes
    client.send(unsubscribe(*(text for text, _ in filters[:35])))
    assert client.answer(raw5.UNSUBACK, 1).reasons == (0,) * 35
    client.send(subscribe(*filters[:36]))
    client.ended(0x95)
    client = open5(name, limited)
    client.send(unsubscribe(*(text for text, _ in filters[:36])))
    client.ended(0x95)
    client = open5(name, limited)
    client.send(publish("$JS/API/INFO", b"x", qos=1))  # has a reason string where there is room
    one = client.receive()
    assert one is not None
    assert 2 + len(one.body) <= 40
    assert answer(one).reason == 0x87
    client.send(publish("+", b"x"))
    (one,) = client.expect_closed()
    assert 2 + len(one.body) <= 40
    assert answer(one).reason in (0x81, 0x90)


@pytest.mark.parametrize("expiry", [0, 600], ids=["regular", "durable"])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
async def test_a_message_that_is_too_large(
    open5: Opener,
    name: str,
    stored: Stored,
    expiry: int,
    qos: int,
    elsewhere: bool,
    second_gateway: Gateway,
    gateway: Gateway,
) -> None:
    """[MQTT-3.1.2-24], [MQTT-3.1.2-25] (5.0): dropped, as if it had been acknowledged; what follows comes."""
    there = second_gateway if elsewhere else gateway
    small = [prop(SESSION_EXPIRY, expiry), prop(MAXIMUM_PACKET_SIZE, 100), prop(RECEIVE_MAXIMUM, 1)]
    client, other = open5(name, *small), open5()
    for one in (client, other):
        one.subscribed((name, qos))
    publisher = open5(to=there)
    room = 100 - 2 - len(field(name)) - 1 - (2 if qos else 0)
    fits, too_large = b"f" * room, b"t" * (room + 1)
    for payload in (too_large, fits, too_large, too_large, b"last"):
        publisher.deliver(name, payload, qos=qos)
    client.receive_message(fits)
    client.receive_message(b"last")
    client.quiet()
    for payload in (too_large, fits, too_large, too_large, b"last"):  # nobody else is concerned
        other.receive_message(payload)
    with_properties = prop(CONTENT_TYPE, "x" * 80)
    publisher.deliver(name, b"properties", with_properties, qos=qos)
    publisher.deliver(name, b"after them", qos=qos)
    client.receive_message(b"after them")
    await stored.settled(name)
    client.close()
    if expiry:
        client = open5(name, STORED, clean=False)
        assert client.present
        client.quiet()
        publisher.deliver(name, too_large, qos=qos)
        client.receive_message(too_large)


def aliases_of(found: list[Message]) -> list[tuple[str, int | None]]:
    """Topics, as aliases tell them, and the aliases themselves."""
    known: dict[int, str] = {}
    told = []
    for one in found:
        alias = one.get(ALIAS)
        if one.topic and alias is not None:
            known[alias] = one.topic
        told.append((one.topic or known[alias], alias))
    return told


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("expiry", [0, 600], ids=["regular", "durable"])
@pytest.mark.parametrize("maximum", [None, 0, 1, 3])
def test_aliases_of_the_gateway(open5: Opener, name: str, qos: int, expiry: int, maximum: int | None) -> None:
    """[MQTT-3.1.2-26], [MQTT-3.1.2-27], [MQTT-3.3.2-8], [MQTT-3.3.2-11] (5.0)"""
    allowed = [] if maximum is None else [prop(ALIAS_MAXIMUM, maximum)]
    client = open5(name, prop(SESSION_EXPIRY, expiry), *allowed)
    client.subscribed((f"{name}/#", qos))
    publisher = open5()
    topics = [f"{name}/{number}" for number in (1, 2, 1, 1, 3, 2, 4, 5, 1, 1)]
    for topic in topics:
        publisher.deliver(topic, b"x", qos=qos)
    found = [client.receive_message() for _ in topics]
    told = aliases_of(found)
    order = sorted if expiry else list  # a durable session has no order between topics
    assert order(topic for topic, _ in told) == order(topics)
    aliases = {alias for _, alias in told}
    if maximum:
        assert aliases <= {None, *range(1, maximum + 1)}
        assert not all(one.topic for one in found)  # they are used
    else:
        assert aliases == {None}
        assert all(one.topic for one in found)


async def test_aliases_end_with_the_connection(open5: Opener, name: str, stored: Stored) -> None:
    """[MQTT-3.3.2-7] (5.0): towards the client; each connection hears every topic anew."""
    for _ in range(2):
        client = open5(name, STORED, prop(ALIAS_MAXIMUM, 5), clean=False)
        client.subscribed((name, 1))
        publisher = open5()
        for _ in range(3):
            publisher.deliver(name, b"x")
        found = [client.receive_message() for _ in range(3)]
        assert [one.topic for one in found] == [name, "", ""]
        await stored.settled(name)
        client.send(disconnect())
        assert client.expect_closed() == []


def test_response_information(nats_server: NatsServer, gateway_factory: GatewayFactory, open5: Opener) -> None:
    """[MQTT-3.1.2-28] (5.0)"""
    gateway = gateway_factory(nats_server, "--response-information", "answers/%c")
    told = [
        open5("asker", *parts, to=gateway).connack.get(RESPONSE_INFORMATION)
        for parts in ([], [prop(REQUEST_RESPONSE, 0)], [prop(REQUEST_RESPONSE, 1)], [])
    ]
    assert told == [None, None, "answers/asker", None]


@pytest.mark.parametrize("wanted", [None, 1, 0])
def test_problem_information(gateway: Gateway, open5: Opener, wanted: int | None) -> None:
    """[MQTT-3.1.2-29] (5.0): acknowledgements say why unless the client does not want to know."""
    asked = [] if wanted is None else [prop(PROBLEM_INFORMATION, wanted)]
    client = open5("", *asked)
    explained = []
    for data in (
        publish("$JS/API/INFO", b"x", qos=1, id=1),
        publish("$JS/API/INFO", b"x", qos=2, id=2),
        publish("x", b"x", prop(raw5.RESPONSE_TOPIC, "$JS/API/INFO"), qos=1, id=3),
        subscribe(("$JS/#", 0), id=4),
        subscribe(("a/" * 128 + "a", 0), id=4),
        unsubscribe("a/" * 128 + "a", "never", id=5),
        ack(PUBREC, 6),
        ack(raw5.PUBREL, 7),
    ):
        client.send(data)
        one = client.receive()
        assert one is not None
        found = answer(one)
        assert max(found.reasons) > 0
        explained.append({id for id, _ in found.properties} & {REASON_STRING, USER})
    if wanted == 0:
        assert not any(explained)
    else:
        assert explained[:3] == [{REASON_STRING}] * 3
    client.send(publish("+", b"x"))  # in DISCONNECT it may be told all the same
    (one,) = client.expect_closed()
    assert answer(one).kind == DISCONNECT


def test_largest_packet_of_a_client(nats_server: NatsServer, gateway_factory: GatewayFactory, open5: Opener) -> None:
    """[MQTT-3.2.2-15] (5.0)"""
    gateway = gateway_factory(nats_server, "--max-packet-size", "1000")
    client = open5(to=gateway)
    limit = client.connack.get(MAXIMUM_PACKET_SIZE)
    assert limit == 1000
    room = limit - 3 - len(field("t")) - 1
    client.subscribed(("t", 0))
    client.send(publish("t", b"x" * room))
    client.message(b"x" * room)
    client.send(publish("t", b"x" * (room + 1)))
    client.ended(0x95)


@pytest.mark.parametrize("maximum", [0, 1, 32])
def test_highest_alias_of_a_client(
    nats_server: NatsServer, gateway_factory: GatewayFactory, open5: Opener, maximum: int
) -> None:
    """[MQTT-3.2.2-17], [MQTT-3.2.2-18], [MQTT-3.3.2-9], [MQTT-3.3.2-12] (5.0)"""
    gateway = gateway_factory(nats_server, "--topic-alias-maximum", str(maximum))
    client = open5(to=gateway)
    assert client.connack.get(ALIAS_MAXIMUM) == (maximum or None)
    client.subscribed(("t/+", 0))
    used = range(1, maximum + 1)
    client.send(b"".join(publish(f"t/{alias}", b"named", prop(ALIAS, alias)) for alias in used))
    assert [one.topic for one in client.messages()] == [f"t/{alias}" for alias in used]
    client.send(b"".join(publish("", b"alias", prop(ALIAS, alias)) for alias in reversed(used)))
    assert [one.topic for one in client.messages()] == [f"t/{alias}" for alias in reversed(used)]
    for alias, topic in itertools.product((maximum + 1, 65535), ("t", "")):
        client = open5(to=gateway)
        client.send(publish(topic, b"x", prop(ALIAS, alias), qos=1))
        client.ended(0x94)
