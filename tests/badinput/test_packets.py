# SPDX-License-Identifier: Apache-2.0
"""Packets that break the protocol: the connection is closed, with CONNACK where the protocol has one."""

import secrets
import socket
import time

import pytest

from mqtt_nats.config.settings import Settings
from tests.conftest import GatewayFactory
from tests.harness import raw, raw5
from tests.harness.bystanders import Bystanders
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, connect, field, packet, publish, subscribe, unsubscribe
from tests.harness.waiting import eventually

pytestmark = pytest.mark.usefixtures("unharmed")

_LEVELS = "/".join("x" * 129)  # one more than max_topic_levels

NO_STRINGS = {
    "lone continuation": b"a\x80b",
    "truncated": b"a\xe2\x82",
    "overlong": b"a\xc0\xaf",
    "surrogate": b"a\xed\xa0\x80",
    "beyond U+10FFFF": b"\xf4\x90\x80\x80",
    "U+0000": b"a\0b",
}
"""What no MQTT string may hold [MQTT-1.5.3-1] [MQTT-1.5.3-2]."""

BEFORE_CONNECT: dict[str, bytes] = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a1"),
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    # [MQTT-3.1.0-1]
    "PUBLISH": publish("bystanders/x/1", b"early"),
    "SUBSCRIBE": subscribe(("#", 0)),
    "UNSUBSCRIBE": unsubscribe("#"),
    "PUBACK": raw.ack(raw.PUBACK, 1),
    "PUBREL": raw.ack(raw.PUBREL, 1),
    "PINGREQ": packet(0xC0),
    "DISCONNECT": packet(0xE0),
    "CONNACK": packet(0x20, b"\0\0"),
    "AUTH": packet(0xF0),
    # [MQTT-2.2.2-2]
    "flags of CONNECT": b"\x11" + connect("x")[1:],
    "remaining length of five bytes": b"\x10\x80\x80\x80\x80\x01",
    # Legal, and no return code says it [MQTT-3.2.2-6]
    "more than connect_packet_size": b"\x10" + raw.remaining_length(64 * 1024),
    "the largest packet there is": b"\x10\xff\xff\xff\x7f",
    # What the packet must and must not have
    "empty CONNECT": packet(0x10),
    "only a protocol name": packet(0x10, field("MQTT")),
    "name longer than the packet": packet(0x10, b"\xff\xffMQTT"),
    "no client id": packet(0x10, field("MQTT") + b"\x04\x02\0\x3c"),  # [MQTT-3.1.3-3]
    "client id longer than the packet": packet(0x10, field("MQTT") + b"\x04\x02\0\x3c\0\x09abc"),
    "bytes after the last field": packet(0x10, field("MQTT") + b"\x04\x02\0\x3c" + field("x") + b"y"),
    "reserved connect flag": connect("x", flags=0x03),  # [MQTT-3.1.2-3]
    "will QoS without will": connect("x", flags=0x0A),  # [MQTT-3.1.2-11] [MQTT-3.1.2-13]
    "will retain without will": connect("x", flags=0x22),  # [MQTT-3.1.2-11] [MQTT-3.1.2-15]
    "will fields without will": connect("x", flags=0x02, tail=("will/topic", b"p")),  # [MQTT-3.1.2-11]
    "will QoS 3": connect("x", flags=0x1E, tail=("will/topic", b"p")),  # [MQTT-3.1.2-14]
    "no will fields": connect("x", flags=0x06),  # [MQTT-3.1.2-9]
    "no will payload": connect("x", flags=0x06, tail=("will/topic",)),  # [MQTT-3.1.2-9]
    "will topic with a wildcard": connect("x", flags=0x06, tail=("will/+", b"p")),
    "will topic of too many levels": connect("x", flags=0x06, tail=(_LEVELS, b"p")),
    "empty will topic": connect("x", flags=0x06, tail=("", b"p")),
    "user name not announced": connect("x", flags=0x02, tail=("user",)),  # [MQTT-3.1.2-18]
    "user name missing": connect("x", flags=0x82),  # [MQTT-3.1.2-19]
    "password not announced": connect("x", flags=0x82, tail=("user", "secret")),  # [MQTT-3.1.2-20]
    "password missing": connect("x", flags=0xC2, tail=("user",)),  # [MQTT-3.1.2-21]
    "password without user name": connect("x", flags=0x42, tail=("secret",)),  # [MQTT-3.1.2-22]
    # [MQTT-3.1.3-4] [MQTT-3.1.3-11] [MQTT-3.1.3-10]
    **{f"client id: {why}": connect(value) for why, value in NO_STRINGS.items()},
    **{f"user name: {why}": connect("x", flags=0x82, tail=(value,)) for why, value in NO_STRINGS.items()},
    **{f"will topic: {why}": connect("x", flags=0x06, tail=(value, b"p")) for why, value in NO_STRINGS.items()},
}

