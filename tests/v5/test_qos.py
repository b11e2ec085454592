# SPDX-License-Identifier: Apache-2.0
"""Session state, delivery at QoS 0, 1 and 2, repetition, order (sections 4.1 to 4.6)."""

import time

import pytest

from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import packet
from tests.harness.raw5 import (
    CONNACK,
    EXPIRY,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    RECEIVE_MAXIMUM,
    SESSION_EXPIRY,
    SUBACK,
    Raw5,
    ack,
    connect,
    prop,
    publish,
    subscribe,
)
from tests.integration.conftest import Stored
from tests.v5.conftest import Opener

STORED = prop(SESSION_EXPIRY, 600)
KINDS = pytest.mark.parametrize("session", [[], [STORED]], ids=["regular", "durable"])
WHERE = pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])


def test_any_pieces(gateway: Gateway, name: str) -> None:
    """[MQTT-4.2.0-1] (5.0): a stream of bytes: packets in pieces of one byte, and all in one piece, both ways."""
    data = connect(name) + subscribe((name, 0)) + packet(0xC0) * 3 + publish("x", b"y" * 300, qos=1)
    for pieces in ([data[at : at + 1] for at in range(len(data))], [data]):
        with Raw5(gateway.port, receive_buffer=4096) as client:
            for piece in pieces:
                client.send(piece)
            kinds = [client.expect_one_of(CONNACK, SUBACK, PINGRESP, PUBACK) for _ in range(6)]
            assert sorted(kinds) == [CONNACK, PUBACK, SUBACK, *[PINGRESP] * 3]
            client.send(b"".join(publish(name, b"%07d" % at * 10_000) for at in range(10)))
            for at in range(10):
                client.message(b"%07d" % at * 10_000)


@pytest.mark.long
async def test_a_session_lives_as_long_as_its_connection(open5: Opener, name: str, stored: Stored) -> None:
    """[MQTT-4.1.0-1], [MQTT-4.1.0-2] (5.0): its expiry counts from the end of the connection, and then it is gone."""
    client, publisher = open5(name, prop(SESSION_EXPIRY, 3)), open5()
    client.subscribed((name, 1))
    time.sleep(3.5)
    publisher.deliver(name, b"still there")
    client.receive_message(b"still there")
    await stored.settled(name)
    client.close()
    client = open5(name, prop(SESSION_EXPIRY, 1), clean=False)
    assert client.present
    publisher.deliver(name, b"still subscribed")
    client.receive_message(b"still subscribed")
    client.close()
    time.sleep(2.5)
    client = open5(name, prop(SESSION_EXPIRY, 1), clean=False)
    assert not client.present
    publisher.deliver(name, b"nobody is subscribed")
    client.quiet()


async def test_nothing_is_left_of_a_session_that_has_expired(open5: Opener, name: str, stored: Stored) -> None:
    """[MQTT-4.1.0-2] (5.0)"""
    client = open5(name, prop(SESSION_EXPIRY, 1))
    client.subscribed((name, 2))
    client.send(publish(name, b"held", qos=2, id=7))
    client.answer(PUBREC, 7, 0)
    assert await stored.traces(name)
    client.close()
    await stored.gone(name)


def test_qos_0(open5: Opener, name: str) -> None:
    """[MQTT-4.3.1-1] (5.0)"""
    client, publisher = open5(name, STORED), open5()
    client.subscribed((name, 2))
    publisher.deliver(name, b"x", qos=0)
    assert client.expect(3).first == 0x30
    client.close()
    client = open5(name, STORED, clean=False)
    client.quiet()


