# SPDX-License-Identifier: Apache-2.0
"""MQTT 5.0 clients of a gateway beside 3.1.1 clients of nats-server's listener, which refuses 5.0."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.raw5 import (
    CONTENT_TYPE,
    CORRELATION,
    EXPIRY,
    FORMAT,
    NO_LOCAL,
    RESPONSE_TOPIC,
    SESSION_EXPIRY,
    SUBSCRIPTION_ID,
    USER,
    Raw5,
    connect,
    prop,
)
from tests.interop.support import Message, Pahos, Sides, unique

PROPERTIES: list[tuple[int, Any]] = [
    (FORMAT, 1),
    (CONTENT_TYPE, "text/plain"),
    (RESPONSE_TOPIC, "answers/a b"),
    (CORRELATION, b"\x00\xff"),
    (USER, ("unit", "°C")),
    (USER, ("unit", "K")),
]
PARTS = tuple(prop(*one) for one in PROPERTIES)
KEPT = prop(SESSION_EXPIRY, 600)


def test_nats_server_refuses_5_0(sides: Sides) -> None:
    """Return code 1 in the form of 3.1.1; the gateway accepts the same bytes."""
    with Raw5(sides["nats-server"]) as client:
        client.send(connect("new"))
        assert client.expect(2).body == b"\x00\x01"
    Raw5.open(sides["gateway"], "new").close()


def test_messages_both_ways(sides: Sides, paho: Pahos) -> None:
    """Those of 5.0 arrive without their properties, those of nats-server's clients have none."""
    topic = unique("both/")
    old = paho("nats-server", unique("old"))
    old.subscribe(topic, 2)
    with Raw5.open(sides["gateway"], unique("new")) as new, Raw5.open(sides["gateway"], unique("pub")) as publisher:
        new.subscribed((topic, 2))
        for qos in (0, 1, 2):
            publisher.deliver(topic, b"%d" % qos, *PARTS, prop(EXPIRY, 60), qos=qos)
            old.expect(Message(topic, b"%d" % qos, qos, False))
            received = new.receive_message(b"%d" % qos)
            assert [one for one in received.properties if one[0] != EXPIRY] == PROPERTIES
            old.publish(topic, b"old", qos)
            old.expect(Message(topic, b"old", qos, False))
            received = new.receive_message(b"old")
            assert (received.qos, received.properties) == (qos, [])


def test_retained_both_ways(sides: Sides, paho: Pahos) -> None:
    """The properties of a retained message are there for 5.0 clients, whoever reads it in between."""
    topic = unique("retained/")
    with Raw5.open(sides["gateway"], unique("pub")) as publisher:
        publisher.deliver(topic, b"kept", *PARTS, flags=1)
    old = paho("nats-server", unique("old"))
    old.subscribe(topic, 1)
    old.expect(Message(topic, b"kept", 1, True))
    with Raw5.open(sides["gateway"], unique("new")) as new:
        new.subscribed((topic, 1))
        assert new.receive_message(b"kept").properties == PROPERTIES
        old.publish(topic, b"replaced", 1, retain=True)
        old.expect(Message(topic, b"replaced", 1, False))
        new.receive_message(b"replaced")
    with Raw5.open(sides["gateway"], unique("new")) as new:
        new.subscribed((topic, 1))
        assert new.receive_message(b"replaced").properties == []
    old.publish(topic, b"", 1, retain=True)


@pytest.mark.parametrize("qos", [1, 2])
def test_a_session_goes_there_and_comes_back(
    sides: Sides, paho: Pahos, let_go: Callable[[str], None], settle: Callable[[str], None], qos: int
) -> None:
    """Nothing queued is lost; what 3.1.1 cannot say of a subscription is, as docs/compatibility.md has it."""
    topic, client_id = unique("moving/"), unique("mover")
    publisher = Raw5.open(sides["gateway"], unique("pub"))
    new = Raw5.open(sides["gateway"], client_id, KEPT)
    assert new.subscribed((topic, qos | NO_LOCAL), parts=prop(SUBSCRIPTION_ID, 7)) == (qos,)
    new.deliver(topic, b"not for me", qos=qos)
    publisher.deliver(topic, b"first", *PARTS, qos=qos)
    first = new.receive_message(b"first")
    assert first.get(SUBSCRIPTION_ID) == 7
    assert [one for one in first.properties if one[0] != SUBSCRIPTION_ID] == PROPERTIES
    settle(client_id)
    new.close()
    let_go(client_id)
    publisher.deliver(topic, b"second", *PARTS, qos=qos)

    old = paho("nats-server", client_id, clean=False)
    assert old.session_present
    old.expect(Message(topic, b"second", qos, False))
    settle(client_id)
    old.close()
    let_go(client_id)
    publisher.deliver(topic, b"third", *PARTS, qos=qos)

    back = Raw5.open(sides["gateway"], client_id, KEPT, clean=False)
    assert back.present
    assert back.receive_message(b"third").properties == PROPERTIES
    back.close()
    publisher.close()
