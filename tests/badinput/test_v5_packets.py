# SPDX-License-Identifier: Apache-2.0
"""Packets of 5.0 that break the protocol: CONNACK or DISCONNECT says why, and nobody else notices."""

import secrets

import pytest

from tests.harness import raw5
from tests.harness.bystanders import Bystanders
from tests.harness.gateway import Gateway
from tests.harness.raw import field, packet
from tests.harness.raw5 import (
    ALIAS,
    ALIAS_MAXIMUM,
    ASSIGNED_ID,
    AUTH,
    CONTENT_TYPE,
    CORRELATION,
    DATA,
    DISCONNECT,
    EXPIRY,
    FORMAT,
    MAXIMUM_PACKET_SIZE,
    MAXIMUM_QOS,
    METHOD,
    NO_LOCAL,
    PROBLEM_INFORMATION,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    REASON_STRING,
    RECEIVE_MAXIMUM,
    REQUEST_RESPONSE,
    RESPONSE_INFORMATION,
    RESPONSE_TOPIC,
    RETAIN_AVAILABLE,
    SERVER_KEEP_ALIVE,
    SERVER_REFERENCE,
    SESSION_EXPIRY,
    SHARED,
    SUBSCRIPTION_ID,
    SUBSCRIPTION_IDS,
    USER,
    WILDCARDS,
    WILL_DELAY,
    Raw5,
    ack,
    auth,
    connect,
    disconnect,
    prop,
    properties,
    publish,
    refused,
    subscribe,
    unsubscribe,
    will,
)

pytestmark = pytest.mark.usefixtures("unharmed")

MALFORMED, PROTOCOL_ERROR, TOPIC_FILTER_INVALID, TOPIC_INVALID = 0x81, 0x82, 0x8F, 0x90
BAD_METHOD, ALIAS_INVALID, TOO_LARGE = 0x8C, 0x94, 0x95

# Every property (section 2.2.2.2): one that is legal where it belongs, and the packets in which it does.
WILL, SUBSCRIBE, UNSUBSCRIBE, CONNECT = "will", "SUBSCRIBE", "UNSUBSCRIBE", "CONNECT"
ACKS = {PUBACK, PUBREC, PUBREL, PUBCOMP}
EVERY: dict[int, tuple[bytes, set[int | str]]] = {
    FORMAT: (prop(FORMAT, 1), {PUBLISH, WILL}),
    EXPIRY: (prop(EXPIRY, 60), {PUBLISH, WILL}),
    CONTENT_TYPE: (prop(CONTENT_TYPE, "text"), {PUBLISH, WILL}),
    RESPONSE_TOPIC: (prop(RESPONSE_TOPIC, "a"), {PUBLISH, WILL}),
    CORRELATION: (prop(CORRELATION, b"\0"), {PUBLISH, WILL}),
    SUBSCRIPTION_ID: (prop(SUBSCRIPTION_ID, 1), {SUBSCRIBE}),
    SESSION_EXPIRY: (prop(SESSION_EXPIRY, 0), {CONNECT, DISCONNECT}),
    ASSIGNED_ID: (prop(ASSIGNED_ID, "x"), set()),
    SERVER_KEEP_ALIVE: (prop(SERVER_KEEP_ALIVE, 10), set()),
    METHOD: (prop(METHOD, "SCRAM-SHA-256"), {CONNECT, AUTH}),
    DATA: (prop(DATA, b"x"), {CONNECT, AUTH}),
    PROBLEM_INFORMATION: (prop(PROBLEM_INFORMATION, 1), {CONNECT}),
    WILL_DELAY: (prop(WILL_DELAY, 1), {WILL}),
    REQUEST_RESPONSE: (prop(REQUEST_RESPONSE, 1), {CONNECT}),
    RESPONSE_INFORMATION: (prop(RESPONSE_INFORMATION, "x"), set()),
    SERVER_REFERENCE: (prop(SERVER_REFERENCE, "x"), set()),
    REASON_STRING: (prop(REASON_STRING, "x"), {*ACKS, DISCONNECT, AUTH}),
    RECEIVE_MAXIMUM: (prop(RECEIVE_MAXIMUM, 10), {CONNECT}),
    ALIAS_MAXIMUM: (prop(ALIAS_MAXIMUM, 10), {CONNECT}),
    ALIAS: (prop(ALIAS, 1), {PUBLISH}),
    MAXIMUM_QOS: (prop(MAXIMUM_QOS, 1), set()),
    RETAIN_AVAILABLE: (prop(RETAIN_AVAILABLE, 1), set()),
    USER: (prop(USER, ("a", "b")), {CONNECT, WILL, PUBLISH, SUBSCRIBE, UNSUBSCRIBE, *ACKS, DISCONNECT, AUTH}),
    MAXIMUM_PACKET_SIZE: (prop(MAXIMUM_PACKET_SIZE, 1000), {CONNECT}),
    WILDCARDS: (prop(WILDCARDS, 1), set()),
    SUBSCRIPTION_IDS: (prop(SUBSCRIPTION_IDS, 1), set()),
    SHARED: (prop(SHARED, 1), set()),
    0x04: (b"\x04\0", set()),  # no property
    0x2B: (b"\x2b\0", set()),
    0x7F: (b"\x7f\0", set()),
    0x80: (b"\x80\x01\0", set()),  # in two bytes
}


