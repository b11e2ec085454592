# SPDX-License-Identifier: Apache-2.0
"""Clients that send without waiting for answers: the next publish with the PUBREL, a whole connection in one write."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mqtt_nats.codec import Ack, Connect, Disconnect, Packet, Properties, Publish, Subscribe, Subscription, encode
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBCOMP, PUBREC, PUBREL, RawClient, key_of
from tests.integration.conftest import Connector, Connector5, Stored, until

MANY = 100

DURABLE: dict[str, Any] = {"session_expiry_interval": 60}


@pytest.mark.parametrize("kind", ["3.1.1", "3.1.1 durable", "5.0", "5.0 durable"])
async def test_a_publish_with_an_identifier_that_is_being_released(
    connect: Connector, connect5: Connector5, name: str, kind: str
) -> None:
    """[MQTT-4.3.3-12] (5.0): it waits for PUBCOMP, then it is new; as rumqttc sends it."""
    subscriber = await connect(f"{name}-subscriber")
    await subscriber.subscribe(name, qos=2)
    durable = kind.endswith("durable")
    if kind.startswith("5.0"):
        client: RawClient = await connect5(name, **(DURABLE if durable else {}))
    else:
        client = await connect(name, clean=not durable)
    client.publish(name, b"0", 2, packet_id=1)
    await client.expect_ack(PUBREC, 1)
    for number in range(1, MANY):
        client.ack(PUBREL, 1)
        client.publish(name, b"%d" % number, 2, packet_id=1)
        await client.expect_ack(PUBCOMP, 1)
        await client.expect_ack(PUBREC, 1)
    client.ack(PUBREL, 1)
    await client.expect_ack(PUBCOMP, 1)
    for number in range(MANY):
        await subscriber.receive(name, b"%d" % number, qos=2)
    await subscriber.quiet()


async def test_what_is_behind_it_comes_after_it(connect: Connector, name: str) -> None:
    """In one write, in the order of the packets; sent again it is no second one."""
    subscriber = await connect(f"{name}-subscriber")
    await subscriber.subscribe(name, qos=0)
    client = await connect(name)
    for number in range(20):
        client.publish(name, b"first", 2, packet_id=1)
        await client.expect_ack(PUBREC, 1)
        client.send(
            Publish(0, False, False, key_of(name), 0, b"before"),
            Ack(PUBREL, 1, 0),
            Publish(2, False, False, key_of(name), 1, b"second"),
            Publish(2, False, True, key_of(name), 1, b"second"),
            Publish(0, False, False, key_of(name), 0, b"behind"),
        )
        await client.expect_ack(PUBCOMP, 1)
        await client.expect_ack(PUBREC, 1)
        client.ack(PUBREL, 1)
        await client.expect_ack(PUBCOMP, 1)
        found = [one.payload for one in await subscriber.messages(4)]
        assert found == [b"before", b"first", b"behind", b"second"], number
    await subscriber.quiet()


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("kind", ["3.1.1", "3.1.1 durable", "5.0", "5.0 durable"])
async def test_a_connection_in_one_write(connect: Connector, name: str, gateway: Gateway, kind: str, qos: int) -> None:
    """Nothing that came before its end is dropped, also where the session exists, and the next comes at once."""
    subscriber = await connect(f"{name}-subscriber")
    await subscriber.subscribe(name, qos=1)
    durable = kind.endswith("durable")
    version = 5 if kind.startswith("5.0") else 4
    properties: Properties | None = {"session_expiry_interval": 60} if version == 5 and durable else None
    expected = []
    for number in range(30):
        packets: list[Packet] = [Connect(version, name, not durable, 0, None, None, None, properties)]
        for part in b"ab":
            payload = b"%d%c" % (number, part)
            packets.append(Publish(qos, False, False, key_of(name), part if qos else 0, payload))
            expected.append(payload)
        packets.append(Disconnect())
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"".join(encode(packet, version) for packet in packets))
        writer.close()
        if number % 3 == 0:
            await asyncio.sleep(0.02)
    found = []
    for _ in expected:
        one = (await subscriber.messages(1))[0]
        await subscriber.complete(one)
        found.append(one.payload)
    assert sorted(found) == sorted(expected)
    await subscriber.quiet()


@pytest.mark.parametrize("size", [100, 20_000])
async def test_a_connection_with_a_subscription_in_one_write(
    connect: Connector, name: str, gateway: Gateway, stored: Stored, size: int
) -> None:
    """What is behind the SUBSCRIBE too; and both subscriptions are there when the session goes on."""
    subscriber = await connect(f"{name}-subscriber")
    await subscriber.subscribe(f"{name}/+", qos=1)
    for number in range(5):
        packets: list[Packet] = [
            Connect(4, name, False, 0),
            Subscribe(1, (Subscription(f"{name}/{number}/a", 1),)),
            Subscribe(2, (Subscription(f"{name}/{number}/b", 1),)),
            Publish(1, False, False, key_of(f"{name}/{number}"), 3, b"x" * size),
            Disconnect(),
        ]
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"".join(encode(packet, 4) for packet in packets))
        writer.close()
        await subscriber.receive(f"{name}/{number}", b"x" * size)

        async def there(number: int = number) -> None:
            subs = (await stored.record(name))["subs"]
            assert {f"{name}.{number}.a", f"{name}.{number}.b"} <= set(subs)

        await until(there)
