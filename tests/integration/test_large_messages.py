# SPDX-License-Identifier: Apache-2.0
"""Large messages at QoS 0, which are read into buffers of their own: everybody gets them whole and in order."""

import asyncio
import random

import nats
import pytest

from mqtt_nats.codec import encode_publish
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient, key_of, topic_of
from tests.integration.conftest import Connector, Connector5

pytestmark = pytest.mark.anyio

SIZES = (0, 10, 5_000, 100_000, 131_072, 200_000, 200_000, 200_000, 262_144, 600_000, 1_000_000)


def payload(dice: random.Random, size: int, number: int) -> bytes:
    """Bytes of which no two parts are alike."""
    return number.to_bytes(4, "big") + dice.randbytes(size)


async def comes(subscriber: RawClient, sent: list[tuple[str, bytes]]) -> None:
    """A subscriber gets what was sent, in order."""
    for topic, expected in sent:
        (message,) = await subscriber.messages(1, 30)
        assert topic_of(message) == topic
        assert message.payload == expected


@pytest.mark.parametrize("modern", [False, True], ids=["3.1.1", "5.0"])
async def test_everybody_gets_them(
    connect: Connector,
    connect5: Connector5,
    name: str,
    modern: bool,
    nats_server: NatsServer,
    second_gateway: Gateway,
) -> None:
    four, wild = await connect(f"{name}-four"), await connect(f"{name}-wild")
    five, far = await connect5(f"{name}-five"), await connect(f"{name}-far", to=second_gateway)
    subscribers: list[RawClient] = [four, wild, five, far]
    for subscriber, found in ((four, f"{name}/1"), (wild, f"{name}/#"), (five, f"{name}/+"), (far, f"{name}/1")):
        await subscriber.subscribe(found)
    native = await nats.connect(nats_server.url)
    heard = await native.subscribe(f"{name}.1")
    await fence(native)
    publisher = await (connect5 if modern else connect)(f"{name}-publisher")
    dice = random.Random(name)
    sent = []
    for number in range(60):
        body = payload(dice, dice.choice(SIZES[:-1]), number)
        publisher.publish(f"{name}/1", body)
        sent.append((f"{name}/1", body))
        if number % 10 == 9:  # what none of them waits for is dropped
            publisher.publish(f"{name}/1", b"now", 0)
            sent.append((f"{name}/1", b"now"))
            await asyncio.gather(*(comes(subscriber, sent) for subscriber in subscribers))
            for _, expected in sent:
                assert (await heard.next_msg(30)).data == expected
            sent = []
    await native.close()


async def test_other_packets_between_them(connect: Connector, name: str) -> None:
    subscriber, publisher = await connect(f"{name}-subscriber"), await connect(f"{name}-publisher")
    await subscriber.subscribe(f"{name}/+", qos=1)
    dice = random.Random(name)
    for number in range(30):
        sent = [
            (f"{name}/{dice.randrange(3)}", payload(dice, dice.choice(SIZES), number)) for _ in range(dice.randrange(4))
        ]
        for topic, body in sent:
            publisher.publish(topic, body)
        sent.append((f"{name}/acknowledged", payload(dice, dice.choice(SIZES[:-1]), number)))
        await publisher.deliver(*sent[-1], 1)
        for topic, expected in sorted(sent, key=lambda one: one[0].endswith("acknowledged")):
            (message,) = await subscriber.messages(1, 30)
            assert (topic_of(message), message.payload) == (topic, expected)
            await subscriber.complete(message)


async def test_who_leaves_in_the_middle_of_one(connect: Connector, name: str) -> None:
    """What has come of it goes to nobody, and the next one's messages do."""
    subscriber = await connect(f"{name}-subscriber")
    await subscriber.subscribe(name)
    whole = encode_publish(key_of(name), b"x" * 500_000, 0, False, False, 0, 4) * 2
    leaving = await connect(f"{name}-leaving")
    leaving.write(whole[:900_000])
    await comes(subscriber, [(name, b"x" * 500_000)])
    leaving.drop()
    await (await connect(f"{name}-next")).deliver(name, b"next", 1)
    await comes(subscriber, [(name, b"next")])


async def test_who_does_not_read_holds_up_nobody(connect: Connector, name: str) -> None:
    """It may lose QoS 0 messages, whole ones; what it gets is in order."""
    reading, silent = await connect(f"{name}-reading"), await connect(f"{name}-silent")
    for subscriber in (reading, silent):
        await subscriber.subscribe(name)
    publisher = await connect(f"{name}-publisher")
    for number in range(80):  # more than its socket takes
        body = number.to_bytes(4, "big") * 75_000
        publisher.publish(name, body)
        await comes(reading, [(name, body)])
    await publisher.deliver(name, b"last", 1)
    last = -1
    while True:
        (message,) = await silent.messages(1, 30)
        if message.payload == b"last":
            break
        number = int.from_bytes(message.payload[:4], "big")
        assert number > last
        assert message.payload == number.to_bytes(4, "big") * 75_000
        last = number
    assert last >= 0