def with_properties(kind: int | str, *parts: bytes) -> bytes:
    """A packet of ``kind`` with these properties, all else in order."""
    match kind:
        case "CONNECT":
            return connect("", *parts)
        case "will":
            return connect("", flags=4, tail=will("a", b"x", *parts))
        case "SUBSCRIBE":
            return subscribe(("a", 0), parts=b"".join(parts))
        case "UNSUBSCRIBE":
            return unsubscribe("a", parts=b"".join(parts))
        case raw5.PUBLISH:
            return publish("a", b"x", *parts)
        case raw5.DISCONNECT:
            return disconnect(0, *parts)
        case raw5.AUTH:
            return auth(0x19, *parts)
        case _:
            assert isinstance(kind, int)
            return ack(kind, 1, 0, *parts)


KINDS: list[int | str] = [CONNECT, WILL, PUBLISH, *sorted(ACKS), SUBSCRIBE, UNSUBSCRIBE, DISCONNECT, AUTH]
MATRIX = [(kind, id) for kind in KINDS for id in EVERY]
LEGAL = [(kind, id) for kind, id in MATRIX if kind in EVERY[id][1]]


def rejected(port: int, data: bytes, reason: int) -> None:
    """Send a packet of which the gateway says what is wrong with it: CONNECT, or to a connection that is open."""
    if data[0] == 0x10:
        refused(port, data, reason)
        return
    with Raw5.open(port) as client:
        client.send(data)
        client.ended(reason)


def test_the_matrix_is_whole() -> None:
    """The properties of section 2.2.2.2, and some numbers that are none."""
    known = {1, 2, 3, 8, 9, 0x0B, 0x11, 0x12, 0x13, *range(0x15, 0x1B), 0x1C, 0x1F, *range(0x21, 0x2B)}
    assert {id for id in EVERY if id <= 0x2A} - {0x04} == known


def label(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value:02x}"


@pytest.mark.parametrize(("kind", "id"), [(kind, id) for kind, id in MATRIX if kind not in EVERY[id][1]], ids=label)
def test_misplaced_properties(gateway: Gateway, kind: int | str, id: int) -> None:
    """Section 2.2.2.2: malformed; what only servers may set in such a packet is a protocol error."""
    servers = (kind, id) in ((PUBLISH, SUBSCRIPTION_ID), (DISCONNECT, SERVER_REFERENCE))  # [MQTT-3.3.4-6] (5.0)
    rejected(gateway.port, with_properties(kind, EVERY[id][0]), PROTOCOL_ERROR if servers else MALFORMED)


@pytest.mark.parametrize(("kind", "id"), [(kind, id) for kind, id in LEGAL if id != USER], ids=label)
def test_properties_that_stand_twice(gateway: Gateway, kind: int | str, id: int) -> None:
    """Sections 3.1.2.11 and its like: a protocol error."""
    one = EVERY[id][0]
    rejected(gateway.port, with_properties(kind, one, one), PROTOCOL_ERROR)


@pytest.mark.parametrize(("kind", "id"), LEGAL, ids=label)
def test_values_that_are_cut_off(gateway: Gateway, kind: int | str, id: int) -> None:
    """The properties are as long as they say, and end within the last of them."""
    rejected(gateway.port, with_properties(kind, EVERY[id][0][:-1]), MALFORMED)