AFTER_CONNECT: dict[str, bytes] = {
    "type 0": packet(0x00),
    "AUTH": packet(0xF0),
    "a server's packets: CONNACK": packet(0x20, b"\0\0"),
    "a server's packets: SUBACK": packet(0x90, b"\0\x01\0"),
    "a server's packets: UNSUBACK": packet(0xB0, b"\0\x01"),
    "a server's packets: PINGRESP": packet(0xD0),
    "second CONNECT": connect("another"),  # [MQTT-3.1.0-2]
    "PUBLISH at QoS 3": packet(0x36, field("a") + b"\0\x01x"),  # [MQTT-3.3.1-4]
    "DUP at QoS 0": publish("a", b"x", flags=8),  # [MQTT-3.3.1-2]
    # [MQTT-2.2.2-2]
    "flags of PUBACK": packet(0x41, b"\0\x01"),
    "flags of PUBREC": packet(0x52, b"\0\x01"),
    "flags of PUBREL": packet(0x60, b"\0\x01"),  # [MQTT-3.6.1-1]
    "flags of PUBCOMP": packet(0x78, b"\0\x01"),
    "flags of SUBSCRIBE": b"\x80" + subscribe(("a", 0))[1:],  # [MQTT-3.8.1-1]
    "flags of UNSUBSCRIBE": b"\xa0" + unsubscribe("a")[1:],  # [MQTT-3.10.1-1]
    "flags of PINGREQ": packet(0xC1),
    "flags of DISCONNECT": packet(0xE1),  # [MQTT-3.14.1-1]
    # [MQTT-2.3.1-1]
    "packet id 0: PUBLISH at QoS 1": publish("a", b"x", qos=1, id=0),
    "packet id 0: PUBLISH at QoS 2": publish("a", b"x", qos=2, id=0),
    "packet id 0: PUBACK": raw.ack(raw.PUBACK, 0),
    "packet id 0: PUBREC": raw.ack(raw.PUBREC, 0),
    "packet id 0: PUBREL": raw.ack(raw.PUBREL, 0),
    "packet id 0: PUBCOMP": raw.ack(raw.PUBCOMP, 0),
    "packet id 0: SUBSCRIBE": subscribe(("a", 0), id=0),
    "packet id 0: UNSUBSCRIBE": unsubscribe("a", id=0),
    "remaining length of five bytes": b"\x30\x80\x80\x80\x80\x01",
    "more than max_packet_size": b"\x30" + raw.remaining_length(1024 * 1024),
    "the largest packet there is": b"\x32\xff\xff\xff\x7f",
    "PUBLISH without topic": packet(0x30),  # [MQTT-3.3.2-1]
    "topic longer than the packet": packet(0x30, b"\0\x09abc"),
    "no packet id": packet(0x32, field("a")),
    "half a packet id": packet(0x32, field("a") + b"\0"),
    "PUBACK of one byte": packet(0x40, b"\0"),
    "PUBACK of three bytes": packet(0x40, b"\0\x01\0"),
    "PINGREQ with a body": packet(0xC0, b"x"),
    "DISCONNECT with a body": packet(0xE0, b"\0"),
    "SUBSCRIBE without filter": packet(0x82, b"\0\x01"),  # [MQTT-3.8.3-3]
    "SUBSCRIBE without QoS": packet(0x82, b"\0\x01" + field("a")),
    "SUBSCRIBE at QoS 3": subscribe(("a", 3)),  # [MQTT-3-8.3-4]
    "reserved bits of a SUBSCRIBE option": subscribe(("a", 0x40)),  # [MQTT-3-8.3-4]
    "UNSUBSCRIBE without filter": packet(0xA2, b"\0\x01"),  # [MQTT-3.10.3-2]
    "filter longer than the packet": packet(0x82, b"\0\x01\0\x09abc"),
    "empty topic": publish("", b"x"),  # [MQTT-4.7.3-1]
    # [MQTT-3.3.2-2] [MQTT-4.7.1-1]
    "topic with +": publish("a/+/b", b"x"),
    "topic with #": publish("a/#", b"x", qos=1),
    "topic with a wildcard in a level": publish("a/b+", b"x", qos=2),
    "topic of too many levels": publish(_LEVELS, b"x"),
    "PUBREL before PUBREC": publish("a", b"x", qos=2, id=7) + raw.ack(raw.PUBREL, 7),
    # [MQTT-3.3.2-1] [MQTT-3.8.3-1] [MQTT-3.10.3-1] [MQTT-4.7.3-2]
    **{f"topic: {why}": publish(value, b"x") for why, value in NO_STRINGS.items()},
    **{f"topic at QoS 1: {why}": publish(value, b"x", qos=1) for why, value in NO_STRINGS.items()},
    **{f"filter: {why}": subscribe((value, 0)) for why, value in NO_STRINGS.items()},
    **{f"UNSUBSCRIBE: {why}": unsubscribe(value) for why, value in NO_STRINGS.items()},
}