async def test_qos_1_sender(
    open5: Opener, name: str, stored: Stored, second_gateway: Gateway, gateway: Gateway
) -> None:
    """[MQTT-4.3.2-1], [MQTT-4.3.2-2], [MQTT-4.3.2-3], [MQTT-4.4.0-1], [MQTT-4.4.0-2] (5.0)

    First with DUP 0 and an identifier of its own; again with DUP 1 and the same one on each new connection, until a
    PUBACK, whatever its reason code.
    """
    client, publisher = open5(name, STORED), open5()
    client.subscribed((name, 1))
    for payload in (b"1", b"2", b"3"):
        publisher.deliver(name, payload)
    first = [client.message(payload) for payload in (b"1", b"2", b"3")]
    assert [(one.qos, one.dup) for one in first] == [(1, False)] * 3
    ids = [one.id for one in first]
    assert len({*ids}) == 3
    left = [b"1", b"2", b"3"]
    for at, reason in ((1, 0), (0, 0x80), (0, 0x97)):
        client.quiet()
        client.close()
        client = open5(name, STORED, clean=False, to=(second_gateway, gateway)[at])
        again = client.messages()
        assert [(one.payload, one.id, one.qos, one.dup) for one in again] == [
            (payload, ids[int(payload) - 1], 1, True) for payload in left
        ]
        client.send(ack(PUBACK, again[at].id, reason))
        client.quiet()
        del left[at]
        await stored.settled(name, inflight=len(left))
    client.close()
    client = open5(name, STORED, clean=False)
    client.quiet()


async def test_qos_2_sender(
    open5: Opener, name: str, stored: Stored, second_gateway: Gateway, gateway: Gateway
) -> None:
    """[MQTT-4.3.3-1], [MQTT-4.3.3-2], [MQTT-4.3.3-3], [MQTT-4.3.3-4], [MQTT-4.3.3-5], [MQTT-4.3.3-6] (5.0)

    [MQTT-4.4.0-1], [MQTT-4.4.0-2] (5.0): each step is repeated on a new connection, and no step before it.
    """
    client, publisher = open5(name, STORED), open5()
    client.subscribed((name, 2))
    for payload in (b"1", b"2", b"3"):
        publisher.deliver(name, payload, qos=2)
    first = [client.message(payload) for payload in (b"1", b"2", b"3")]
    assert [(one.qos, one.dup) for one in first] == [(2, False)] * 3
    ids = [one.id for one in first]
    assert len({*ids}) == 3

    def back(turn: int) -> Raw5:
        client.close()
        return open5(name, STORED, clean=False, to=(second_gateway, gateway)[turn % 2])

    client = back(0)
    again = client.messages()
    assert [(one.payload, one.id, one.qos, one.dup) for one in again] == [
        (b"%d" % (at + 1), ids[at], 2, True) for at in range(3)
    ]
    client.send(ack(PUBREC, ids[0]))
    client.answer(PUBREL, ids[0], 0)
    client.send(ack(PUBREC, ids[1], 0x80))  # refused: complete without PUBREL
    client.quiet()
    await stored.settled(name, inflight=1, owed=1)
    for turn in (1, 2):
        client = back(turn)
        client.answer(PUBREL, ids[0], 0)
        (only,) = client.messages()
        assert (only.payload, only.id, only.dup) == (b"3", ids[2], True)
    client.send(ack(PUBREC, ids[0]))  # once more: PUBREL, no PUBLISH
    client.answer(PUBREL, ids[0], 0)
    client.send(ack(PUBCOMP, ids[0]))
    client.quiet()
    await stored.settled(name, inflight=1)
    client = back(3)
    (only,) = client.messages()
    assert only.id == ids[2]
    client.send(ack(PUBREC, ids[2]))
    client.answer(PUBREL, ids[2], 0)
    client.send(ack(PUBCOMP, ids[2]))
    await stored.settled(name)
    client = back(4)
    client.quiet()


