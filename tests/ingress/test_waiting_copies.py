# SPDX-License-Identifier: Apache-2.0
"""Which of two copies of a message that changes while its topic is subscribed a client gets."""

from __future__ import annotations

from typing import cast

import pytest

from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.ingress.retained import waiting_copies
from mqtt_nats.ingress.retained.waiting_copies import WaitingCopies
from mqtt_nats.messages.ids import MessageIds
from mqtt_nats.messages.message import Message, Stored
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.pubsub.backlog import Gate
from mqtt_nats.pubsub.routing_table import Choice, Filter
from mqtt_streams.retained import RetainedMessage
from tests.sessions.fakes import FakeClient, FakeServices, FakeSide, as_client

KEY, OTHER_KEY = b"\0\1a", b"\0\1b"


def ids(count: int) -> list[bytes]:
    """Ids of one gateway, in order."""
    made = MessageIds(1)
    return [made.next() for _ in range(count)]


def retained(identity: bytes, age_s: float = 0.0) -> RetainedMessage:
    """A retained message with this id."""
    headers = b"NATS/1.0\r\nNmqtt-Id:%b\r\n\r\n" % identity if identity else b"NATS/1.0\r\n\r\n"
    return RetainedMessage("a", 1, b"retained", headers, 9, int((natstime.now() - age_s) * 1e9))


def found(text: str) -> Filter:
    """A filter."""
    return Filter(text, (text.encode(),), cast("NatsConnection", None), True)


class Scene:
    """A session that subscribes to a topic, with a gate and a consumer's source that keep back new messages."""

    def __init__(self) -> None:
        self.client = FakeClient(FakeServices())
        self.side = self.client.durable_side = FakeSide(self.client)
        self.gate = Gate(found("a"), 10_000)
        self.source = SubscriptionState(1, 1)
        self.source.hold(SubscriptionState.REPLAYING)
        self.side.machine.sources.append(self.source)
        self.copies = WaitingCopies(as_client(self.client), "a", "a")
        self.copies.begin_anew(100)

    def core(self, identity: bytes, key: bytes = KEY) -> None:
        """Core NATS brings a message."""
        self.gate.keep_back(Choice(self.gate.found, 1, b"", False), Message(key, b"new", 1), identity)

    def stored(self, sequence: int, identity: bytes, subject: str = "a") -> None:
        """The consumer brings a message."""
        key = b"\0\1" + subject.encode()
        headers = b"NATS/1.0\r\nNmqtt-Id:%b\r\n\r\n" % identity
        body = Stored(subject, key, b"new", 1, 0, headers=headers)
        self.side.machine.arrived(self.source, sequence, 1, b"$JS.ACK.%d" % sequence, body, 1)

    def sent(self, message: RetainedMessage) -> bool:
        """Whether the retained message is sent."""
        return self.copies.replaced_by(message, KEY, [self.gate], self.source)

    @property
    def left(self) -> tuple[list[bytes | int], list[int]]:
        """What waits still: ids in the gate, and stream sequences."""
        return list(self.gate.waiting), [one.sequence for one in self.source.backlog]


def test_old_messages_have_no_copies() -> None:
    copies = Scene().copies
    assert copies.may_have(retained(b"x"))
    assert not copies.may_have(retained(b"x", age_s=120))


@pytest.mark.parametrize("stored", [False, True], ids=["core NATS", "consumer"])
def test_a_new_subscription_gets_the_retained_message_for_its_copy(stored: bool) -> None:
    """Nothing older of the topic comes behind it; other topics, and newer messages, do."""
    scene = Scene()
    one, two, three, other = ids(4)
    for sequence, identity in enumerate((one, two, three), 1):
        if stored:
            scene.stored(sequence, identity)
        else:
            scene.core(identity)
    if stored:
        scene.stored(4, other, "b")
    else:
        scene.core(other, OTHER_KEY)
    assert scene.sent(retained(two))
    assert scene.left == (([], [3, 4]) if stored else ([three, other], []))
    if stored:
        assert scene.side.fake_ports.calls == [("ack", b"$JS.ACK.1"), ("ack", b"$JS.ACK.2")]


@pytest.mark.parametrize("newer", [True, False], ids=["newer ones wait", "nothing waits"])
def test_a_message_whose_copy_came_before_the_subscription(newer: bool) -> None:
    scene = Scene()
    one, two = ids(2)
    if newer:
        scene.core(two)
    assert scene.sent(retained(one))
    assert scene.left == ([two] * newer, [])


def test_a_message_behind_older_ones_comes_as_a_new_message() -> None:
    """Its copy does not wait yet, and comes behind them."""
    scene = Scene()
    one, two = ids(2)
    scene.stored(1, one)
    assert not scene.sent(retained(two))
    assert scene.left == ([], [1])


@pytest.mark.parametrize("why", ["after SUBACK", "another subscription"])
def test_a_present_subscription_loses_nothing(why: str) -> None:
    scene = Scene()
    one, two = ids(2)
    scene.core(one)
    scene.core(two)
    if why == "after SUBACK":
        scene.copies.pass_page()
    else:
        scene.client.filters[found("*")] = 1
    assert not scene.sent(retained(two))
    assert scene.left == ([one, two], [])


@pytest.mark.parametrize("first", ["older", "copy", "newer"])
async def test_a_copy_that_comes_too_late(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream tells what has yet to come: the copy, with or without older messages before it, or newer ones only."""
    monkeypatch.setattr(waiting_copies, "MOST_S", 0.01)
    scene = Scene()
    one, two, three = ids(3)
    identity = {"older": one, "copy": two, "newer": three}[first]
    js = scene.client.services.fake_inbox
    js.put("$MQTT.msgs.a", headers=b"NATS/1.0\r\nNmqtt-Id:%b\r\n\r\n" % identity)
    await scene.copies.come([retained(two)], [scene.gate], scene.source, 9)
    assert scene.sent(retained(two)) == (first == "newer")


def test_a_message_without_an_id() -> None:
    """Of a NATS client."""
    scene = Scene()
    scene.core(ids(1)[0])
    assert scene.sent(retained(b""))
