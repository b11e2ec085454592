# SPDX-License-Identifier: Apache-2.0
"""PUBLISH actions (section 3.3.4): overlapping subscriptions, their identifiers, Receive Maximum both ways."""

import itertools

import pytest

from tests.conftest import GatewayFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import packet
from tests.harness.raw5 import (
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    RECEIVE_MAXIMUM,
    SESSION_EXPIRY,
    SUBACK,
    SUBSCRIPTION_ID,
    UNSUBACK,
    Message,
    Raw5,
    ack,
    prop,
    publish,
    subscribe,
    unsubscribe,
)
from tests.v5.conftest import Opener

STORED = prop(SESSION_EXPIRY, 600)
KINDS = pytest.mark.parametrize("session", [[], [STORED]], ids=["regular", "durable"])


@KINDS
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_overlapping_subscriptions(
    open5: Opener, name: str, session: list[bytes], elsewhere: bool, second_gateway: Gateway, gateway: Gateway
) -> None:
    """[MQTT-3.3.4-2], [MQTT-3.3.4-3], [MQTT-3.3.4-4] (5.0): one copy, the highest QoS, all identifiers."""
    publisher = open5(to=second_gateway if elsewhere else gateway)
    for granted in itertools.product((0, 1, 2), repeat=2):
        client = open5(name, *session)
        filters = ((f"{name}/a", granted[0], 1), (f"{name}/+", granted[1], 268_435_455), (f"{name}/#", 0, None))
        for topic_filter, qos, identifier in filters:
            parts = b"" if identifier is None else prop(SUBSCRIPTION_ID, identifier)
            assert client.subscribed((topic_filter, qos), parts=parts) == (qos,)
        for qos in (0, 1, 2):
            publisher.deliver(f"{name}/a", b"%d" % qos, qos=qos)
            publisher.deliver(f"{name}/b", b"only one", qos=qos)
            publisher.deliver(f"{name}/b/c", b"none", qos=qos)
        found: dict[bytes, list[Message]] = {}
        for _ in range(9):
            one = client.receive_message()
            found.setdefault(one.payload, []).append(one)
        client.quiet()
        for qos in (0, 1, 2):
            (both,) = found[b"%d" % qos]
            assert both.qos == min(qos, max(granted))
            assert sorted(both.all(SUBSCRIPTION_ID)) == [1, 268_435_455]
        assert sorted(one.qos for one in found[b"only one"]) == [min(qos, granted[1]) for qos in (0, 1, 2)]
        assert [one.properties for one in found[b"only one"]] == [[(SUBSCRIPTION_ID, 268_435_455)]] * 3
        assert [(one.qos, one.properties) for one in found[b"none"]] == [(0, [])] * 3


