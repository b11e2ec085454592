# SPDX-License-Identifier: Apache-2.0
"""Consumers of ended subscriptions: what they still bring to the client, and that they are removed."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import nats
import orjson

from mqtt_nats.delivery.draining import drain, inherited, still_draining, was_sent
from mqtt_nats.messages.message import Stored
from mqtt_nats.protocol.durable_sender import packet_id
from mqtt_nats.protocol.inflight import SubscriptionState
from mqtt_nats.protocol.overlap import Overlap
from mqtt_nats.sessions.consumer_binding import ConsumerBinding
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.hashing import name_hash
from mqtt_streams.sessions import V5, SessionRecord
from tests.delivery.fakes import FakeDeliveryServices, FakeReceiver
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually
from tests.protocol.recorder import PUBACK, session
from tests.sessions.fakes import FakeTasks


class Closing(FakeTasks):
    """Runs nothing."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        work.close()
        return asyncio.get_running_loop().create_task(asyncio.sleep(0), name=name)


class Services(FakeDeliveryServices):
    """Services whose tasks do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = Closing()


class Session:
    """One that has subscriptions on the subjects ``t`` and ``t.>``, as a filter that ends in ``#`` has them."""

    def __init__(self) -> None:
        self.overlap: Overlap[ConsumerBinding] = Overlap()
        self.machine, _ = session()
        self.bindings: dict[str, ConsumerBinding] = {}
        self.record = SessionRecord("me", v5=V5())
        self.client = FakeReceiver(Services(), "me")
        self.client.record = self.record

    def settle(self) -> None:
        pass

    def subscription(self, subject: str, start: int, end: int | None = None) -> ConsumerBinding:
        source = SubscriptionState(1, start, 100, end)
        consumer = ConsumerRef(f"from {start}", "", f"$MQTT.msgs.{subject}", 100)
        binding = self.bindings[consumer.durable_name] = ConsumerBinding(str(start), consumer, source)
        if not end:
            self.overlap.add(subject, binding, source)
            self.record.cons[str(start)] = consumer
            self.machine.sources.append(source)
        return binding


def message(sender: str = "somebody") -> Stored:
    return Stored("t", b"\0\1t", b"", 1, 1, False, b"", b"NATS/1.0\r\nNmqtt-Client:%b\r\n\r\n" % sender.encode())


def test_what_an_ended_subscription_brings_for_others() -> None:
    """What they had left to it, as far as they have left it; not what was never its own."""
    side: Any = Session()
    before, after = side.subscription("t", 5), side.subscription("t", 9)
    ended = side.subscription("t", 7, end=20)
    still_draining(side, ended, [])
    assert ended.handover_limits == {after.source: 20}
    assert side.machine.ended == 20
    assert after.source.held
    assert not before.source.held
    assert [inherited(side, ended, message(), sequence) for sequence in (8, 15, 21)] == [0, 0, 0]
    assert [was_sent(side, ended, message(), sequence) for sequence in (8, 15)] == [0, 0]
    side.overlap.remove(before)
    assert [inherited(side, ended, message(), sequence) for sequence in (8, 15, 21)] == [0, 1, 0]
    assert [was_sent(side, ended, message(), sequence) for sequence in (8, 15)] == [1, 1]


def test_own_messages_that_the_first_one_does_not_take() -> None:
    """With No Local it had not had them, and they were left to the ended one."""
    side: Any = Session()
    before, after = side.subscription("t", 5), side.subscription("t", 9)
    before.source.no_local = True
    side.client.options = 1
    ended = side.subscription("t", 7, end=20)
    still_draining(side, ended, [])
    assert [inherited(side, ended, message(sender), 15) for sender in ("me", "somebody")] == [1, 0]
    assert [was_sent(side, ended, message(sender), 15) for sender in ("me", "somebody")] == [1, 0]
    assert after.source.held
    before.source.no_local = False  # it was subscribed again: what it had not had then it has not now
    side.client.options = 0
    assert inherited(side, ended, message("me"), 15) == 1
    assert was_sent(side, ended, message("me"), 15) == 1
    ended.source.no_local = True
    assert inherited(side, ended, message("me"), 15) == 0
    assert was_sent(side, ended, message("me"), 15) == 0


async def test_one_more_ends_while_an_ended_one_has_something_left() -> None:
    """The third has left a message to the second since, which had left it to the first: so it is from the first."""
    side: Any = Session()
    first, second, third = (side.subscription("t", start) for start in (1, 5, 9))
    first.source.last, second.source.last, third.source.last = 20, 30, 10
    drain(side, "1")
    assert not first.drained
    assert [inherited(side, first, message(), sequence) for sequence in (8, 25, 31)] == [1, 1, 0]
    third.source.last = 28
    drain(side, "5")
    assert inherited(side, first, message(), 25) == 1
    assert inherited(side, first, message(), 29) == 0
    assert side.machine.ended == 30


def test_what_is_held_back_of_an_ended_subscription_keeps_its_consumer() -> None:
    """It stands behind another ended one, and nobody else would bring it."""
    one = SubscriptionState(1, 1, 100)
    machine, _ = session(one)
    machine.drain(one)
    one.held += SubscriptionState.BEHIND
    machine.arrived(one, 5, 1, b"held", message(), 1)
    assert machine.holds(one)
    machine.drop_hold(one, SubscriptionState.BEHIND)
    assert machine.holds(one)
    machine.acknowledged(PUBACK, [packet_id(5)])
    assert not machine.holds(one)


def test_where_an_ended_subscription_began_is_not_known() -> None:
    """It may have had everything."""
    side: Any = Session()
    one = side.subscription("t", 5)
    ended = side.subscription("t", 0, end=20)
    still_draining(side, ended, [])
    assert inherited(side, ended, message(), 8) == 1
    assert was_sent(side, ended, message(), 8) == 1
    assert one.source.held


async def test_a_subscription_that_has_brought_nothing(gateway: Gateway, nats_server: NatsServer) -> None:
    """Another one, which matches the same, had brought all there was when it began."""
    control = await nats.connect(nats_server.url)

    async def consumers() -> int:
        answer = await control.request("$JS.API.CONSUMER.NAMES.$MQTT_msgs", timeout=10)
        names = orjson.loads(answer.data)["consumers"] or []
        return sum(name.startswith(f"{name_hash('drained')}_") for name in names)

    async def only_one() -> bool:
        return await consumers() == 1

    try:
        async with (
            await RawClient.connect(gateway.port, "drained", clean=False) as client,
            await RawClient.connect(gateway.port, "publisher") as publisher,
        ):
            await client.subscribe("drained/topic", qos=1)
            for number in range(3):
                await publisher.deliver("drained/topic", b"%d" % number, 1)
                await client.receive("drained/topic", b"%d" % number)
            await client.subscribe("drained/#", qos=1)
            assert await consumers() == 3
            await client.unsubscribe("drained/#")
            await aeventually(only_one, 30, what="one consumer")
    finally:
        await control.close()
