# SPDX-License-Identifier: Apache-2.0
"""DISCONNECT (section 3.14), and how errors end connections (section 4.13)."""

import select
import signal
import socket
import time

import pytest

from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, packet
from tests.harness.raw5 import (
    ALIAS,
    CONNACK,
    DISCONNECT,
    MAXIMUM_PACKET_SIZE,
    PUBACK,
    PUBLISH,
    PUBREC,
    PUBREL,
    REASON_STRING,
    SERVER_REFERENCE,
    SESSION_EXPIRY,
    SUBSCRIPTION_ID,
    USER,
    Raw5,
    ack,
    answer,
    auth,
    connect,
    disconnect,
    prop,
    publish,
    subscribe,
    unsubscribe,
    will,
)
from tests.harness.waiting import eventually
from tests.v5.conftest import Opener

STORED = prop(SESSION_EXPIRY, 600)

VIOLATIONS = {
    "reserved type": (b"\0\0", 0x81),
    "malformed [MQTT-3.14.1-1] (5.0)": (b"\xe1\0", 0x81),
    "all flags of DISCONNECT [MQTT-3.14.1-1] (5.0)": (packet(0xEF, b"\0"), 0x81),
    "flags of AUTH [MQTT-3.15.1-1] (5.0)": (packet(0xF1, b"\0\0"), 0x81),
    "all flags of AUTH [MQTT-3.15.1-1] (5.0)": (packet(0xFF), 0x81),
    "second CONNECT": (connect("x"), 0x82),
    "AUTH without method": (auth(0x19, prop(0x15, "x")), 0x82),
    "SUBACK from a client": (packet(0x90, b"\0\1\0\0"), 0x82),
    "PUBREL before PUBREC": (publish("held", b"", qos=2, id=9) + ack(PUBREL, 9), 0x82),
    "topic": (publish("+", b"x"), 0x90),
    "reserved topic at QoS 0": (publish("$JS/API/INFO", b"x"), 0x87),
    "alias": (publish("", b"x", prop(ALIAS, 5)), 0x94),
    "subscription identifier": (publish("a", b"x", prop(SUBSCRIPTION_ID, 5)), 0x82),
    "too large": (b"\x30\xff\xff\xff\x7f", 0x95),
    "too many user properties": (subscribe(("a", 0), parts=prop(USER, ("", "")) * 1000), 0x97),
    "DISCONNECT of a server": (disconnect(0x8E), 0x82),
    "expiry for a session without": (disconnect(0, STORED), 0x82),
}
"""What ends a connection, and with which reason code.

[MQTT-3.14.2-1] (5.0), [MQTT-3.14.2-2] (5.0), [MQTT-3.14.4-1] (5.0), [MQTT-3.14.4-2] (5.0)
[MQTT-4.13.1-1] (5.0), [MQTT-4.13.2-1] (5.0)
"""