@pytest.mark.parametrize("kind", KINDS, ids=label)
@pytest.mark.parametrize(
    "pair",
    [
        (b"a\x80", b"b"),
        (b"a", b"\xe2\x82"),
        (b"\xc0\xaf", b"b"),
        (b"a", b"\xed\xa0\x80"),
        (b"a\0", b"b"),
        (b"a", b"\0"),
    ],
    ids=["name", "value", "overlong name", "surrogate", "NUL in the name", "NUL in the value"],
)
def test_string_pairs(gateway: Gateway, kind: int | str, pair: tuple[bytes, bytes]) -> None:
    """[MQTT-1.5.7-1], [MQTT-1.5.4-1], [MQTT-1.5.4-2] (5.0)"""
    bad = bytes((USER,)) + field(pair[0]) + field(pair[1])
    rejected(gateway.port, with_properties(kind, prop(USER, ("fine", "fine")), bad), MALFORMED)


LENGTH_AT = {CONNECT: 12, WILL: 15, PUBLISH: 5, SUBSCRIBE: 4, UNSUBSCRIBE: 4, DISCONNECT: 3, AUTH: 3}
"""Offset of the length of the properties in `with_properties(kind)`; in acknowledgements it is the last byte."""


@pytest.mark.parametrize("kind", KINDS, ids=label)
@pytest.mark.parametrize("length", [b"\x7f", b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff\x01", b"\x80\x80\x80\x80"])
def test_lengths_of_properties(gateway: Gateway, kind: int | str, length: bytes) -> None:
    """One that goes beyond the end of the packet, or takes more than four bytes [MQTT-1.5.5-1] (5.0)."""
    good = with_properties(kind)
    at = LENGTH_AT.get(kind, 5)
    rejected(gateway.port, packet(good[0], good[2:at] + length + good[at + 1 :]), MALFORMED)


LONG = "/".join("x" * 129)  # one more than max_topic_levels

IN_CONNECT: dict[str, tuple[bytes, int]] = {
    # Zero, or more than 1, where the standard forbids it
    "receive maximum 0": (connect("", prop(RECEIVE_MAXIMUM, 0)), PROTOCOL_ERROR),
    "maximum packet size 0": (connect("", prop(MAXIMUM_PACKET_SIZE, 0)), PROTOCOL_ERROR),
    "request problem information 2": (connect("", prop(PROBLEM_INFORMATION, 2)), PROTOCOL_ERROR),
    "request response information 2": (connect("", prop(REQUEST_RESPONSE, 2)), PROTOCOL_ERROR),
    "authentication data without a method": (connect("", prop(DATA, b"x")), PROTOCOL_ERROR),
    "an unknown method": (connect("", prop(METHOD, "x")), BAD_METHOD),
    "will payload format 2": (connect("", flags=4, tail=will("a", b"x", prop(FORMAT, 2))), PROTOCOL_ERROR),
    "+ in the will's response topic": (
        connect("", flags=4, tail=will("a", b"x", prop(RESPONSE_TOPIC, "a/+"))),
        PROTOCOL_ERROR,
    ),
    "# in the will's response topic": (
        connect("", flags=4, tail=will("a", b"x", prop(RESPONSE_TOPIC, "#"))),
        PROTOCOL_ERROR,
    ),
    # Flags
    "reserved flag": (connect("", flags=1), MALFORMED),
    "will QoS without will": (connect("", flags=8), MALFORMED),
    "will retain without will": (connect("", flags=32), MALFORMED),
    "will QoS 3": (connect("", flags=4 | 24, tail=will("a", b"x")), MALFORMED),
    # Fields
    "no will": (connect("", flags=4), MALFORMED),
    "no will topic": (connect("", flags=4, tail=properties()), MALFORMED),
    "no will payload": (connect("", flags=4, tail=properties() + field("a")), MALFORMED),
    "empty will topic": (connect("", flags=4, tail=will("", b"x")), TOPIC_INVALID),
    "wildcard in the will topic": (connect("", flags=4, tail=will("a/+", b"x")), TOPIC_INVALID),
    "will topic of too many levels": (connect("", flags=4, tail=will(LONG, b"x")), TOPIC_INVALID),
    "no user name": (connect("", flags=0x80), MALFORMED),
    "no password": (connect("", flags=0x40), MALFORMED),
    "bytes after the last field": (connect("", tail=b"x"), MALFORMED),
    "client id that is no UTF-8": (connect(b"\xff"), MALFORMED),
    "no client id": (packet(0x10, field("MQTT") + b"\x05\x02\0\x3c\0"), MALFORMED),
    "no properties": (packet(0x10, field("MQTT") + b"\x05\x02\0\x3c"), MALFORMED),
}


@pytest.mark.parametrize(("data", "reason"), IN_CONNECT.values(), ids=IN_CONNECT.keys())
def test_connect(gateway: Gateway, data: bytes, reason: int) -> None:
    rejected(gateway.port, data, reason)


LATER: dict[str, tuple[bytes, int]] = {
    # PUBLISH
    "alias 0": (publish("a", b"x", prop(ALIAS, 0)), ALIAS_INVALID),  # [MQTT-3.3.2-8] (5.0)
    "alias above the maximum": (publish("a", b"x", prop(ALIAS, 33)), ALIAS_INVALID),  # [MQTT-3.3.2-9] (5.0)
    "the largest alias": (publish("a", b"x", prop(ALIAS, 65535)), ALIAS_INVALID),
    "an alias that stands for nothing": (publish("", b"x", prop(ALIAS, 1)), ALIAS_INVALID),
    "neither topic nor alias": (publish("", b"x"), PROTOCOL_ERROR),
    "payload format 2": (publish("a", b"x", prop(FORMAT, 2)), PROTOCOL_ERROR),
    "+ in the response topic": (publish("a", b"x", prop(RESPONSE_TOPIC, "+/a")), PROTOCOL_ERROR),
    "# in the response topic": (publish("a", b"x", prop(RESPONSE_TOPIC, "a/#")), PROTOCOL_ERROR),
    "a wildcard in the topic": (publish("a/+", b"x"), TOPIC_INVALID),  # [MQTT-3.3.2-2] (5.0)
    "QoS 3": (publish("a", b"x", qos=3), MALFORMED),  # [MQTT-3.3.1-4] (5.0)
    "DUP at QoS 0": (publish("a", b"x", flags=8), MALFORMED),  # [MQTT-3.3.1-2] (5.0)
    "packet identifier 0": (publish("a", b"x", qos=1, id=0), PROTOCOL_ERROR),
    "no topic": (packet(0x30), MALFORMED),
    "a topic longer than the packet": (packet(0x30, b"\0\x09ab"), MALFORMED),
    "a topic that is no UTF-8": (publish(b"\xc0\xaf", b"x"), MALFORMED),
    "a topic with U+0000": (publish("a\0b", b"x"), MALFORMED),
    "PUBLISH without properties": (packet(0x30, field("a")), MALFORMED),
    # SUBSCRIBE
    "subscription identifier 0": (subscribe(("a", 0), parts=prop(SUBSCRIPTION_ID, 0)), PROTOCOL_ERROR),
    "subscription identifier of five bytes": (subscribe(("a", 0), parts=b"\x0b\x80\x80\x80\x80\x01"), MALFORMED),
    "SUBSCRIBE to nothing": (subscribe(), PROTOCOL_ERROR),  # [MQTT-3.8.3-2] (5.0)
    "subscribe at QoS 3": (subscribe(("a", 3)), PROTOCOL_ERROR),
    "retain handling 3": (subscribe(("a", 0x30)), PROTOCOL_ERROR),
    "reserved bit 6": (subscribe(("a", 0x40)), MALFORMED),  # [MQTT-3.8.3-5] (5.0)
    "reserved bit 7": (subscribe(("a", 0x80)), MALFORMED),
    "no options": (packet(0x82, b"\0\1\0" + field("a")), MALFORMED),
    "shared and no local": (subscribe(("$share/g/a", NO_LOCAL)), PROTOCOL_ERROR),  # [MQTT-3.8.3-4] (5.0)
    "flags of SUBSCRIBE": (packet(0x80, subscribe(("a", 0))[2:]), MALFORMED),  # [MQTT-3.8.1-1] (5.0)
    # UNSUBSCRIBE
    "UNSUBSCRIBE from nothing": (unsubscribe(), PROTOCOL_ERROR),  # [MQTT-3.10.3-2] (5.0)
    "flags of UNSUBSCRIBE": (packet(0xA0, unsubscribe("a")[2:]), MALFORMED),
    "a filter longer than the packet": (packet(0xA2, b"\0\1\0\0\x09ab"), MALFORMED),
    # Acknowledgements
    "PUBACK without an identifier": (packet(0x40), MALFORMED),
    "PUBACK of one byte": (packet(0x40, b"\1"), MALFORMED),
    "PUBACK with a reason that is not its own": (ack(PUBACK, 1, 0x92), PROTOCOL_ERROR),
    "PUBREC with an unknown reason": (ack(PUBREC, 1, 0x7F), PROTOCOL_ERROR),
    "PUBREL with a reason that is not its own": (ack(PUBREL, 1, 0x80), PROTOCOL_ERROR),
    "PUBCOMP with a reason that is not its own": (ack(PUBCOMP, 1, 0x10), PROTOCOL_ERROR),
    "bytes after the properties of PUBACK": (packet(0x40, b"\0\1\0\0x"), MALFORMED),
    "flags of PUBREL": (packet(0x60, b"\0\1"), MALFORMED),
    # DISCONNECT, AUTH, PINGREQ
    "a server's reason to disconnect": (disconnect(0x8B), PROTOCOL_ERROR),
    "bytes after the properties of DISCONNECT": (packet(0xE0, b"\0\0x"), MALFORMED),
    "an expiry for a session that has none": (disconnect(0, prop(SESSION_EXPIRY, 10)), PROTOCOL_ERROR),
    "AUTH when CONNECT had no method": (auth(0x19, prop(METHOD, "SCRAM-SHA-256")), PROTOCOL_ERROR),
    "AUTH with an unknown reason": (auth(0x01), PROTOCOL_ERROR),
    "AUTH with a server's reason": (auth(0x00, prop(METHOD, "SCRAM-SHA-256")), PROTOCOL_ERROR),
    "PINGREQ with a body": (packet(0xC0, b"x"), MALFORMED),
    # What a client must not send at all
    "CONNECT again": (connect("again"), PROTOCOL_ERROR),  # [MQTT-3.1.0-2] (5.0)
    "CONNACK": (packet(0x20, b"\0\0\0"), PROTOCOL_ERROR),
    "SUBACK": (packet(0x90, b"\0\1\0\0"), PROTOCOL_ERROR),
    "UNSUBACK": (packet(0xB0, b"\0\1\0\0"), PROTOCOL_ERROR),
    "PINGRESP": (packet(0xD0), PROTOCOL_ERROR),
    "packet type 0": (packet(0x00), MALFORMED),
    # Lengths
    "a remaining length of five bytes": (b"\x30\x80\x80\x80\x80\x01", MALFORMED),
    "more than maximum packet size": (b"\x30\xff\xff\xff\x7f", TOO_LARGE),
}


@pytest.mark.parametrize(("data", "reason"), LATER.values(), ids=LATER.keys())
def test_a_violation_ends_the_connection(gateway: Gateway, bystanders: Bystanders, data: bytes, reason: int) -> None:
    """DISCONNECT with the reason, and the will is published: the client has not left in good order."""
    topic = f"bad/{secrets.token_hex(4)}"
    with Raw5.open(gateway.port) as watcher:
        watcher.subscribed((topic, 0))
        with Raw5.open(gateway.port, flags=4, tail=will(topic, b"will")) as client:
            client.send(data)
            client.ended(reason)
        watcher.message(b"will")


FILTERS = {
    "no filter": "$share/g",
    "an empty group": "$share//a",
    "an empty filter": "$share/g/",
    "+ in the group": "$share/+/a",
    "# in the group": "$share/g#/a",
    "# before the end": "$share/g/a/#/b",
    "+ within a level": "$share/g/a+",
    "nothing": "",
    "# within a level": "a#",
}


@pytest.mark.parametrize("text", FILTERS.values(), ids=FILTERS.keys())
def test_filters(gateway: Gateway, text: str) -> None:
    """[MQTT-4.8.2-1], [MQTT-4.8.2-2] (5.0): the packet is malformed."""
    for data in (subscribe(("fine", 0), (text, 0)), unsubscribe("fine", text)):
        with Raw5.open(gateway.port) as client:
            client.send(data)
            client.ended(MALFORMED)


def test_a_filter_of_too_many_levels(gateway: Gateway) -> None:
    """It is refused alone, the others of the packet are subscribed."""
    with Raw5.open(gateway.port) as client:
        assert client.subscribed(("fine", 0), (LONG, 0)) == (0, TOPIC_FILTER_INVALID)
        client.quiet()
