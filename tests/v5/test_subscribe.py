# SPDX-License-Identifier: Apache-2.0
"""SUBSCRIBE, SUBACK, UNSUBSCRIBE, UNSUBACK, PINGREQ (sections 3.8 to 3.13)."""

import pytest

from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import field, packet
from tests.harness.raw5 import (
    MAXIMUM_PACKET_SIZE,
    NO_LOCAL,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SESSION_EXPIRY,
    SUBACK,
    SUBSCRIPTION_ID,
    UNSUBACK,
    USER,
    ack,
    message,
    prop,
    publish,
    subscribe,
    unsubscribe,
)
from tests.integration.conftest import Stored
from tests.v5.conftest import Opener

STORED = prop(SESSION_EXPIRY, 600)
KINDS = pytest.mark.parametrize("session", [[], [STORED]], ids=["regular", "durable"])

BROKEN = {
    "no filter [MQTT-3.8.3-2] (5.0)": (packet(0x82, b"\0\1\0"), 0x82),
    "no options [MQTT-3.8.3-2] (5.0)": (packet(0x82, b"\0\1\0" + field("a")), 0x81),
    "filter cut off [MQTT-3.8.3-1] (5.0)": (packet(0x82, b"\0\1\0\0\x09a\0"), 0x81),
    "filter no string [MQTT-3.8.3-1] (5.0)": (subscribe((b"\xff", 0)), 0x81),
    "bit 6 [MQTT-3.8.3-5] (5.0)": (subscribe(("a", 0x40)), 0x81),
    "bit 7 [MQTT-3.8.3-5] (5.0)": (subscribe(("a", 0), ("b", 0x81)), 0x81),
    "QoS 3": (subscribe(("a", 3)), 0x82),
    "Retain Handling 3": (subscribe(("a", 0x30)), 0x82),
    "no local, shared [MQTT-3.8.3-4] (5.0)": (subscribe(("$share/g/a", 1 | NO_LOCAL)), 0x82),
    "subscription identifier 0": (subscribe(("a", 0), parts=b"\x0b\0"), 0x82),
    "two subscription identifiers": (subscribe(("a", 0), parts=b"\x0b\1\x0b\2"), 0x82),
    "UNSUBSCRIBE without filter [MQTT-3.10.3-2] (5.0)": (packet(0xA2, b"\0\1\0"), 0x82),
    "UNSUBSCRIBE, no string [MQTT-3.10.3-1] (5.0)": (unsubscribe(b"a\0b"), 0x81),
    "UNSUBSCRIBE, cut off [MQTT-3.10.3-1] (5.0)": (packet(0xA2, b"\0\1\0\0\x09a"), 0x81),
    **{
        f"flags {first:02x} [MQTT-3.8.1-1] (5.0)": (packet(first, subscribe(("a", 0))[2:]), 0x81)
        for first in range(0x80, 0x90)
        if first != 0x82
    },
    **{
        f"flags {first:02x} [MQTT-3.10.1-1] (5.0)": (packet(first, unsubscribe("a")[2:]), 0x81)
        for first in range(0xA0, 0xB0)
        if first != 0xA2
    },
}
"""[MQTT-4.13.1-1] (5.0)"""

DEEP = "/".join("x" * 129)
"""A filter of more levels than are allowed."""


