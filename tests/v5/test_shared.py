# SPDX-License-Identifier: Apache-2.0
"""Shared subscriptions (section 4.8.2)."""

import pytest

from tests.harness.gateway import Gateway
from tests.harness.raw5 import (
    NO_LOCAL,
    PUBACK,
    PUBREC,
    PUBREL,
    RECEIVE_MAXIMUM,
    SESSION_EXPIRY,
    SUBSCRIPTION_ID,
    UNSUBACK,
    Message,
    Raw5,
    ack,
    prop,
    subscribe,
    unsubscribe,
)
from tests.v5.conftest import Opener

STORED = prop(SESSION_EXPIRY, 600)
KINDS = pytest.mark.parametrize("session", [[], [STORED]], ids=["regular", "durable"])

ILLEGAL = {
    "empty name [MQTT-4.8.2-1] (5.0)": "$share//NAME",
    "empty name and filter [MQTT-4.8.2-1] (5.0)": "$share//",
    "nothing [MQTT-4.8.2-1] (5.0)": "$share/",
    "no filter [MQTT-4.8.2-2] (5.0)": "$share/NAME",
    "empty filter [MQTT-4.8.2-2] (5.0)": "$share/NAME/",
    "plus [MQTT-4.8.2-2] (5.0)": "$share/+/NAME",
    "plus in the name [MQTT-4.8.2-2] (5.0)": "$share/a+b/NAME",
    "hash [MQTT-4.8.2-2] (5.0)": "$share/#",
    "hash in the name [MQTT-4.8.2-2] (5.0)": "$share/a#/NAME",
    "filter that is none": "$share/g/NAME/#/a",
}


@KINDS
@pytest.mark.parametrize("topic_filter", ILLEGAL.values(), ids=ILLEGAL.keys())
def test_illegal_filters(open5: Opener, name: str, session: list[bytes], topic_filter: str) -> None:
    """[MQTT-4.13.1-1] (5.0): the packet is malformed, and nothing of it is done."""
    wrong = topic_filter.replace("NAME", name)
    publisher = open5()
    for data in (subscribe((f"$share/g/{name}/fine", 1), (wrong, 1)), unsubscribe(wrong)):
        client = open5(name, *session)
        client.send(data)
        client.ended(0x81)
    client = open5(name, *session)
    publisher.deliver(name, b"x")
    publisher.deliver(f"{name}/fine", b"not fine")
    client.quiet()


@KINDS
def test_names(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-4.8.2-1], [MQTT-4.8.2-2] (5.0): any other characters make a name; what begins otherwise is not shared."""
    publisher = open5()
    for at, group in enumerate(("g", "é", "a b", "$", "*", ">", ".", "$share", "\U0001f321", "x" * 200)):
        members = [open5(f"{name}-{at}-{number}", *session) for number in range(2)]
        for member in members:
            assert member.subscribed((f"$share/{group}/{name}/{at}/+", 1)) == (1,)
        for number in range(6):
            publisher.deliver(f"{name}/{at}/a", b"%d" % number)
        found: list[Message] = []
        while len(found) < 6:
            for member in members:
                for one in member.messages():
                    member.send(ack(PUBACK, one.id))
                    found.append(one)
        assert sorted(one.payload for one in found) == [b"%d" % number for number in range(6)]
        for member in members:
            member.quiet()
    for plain in (f"$Share/g/{name}", f"share/g/{name}", f"/$share/g/{name}"):
        members = [open5(f"{name}-{number}", *session) for number in range(2)]
        for member in members:
            assert member.subscribed((plain, 1)) == (1,)
        publisher.deliver(plain, b"both")
        for member in members:
            member.receive_message(b"both")


def test_no_local(open5: Opener, name: str) -> None:
    """[MQTT-3.8.3-4] (5.0)"""
    client = open5()
    client.send(subscribe((name, 0), (f"$share/g/{name}", NO_LOCAL)))
    client.ended(0x82)


@KINDS
def test_granted_qos(open5: Opener, name: str, session: list[bytes]) -> None:
    """[MQTT-4.8.2-3] (5.0): each member's own; replacing the subscription changes it and adds none."""
    publisher = open5()
    for granted in (2, 0, 1, 2):
        client = open5(f"{name}-{granted}", *session)
        for _ in range(2):
            assert client.subscribed((f"$share/g{granted}/{name}", granted)) == (granted,)
        for qos in (0, 1, 2):
            publisher.deliver(name, b"%d" % qos, qos=qos)
        found = {one.payload: one.qos for one in (client.receive_message() for _ in range(3))}
        assert found == {b"%d" % qos: min(qos, granted) for qos in (0, 1, 2)}
        client.quiet()
        client.send(unsubscribe(f"$share/g{granted}/{name}"))
        client.answer(UNSUBACK, 1, 0)