@KINDS
def test_qos_1_receiver(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-4.3.2-4], [MQTT-4.3.2-5] (5.0): PUBACK, and then the same identifier is new, DUP or not."""
    listener, client = open5(), open5(name, *session)
    listener.subscribed((name, 1))
    for flags in (0, 8, 8, 0):
        client.send(publish(name, b"the same", qos=1, id=0x7777, flags=flags))
        client.answer(PUBACK, 0x7777, 0)
        assert not listener.receive_message(b"the same").dup
    listener.quiet()


@KINDS
def test_qos_2_receiver(open5: Opener, name: str, session: list[bytes], second_gateway: Gateway) -> None:
    """[MQTT-4.3.3-8], [MQTT-4.3.3-10], [MQTT-4.3.3-11], [MQTT-4.3.3-12] (5.0)

    PUBREC for each repetition, one delivery, PUBCOMP; then the identifier is new; also across connections.
    """
    listener, client = open5(), open5(name, *session)
    listener.subscribed((name, 2))
    for turn in range(3):
        payload = b"turn %d" % turn
        for flags in (0, 8, 0, 8):
            client.send(publish(name, payload, qos=2, id=0x7777, flags=flags))
            client.answer(PUBREC, 0x7777, 0)
        if session and turn == 1:
            client.close()
            client = open5(name, STORED, clean=False, to=second_gateway)
            client.send(publish(name, payload, qos=2, id=0x7777, flags=8))
            client.answer(PUBREC, 0x7777, 0)
        client.send(ack(PUBREL, 0x7777))
        client.answer(PUBCOMP, 0x7777, 0)
        listener.receive_message(payload)
        listener.quiet()
        client.send(ack(PUBREL, 0x7777))
        client.answer(PUBCOMP, 0x7777)
    listener.quiet()


def test_an_identifier_after_a_refusal(open5: Opener, name: str) -> None:
    """[MQTT-4.3.3-9] (5.0): after PUBREC of 0x80 and more it is free, for another message or the same one."""
    listener, client = open5(), open5()
    listener.subscribed((name, 2))
    for _ in range(3):
        client.send(publish("$JS/API/INFO", b"refused", qos=2, id=5))
        client.answer(PUBREC, 5, 0x87)
    for flags in (8, 0):
        client.send(publish(name, b"taken", qos=2, id=5, flags=flags))
        client.answer(PUBREC, 5, 0)
        client.send(ack(PUBREL, 5))
        client.answer(PUBCOMP, 5, 0)
        listener.receive_message(b"taken")
    listener.quiet()


@pytest.mark.long
@pytest.mark.parametrize("qos", [1, 2])
def test_what_has_been_sent_does_not_expire(open5: Opener, name: str, qos: int, second_gateway: Gateway) -> None:
    """[MQTT-4.3.3-7], [MQTT-4.3.3-13] (5.0): it is sent again, and its handshake goes on."""
    client, publisher = open5(name, STORED, prop(RECEIVE_MAXIMUM, 2)), open5()
    client.subscribed((name, qos))
    for payload in (b"1", b"2", b"never sent"):
        publisher.deliver(name, payload, prop(EXPIRY, 3), qos=qos)
    sent = [client.message(b"1"), client.message(b"2")]
    time.sleep(3.6)
    client.quiet()
    client.close()
    client = open5(name, STORED, prop(RECEIVE_MAXIMUM, 1), clean=False, to=second_gateway)
    for one in sent:
        again = client.message(one.payload)
        assert (again.id, again.dup) == (one.id, True)
        client.send(ack(PUBACK if qos == 1 else PUBREC, one.id))
        if qos == 2:
            client.answer(PUBREL, one.id, 0)
            client.send(ack(PUBCOMP, one.id))
    publisher.deliver(name, b"new", qos=qos)
    client.receive_message(b"new")
    client.quiet()


def test_the_handshake_of_a_publisher_outlives_the_expiry(open5: Opener, name: str) -> None:
    """[MQTT-4.3.3-13] (5.0)"""
    listener, client = open5(), open5()
    listener.subscribed((name, 2))
    client.send(publish(name, b"expires", prop(EXPIRY, 1), qos=2, id=9))
    client.answer(PUBREC, 9, 0)
    time.sleep(2.2)
    client.send(publish(name, b"expires", prop(EXPIRY, 1), qos=2, id=9, flags=8))
    client.answer(PUBREC, 9, 0)
    client.send(ack(PUBREL, 9))
    client.answer(PUBCOMP, 9, 0)
    listener.quiet()
    client.send(publish(name, b"new", prop(EXPIRY, 9), qos=2, id=9))
    client.answer(PUBREC, 9, 0)
    client.send(ack(PUBREL, 9))
    client.answer(PUBCOMP, 9, 0)
    listener.receive_message(b"new")


@KINDS
def test_a_connected_client_is_sent_nothing_again(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-4.4.0-1] (5.0): other connections, subscriptions and their ends do not make the gateway repeat itself."""
    client, publisher = open5(name, *session), open5()
    client.subscribed((f"{name}/+", 2))
    for qos in (1, 2):
        publisher.deliver(f"{name}/{qos}", b"x", qos=qos)
    one, two = sorted((client.message(b"x"), client.message(b"x")), key=lambda found: found.qos)
    client.send(ack(PUBREC, two.id))
    client.answer(PUBREL, two.id, 0)
    assert client.subscribed((f"{name}/+", 2)) == (2,)
    assert client.subscribed((f"{name}/1", 1)) == (1,)
    other = open5(f"{name}-other", *session)
    other.subscribed((f"{name}/+", 2))
    other.close()
    client.send(ack(PUBREC, 12345) + ack(PUBACK, 12346))  # of nothing
    client.answer(PUBREL, 12345, 0x92)
    publisher.deliver(f"{name}/2", b"new", qos=2)
    assert not client.receive_message(b"new").dup
    client.send(ack(PUBACK, one.id) + ack(PUBCOMP, two.id))
    client.quiet()