@pytest.mark.parametrize(("data", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_packets(open5: Opener, data: bytes, reason: int) -> None:
    client = open5()
    client.send(data)
    found = client.ended(reason)
    assert found.get(0x1F)


@KINDS
def test_answers(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-3.8.4-1], [MQTT-3.8.4-2], [MQTT-3.8.4-5], [MQTT-3.8.4-6], [MQTT-3.8.4-7], [MQTT-3.9.3-1] (5.0)

    [MQTT-3.9.3-2], [MQTT-3.10.4-4], [MQTT-3.10.4-5], [MQTT-3.10.4-6], [MQTT-3.11.3-1], [MQTT-3.11.3-2] (5.0)
    """
    client, publisher = open5(name, *session), open5()
    wanted = ((f"{name}/2", 2), (DEEP, 1), (f"{name}/0", 0), ("$JS/#", 2), (f"{name}/1", 1), (DEEP, 0))
    client.send(subscribe(*wanted, id=0x1234))
    assert client.expect(SUBACK).body == b"\x12\x34\0" + bytes((2, 0x8F, 0, 0x87, 1, 0x8F))
    for topic in ("2", "0", "1"):
        publisher.deliver(f"{name}/{topic}", b"x", qos=2)
    # Order is kept within a topic and a QoS: QoS 0 comes by another way than what is stored.
    received = [client.receive_message(b"x") for _ in range(3)]
    assert {one.topic: one.qos for one in received} == {f"{name}/{qos}": qos for qos in range(3)}
    client.send(subscribe((f"{name}/2", 0), (f"{name}/2", 1), id=0xFFFF))  # the last of equal ones counts
    assert client.expect(SUBACK).body == b"\xff\xff\0\0\1"
    publisher.deliver(f"{name}/2", b"x", qos=2)
    assert client.receive_message(b"x").qos == 1
    ended = (f"{name}/2", "never", DEEP, f"{name}/0", f"{name}/0")
    client.send(unsubscribe(*ended, id=0x2345))
    assert client.expect(UNSUBACK).body == b"\x23\x45\0" + bytes((0, 0x11, 0x8F, 0, 0x11))
    for topic in ("2", "0", "1"):
        publisher.deliver(f"{name}/{topic}", b"y", qos=1)
    assert client.receive_message(b"y").topic == f"{name}/1"
    client.quiet()
    client.send(packet(0xC0) * 3)  # [MQTT-3.12.4-1] (5.0)
    assert [client.expect(13).body for _ in range(3)] == [b""] * 3


@KINDS
def test_filters_that_are_named_twice_in_unsubscribe(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-3.10.4-6] (5.0): as in a sequence of packets, of which the second finds no subscription."""
    client = open5(name, *session)
    share = f"$share/g/{name}"
    client.send(subscribe((f"{name}/1", 1), (share, 0), id=1))
    assert client.expect(SUBACK).body == b"\0\1\0\1\0"
    client.send(unsubscribe(f"{name}/1", share, f"{name}/1", share, id=2))
    assert client.expect(UNSUBACK).body == b"\0\2\0\0\0\x11\x11"


@pytest.mark.parametrize("limit", [16, 20, 100_000])
def test_nothing_is_explained_in_suback(open5: Opener, name: str, limit: int) -> None:
    """[MQTT-3.9.2-1], [MQTT-3.9.2-2], [MQTT-3.11.2-1], [MQTT-3.11.2-2] (5.0): no reason string, no user properties."""
    client = open5(name, prop(MAXIMUM_PACKET_SIZE, limit))
    client.send(subscribe(("$JS/#", 2), (DEEP, 0), id=7, parts=prop(USER, ("a", "b"))))
    assert client.expect(SUBACK).body == b"\0\7\0\x87\x8f"
    client.send(unsubscribe(DEEP, "never", id=7, parts=prop(USER, ("a", "b"))))
    assert client.expect(UNSUBACK).body == b"\0\7\0\x8f\x11"


def test_quota(nats_server: NatsServer, gateway_factory: GatewayFactory, open5: Opener, name: str) -> None:
    """[MQTT-3.9.3-2] (5.0): 0x97 beyond the subscriptions that a session may have; replacing one is no more."""
    gateway = gateway_factory(nats_server, "--max-subscriptions", "2")
    client = open5(name, to=gateway)
    assert client.subscribed(("a", 1), ("b", 0)) == (1, 0)
    assert client.subscribed(("c", 0), ("a", 2)) == (0x97, 2)
    client.send(unsubscribe("b"))
    client.answer(UNSUBACK, 1, 0)
    assert client.subscribed(("c", 1)) == (1,)


@KINDS
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_lower_qos_of_the_two(
    open5: Opener, name: str, session: list[bytes], elsewhere: bool, second_gateway: Gateway, gateway: Gateway
) -> None:
    """[MQTT-3.8.4-8] (5.0): of new messages and of retained ones."""
    publisher = open5(to=second_gateway if elsewhere else gateway)
    for granted in (0, 1, 2):
        client = open5(f"{name}-{granted}", *session)
        assert client.subscribed((f"{name}/#", granted)) == (granted,)
        for qos in (0, 1, 2):
            publisher.deliver(f"{name}/{granted}", b"%d" % qos, qos=qos)
        found = {one.payload: one.qos for one in (client.receive_message() for _ in range(3))}
        assert found == {b"%d" % qos: min(qos, granted) for qos in (0, 1, 2)}
        for qos in (0, 1, 2):
            open5().deliver(f"{name}/kept", b"%d" % qos, qos=qos, flags=1)
            client.receive_message(b"%d" % qos)
            client.send(unsubscribe(f"{name}/#"))
            client.answer(UNSUBACK, 1, 0)
            client.subscribed((f"{name}/#", granted))
            kept = client.receive_message(b"%d" % qos)
            assert (kept.qos, kept.retain) == (min(qos, granted), True)
        client.close()
        open5().deliver(f"{name}/kept", b"", flags=1)


@KINDS
def test_an_equal_filter_replaces(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-3.8.4-3] (5.0): with all its options; there is one subscription, and one copy."""
    client, publisher = open5(name, *session), open5()
    for qos, options, identifier in ((1, 0, 7), (2, NO_LOCAL, None), (0, 0, 8), (2, 0, 9), (1, NO_LOCAL, 10)):
        parts = b"" if identifier is None else prop(SUBSCRIPTION_ID, identifier)
        assert client.subscribed((f"{name}/+", qos | options), parts=parts) == (qos,)
        publisher.deliver(f"{name}/a", b"other", qos=2)
        found = client.receive_message(b"other")
        assert (found.qos, found.get(SUBSCRIPTION_ID)) == (qos, identifier)
        client.send(publish(f"{name}/a", b"own"))
        assert [one.payload for one in client.messages()] == ([] if options else [b"own"])
    client.send(unsubscribe(f"{name}/+"))
    client.answer(UNSUBACK, 1, 0)
    publisher.deliver(f"{name}/a", b"x", qos=2)
    client.quiet()


@KINDS
def test_nothing_is_lost_by_replacing(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-3.8.4-4] (5.0): messages go on; with Retain Handling 0 the retained one comes each time."""
    client, publisher = open5(name, *session), open5()
    publisher.deliver(f"{name}/kept", b"kept", flags=1)
    client.subscribed((f"{name}/#", 1))
    client.receive_message(b"kept")
    kept = 0
    got: list[int] = []
    for turn in range(20):
        data = b"".join(publish(f"{name}/a", b"%d" % (10 * turn + at), qos=1, id=1 + at) for at in range(10))
        publisher.send(data)
        client.send(subscribe((f"{name}/#", 1 + turn % 2), id=1 + turn))
        for _ in range(10):
            publisher.answer(PUBACK)
    answered = 0
    while len(got) < 200 or answered < 20 or kept < 20:
        one = client.receive()
        assert one is not None
        if one.kind == SUBACK:
            answered += 1
        elif one.kind == PUBREL:
            client.send(ack(PUBCOMP, one.id))
        else:
            found = message(one)
            client.send(ack(PUBACK if found.qos == 1 else PUBREC, found.id))
            if found.retain:
                assert found.payload == b"kept"
                kept += 1
            else:
                got.append(int(found.payload))
    assert got == [*range(200)]
    assert (answered, kept) == (20, 20)


@KINDS
def test_unsubscribe_compares_characters(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-3.10.4-1], [MQTT-3.10.4-2], [MQTT-3.10.4-5] (5.0)"""
    client, publisher = open5(name, *session), open5()
    client.subscribed((f"{name}/+", 1), (f"{name}/a", 0))
    others = [f"{name}/#", f"{name}/b", f"{name}/A", f"{name}/a/", f"{name}", "#", f"/{name}/a", f"{name}/\u0041\u030a"]
    client.send(unsubscribe(*others, id=9))
    assert client.answer(UNSUBACK, 9).reasons == (0x11,) * len(others)
    publisher.deliver(f"{name}/a", b"x")
    assert client.receive_message(b"x").qos == 1
    client.send(unsubscribe(f"{name}/+", id=10))
    client.answer(UNSUBACK, 10, 0)
    publisher.deliver(f"{name}/a", b"y")
    publisher.deliver(f"{name}/b", b"nobody's")
    assert client.message(b"y").qos == 0
    client.send(unsubscribe(f"{name}/a", f"{name}/a", id=11))
    assert client.answer(UNSUBACK, 11).reasons[0] == 0
    publisher.deliver(f"{name}/a", b"nobody's")
    client.quiet()


@KINDS
async def test_what_was_begun_is_completed(open5: Opener, name: str, stored: Stored, session: list[bytes]) -> None:
    """[MQTT-3.10.4-2], [MQTT-3.10.4-3] (5.0): QoS 1 and 2 go on after UNSUBACK, also on another connection."""
    client, publisher = open5(name, b"\x21\0\3", *session), open5()
    client.subscribed((f"{name}/#", 2))
    for qos in (1, 2, 2):
        publisher.deliver(f"{name}/{qos}", b"begun", qos=qos)
    one, two, released = sorted((client.message(b"begun") for _ in range(3)), key=lambda found: found.qos)
    client.send(ack(PUBREC, released.id))
    client.answer(PUBREL, released.id, 0)
    client.send(unsubscribe(f"{name}/#"))
    client.answer(UNSUBACK, 1, 0)
    publisher.deliver(f"{name}/1", b"nobody's")
    if session:
        client.close()
        client = open5(name, STORED, clean=False)
        client.answer(PUBREL, released.id, 0)
        again = sorted(client.messages(), key=lambda found: found.qos)
        assert [(found.id, found.qos, found.dup) for found in again] == [(one.id, 1, True), (two.id, 2, True)]
    client.send(ack(PUBACK, one.id) + ack(PUBREC, two.id))
    client.answer(PUBREL, two.id, 0)
    client.send(ack(PUBCOMP, two.id) + ack(PUBCOMP, released.id))
    client.quiet()
    if session:
        await stored.settled(name)
        client.close()
        client = open5(name, STORED, clean=False)
        assert client.present
        client.quiet()


@pytest.mark.parametrize("session", [[], [STORED]], ids=["regular", "durable"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
async def test_no_local(
    open5: Opener,
    name: str,
    stored: Stored,
    session: list[bytes],
    elsewhere: bool,
    second_gateway: Gateway,
    gateway: Gateway,
) -> None:
    """[MQTT-3.8.3-3] (5.0): by client id, also where the session has moved meanwhile."""
    client, other = open5(name, *session), open5(f"{name}-other", to=second_gateway if elsewhere else gateway)
    for one in (client, other):
        one.subscribed((f"{name}/no", 1 | NO_LOCAL), (f"{name}/yes", 1))
    for qos in (0, 1, 2):
        topics = [f"{name}/no", f"{name}/yes"]
        client.send(b"".join(publish(topic, b"own", qos=qos, id=9 + at) for at, topic in enumerate(topics)))
        came: list[str] = []
        answers = 2 * qos
        while answers or not came:
            one_packet = client.receive()
            assert one_packet is not None
            if one_packet.kind == PUBLISH:
                found = message(one_packet)
                client.send(ack(PUBACK, found.id) if found.qos else b"")
                came.append(found.topic)
            else:
                client.send(ack(PUBREL, one_packet.id) if one_packet.kind == PUBREC else b"")
                answers -= 1
        assert came + [one.topic for one in client.messages()] == topics[1:]
        assert sorted(other.receive_message(b"own").topic for _ in topics) == topics
    if session:
        there = gateway if elsewhere else second_gateway
        await stored.settled(name)
        client.close()
        client = open5(name, STORED, clean=False, to=there)
        client.send(publish(f"{name}/no", b"own"))
        client.quiet()
        other.receive_message(b"own")
    open5(f"{name}-third").deliver(f"{name}/no", b"another's")
    client.receive_message(b"another's")