@KINDS
def test_each_copy_of_a_retained_message_names_its_subscription(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-3.3.4-5] (5.0): overlapping subscriptions bring it twice, each with its own identifier."""
    open5().deliver(f"{name}/a", b"kept", qos=1, flags=1)
    client = open5(name, *session)
    client.subscribed((f"{name}/a", 1), parts=prop(SUBSCRIPTION_ID, 5))
    assert client.receive_message(b"kept").all(SUBSCRIPTION_ID) == [5]
    client.subscribed((f"{name}/+", 1), parts=prop(SUBSCRIPTION_ID, 6))
    assert client.receive_message(b"kept").all(SUBSCRIPTION_ID) == [6]
    client.quiet()


def test_identifiers_after_a_return(open5: Opener, name: str, second_gateway: Gateway) -> None:
    """[MQTT-3.3.4-3], [MQTT-3.3.4-4] (5.0): of what came meanwhile, and of what was sent before; a new one replaces."""
    client, publisher = open5(name, STORED), open5()
    client.subscribed((f"{name}/a", 1), parts=prop(SUBSCRIPTION_ID, 5))
    client.subscribed((f"{name}/#", 2), parts=prop(SUBSCRIPTION_ID, 6))
    publisher.deliver(f"{name}/a", b"sent")
    assert sorted(client.message(b"sent").all(SUBSCRIPTION_ID)) == [5, 6]
    client.close()
    publisher.deliver(f"{name}/a", b"meanwhile", qos=2)
    client = open5(name, STORED, clean=False, to=second_gateway)
    for payload in (b"sent", b"meanwhile"):
        one = client.receive_message(payload)
        assert sorted(one.all(SUBSCRIPTION_ID)) == [5, 6]
        assert one.dup == (payload == b"sent")
    client.subscribed((f"{name}/a", 1), parts=prop(SUBSCRIPTION_ID, 7))
    client.subscribed((f"{name}/#", 2))
    for qos in (0, 1, 2):
        publisher.deliver(f"{name}/a", b"new", qos=qos)
        assert client.receive_message(b"new").all(SUBSCRIPTION_ID) == [7]


@pytest.mark.parametrize("mixed", [(1, 1, 1), (2, 2, 2), (1, 2, 1)])
def test_receive_maximum_of_the_gateway(
    nats_server: NatsServer, gateway_factory: GatewayFactory, open5: Opener, name: str, mixed: tuple[int, ...]
) -> None:
    """[MQTT-3.3.4-7] (5.0): as many as CONNACK says may wait, for PUBACK or PUBCOMP; one more is too much."""
    gateway = gateway_factory(nats_server, "--receive-maximum", "3")
    client = open5(name, to=gateway)
    assert client.connack.get(RECEIVE_MAXIMUM) == 3
    for _ in range(20):  # what is acknowledged no longer counts
        for at, qos in enumerate(mixed):
            client.deliver(name, b"x", qos=qos)
            client.send(publish("$JS/API/INFO", b"refused", qos=qos, id=20 + at))
            assert client.answer(PUBACK if qos == 1 else PUBREC, 20 + at).reason == 0x87
    held = [publish(name, b"held", qos=2, id=100 + number) for number in range(3)]
    client.send(b"".join(held))
    for number in range(3):
        client.answer(PUBREC, 100 + number)
    client.send(held[0] + publish(name, b"zero"))  # a repetition, and QoS 0
    client.answer(PUBREC, 100)
    client.send(ack(PUBREL, 101))
    client.answer(PUBCOMP, 101, 0)
    client.deliver(name, b"there is room", qos=1)
    client.send(held[1])
    client.answer(PUBREC, 101)
    client.quiet()
    client.send(publish(name, b"one more", qos=mixed[-1], id=200))
    client.ended(0x93)


def fill(client: Raw5, publisher: Raw5, name: str, count: int, comes: int) -> list[Message]:
    """Publish ``count`` messages, alternating between topics of QoS 1 and 2; what came of them, at least ``comes``."""
    for number in range(count):
        publisher.deliver(f"{name}/{1 + number % 2}", b"%d" % number, qos=1 + number % 2)
    publisher.deliver(f"{name}/0", b"zero", qos=0)  # QoS 0 does not wait
    found: list[Message] = []
    passed = False  # the stored ones come when they come, through a consumer or the shared reader
    while not passed or len(found) < comes:
        one = client.message()
        if one.payload == b"zero":
            passed = True
        else:
            found.append(one)
    return found + client.messages()


@KINDS
@pytest.mark.parametrize("maximum", [1, 2, 3, 50])
def test_receive_maximum_of_the_client(open5: Opener, name: str, session: list[bytes], maximum: int) -> None:
    """[MQTT-3.3.4-9], [MQTT-3.3.4-10], [MQTT-4.9.0-1], [MQTT-4.9.0-2], [MQTT-4.9.0-3] (5.0)

    The send quota begins with the maximum, over all subscriptions; at 0 only PUBLISH above QoS 0 waits.
    """
    client, publisher = open5(name, prop(RECEIVE_MAXIMUM, maximum), *session), open5()
    client.subscribed((f"{name}/0", 0), (f"{name}/1", 1), (f"{name}/2", 2))
    waiting = fill(client, publisher, name, maximum + 20, maximum)
    assert len(waiting) == maximum
    expected = {qos: [b"%d" % number for number in range(maximum + 20) if 1 + number % 2 == qos] for qos in (1, 2)}

    def in_order(one: Message) -> Message:
        assert (one.payload, one.dup) == (expected[one.qos].pop(0), False)
        return one

    waiting = [in_order(one) for one in waiting]
    # Everything else goes on.
    client.send(subscribe((f"{name}/other", 1), id=700) + unsubscribe(f"{name}/other", id=701) + packet(0xC0))
    client.send(publish("x", b"x", qos=1, id=702) + publish("x", b"x", qos=2, id=703) + ack(PUBREL, 704))
    kinds = [client.expect_one_of(SUBACK, UNSUBACK, PINGRESP, PUBACK, PUBREC, PUBCOMP) for _ in range(6)]
    assert len({*kinds}) == 6
    # Each acknowledgement makes room for one; a PUBREC that goes on does not.
    for turn in range(15):
        one = waiting.pop(0)
        if one.qos == 1:
            client.send(ack(PUBACK, one.id, 0x80 if turn % 4 else 0))
        elif turn % 3 == 0:
            client.send(ack(PUBREC, one.id, 0x97))
        else:
            client.send(ack(PUBREC, one.id))
            client.answer(PUBREL, one.id, 0)
            client.quiet()
            client.send(ack(PUBCOMP, one.id))
        waiting.append(in_order(client.message()))
        client.quiet()


def test_receive_maximum_of_a_session_that_is_continued(open5: Opener, name: str, second_gateway: Gateway) -> None:
    """[MQTT-3.3.4-9] (5.0): what is sent again counts, by the new maximum; a PUBREL that is owed is no PUBLISH."""
    client, publisher = open5(name, STORED, prop(RECEIVE_MAXIMUM, 5)), open5()
    client.subscribed((f"{name}/0", 0), (f"{name}/2", 2))
    for number in range(8):
        publisher.deliver(f"{name}/2", b"%d" % number, qos=2)
    sent = [client.message(b"%d" % number) for number in range(5)]
    client.quiet()
    client.send(ack(PUBREC, sent[1].id))
    client.answer(PUBREL, sent[1].id, 0)
    client.close()
    client = open5(name, STORED, prop(RECEIVE_MAXIMUM, 2), clean=False, to=second_gateway)
    client.answer(PUBREL, sent[1].id, 0)
    again = client.messages()
    assert 1 <= len(again) <= 2
    waiting = [sent[0], sent[2], *sent[3:]]
    assert [(one.payload, one.id) for one in again] == [(one.payload, one.id) for one in waiting[: len(again)]]
    client.send(ack(PUBCOMP, sent[1].id))
    again += client.messages()
    assert [(one.payload, one.dup) for one in again] == [(b"0", True), (b"2", True)]
    for payload in (b"3", b"4", b"5", b"6"):
        one = again.pop(0)
        client.send(ack(PUBREC, one.id))
        client.answer(PUBREL, one.id, 0)
        client.quiet()
        client.send(ack(PUBCOMP, one.id))
        again.append(client.message(payload))
        assert again[-1].dup or payload > b"4"  # what the first gateway had not sent, this one cannot tell from it
        client.quiet()
