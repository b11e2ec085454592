# SPDX-License-Identifier: Apache-2.0
"""Packets take effect in the order in which they came, whatever hooks take their time over them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mqtt_nats.codec import Publish, Suback, Subscribe, Subscription
from mqtt_nats.hooks.events import Acked, Published, Publishing, Subscribing
from mqtt_nats.hooks.points import CLIENT_SUBSCRIBE, MESSAGE_ACKED, MESSAGE_PUBLISH
from tests.harness.inprocess import InProcess
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient, key_of
from tests.hooks.conftest import Add

ROUNDS = 30


def look(event: Publishing, message: Published) -> None:
    """Leave a message as it is."""


async def look_later(event: Publishing, message: Published) -> None:
    """Leave a message as it is, after a while."""
    await asyncio.sleep(0.001)


async def ask_later(event: Subscribing, wanted: object) -> None:
    """Leave a SUBSCRIBE as it is, after a while."""
    await asyncio.sleep(0.001)


Look = Callable[[Publishing, Published], Awaitable[None] | None]


@pytest.mark.parametrize("subscribing", [False, True])
@pytest.mark.parametrize("hook", [look, look_later])
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("qos", [0, 1])
async def test_a_publish_behind_a_subscribe(
    inside: InProcess, add: Add, hook: Look, subscribing: bool, clean: bool, qos: int
) -> None:
    seen: list[bytes] = []

    def note(event: Publishing, message: Published) -> None:
        seen.append(message.payload)

    add(MESSAGE_PUBLISH, hook)
    add(MESSAGE_PUBLISH, note)
    if subscribing:
        add(CLIENT_SUBSCRIBE, ask_later)
    name = f"order-{hook.__name__}-{subscribing}-{clean}-{qos}"
    async with await RawClient.connect(inside.port, name, clean=clean) as client:
        for number in range(ROUNDS):
            topic = f"{name}/{number}"
            client.send(
                Publish(0, False, False, key_of(topic), 0, b"before"),
                Subscribe(2 * number + 1, (Subscription(topic, qos),)),
                Publish(qos, False, False, key_of(topic), 2 * number + 2 if qos else 0, b"first"),
                Publish(0, False, False, key_of(topic), 0, b"second"),
            )
            found: list[Publish] = []
            left = 3 + qos
            while left:
                packet = await client.packet(5)
                left -= 1
                if isinstance(packet, Publish):
                    found.append(packet)
                    await client.complete(packet)
            assert sorted(one.payload for one in found) == [b"first", b"second"], number
    assert seen == [b"before", b"first", b"second"] * ROUNDS, "each is seen once"


@pytest.mark.parametrize("hook", [look, look_later])
async def test_an_identifier_that_is_being_released(inside: InProcess, add: Add, hook: Look) -> None:
    """The hook sees the next publish, which is another one."""
    seen: list[bytes] = []

    def note(event: Publishing, message: Published) -> None:
        seen.append(message.payload)

    add(MESSAGE_PUBLISH, hook)
    add(MESSAGE_PUBLISH, note)
    async with await RawClient.connect(inside.port, f"again-{hook.__name__}") as client:
        client.publish("again", b"0", 2, packet_id=1)
        await client.expect_ack(PUBREC, 1)
        for number in range(1, ROUNDS):
            client.ack(PUBREL, 1)
            client.publish("again", b"%d" % number, 2, packet_id=1)
            await client.expect_ack(PUBCOMP, 1)
            await client.expect_ack(PUBREC, 1)
    assert seen == [b"%d" % number for number in range(ROUNDS)]


async def test_acknowledgements_that_do_not_wait_are_told_of(inside: InProcess, add: Add) -> None:
    """While packets of the client wait for its SUBSCRIBE."""
    go = asyncio.Event()
    acked: list[int] = []

    async def ask(event: Subscribing, wanted: object) -> None:
        await go.wait()

    def note(event: Acked) -> None:
        acked.append(event.packet_id)

    add(MESSAGE_ACKED, note)
    async with await RawClient.connect(inside.port, "acked") as client:
        await client.subscribe("acked", qos=1)
        add(CLIENT_SUBSCRIBE, ask)
        client.publish("acked", b"x", 1, packet_id=9)
        got = [await client.packet(), await client.packet()]
        (message,) = [one for one in got if isinstance(one, Publish)]
        client.send(Subscribe(10, (Subscription("more", 0),)), Publish(0, False, False, key_of("more"), 0, b"y"))
        client.ack(PUBACK, message.packet_id)
        await client.quiet()  # a ping does not wait either
        assert acked == [message.packet_id]
        inside.call(go.set)
        await client.expect(Suback, packet_id=10)
        await client.message("more", b"y")
