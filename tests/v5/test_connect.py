# SPDX-License-Identifier: Apache-2.0
"""CONNECT (section 3.1): what is accepted and refused, sessions, client ids, keep alive, takeover."""

import string
import time

import pytest

from mqtt_streams.hashing import name_hash, second_key
from tests.conftest import GatewayFactory
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, field, packet
from tests.harness.raw5 import (
    ASSIGNED_ID,
    CONNACK,
    METHOD,
    PINGRESP,
    PUBACK,
    PUBREC,
    PUBREL,
    RECEIVE_MAXIMUM,
    SERVER_KEEP_ALIVE,
    SESSION_EXPIRY,
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
from tests.integration.conftest import Stored
from tests.v5.conftest import Opener

STORED = prop(SESSION_EXPIRY, 600)

FIRST = {
    "PUBLISH": publish("a", b"x"),
    "SUBSCRIBE": subscribe(("a", 0)),
    "UNSUBSCRIBE": unsubscribe("a"),
    "PINGREQ": packet(0xC0),
    "DISCONNECT": disconnect(),
    "AUTH": auth(0x18, prop(METHOD, "x")),
    "PUBREL": ack(PUBREL, 1),
    "CONNACK": packet(0x20, b"\0\0\0"),
}


@pytest.mark.parametrize("data", FIRST.values(), ids=FIRST.keys())
def test_connect_comes_first(gateway: Gateway, data: bytes) -> None:
    """[MQTT-3.1.0-1] (5.0)"""
    with Raw(gateway.port) as client:
        client.send(data + connect("x"))
        assert client.expect_closed() == []


@pytest.mark.parametrize("same", [False, True])
def test_second_connect(open5: Opener, name: str, same: bool) -> None:
    """[MQTT-3.1.0-2] (5.0)"""
    client = open5(name)
    client.send(connect(name if same else f"{name}-other") + packet(0xC0))
    client.ended(0x82)


@pytest.mark.parametrize("protocol", ["MQTS", "mqtt", "MQTT\0", "", "MQIsdp", "MQTTX"])
def test_protocol_name(gateway: Gateway, protocol: str) -> None:
    """[MQTT-3.1.2-1] (5.0): no packet but a CONNACK that refuses."""
    rest = b"\x05\x02\0\x3c\0" + field("")
    with Raw(gateway.port) as client:
        client.send(packet(0x10, field(protocol) + rest) + packet(0xC0))
        assert [one.body[1] for one in client.expect_closed() if one.kind == CONNACK] in ([], [1], [0x84])
    with Raw(gateway.port) as client:
        client.send(packet(0x10, field("MQTT") + rest) + packet(0xC0))
        assert [client.expect(CONNACK).body[1], client.expect(PINGRESP).body] == [0, b""]


@pytest.mark.parametrize("level", [0, 1, 2, 3, 6, 7, 0x85, 0xFF])
def test_protocol_version(gateway: Gateway, level: int) -> None:
    """[MQTT-3.1.2-2] (5.0)"""
    with Raw(gateway.port) as client:
        client.send(packet(0x10, field("MQTT") + bytes((level,)) + b"\x02\0\x3c\0" + field("")) + packet(0xC0))
        (one,) = client.expect_closed()
        assert (one.kind, one.body[:2]) in ((CONNACK, b"\0\x01"), (CONNACK, b"\0\x84"))


WILL = will("w", b"x")
MALFORMED = {
    "reserved flag [MQTT-3.1.2-3] (5.0)": connect("a", flags=1),
    "will QoS without will [MQTT-3.1.2-11] (5.0)": connect("a", flags=0x08),
    "will QoS 3 without will [MQTT-3.1.2-11] (5.0)": connect("a", flags=0x18),
    "will QoS 3 [MQTT-3.1.2-12] (5.0)": connect("a", flags=0x1C, tail=WILL),
    "will retain without will [MQTT-3.1.2-13] (5.0)": connect("a", flags=0x20),
    "will missing [MQTT-3.1.2-9] (5.0)": connect("a", flags=4),
    "will payload missing [MQTT-3.1.2-9] (5.0)": connect("a", flags=4, tail=WILL[:-3]),
    "will properties missing [MQTT-3.1.2-9] (5.0)": connect("a", flags=4, tail=WILL[1:]),
    "will without its flag [MQTT-3.1.2-9] (5.0)": connect("a", tail=WILL),
    "user name without its flag [MQTT-3.1.2-16] (5.0)": connect("a", tail=field("u")),
    "user name missing [MQTT-3.1.2-17] (5.0)": connect("a", flags=0x80),
    "password without its flag [MQTT-3.1.2-18] (5.0)": connect("a", flags=0x80, tail=field("u") + field("p")),
    "password missing [MQTT-3.1.2-19] (5.0)": connect("a", flags=0xC0, tail=field("u")),
    "client id missing [MQTT-3.1.3-3] (5.0)": packet(0x10, field("MQTT") + b"\x05\x02\0\x3c\0"),
    "client id cut off [MQTT-3.1.3-3] (5.0)": packet(0x10, field("MQTT") + b"\x05\x02\0\x3c\0\0\x02a"),
    "keep alive missing": packet(0x10, field("MQTT") + b"\x05\x02"),
    "property of another packet": connect("a", prop(SERVER_KEEP_ALIVE, 9)),
    "one byte more": connect("a", tail=b"\0"),
}
"""[MQTT-3.1.4-1] (5.0)"""


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_connect(gateway: Gateway, data: bytes) -> None:
    refused(gateway.port, data, 0x81)


BROKEN = {
    "session expiry twice": connect("a", STORED, STORED),
    "Receive Maximum 0": connect("a", prop(RECEIVE_MAXIMUM, 0)),
    "problem information 2": connect("a", b"\x17\x02"),
    "response information 2": connect("a", b"\x19\x02"),
    "Maximum Packet Size 0": connect("a", b"\x27\0\0\0\0"),
    "authentication data alone": connect("a", b"\x16\0\x01x"),
    "will delay twice": connect("a", flags=4, tail=will("w", b"", prop(WILL_DELAY, 1), prop(WILL_DELAY, 1))),
}
"""[MQTT-3.1.4-1] (5.0)"""


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_connect_that_breaks_a_rule(gateway: Gateway, data: bytes) -> None:
    refused(gateway.port, data, 0x82)


ACCEPTED = {
    "nothing but the client id": connect("", clean=False),
    "will, QoS 0 [MQTT-3.1.2-12] (5.0)": connect("", flags=4, tail=WILL),
    "will, QoS 1 [MQTT-3.1.2-12] (5.0)": connect("", flags=0x0C, tail=WILL),
    "will, QoS 2 and RETAIN [MQTT-3.1.2-12] (5.0)": connect("", flags=0x34, tail=will("never", b"")),
    "user name [MQTT-3.1.2-17] (5.0)": connect("", flags=0x80, tail=field("u")),
    "password alone [MQTT-3.1.2-19] (5.0)": connect("", flags=0x40, tail=field(b"\xff\0")),
    "both, empty": connect("", flags=0xC0, tail=field("") + field("")),
    "all [MQTT-3.1.3-1] (5.0)": connect("", flags=0xC4, tail=WILL + field("u") + field(b"\xff")),
}


@pytest.mark.parametrize("data", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted_connect(gateway: Gateway, data: bytes) -> None:
    """[MQTT-3.1.4-5] (5.0)"""
    with Raw5(gateway.port) as client:
        client.send(data)
        assert client.answer(CONNACK, 0, 0).get(ASSIGNED_ID)
        client.quiet()
        client.send(disconnect())
        assert client.expect_closed() == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_sessions(open5: Opener, name: str, elsewhere: bool, second_gateway: Gateway, gateway: Gateway) -> None:
    """[MQTT-3.1.2-4], [MQTT-3.1.2-5], [MQTT-3.1.2-6], [MQTT-3.1.2-23], [MQTT-3.1.3-2], [MQTT-3.1.4-4] (5.0)"""
    there = second_gateway if elsewhere else gateway
    publisher = open5()
    client = open5(name, STORED, clean=False)
    assert not client.present
    client.subscribed((f"{name}/1", 1), (f"{name}/2", 2))
    publisher.deliver(f"{name}/2", b"begun", qos=2)
    begun = client.message(b"begun")
    client.send(ack(PUBREC, begun.id))
    client.answer(PUBREL, begun.id, 0)
    client.close()
    publisher.deliver(f"{name}/1", b"meanwhile", qos=1)
    assert not open5(f"{name}-other", STORED, clean=False, to=there).present
    client = open5(name, STORED, clean=False, to=there)
    assert client.present
    client.answer(PUBREL, begun.id, 0)
    client.send(ack(7, begun.id))
    client.receive_message(b"meanwhile")
    publisher.deliver(f"{name}/2", b"still subscribed", qos=2)
    client.receive_message(b"still subscribed")
    client.close()
    client = open5(name, STORED, to=there)
    assert not client.present
    publisher.deliver(f"{name}/1", b"nobody is subscribed", qos=1)
    client.quiet()
    client.subscribed((f"{name}/3", 1))
    client.close()
    client = open5(name, STORED, clean=False)
    assert client.present
    publisher.deliver(f"{name}/1", b"not subscribed", qos=1)
    publisher.deliver(f"{name}/3", b"new", qos=1)
    client.receive_message(b"new")


def test_a_session_without_expiry_ends_with_its_connection(open5: Opener, name: str) -> None:
    """[MQTT-3.1.2-6], [MQTT-3.1.2-23] (5.0)"""
    client = open5(name, clean=False)
    client.subscribed((name, 1))
    client.close()
    client = open5(name, clean=False)
    assert not client.present
    open5().deliver(name, b"nobody is subscribed")
    client.quiet()


@pytest.mark.parametrize(
    "client_id", ["0", "z", string.digits + string.ascii_lowercase[:13], string.ascii_uppercase[:23]]
)
def test_client_ids_that_must_be_accepted(open5: Opener, client_id: str) -> None:
    """[MQTT-3.1.3-5] (5.0)"""
    assert open5(client_id).connack.get(ASSIGNED_ID) is None
    rest = string.ascii_letters + string.digits
    for start in range(0, len(rest), 23):
        assert open5(rest[start : start + 23]).connack.get(ASSIGNED_ID) is None


@pytest.mark.parametrize("clean", [False, True])
def test_assigned_client_id(open5: Opener, name: str, clean: bool) -> None:
    """[MQTT-3.1.3-6], [MQTT-3.1.3-7], [MQTT-3.2.2-16] (5.0): unique, and as good as one's own."""
    clients = [open5("", STORED, clean=clean) for _ in range(20)]
    ids = [client.connack.get(ASSIGNED_ID) for client in clients]
    assert len({*ids, ""}) == 21
    assert not any(client.present for client in clients)
    clients[0].subscribed((name, 1))
    clients[0].close()
    open5().deliver(name, b"meanwhile")
    again = open5(ids[0], STORED, clean=False)
    assert again.present
    assert again.connack.get(ASSIGNED_ID) is None
    again.receive_message(b"meanwhile")
    open5(ids[1])
    clients[1].ended(0x8E)


async def test_refused_client_id(gateway: Gateway, open5: Opener, name: str, stored: Stored) -> None:
    """[MQTT-3.1.3-8] (5.0): the records at both keys of this id are another client's."""
    open5(name, STORED, clean=False).close()
    record = b'{"id": "another", "v5": {"kind": "durable", "expiry": 600}}'
    for key in (name_hash(name), "second." + second_key(name, "")):
        await stored.js.publish(f"$MQTT.sess.{key}", record)
    refused(gateway.port, connect(name, STORED, clean=False), 0x85)


def test_behind_a_refused_connect(gateway: Gateway, open5: Opener, name: str) -> None:
    """[MQTT-3.1.4-6] (5.0): nothing is processed, neither in the same write nor a moment later."""
    listener = open5()
    listener.subscribed((f"{name}/#", 2))
    behind = b"".join(publish(f"{name}/{qos}", b"x", qos=qos, id=1 + qos, flags=1) for qos in (0, 1, 2))
    behind += subscribe((f"{name}/#", 0), id=9) + packet(0xC0) + connect(name)
    for data, reason in (
        (connect(name, flags=4, tail=will("$JS/API/INFO", b"")), 0x87),
        (connect(name, flags=1), 0x81),
        (connect(name, STORED, STORED), 0x82),
        (packet(0x10, field("MQTT") + b"\x06\x02\0\x3c\0" + field("")), 0x84),
        (packet(0x10, field("MQTT") + b"\x03\x02\0\x3c" + field("")), 1),
    ):
        with Raw(gateway.port) as client:
            client.send(data + behind)
            client.send(behind)
            assert [(one.kind, one.body[1]) for one in client.expect_closed()] == [(CONNACK, reason)]
    listener.deliver(f"{name}-fence", b"")
    listener.quiet()
    listener.subscribed((f"{name}/+", 0))
    listener.quiet()  # nothing is retained either
    with Raw5(gateway.port) as client:  # while behind an accepted one all is
        client.send(connect(name) + subscribe((f"{name}/own", 0), id=9) + publish(f"{name}/own", b"x"))
        client.answer(CONNACK, 0, 0)
        client.answer(raw.SUBACK, 9, 0)
    assert listener.message(b"x").topic == f"{name}/own"


@pytest.mark.parametrize("expiry", [0, 600], ids=["regular", "durable"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_takeover(
    gateway: Gateway, second_gateway: Gateway, open5: Opener, name: str, expiry: int, elsewhere: bool
) -> None:
    """[MQTT-3.1.4-3] (5.0)"""
    first = open5(name, prop(SESSION_EXPIRY, expiry))
    first.subscribed((name, 1))
    second = open5(name, prop(SESSION_EXPIRY, expiry), clean=False, to=second_gateway if elsewhere else gateway)
    assert second.present == (expiry > 0)
    first.ended(0x8E)
    second.quiet()


def test_takeover_between_versions(gateway: Gateway, open5: Opener, name: str) -> None:
    """[MQTT-3.1.4-3] (5.0): DISCONNECT is for a 5.0 client only."""
    first = open5(name, STORED)
    with Raw.connected(gateway.port, name, clean=False) as second:
        first.ended(0x8E)
        third = open5(name, clean=False)
        assert third.present
        assert second.expect_closed() == []


@pytest.mark.long
def test_keep_alive(open5: Opener, name: str) -> None:
    """[MQTT-3.1.2-22], [MQTT-3.2.2-22] (5.0): DISCONNECT 0x8D after one and a half times; the will is published."""
    listener = open5()
    listener.subscribed((name, 1))
    client = open5(keepalive=2, flags=4, tail=will(name, b"network failure"))
    assert client.connack.get(SERVER_KEEP_ALIVE) is None
    for _ in range(8):
        time.sleep(0.5)
        started = time.monotonic()
        client.quiet()
    client.ended(0x8D)
    assert time.monotonic() - started > 2.9
    listener.message(b"network failure")  # its own keep alive is 60


def test_no_keep_alive(open5: Opener) -> None:
    """[MQTT-3.1.2-22], [MQTT-3.2.2-22] (5.0): 0 is any time; another client's end shows that time has passed."""
    silent, watched = open5(keepalive=0), open5(keepalive=1)
    watched.ended(0x8D)
    assert silent.connack.get(SERVER_KEEP_ALIVE) is None
    silent.quiet()


@pytest.mark.long
def test_server_keep_alive(nats_server: NatsServer, gateway_factory: GatewayFactory, open5: Opener) -> None:
    """[MQTT-3.2.2-22] (5.0): what the client sent holds unless CONNACK says something else, and then that."""
    gateway = gateway_factory(nats_server, "--server-keep-alive", "2")
    clients, begun = [], []
    for keepalive in (0, 60, 2, 1):
        begun.append(time.monotonic())
        clients.append(open5(keepalive=keepalive, to=gateway))
    assert [client.connack.get(SERVER_KEEP_ALIVE) for client in clients] == [2, 2, None, None]
    clients.pop().ended(0x8D)
    assert time.monotonic() - begun.pop() > 1.4
    for client, since in zip(clients, begun, strict=True):
        client.ended(0x8D)
        assert time.monotonic() - since > 2.9
    assert time.monotonic() - begun[0] < 60  # a keep alive of 60 would take 90


def test_properties_may_be_empty(gateway: Gateway) -> None:
    """[MQTT-3.1.4-5] (5.0)"""
    with Raw5(gateway.port) as client:
        client.send(packet(0x10, field("MQTT") + b"\x05\x02\0\x3c" + properties() + field("")))
        client.answer(CONNACK, 0, 0)
        client.send(publish("x", b"y", qos=1))
        assert client.answer(PUBACK, 1).reason in (0, 0x10)