@pytest.mark.parametrize("data", BEFORE_CONNECT.values(), ids=BEFORE_CONNECT.keys())
def test_what_is_no_connect_is_closed_without_an_answer(gateway: Gateway, data: bytes) -> None:
    """[MQTT-3.1.4-1]"""
    with Raw(gateway.port) as client:
        client.send(data)
        assert client.expect_closed() == []


@pytest.mark.parametrize("data", AFTER_CONNECT.values(), ids=AFTER_CONNECT.keys())
def test_a_violation_closes_the_connection(gateway: Gateway, data: bytes) -> None:
    """[MQTT-4.8.0-1]"""
    with Raw.connected(gateway.port) as client:
        client.send(data)
        assert [one.kind for one in client.expect_closed()] == []


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *((b"MQTT", level) for level in (0, 1, 2, 3)),
        *((b"MQIsdp", level) for level in (2, 4, 5, 0x84)),
        (b"mqtt", 4),
        (b"MQTTS", 4),
        (b"", 4),
        (b"\xff\xfe", 4),
    ],
)
def test_another_protocol_name_or_level_is_answered_with_1(gateway: Gateway, name: bytes, level: int) -> None:
    """[MQTT-3.1.2-1] [MQTT-3.1.2-2]"""
    with Raw(gateway.port) as client:
        client.send(connect("x", name=name, level=level))
        (answer,) = client.expect_closed()
        assert (answer.first, answer.body) == (0x20, b"\0\x01")


@pytest.mark.parametrize("level", [6, 7, 0x7F, 0x80, 0x82, 0x85, 0xFF])
@pytest.mark.parametrize("more", [b"", b"\0" * 100])
def test_a_newer_version_is_answered_as_5_0_does(gateway: Gateway, level: int, more: bytes) -> None:
    """[MQTT-3.1.2-2] (5.0): CONNACK of 5.0 with 0x84, whatever follows the level."""
    with Raw(gateway.port) as client:
        client.send(packet(0x10, field(b"MQTT") + bytes((level,)) + more))
        (one,) = client.expect_closed()
        assert one.first == 0x20
        found = raw5.answer(one)
        assert found.reason == 0x84
        assert f"level {level}" in found.get(raw5.REASON_STRING)


def test_empty_client_id_without_clean_session_is_answered_with_2(gateway: Gateway) -> None:
    """[MQTT-3.1.3-8] [MQTT-3.1.3-9]"""
    with Raw(gateway.port) as client:
        client.send(connect("", clean=False))
        (answer,) = client.expect_closed()
        assert (answer.first, answer.body) == (0x20, b"\0\x02")


def test_second_connect_in_one_write_with_the_first(gateway: Gateway) -> None:
    """[MQTT-3.1.0-2]"""
    with Raw(gateway.port) as client:
        client.send(connect("twice") + connect("twice"))
        assert [one.kind for one in client.expect_closed()] == [raw.CONNACK]


def test_what_came_before_a_violation_is_served(gateway: Gateway, bystanders: Bystanders) -> None:
    topic = f"served/{secrets.token_hex(4)}"
    bystanders.regular.subscribe(topic, 1)
    with Raw.connected(gateway.port) as client:
        client.send(publish(topic, b"zero") + publish(topic, b"one", qos=1) + packet(0xF0))
        client.expect_closed()
    with Raw(gateway.port) as client:
        client.send(connect() + publish(topic, b"two") + packet(0xF0))
        client.expect_closed()
    eventually(lambda: set(bystanders.regular.payloads(topic)) == {b"zero", b"one", b"two"})


