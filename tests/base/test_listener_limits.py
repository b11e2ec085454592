# SPDX-License-Identifier: Apache-2.0
"""Limits of listeners: each listener of this gateway has one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.base.support import PATIENCE, Inside, let_in, running
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import MAXIMUM_PACKET_SIZE, MAXIMUM_QOS, RECEIVE_MAXIMUM, USER, Raw5, prop, refused
from tests.harness.waiting import eventually
from tests.transport.web import Web

LISTENERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few": {"max_connections": 2},
    "few each": {"max_connections_per_address": 2},
    "connects": {"connect_rate": 2},
    "connects each": {"connect_rate_per_address": 2},
    "messages": {"message_rate": 20},
    "bytes": {"byte_rate": 20_000},
    "small": {"max_packet_size": 2000, "connect_packet_size": 200},
    "modest": {"max_subscriptions": 3, "receive_maximum": 2, "max_inflight": 2, "max_queued": 5},
    "qos 0": {"max_qos": 0},
    "qos 1": {"max_qos": 1},
    "denied": {"addresses": ["allow 10.0.0.0/8", "deny 127.0.0.0/8", "allow all"]},
    "hasty": {"connect_timeout": 0.5},
    "hasty connects": {"connect_timeout": 0.5, "connect_rate": 1},
    "web connects": {"type": "ws", "connect_rate": 2},
}

BUSY, TOO_MANY = 3, 0x9F


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer) -> Iterator[Inside]:
    with running(
        nats_server.url,
        *LISTENERS.values(),
        rate_burst=1,
        rate_pause=10,
        max_filters=10,
        max_topic_length=100,
        max_topic_levels=5,
        max_held=3,
        max_user_properties=3,
        max_user_property_bytes=50,
        max_retained_size=20,
    ) as found:
        yield found


@pytest.fixture
def port(inside: Inside, request: pytest.FixtureRequest) -> int:
    """Of the listener that the test is about."""
    return inside.ports[list(LISTENERS).index(request.param)]


def listener(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("port", names, indirect=True)


def closed(port: int) -> None:
    """A connection that is closed before it has said anything."""
    with Raw(port) as client:
        assert client.expect_closed(PATIENCE) == []


@listener("few", "few each")
def test_connections_at_the_same_time(inside: Inside, port: int) -> None:
    with Raw.connected(port), Raw(port) as silent:  # who says nothing counts too
        silent.send(b"\x10")
        eventually(lambda: inside.connections >= 2)
        closed(port)
        with Raw.connected(inside.ports[0]) as other:  # another listener
            other.ping()
    eventually(lambda: inside.connections == 0, PATIENCE)
    Raw.connected(port).close()


@pytest.mark.long
@listener("connects", "connects each")
def test_a_rate_of_connections(port: int) -> None:
    """The first are let in, the next in their turn, further ones are told to come later, and the rest is closed."""
    clients, codes, begun = list[Raw](), list[int | None](), time.monotonic()
    with ExitStack() as opened:
        for number in range(16):
            clients.append(opened.enter_context(Raw5(port) if number % 2 else Raw(port)))
            clients[-1].send(raw5.connect() if number % 2 else raw.connect())
        for client in clients:
            found = client.receive(PATIENCE)
            codes.append(None if found is None else found.body[1])
    assert codes[:10] == [0] * 10  # two at once, and two per second for four seconds
    assert time.monotonic() - begun > 3.0
    assert set(codes[11::2]) <= {0, TOO_MANY, None}
    assert set(codes[10::2]) <= {0, BUSY, None}
    assert BUSY in codes or TOO_MANY in codes
    eventually(lambda: let_in(port), PATIENCE)


@pytest.mark.long
@listener("web connects")
def test_a_rate_of_connections_by_websocket(port: int) -> None:
    """The request is answered, so that CONNACK can be."""
    with ExitStack() as opened:
        clients = [opened.enter_context(Web(port)) for _ in range(12)]
        for client in clients:
            client.send(raw5.connect())
        codes = [raw5.answer(client.expect(raw.CONNACK)).reason for client in clients]
    assert codes[:10] == [0] * 10
    assert set(codes) == {0, TOO_MANY}


@pytest.mark.long
@listener("hasty connects")
def test_connect_timeout_begins_when_connect_has_its_turn(port: int) -> None:
    with ExitStack() as opened:
        clients = [opened.enter_context(Raw(port)) for _ in range(4)]
        begun = time.monotonic()
        for client in clients:
            client.send(raw.connect())
        assert [client.expect(raw.CONNACK).body for client in clients] == [b"\0\0"] * 4
        assert time.monotonic() - begun > 2.0


def test_a_client_that_waits_is_refused_when_the_gateway_stops(nats_server: NatsServer) -> None:
    with ExitStack() as opened:
        with running(nats_server.url, {"connect_rate": 0.3}, rate_burst=1) as inside:
            clients = [opened.enter_context(Raw(inside.ports[0])) for _ in range(2)]
            for client in clients:
                client.send(raw.connect())
            assert clients[0].expect(raw.CONNACK).body == b"\0\0"
            account = inside.gateway.account
            assert account is not None
            eventually(lambda: inside.call(lambda: any(one.unanswered for one in account.registry.connections)))
        assert clients[1].expect(raw.CONNACK).body == bytes((0, BUSY))


@pytest.mark.long
@listener("messages")
@pytest.mark.parametrize("qos", [0, 1])
def test_a_rate_of_messages(inside: Inside, port: int, qos: int) -> None:
    """Nothing is lost and nobody is disconnected: the client is read from later, and its keepalive does not run."""
    topic = f"rate/{qos}"
    with (
        Raw.connected(inside.ports[0], patience=PATIENCE) as reader,
        Raw.connected(port, keepalive=1, patience=PATIENCE) as writer,
    ):
        assert reader.subscribe((topic, 0)) == [0]
        begun = time.monotonic()
        writer.send(b"".join(raw.publish(topic, b"%d" % n, qos=qos, id=n + 1) for n in range(90)))
        assert [reader.expect(raw.PUBLISH).payload for _ in range(90)] == [b"%d" % n for n in range(90)]
        writer.ping()
        assert time.monotonic() - begun > 3.0  # 20 at once, then 20 per second


@pytest.mark.long
@listener("bytes")
def test_a_rate_of_bytes(inside: Inside, port: int) -> None:
    with Raw.connected(inside.ports[0], patience=PATIENCE) as reader, Raw.connected(port, patience=PATIENCE) as writer:
        assert reader.subscribe(("bytes/#", 0)) == [0]
        begun = time.monotonic()
        for _ in range(8):
            writer.send(raw.publish("bytes/a", bytes(10_000)))
        for _ in range(8):
            reader.expect(raw.PUBLISH)
        writer.ping()
        assert time.monotonic() - begun > 2.5


@listener("messages")
def test_far_too_much_at_once(port: int) -> None:
    with Raw5.open(port) as client:
        client.send(raw5.publish("rate/far", b"x") * 400)
        client.ended(0x96)
    with Raw.connected(port) as client:
        client.send(raw.publish("rate/far", b"x") * 400)
        assert client.expect_closed(PATIENCE) == []


@listener("small")
def test_sizes_of_packets(port: int) -> None:
    with Raw5.open(port) as client:
        assert client.connack.get(MAXIMUM_PACKET_SIZE) == 2000
        client.deliver("small", bytes(1900), qos=1)
        client.send(raw5.publish("small", bytes(2000)))
        client.ended(0x95)
    with Raw(port) as client:
        client.send(raw5.connect("x" * 200))
        assert client.expect_closed(PATIENCE) == []
    with Raw(port) as client:
        client.send(raw.connect("x" * 200))
        assert client.expect_closed(PATIENCE) == []


@listener("modest")
def test_subscriptions_and_windows(inside: Inside, port: int) -> None:
    with Raw5.open(port, "modest") as client, Raw.connected(inside.ports[0]) as writer:
        assert client.connack.get(RECEIVE_MAXIMUM) == 2
        assert client.subscribed(("a", 0), ("b", 0), ("modest", 1), ("d", 0)) == (0, 0, 1, 0x97)
        for number in range(4):
            writer.send(raw.publish("modest", b"%d" % number, qos=1, id=number + 1))
            writer.expect(raw.PUBACK)
        assert [one.payload for one in client.messages()] == [b"0", b"1"]
        client.send(raw5.publish("other", b"", qos=2, id=1) + raw5.publish("other", b"", qos=2, id=2))
        client.answer(raw5.PUBREC)
        client.answer(raw5.PUBREC)
        client.send(raw5.publish("other", b"", qos=2, id=3))
        client.ended(0x93)
    with Raw.connected(port) as client:
        assert client.subscribe(("a", 0), ("b", 0), ("c", 0), ("d", 0)) == [0, 0, 0, 0x80]


@listener("qos 0", "qos 1")
@pytest.mark.parametrize("version", [4, 5])
def test_the_highest_qos(inside: Inside, port: int, version: int) -> None:
    """[MQTT-3.2.2-9] [MQTT-3.2.2-10] [MQTT-3.2.2-11] [MQTT-3.2.2-12] (5.0)."""
    most = 0 if port == inside.ports[list(LISTENERS).index("qos 0")] else 1
    above = most + 1
    if version == 5:
        with Raw5.open(port) as five:
            assert five.connack.get(MAXIMUM_QOS) == most
            assert five.subscribed(("qos/#", 2)) == (most,)
            five.send(raw5.publish("qos/a", b"", qos=above))
            five.ended(0x9B)
        flags = 0x04 | above << 3
        refused(port, raw5.connect("w", flags=flags, tail=raw5.will("qos/w", b"x")), 0x9B)
    else:
        with Raw.connected(port) as client:
            assert client.subscribe(("qos/#", 2)) == [most]
            client.send(raw.publish("qos/a", b"", qos=above))
            assert client.expect_closed(PATIENCE) == []
        with Raw(port) as client:
            client.send(raw.connect("w", flags=0x06 | above << 3, tail=("qos/w", b"x")))
            assert client.expect(raw.CONNACK).body == bytes((0, BUSY))


@listener("denied")
def test_addresses(inside: Inside, port: int) -> None:
    closed(port)
    eventually(lambda: inside.connections == 0, PATIENCE)  # those of other tests may be ending


@listener("hasty")
def test_time_for_connect(inside: Inside, port: int) -> None:
    with Raw(inside.ports[0]) as other:
        with Raw(port) as client:
            client.send(raw.connect("slow")[:5])
            assert client.expect_closed(PATIENCE) == []
        other.send(raw.connect())  # has fifteen seconds
        assert other.expect(raw.CONNACK).body == b"\0\0"


@listener("plain")
def test_time_for_the_answer(inside: Inside, port: int) -> None:
    """It begins with CONNECT, also where no authenticator is asked: CONNECT may come late, and NATS may be slow."""
    with Raw.connected(port, "late"):
        client = inside.client("late")
        assert inside.call(lambda: client.waiting_since) >= client.connection.opened


@listener("plain")
def test_filters_of_one_packet(port: int) -> None:
    filters = [(f"f/{number}", 0) for number in range(11)]
    with Raw5.open(port) as client:
        assert client.subscribed(*filters[:10]) == (0,) * 10
        client.send(raw5.subscribe(*filters))
        client.ended(0x97)
    with Raw5.open(port) as client:
        client.send(raw5.unsubscribe(*(text for text, _ in filters)))
        client.ended(0x97)
    with Raw.connected(port) as client:
        client.send(raw.subscribe(*filters))
        assert client.expect_closed(PATIENCE) == []


@listener("plain")
@pytest.mark.parametrize("topic", ["x" * 101, "\u20ac" * 34, "a/b/c/d/e/f"], ids=["bytes", "characters", "levels"])
def test_topics(port: int, topic: str) -> None:
    with Raw5.open(port) as client:
        assert client.subscribed((topic, 0), ("x" * 100, 0), ("a/b/c/d/e", 0)) == (0x8F, 0, 0)
        client.send(raw5.publish(topic, b"x", qos=1))
        client.answer(raw5.PUBACK, 1, 0x90)
        client.deliver("x" * 99 + "y", b"x")
        client.send(raw5.publish(topic, b"x"))
        client.ended(0x90)
    with Raw.connected(port) as client:
        assert client.subscribe((topic, 0)) == [0x80]
        client.send(raw.publish(topic, b"x", qos=1))
        assert client.expect_closed(PATIENCE) == []
    refused(port, raw5.connect("w", flags=0x04, tail=raw5.will(topic, b"x")), 0x90)


@listener("plain")
def test_publishes_that_wait_for_pubrel(port: int) -> None:
    with Raw5.open(port) as client:
        for number in (1, 2, 3, 4):
            client.send(raw5.publish("held", b"x", qos=2, id=number))
            client.answer(raw5.PUBREC, number, 0x97 if number == 4 else 0)
        client.send(raw5.ack(raw5.PUBREL, 1))
        client.answer(raw5.PUBCOMP, 1, 0)
        client.send(raw5.publish("held", b"x", qos=2, id=4))
        client.answer(raw5.PUBREC, 4, 0)
        client.send(raw5.publish("held", b"x", qos=2, id=4, flags=8))  # one that is there is no other
        client.answer(raw5.PUBREC, 4, 0)
    with Raw.connected(port) as client:
        for number in (1, 2, 3):
            client.send(raw.publish("held", b"x", qos=2, id=number))
            client.expect(raw.PUBREC)
        client.send(raw.publish("held", b"x", qos=2, id=4))
        assert client.expect_closed(PATIENCE) == []


@listener("plain")
def test_user_properties(port: int) -> None:
    few = [prop(USER, ("a", "b"))] * 3
    large = prop(USER, ("a", "x" * 50))
    with Raw5.open(port) as client:
        client.deliver("user", b"x", *few)
        client.deliver("user", b"x", prop(USER, ("a", "x" * 49)))
        client.send(raw5.publish("user", b"x", *few, few[0]))
        client.ended(0x97)
    with Raw5.open(port) as client:
        client.send(raw5.publish("user", b"x", large))
        client.ended(0x97)
    with Raw5.open(port) as client:
        client.send(raw5.publish("user", b"x", prop(USER, ("x" * 25, "y")), prop(USER, ("x" * 25, "y"))))
        client.ended(0x97)
    with Raw5.open(port) as client:
        client.send(raw5.ack(raw5.PUBACK, 1, 0, large))
        client.ended(0x97)
    refused(port, raw5.connect("u", *few, few[0]), 0x97)
    refused(port, raw5.connect("u", large), 0x97)
    refused(port, raw5.connect("u", flags=0x04, tail=raw5.will("user", b"x", large)), 0x97)


@listener("plain")
def test_the_size_of_what_is_retained(inside: Inside, port: int) -> None:
    """A 5.0 client is told; otherwise the message is passed on, and not retained."""
    account = inside.gateway.account
    assert account is not None
    with Raw5.open(port) as five, Raw.connected(port) as four, Raw.connected(port) as reader:
        assert reader.subscribe(("kept/#", 0)) == [0]
        for qos in (1, 2):
            five.send(raw5.publish("kept/five", bytes(21), qos=qos, id=7, flags=1))
            five.answer(raw5.PUBACK if qos == 1 else raw5.PUBREC, 7, 0x97)
        reader.ping()
        before = account.services.counters.not_retained
        five.deliver("kept/five", bytes(21), qos=0, flags=1)
        four.send(raw.publish("kept/four", bytes(21), qos=1, id=8, flags=1))
        assert four.expect(raw.PUBACK).id == 8
        four.send(raw.publish("kept/fits", bytes(20), qos=1, id=9, flags=1))
        assert four.expect(raw.PUBACK).id == 9
        assert sorted(one.topic for one in reader.ping()) == ["kept/fits", "kept/five", "kept/four"]
        assert account.services.counters.not_retained - before == 2
        with Raw.connected(port) as late:
            assert late.subscribe(("kept/#", 0)) == [0]
            assert late.expect(raw.PUBLISH).topic == "kept/fits"
            assert late.ping() == []
        four.send(raw.publish("kept/fits", b"", qos=1, id=9, flags=1))
        four.expect(raw.PUBACK)
    refused(port, raw5.connect("w", flags=0x24, tail=raw5.will("kept/w", bytes(21))), 0x95)


def test_what_is_not_set_costs_nothing(inside: Inside) -> None:
    """Where no rate is set a connection is not even of the class that counts."""
    with Raw.connected(inside.ports[0], "free"), Raw.connected(inside.ports[5], "paced"):
        assert type(inside.client("free").connection).__name__ == "Connection"
        assert type(inside.client("paced").connection).__name__ == "PacedConnection"