@pytest.mark.parametrize("qos", [1, 2])
def test_what_is_acknowledged_is_in_the_sessions(
    nats_server: NatsServer, gateway_factory: GatewayFactory, open5: Opener, name: str, qos: int
) -> None:
    """[MQTT-4.5.0-1] (5.0): of absent clients, too, whatever becomes of the gateway that has acknowledged."""
    gateway, other = gateway_factory(nats_server), gateway_factory(nats_server)
    filters = (f"{name}/a", f"{name}/+", f"{name}/#", f"{name}/b")
    for at, topic_filter in enumerate(filters):
        client = open5(f"{name}-{at}", STORED, to=other if at % 2 else gateway)
        client.subscribed((topic_filter, qos))
        client.close()
    publisher = open5(to=gateway)
    for number in range(20):
        publisher.deliver(f"{name}/a", b"%d" % number, qos=qos)
    gateway.kill()
    for at in range(4):
        client = open5(f"{name}-{at}", STORED, clean=False, to=other)
        assert client.present
        for number in range(20 if at < 3 else 0):
            client.receive_message(b"%d" % number)
        client.quiet()


@KINDS
@WHERE
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_order(
    open5: Opener, name: str, session: list[bytes], elsewhere: bool, qos: int, second_gateway: Gateway, gateway: Gateway
) -> None:
    """[MQTT-4.6.0-5], [MQTT-4.6.0-6] (5.0): as the publisher has sent them, however fast, by every filter."""
    clients = [open5(f"{name}-{at}", *session) for at in range(2)]
    clients[0].subscribed((f"{name}/a", qos), (f"{name}/+", qos))
    clients[1].subscribed((f"{name}/#", 2))
    publisher = open5(to=second_gateway if elsewhere else gateway)
    count = 300
    publisher.send(b"".join(publish(f"{name}/{'ab'[at % 2]}", b"%d" % at, qos=qos, id=1 + at) for at in range(count)))
    if qos:
        kind = PUBACK if qos == 1 else PUBREC
        assert [publisher.answer(kind).id for _ in range(count)] == [*range(1, count + 1)]
    if qos == 2:
        publisher.send(b"".join(ack(PUBREL, 1 + at) for at in range(count)))
        assert [publisher.answer(PUBCOMP).id for _ in range(count)] == [*range(1, count + 1)]
    for client in clients:
        got: dict[str, list[int]] = {"a": [], "b": []}
        for _ in range(count):
            one = client.receive_message()
            assert one.qos == qos
            got[one.topic[-1]].append(int(one.payload))
        assert got == {"a": [*range(0, count, 2)], "b": [*range(1, count, 2)]}
        client.quiet()