@pytest.mark.parametrize("data", [packet(0xF0), publish("a/+", b"x"), connect("w")])
def test_a_violation_publishes_the_will(gateway: Gateway, bystanders: Bystanders, data: bytes) -> None:
    """[MQTT-3.1.2-8]: a protocol error is an abnormal end."""
    topic = f"will/{secrets.token_hex(4)}"
    bystanders.regular.subscribe(topic, 1)
    with Raw(gateway.port) as client:
        client.send(connect(flags=0x0E, tail=(topic, b"gone")))
        client.expect(raw.CONNACK)
        client.send(data)
        client.expect_closed()
    eventually(lambda: bystanders.regular.payloads(topic) == [b"gone"])


@pytest.mark.parametrize(
    "data",
    [
        connect("truncated", flags=0xCE, tail=("will/topic", b"payload", "user", "password")),
        publish("truncated/topic", b"payload", qos=1),
        subscribe(("truncated/a", 1), ("truncated/b", 2)),
        raw.ack(raw.PUBREL, 5),
        unsubscribe("truncated/a"),
    ],
    ids=["CONNECT", "PUBLISH", "SUBSCRIBE", "PUBREL", "UNSUBSCRIBE"],
)
def test_truncated_packets_have_no_effect(gateway: Gateway, bystanders: Bystanders, data: bytes) -> None:
    """The socket ends, whole or in one direction, after each prefix of a packet."""
    bystanders.regular.subscribe("truncated/#", 1)
    count = len(bystanders.regular.payloads("truncated/topic"))
    for end in range(len(data)):
        with Raw(gateway.port) if data[0] == 0x10 else Raw.connected(gateway.port) as client:
            client.send(data[:end])
            if end % 2:
                client.socket.shutdown(socket.SHUT_WR)
                assert client.expect_closed() == []
    bystanders.publisher.publish_acknowledged("truncated/end", b"")
    eventually(lambda: bystanders.regular.payloads("truncated/end"))
    assert len(bystanders.regular.payloads("truncated/topic")) == count


def test_packets_byte_by_byte(gateway: Gateway, bystanders: Bystanders) -> None:
    """Slow is not wrong: packets are where the stream of bytes has them [MQTT-7.1.1-1]."""
    topic = f"slow/{secrets.token_hex(4)}"
    bystanders.regular.subscribe(topic, 1)
    with Raw(gateway.port) as client:
        for byte in connect() + publish(topic, b"byte by byte", qos=1, id=9):
            client.send(bytes((byte,)))
        client.expect(raw.CONNACK)
        assert client.expect(raw.PUBACK).id == 9
    eventually(lambda: bystanders.regular.payloads(topic) == [b"byte by byte"])


def test_the_largest_packets_that_are_accepted(gateway: Gateway, bystanders: Bystanders) -> None:
    """max_packet_size and connect_packet_size count the whole packet."""
    with Raw(gateway.port) as client:
        client.send(connect("x", flags=0x06, tail=("w", bytes(8 * 1024 - 3 - 10 - 3 - 3 - 2))))
        client.expect(raw.CONNACK)
        client.send(packet(0xE0))
        client.expect_closed()
    topic = f"large/{secrets.token_hex(4)}"
    bystanders.regular.subscribe(topic, 1)
    with Raw.connected(gateway.port) as client:
        payload = bytes(1024 * 1024 - 4 - 2 - len(topic) - 2 - 1024)
        client.send(publish(topic, payload, qos=1))
        client.expect(raw.PUBACK)
    eventually(lambda: bystanders.regular.payloads(topic) == [payload])


def test_default_of_the_connect_timeout() -> None:
    assert Settings().connect_timeout == 15.0


@pytest.mark.long
def test_no_connect_in_time(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """Silence, half a CONNECT and one that trickles in are all closed; whoever has connected stays."""
    gateway = gateway_factory(nats_server, env={"MQTT_NATS_CONNECT_TIMEOUT": "1"})
    data = connect("slow", flags=0x06, tail=("will/slow", bytes(1000)))
    begun = time.monotonic()
    with (
        Raw(gateway.port) as silent,
        Raw(gateway.port) as half,
        Raw(gateway.port) as trickle,
        Raw.connected(gateway.port, keepalive=0) as bystander,
    ):
        half.send(data[:40])
        position = 0

        def trickled() -> bool:
            nonlocal position
            trickle.send(data[position : position + 1])
            position += 1
            try:
                return trickle.receive(0.05) is None
            except TimeoutError:
                return False

        eventually(trickled)
        assert position < len(data)
        assert silent.expect_closed() == []
        assert half.expect_closed() == []
        assert 0.9 < time.monotonic() - begun < Settings().connect_timeout
        assert bystander.ping() == []