@pytest.mark.parametrize(("data", "reason"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_violations(open5: Opener, name: str, data: bytes, reason: int) -> None:
    """Nothing comes behind DISCONNECT, also when much is on its way; nothing behind the violation is processed."""
    listener, publisher, client = open5(), open5(), open5(name)
    listener.subscribed((f"{name}/behind", 0))
    client.subscribed((f"{name}/flood", 0))
    flood = publish(f"{name}/flood", b"x" * 100) * 500
    publisher.send(flood)
    client.send(data + publish(f"{name}/behind", b"x") + packet(0xC0))
    client.send(flood)
    found = client.expect_closed()
    kinds = [one.kind for one in found]
    assert kinds[-1] == DISCONNECT
    assert kinds.count(DISCONNECT) == 1
    assert {*kinds[:-1]} <= {PUBLISH, PUBREC}
    last = answer(found[-1])
    assert last.reason == reason
    assert [id for id, _ in last.properties] == [REASON_STRING]
    listener.quiet()
    publisher.deliver(f"{name}/behind", b"x", qos=0)
    listener.message(b"x")


@pytest.mark.parametrize(("data", "reason"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_disconnect_fits_the_client(open5: Opener, data: bytes, reason: int) -> None:
    """[MQTT-3.14.2-3], [MQTT-3.14.2-4] (5.0): without reason string and user properties where they do not fit."""

    def farewell(limit: int) -> bytes:
        client = open5("a", prop(MAXIMUM_PACKET_SIZE, limit))
        client.send(data)
        return client.expect_closed()[-1].body

    whole = farewell(10_000)
    size = len(whole) + 2
    assert size > 20
    assert [farewell(limit) for limit in (size, size - 1, 20, 16)] == [whole, *[bytes((reason,))] * 3]


@pytest.mark.parametrize("reason", [None, 0, 4, 0x80, 0x81, 0x82, 0x83, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99])
def test_after_disconnect(open5: Opener, name: str, reason: int | None) -> None:
    """[MQTT-3.14.2-1], [MQTT-3.14.4-1], [MQTT-3.14.4-2] (5.0): from a client: the gateway closes, in silence.

    What follows DISCONNECT is not processed.
    """
    listener, client = open5(), open5(name)
    listener.subscribed((f"{name}/#", 0))
    client.send(publish(f"{name}/before", b"x"))
    client.send((packet(0xE0) if reason is None else disconnect(reason)) + publish(f"{name}/behind", b"x"))
    client.send(packet(0xC0) + publish(f"{name}/behind", b"x"))
    assert client.expect_closed() == []
    assert listener.message().topic == f"{name}/before"
    listener.quiet()


@pytest.mark.parametrize("reason", [0x01, 0x11, 0x84, 0x87, 0x89, 0x8B, 0x8D, 0x8E, 0x9A, 0x9D, 0xA2, 0xFF])
def test_reason_codes_that_clients_may_not_use(open5: Opener, reason: int) -> None:
    """[MQTT-3.14.2-1] (5.0)"""
    client = open5()
    client.send(disconnect(reason))
    client.ended(0x82)


REFUSED = {
    "nothing sent before": b"\xc0\0",
    "malformed": connect("a", flags=1),
    "protocol error": connect("a", STORED, STORED),
    "not authorized": connect("a", flags=4, tail=will("$JS/API/INFO", b"")),
    "violation behind": connect("a", flags=4, tail=will("$JS/API/INFO", b"")) + b"\xe1\0",
    "too large": b"\x10\xff\xff\xff\x7f",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
def test_no_disconnect_before_connack(gateway: Gateway, data: bytes) -> None:
    """[MQTT-3.14.0-1], [MQTT-4.13.2-1] (5.0): and the connection is closed, whether or not a CONNACK was sent."""
    with Raw(gateway.port) as client:
        client.send(data)
        found = client.expect_closed()
        assert [one.kind for one in found] in ([], [CONNACK])
        assert all(one.body[1] >= 0x80 for one in found)
    with Raw5(gateway.port) as client:  # while behind an accepted CONNECT there is one
        client.send(connect("a") + b"\xe1\0")
        client.answer(CONNACK, 0, 0)
        client.ended(0x81)


def test_shutdown(nats_server: NatsServer, gateway_factory: GatewayFactory, open5: Opener) -> None:
    """[MQTT-3.14.2-1], [MQTT-3.14.0-1] (5.0): 0x8B, but not to those who have not got CONNACK."""
    gateway = gateway_factory(nats_server)
    clients = [open5("a", to=gateway), open5("b", STORED, to=gateway)]
    with Raw(gateway.port) as silent, Raw.connected(gateway.port, "c") as old:
        assert gateway.term() == 0
        for client in clients:
            client.ended(0x8B)
        assert silent.expect_closed() == []
        assert old.expect_closed() == []


@pytest.mark.long
def test_drain(nats_server: NatsServer, gateway_factory: GatewayFactory, open5: Opener) -> None:
    """Clients are let go one after the other and told where to go; until then they are served, and nobody new is."""
    gateway = gateway_factory(nats_server, "--drain-time", "8", "--server-reference", "other:1883")
    clients = [open5(f"drained-{number}", STORED, to=gateway) for number in range(4)]
    small = open5("small", prop(MAXIMUM_PACKET_SIZE, 40), to=gateway)
    begun = time.monotonic()
    gateway.process.send(signal.SIGTERM)
    eventually(lambda: "is shutting down" in gateway.log)
    left = [client for client in (*clients, small) if not select.select([client.socket], [], [], 0)[0]]
    assert len(left) >= 3, "they were let go at once"
    served = 0
    for client in left:
        client.send(publish("still/served", b"x", qos=1))
        served += client.expect_one_of(PUBACK, DISCONNECT) == PUBACK
    assert served >= len(left) - 1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", gateway.port))
    found = [client.ended(0x9C) for client in (*clients, small) if client not in left or served == len(left)]
    assert {one.get(SERVER_REFERENCE) for one in found} == {"other:1883"}
    assert small not in left or found[-1].get(REASON_STRING) is None
    assert gateway.wait() == 0
    assert 6 < time.monotonic() - begun < 30


def test_unsubscribe_is_no_violation(open5: Opener) -> None:
    """[MQTT-4.13.1-1] (5.0): what is merely in vain, or refused by itself, ends nothing."""
    client = open5()
    deep = "a/" * 128 + "a"
    client.send(unsubscribe("never", deep) + subscribe((deep, 0), ("$JS/#", 1)))
    client.send(publish("$JS/API/INFO", b"x", qos=1) + ack(PUBREL, 9) + ack(4, 9) + ack(7, 9))
    assert DISCONNECT not in {one.kind for one in client.ping()}
