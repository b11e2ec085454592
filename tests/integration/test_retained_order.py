# SPDX-License-Identifier: Apache-2.0
"""A subscriber that comes while a retained topic changes gets no older message after a newer one, and misses none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from mqtt_nats.codec import Publish, Suback, Subscribe, Subscription
from tests.harness.gateway import Gateway
from tests.harness.rawclient import RawClient
from tests.integration.conftest import Connector, Connector5

ROUNDS = 12
FOLLOWING = 6


@contextlib.asynccontextmanager
async def changing(publisher: RawClient, topic: str, qos: int) -> AsyncIterator[None]:
    """Retain one message after the other on a topic: 1, 2, 3 and so on."""

    async def publish() -> None:
        number = 0
        while True:
            payloads = [b"%d" % one for one in range(number + 1, number + 4)]
            await publisher.deliver_all(topic, payloads, qos, retain=True)
            number += 3

    task = asyncio.create_task(publish())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def received(client: RawClient, count: int) -> list[Publish]:
    """The next messages, each of which is completed; PUBRELs are answered."""
    found: list[Publish] = []
    while len(found) < count:
        packet = await client.packet()
        if isinstance(packet, Publish):
            found.append(packet)
            await client.complete(packet)
    return found


def judge(found: list[Publish], *, gap: bool) -> None:
    """Assert that each message is newer than the one before, and that none is missing.

    The first one is retained, unless it was replaced while it was read: then its successor comes as a new message.

    Args:
        gap: whether the first message may be the last one that was stored, while later ones were on their way from
            another gateway, and whether it may be on its way as a new message, too.
    """
    numbers = [int(one.payload) for one in found]
    assert not any(one.retain for one in found[1:]), numbers
    following = numbers[1:] if gap else numbers
    assert numbers[0] <= following[0], numbers
    assert following == list(range(following[0], following[0] + len(following)))


@pytest.mark.parametrize("version", [4, 5], ids=["3.1.1", "5.0"])
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "regular"])
@pytest.mark.parametrize("published", [0, 1, 2])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["one gateway", "two gateways"])
async def test_a_new_subscriber(
    connect: Connector,
    connect5: Connector5,
    name: str,
    second_gateway: Gateway,
    version: int,
    durable: bool,
    published: int,
    qos: int,
    elsewhere: bool,
) -> None:
    """It gets the newest retained message, and then all that follow."""
    publisher = await connect5(f"{name}-publisher", to=second_gateway if elsewhere else None)
    await publisher.deliver(f"{name}/a", b"0", published, retain=True)
    async with changing(publisher, f"{name}/a", published):
        for number in range(ROUNDS):
            if version == 5:
                client: RawClient = await connect5(f"{name}-{number}", session_expiry_interval=60 if durable else 0)
            else:
                client = await connect(f"{name}-{number}", clean=not durable)
            client.send(Subscribe(9, (Subscription(f"{name}/{'a' if number % 2 else '+'}", qos),)))
            await client.expect(Suback, packet_id=9)
            judge(await received(client, FOLLOWING), gap=elsewhere and not (durable and published))
            client.drop()


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "regular"])
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["one gateway", "two gateways"])
async def test_a_present_subscriber_subscribes_again(
    connect5: Connector5, name: str, second_gateway: Gateway, durable: bool, qos: int, elsewhere: bool
) -> None:
    """It misses none of the new messages, and the retained ones are no older than those before them."""
    publisher = await connect5(f"{name}-publisher", to=second_gateway if elsewhere else None)
    client = await connect5(name, session_expiry_interval=60 if durable else 0)
    await client.subscribe(f"{name}/+", qos=qos)
    await publisher.deliver(f"{name}/a", b"0", qos, retain=True)
    numbers: list[int] = []
    new: list[int] = []
    async with changing(publisher, f"{name}/a", qos):
        for number in range(ROUNDS):
            client.send(Subscribe(10 + number, (Subscription(f"{name}/+", qos),)))
            answered = False
            while not answered or len(new) < FOLLOWING * number:
                packet = await client.packet()
                if isinstance(packet, Publish):
                    numbers.append(int(packet.payload))
                    new += [] if packet.retain else [int(packet.payload)]
                    await client.complete(packet)
                else:
                    answered = answered or isinstance(packet, Suback)
    assert numbers == sorted(numbers)
    assert new == list(range(len(new)))
