# SPDX-License-Identifier: Apache-2.0
"""Hooks about messages: what they change, what they drop, what they are told, and that order is kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from mqtt_nats.codec import Ack, Connack, Connect, Publish, ReasonCode, Subscription, Will
from mqtt_nats.hooks import (
    MESSAGE_ACKED,
    MESSAGE_DELIVERED,
    MESSAGE_DROPPED,
    MESSAGE_PUBLISH,
    Acked,
    Continue,
    Delivered,
    Drop,
    Dropped,
    Published,
    Publishing,
    Stop,
)
from tests.harness.inprocess import InProcess
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient, key_of, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.hooks.conftest import Add

pytestmark = pytest.mark.anyio

Value = Published | Drop
Result = Continue[Value] | Stop[Value] | None

SPECIFIC = ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR


def shout(event: Publishing, message: Value) -> Result:
    """Another topic, payload and property for what is below ``in/``."""
    if isinstance(message, Drop) or not message.topic.startswith("in/"):
        return None
    return Continue(
        replace(
            message,
            topic="out/" + message.topic[3:],
            payload=message.payload.upper(),
            properties={**message.properties, "content_type": "loud"},
        )
    )


async def shout_later(event: Publishing, message: Value) -> Result:
    await asyncio.sleep(0)
    return shout(event, message)


@pytest.mark.parametrize("callback", [shout, shout_later])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("version", [4, 5])
async def test_topic_payload_and_properties(inside: InProcess, add: Add, callback: Any, qos: int, version: int) -> None:
    add(MESSAGE_PUBLISH, callback)
    kind = RawClient if version == 4 else RawClient5
    async with (
        await RawClient5.connect5(inside.port, "reader") as reader,
        await kind.connect(inside.port, "writer")
        if version == 4
        else await RawClient5.connect5(inside.port, "writer") as writer,
    ):
        await reader.subscribe("in/#", "out/#", "other", qos=2)
        await writer.deliver("in/a", b"hello", qos)
        await writer.deliver("other", b"hello", qos)
        found = await reader.receive("out/a", b"HELLO", qos=qos)
        assert found.properties == {"content_type": "loud"}
        assert (await reader.receive("other", b"hello", qos=qos)).properties is None
        await reader.quiet()


async def test_a_topic_alias_stands_for_what_the_client_has_published(inside: InProcess, add: Add) -> None:
    seen: list[str] = []

    def note(event: Publishing, message: Value) -> Result:
        assert isinstance(message, Published)
        assert "topic_alias" not in message.properties
        seen.append(message.topic)
        return shout(event, message)

    add(MESSAGE_PUBLISH, note)
    async with await RawClient5.connect5(inside.port, "reader") as reader:
        await reader.subscribe("out/#", "plain")
        reader.publish5("in/a", b"1", topic_alias=1)
        reader.publish5("plain", b"2", topic_alias=2)
        reader.publish5("", b"3", topic_alias=1)
        reader.publish5("", b"4", 1, topic_alias=2, packet_id=9)
        await reader.message("out/a", b"1")
        await reader.message("plain", b"2")
        await reader.message("out/a", b"3")
        await reader.message("plain", b"4")
        await reader.expect_ack(PUBACK, 9)
    assert seen == ["in/a", "plain", "in/a", "plain"]


async def test_retain_is_changed(inside: InProcess, add: Add) -> None:
    def change(event: Publishing, message: Value) -> Result:
        assert isinstance(message, Published)
        return Continue(replace(message, retain=not message.retain))

    add(MESSAGE_PUBLISH, change)
    async with await RawClient.connect(inside.port, "writer") as writer:
        await writer.deliver("r/1", b"kept", 1)
        await writer.deliver("r/2", b"not kept", 1, retain=True)
        await writer.subscribe("r/#")
        await writer.message("r/1", b"kept", retain=True)
        await writer.quiet()
        await writer.unsubscribe("r/#")
        await writer.deliver("r/1", b"", 1)


@pytest.mark.parametrize(("version", "retain"), [(4, False), (5, True)])
@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 2])
async def test_qos_is_changed_and_the_publisher_is_answered_as_it_has_published(
    inside: InProcess, add: Add, version: int, before: int, after: int, retain: bool
) -> None:
    topic = f"q/{version}{before}{after}{retain}"

    def change(event: Publishing, message: Value) -> Result:
        assert isinstance(message, Published)
        return Continue(replace(message, qos=after)) if message.topic == topic else None

    add(MESSAGE_PUBLISH, change)
    async with (
        await RawClient5.connect5(inside.port, "reader") as reader,
        await RawClient5.connect5(inside.port, "keeper", session_expiry_interval=100) as keeper,
        await RawClient.connect(inside.port, "writer")
        if version == 4
        else await RawClient5.connect5(inside.port, "writer") as writer,
    ):
        for one in (reader, keeper):
            await one.subscribe(topic, qos=2)
        await writer.deliver(topic, b"x", before, retain=retain)
        await writer.deliver(topic, b"y", before, retain=retain)
        for one in (reader, keeper):
            await one.receive(topic, b"x", qos=after)
            await one.receive(topic, b"y", qos=after)
            await one.quiet()
        async with await RawClient.connect(inside.port, "later") as later:
            await later.subscribe(topic, qos=2)
            if retain:
                await later.receive(topic, b"y", qos=after)
            await later.quiet()
        await keeper.disconnect5(session_expiry_interval=0)
        if retain:
            await writer.deliver(topic, b"", before, retain=True)


@pytest.mark.parametrize("reason", [0, 0x80, 0x87, 0x97])
@pytest.mark.parametrize("later", [False, True])
async def test_messages_are_dropped_with_a_reason(inside: InProcess, add: Add, reason: int, later: bool) -> None:
    dropped: list[Dropped] = []

    def drop(event: Publishing, message: Value) -> Result:
        assert isinstance(message, Published)
        return Stop(Drop(ReasonCode(reason), "not here")) if message.topic == "bad" else None

    async def drop_later(event: Publishing, message: Value) -> Result:
        return drop(event, message)

    add(MESSAGE_PUBLISH, drop_later if later else drop)
    add(MESSAGE_DROPPED, dropped.append)
    async with (
        await RawClient.connect(inside.port, "old") as old,
        await RawClient5.connect5(inside.port, "new", receive_maximum=10) as new,
    ):
        await old.subscribe("bad", "good", qos=2)
        for _ in range(3):
            for qos in (0, 1, 2):
                await old.deliver("bad", b"", qos)
        for number in range(1100):  # more than the receive maximum of the gateway
            if number % 100:
                new.publish5("bad", b"", 1, packet_id=7)
                await new.expect_refusal(PUBACK, 7, reason)
                continue
            new.publish5("bad", b"", 2, packet_id=8)
            await new.expect_refusal(PUBREC, 8, reason)
            if not reason:
                new.ack(PUBREL, 8)
                await new.expect_ack(PUBCOMP, 8)
        await new.deliver("good", b"x", 2)
        await old.receive("good", b"x")
        await old.quiet()
    assert {(one.topic, one.reason) for one in dropped} == {("bad", "hook")}
    assert len(dropped) == 9 + 1100


async def test_a_hook_that_fails_lets_no_message_pass(inside: InProcess, add: Add) -> None:
    """A 5.0 client is told; one of 3.1.1 is cut off before it believes that its message has arrived."""

    def broken(event: Publishing, message: Value) -> Any:
        assert isinstance(message, Published)
        if message.topic == "bad":
            raise RuntimeError
        return None

    dropped: list[Dropped] = []
    add(MESSAGE_DROPPED, dropped.append)
    entry = add(MESSAGE_PUBLISH, broken)
    async with (
        await RawClient.connect(inside.port, "old") as old,
        await RawClient5.connect5(inside.port, "new") as new,
    ):
        await new.subscribe("#", qos=2)
        old.publish("bad", b"", 0)
        await old.quiet()
        assert [(one.client.client_id, one.topic, one.qos, one.reason) for one in dropped] == [
            ("old", "bad", 0, "hook")
        ]
        old.publish("bad", b"", 1)
        await old.expect_closed()
        for qos, kind in ((1, PUBACK), (2, PUBREC)):
            new.publish5("bad", b"", qos, packet_id=9)
            await new.expect_refusal(kind, 9, SPECIFIC)
        await new.deliver("$other", b"", 2)
        await new.quiet()
    assert entry.failures == 4


async def test_a_hook_that_takes_too_long(inside: InProcess, add: Add) -> None:
    async def slow(event: Publishing, message: Value) -> Any:
        await asyncio.sleep(100)

    add(MESSAGE_PUBLISH, slow, timeout=0.01)
    async with await RawClient5.connect5(inside.port, "new") as new:
        new.publish5("a", b"", 1, packet_id=9)
        await new.expect_refusal(PUBACK, 9, SPECIFIC)


@pytest.mark.parametrize("invalid", ["", "a/+", "a/#", "$MQTT/x", "a\0b", "x" * 65536])
async def test_a_topic_that_cannot_be(inside: InProcess, add: Add, invalid: str) -> None:
    def change(event: Publishing, message: Value) -> Result:
        assert isinstance(message, Published)
        return Continue(replace(message, topic=invalid)) if message.topic == "in" else None

    add(MESSAGE_PUBLISH, change)
    async with (
        await RawClient5.connect5(inside.port, "other") as other,
        await RawClient5.connect5(inside.port, "new") as new,
    ):
        new.publish5("in", b"", 1, packet_id=9)
        packet = await new.packet()
        assert getattr(packet, "reason", 0) >= 0x80, packet
        await other.quiet()


async def test_order_is_kept_while_async_hooks_wait(inside: InProcess, add: Add) -> None:
    """Slower for some messages than for others, over all QoS, with what is not a publish in between."""
    count = 0

    async def uneven(event: Publishing, message: Value) -> Result:
        nonlocal count
        count += 1
        await asyncio.sleep(0.01 if count % 5 == 0 else 0)
        return None

    add(MESSAGE_PUBLISH, uneven)
    async with (
        await RawClient.connect(inside.port, "reader") as reader,
        await RawClient.connect(inside.port, "writer") as writer,
    ):
        await reader.subscribe("o", qos=1)
        bodies = [b"%d" % number for number in range(120)]
        for number, body in enumerate(bodies):
            writer.publish("o", body, number // 3 % 2)  # runs of QoS 0 among those of QoS 1
        for body in bodies:
            await reader.receive("o", body)
        await reader.quiet()
    assert count == 120


async def test_what_is_sent_before_a_connection_ends_is_published(inside: InProcess, add: Add) -> None:
    """While a hook has the first, the client has sent the others, DISCONNECT, and is gone."""
    go = asyncio.Event()
    begun: list[int] = []

    async def wait(event: Publishing, message: Value) -> Result:
        if not event.will:
            begun.append(1)
            await go.wait()
        return None

    add(MESSAGE_PUBLISH, wait)
    async with await RawClient.connect(inside.port, "reader") as reader:
        await reader.subscribe("last/#")
        async with await RawClient.connect(inside.port, "writer", will=Will("last/will", b"", 0, False)) as writer:
            for number in range(10):
                writer.publish("last/x", b"%d" % number)
            writer.write(b"\xe0\0")
            await writer._writer.drain()
            await aeventually(lambda: begun)
        inside.call(go.set)
        for number in range(10):
            await reader.message("last/x", b"%d" % number)
        await reader.quiet()  # no will: it has left in good order
    await aeventually(lambda: not inside.call(lambda: inside.account.registry.connections), 30.0)


async def test_what_comes_with_connect_is_looked_at(inside: InProcess, add: Add) -> None:
    add(MESSAGE_PUBLISH, shout)
    async with await RawClient.connect(inside.port, "reader") as reader, await RawClient.open(inside.port) as early:
        await reader.subscribe("in/#", "out/#")
        early.send(Connect(4, "early", True, 0), Publish(1, False, False, key_of("in/e"), 3, b"x"))
        await early.expect(Connack, code=0)
        await early.expect_ack(PUBACK, 3)
        await reader.message("out/e", b"X")
        await reader.quiet()


async def test_a_will_is_looked_at_when_its_client_connects(inside: InProcess, add: Add) -> None:
    events: list[Publishing] = []

    def look(event: Publishing, message: Value) -> Result:
        assert isinstance(message, Published)
        events.append(event)
        if message.topic == "none":
            return Stop(Drop())
        if message.topic == "refused":
            return Stop(Drop(ReasonCode.NOT_AUTHORIZED))
        return shout(event, message)

    add(MESSAGE_PUBLISH, look)
    async with await RawClient.connect(inside.port, "reader") as reader:
        await reader.subscribe("#")
        for topic in ("in/will", "none"):
            client = await RawClient.connect(inside.port, "mortal", will=Will(topic, b"gone", 0, False))
            client.drop()
        await reader.message("out/will", b"GONE")
        will = Will("refused", b"", 0, False)
        async with await RawClient5.connect5(inside.port, "mortal", will=will, code=0x87) as refused:
            await refused.expect_closed()
        await aeventually(lambda: set(inside.call(lambda: list(inside.account.registry.clients))) == {"reader"}, 30.0)
        await reader.quiet()
    assert all(event.will and event.client.client_id == "mortal" for event in events)


async def test_what_was_delivered_and_acknowledged(inside: InProcess, add: Add) -> None:
    """To regular and durable sessions, of both versions, with aliases; and who does not acknowledge is not said to."""
    delivered: list[Delivered] = []
    acked: list[Acked] = []
    async with (
        await RawClient.connect(inside.port, "old") as old,
        await RawClient5.connect5(inside.port, "new", session_expiry_interval=50, topic_alias_maximum=5) as new,
        await RawClient.connect(inside.port, "writer") as writer,
    ):
        await old.subscribe("d/#", qos=2)
        await new.subscribe("d/#", qos=2)
        await writer.deliver("d/before", b"0", 0)
        await old.message("d/before", b"0")
        await new.expect(Publish)
        add(MESSAGE_DELIVERED, delivered.append)
        add(MESSAGE_ACKED, acked.append)
        for qos in (0, 1, 2):
            await writer.deliver("d/x", b"%d" % qos, qos)
            await writer.deliver("d/before", b"%d" % qos, qos)
        for reader in (old, new):
            for packet in await reader.messages(3):
                await reader.complete(packet)
            found = await reader.expect(Publish)
            await reader.complete(found)
            found = await reader.expect(Publish)
            found_last = await reader.expect(Publish)
            await reader.complete(found)
            assert found_last.qos == 2
        await old.quiet()
        await new.quiet()
        seen = {
            client: [(one.topic, one.payload, one.qos) for one in delivered if one.client.client_id == client]
            for client in ("old", "new")
        }
        wanted = [(topic, b"%d" % qos, qos) for qos in (0, 1, 2) for topic in ("d/x", "d/before")]
        assert sorted(seen["old"]) == sorted(wanted)
        assert sorted(seen["new"]) == sorted(wanted)
        for client in ("old", "new"):
            mine = [one for one in acked if one.client.client_id == client]
            assert {(one.message.topic, one.message.qos) for one in mine if one.message is not None} == {
                ("d/x", 1),
                ("d/before", 1),
                ("d/x", 2),
            }
            assert len(mine) == 3
            assert not any(one.failed for one in mine)
        await new.disconnect5(session_expiry_interval=0)


async def test_a_refusal_is_an_acknowledgement_that_has_failed(inside: InProcess, add: Add) -> None:
    acked: list[Acked] = []
    add(MESSAGE_ACKED, acked.append)
    async with (
        await RawClient5.connect5(inside.port, "new") as new,
        await RawClient.connect(inside.port, "writer") as writer,
    ):
        await new.subscribe("f", qos=2)
        await writer.deliver("f", b"", 1)
        first = await new.expect(Publish)
        new.send(Ack(PUBACK, first.packet_id, 0x97))
        await writer.deliver("f", b"", 2)
        second = await new.expect(Publish)
        new.send(Ack(PUBREC, second.packet_id, 0x97))
        await new.quiet()
    assert [one.failed for one in acked] == [True, True]


async def test_what_was_not_delivered(inside: InProcess, add: Add) -> None:
    dropped: list[Dropped] = []
    add(MESSAGE_DROPPED, dropped.append)
    async with (
        await RawClient5.connect5(inside.port, "small", maximum_packet_size=100) as small,
        await RawClient.connect(inside.port, "writer") as writer,
    ):
        await small.subscribe5(Subscription("n/#", 1))
        await writer.deliver("n/1", b"x" * 200, 1)
        await writer.deliver("n/0", b"x" * 200, 0)
        await writer.deliver("n/ok", b"", 0)
        found = await small.expect(Publish)
        assert topic_of(found) == "n/ok"
    assert [(one.client.client_id, one.topic, one.reason) for one in dropped] == [
        ("small", "n/1", "too large"),
        ("small", "n/0", "too large"),
    ]


async def test_a_client_that_does_not_read(inside: InProcess, add: Add) -> None:
    dropped: list[Dropped] = []
    add(MESSAGE_DROPPED, dropped.append)
    async with (
        await RawClient.connect(inside.port, "asleep") as asleep,
        await RawClient.connect(inside.port, "writer") as writer,
    ):
        await asleep.subscribe("flood")
        body = b"x" * 500_000
        for _ in range(200):
            await writer.deliver("flood", body)
            if dropped:
                break
        assert dropped
        one = dropped[0]
        assert (one.client.client_id, one.topic, one.qos, one.reason) == ("asleep", "flood", 0, "slow client")