@KINDS
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_one_copy_for_each_kind_of_subscription(
    open5: Opener, name: str, session: list[bytes], elsewhere: bool, second_gateway: Gateway, gateway: Gateway
) -> None:
    """[MQTT-3.3.4-5] (5.0): a shared subscription brings a copy of its own, with its own identifier."""
    client = open5(name, *session)
    client.subscribed((f"{name}/+", 1), parts=prop(SUBSCRIPTION_ID, 5))
    client.subscribed((f"{name}/a", 1), parts=prop(SUBSCRIPTION_ID, 6))
    client.subscribed((f"$share/g/{name}/a", 1), parts=prop(SUBSCRIPTION_ID, 7))
    client.subscribed((f"$share/h/{name}/+", 1), parts=prop(SUBSCRIPTION_ID, 8))
    publisher = open5(to=second_gateway if elsewhere else gateway)
    for qos in (0, 1, 2):
        publisher.deliver(f"{name}/a", b"x", qos=qos)
        found = [client.receive_message(b"x") for _ in range(3)]
        assert sorted(sorted(one.all(SUBSCRIPTION_ID)) for one in found) == [[5, 6], [7], [8]]
        client.quiet()


@KINDS
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("reason", [0x80, 0x97])
def test_what_a_member_refuses(
    open5: Opener, name: str, session: list[bytes], qos: int, reason: int, second_gateway: Gateway
) -> None:
    """[MQTT-4.8.2-6] (5.0): nobody else gets it, neither at once nor when the member has gone."""
    refuser = open5(f"{name}-refuser", *session)
    other = open5(f"{name}-other", *session, to=second_gateway)
    publisher = open5()
    assert refuser.subscribed((f"$share/g/{name}", qos)) == (qos,)
    for number in range(5):
        publisher.deliver(name, b"refused %d" % number, qos=qos)
    found = [refuser.message() for _ in range(5)]
    assert other.subscribed((f"$share/g/{name}", qos)) == (qos,)
    for one in found:
        refuser.send(ack(PUBACK if qos == 1 else PUBREC, one.id, reason))
    refuser.quiet()
    refuser.send(unsubscribe(f"$share/g/{name}"))
    refuser.answer(UNSUBACK, 1, 0)
    refuser.close()
    for number in range(3):
        publisher.deliver(name, b"taken %d" % number, qos=qos)
        other.receive_message(b"taken %d" % number)
    other.quiet()


def sent_at_qos_2(open5: Opener, name: str) -> tuple[Raw5, list[Message], Raw5]:
    """A durable member with three messages, the first of them at PUBREL; another member; one message is left."""
    owner = open5(f"{name}-owner", STORED, prop(RECEIVE_MAXIMUM, 3))
    assert owner.subscribed((f"$share/g/{name}", 2)) == (2,)
    publisher = open5()
    for number in range(3):
        publisher.deliver(name, b"%d" % number, qos=2)
    sent = [owner.message(b"%d" % number) for number in range(3)]
    owner.send(ack(PUBREC, sent[0].id))
    owner.answer(PUBREL, sent[0].id, 0)
    other = open5(f"{name}-other", STORED)
    assert other.subscribed((f"$share/g/{name}", 2)) == (2,)
    owner.close()
    publisher.deliver(name, b"left", qos=2)
    other.receive_message(b"left")
    other.quiet()
    return owner, sent, other


def test_qos_2_is_completed_to_its_client(open5: Opener, name: str, second_gateway: Gateway) -> None:
    """[MQTT-4.8.2-4] (5.0): when it returns, under the same identifiers; the others get nothing of it."""
    _, sent, other = sent_at_qos_2(open5, name)
    owner = open5(f"{name}-owner", STORED, clean=False, to=second_gateway)
    assert owner.present
    owner.answer(PUBREL, sent[0].id, 0)
    owner.send(ack(7, sent[0].id))
    again = owner.messages()
    assert [(one.payload, one.id, one.qos, one.dup) for one in again] == [
        (b"1", sent[1].id, 2, True),
        (b"2", sent[2].id, 2, True),
    ]
    for one in again:
        owner.send(ack(PUBREC, one.id))
        owner.answer(PUBREL, one.id, 0)
        owner.send(ack(7, one.id))
    owner.quiet()
    other.quiet()


@pytest.mark.parametrize("how", ["clean start", "expiry 0"])
def test_qos_2_of_a_session_that_ends(open5: Opener, name: str, how: str) -> None:
    """[MQTT-4.8.2-5] (5.0): what it was sent goes to nobody else."""
    _, _, other = sent_at_qos_2(open5, name)
    if how == "clean start":
        open5(f"{name}-owner", STORED).quiet()
    else:
        open5(f"{name}-owner", clean=False).close()
    publisher = open5()
    for number in range(3):
        publisher.deliver(name, b"later %d" % number, qos=2)
        other.receive_message(b"later %d" % number)
    other.quiet()
