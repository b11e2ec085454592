# SPDX-License-Identifier: Apache-2.0
"""Consumers of ended subscriptions: what they still bring to the client, and that they are removed."""

from types import SimpleNamespace
from typing import Any

import nats
import orjson

from mqtt_nats.broker.attachment import Attachment
from mqtt_nats.broker.draining import inherited, still_draining, was_sent
from mqtt_nats.session.delivery import Source
from mqtt_nats.session.overlap import Overlap
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.hashing import name_hash
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually


class Session:
    """One that has subscriptions on the subjects ``t`` and ``t.>``, as a filter that ends in ``#`` has them."""

    def __init__(self) -> None:
        self.overlap: Overlap[Attachment] = Overlap()
        self.machine = SimpleNamespace(ended=0)
        self.client = SimpleNamespace(no_local=False, options=0, client_id="me")

    def subscription(self, subject: str, start: int, end: int = 0) -> Attachment:
        source = Source(1, start, 100, end)
        attachment = Attachment("" if end else subject, ConsumerRef("name", "", f"$MQTT.msgs.{subject}", 100), source)
        if not end:
            self.overlap.add(subject, attachment, source)
        return attachment


def message(sender: str = "somebody") -> Any:
    return SimpleNamespace(subject="t", sender=sender)


def test_what_an_ended_subscription_brings_for_others() -> None:
    """What they had left to it, as far as they have left it; not what was never its own."""
    side: Any = Session()
    before, after = side.subscription("t", 5), side.subscription("t", 9)
    ended = side.subscription("t", 7, end=20)
    still_draining(side, ended)
    assert ended.heirs == {after.source: 20}
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
    still_draining(side, ended)
    assert [inherited(side, ended, message(sender), 15) for sender in ("me", "somebody")] == [1, 0]
    assert [was_sent(side, ended, message(sender), 15) for sender in ("me", "somebody")] == [1, 0]
    assert after.source.held


def test_where_an_ended_subscription_began_is_not_known() -> None:
    """Its record is of an older gateway: it may have had everything."""
    side: Any = Session()
    one = side.subscription("t", 5)
    ended = side.subscription("t", 0, end=20)
    still_draining(side, ended)
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
