# SPDX-License-Identifier: Apache-2.0
"""A durable subscription is raised from QoS 0 and lowered to it while messages come: each comes once, in order."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.codec import Ack, Publish, Suback, Subscribe, Subscription
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.integration.conftest import Connector, Connector5

CHANGES = 18
STEP = 20
AHEAD_MAX = 200
"""Messages that are published and have not come."""


async def publishing(client: RawClient, topic: str, qos: int, enough: asyncio.Event, found: list[Publish]) -> int:
    """Publish numbers, one after the other, and complete them; how many there were.

    A subscriber that is slower is waited for: a change takes effect behind all that it has yet to get.
    """
    number = 0
    while not enough.is_set():
        if number - len(found) > AHEAD_MAX:
            await asyncio.sleep(0.001)
            continue
        client.publish(topic, b"%d" % number, qos, packet_id=number % 60_000 + 1)
        if qos == 1:
            await client.expect_ack(PUBACK, number % 60_000 + 1)
        else:
            await client.expect_ack(PUBREC, number % 60_000 + 1)
            client.ack(PUBREL, number % 60_000 + 1)
            await client.expect_ack(PUBCOMP, number % 60_000 + 1)
        number += 1
    return number


def runs(found: list[Publish]) -> list[tuple[int, int, int]]:
    """What came in a row at the same QoS: first and last number, and the QoS."""
    rows: list[tuple[int, int, int]] = []
    for number, qos in ((int(one.payload), one.qos) for one in found):
        if rows and rows[-1][1:] == (number - 1, qos):
            rows[-1] = (rows[-1][0], number, qos)
        else:
            rows.append((number, number, qos))
    return rows


@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("way", ["the same filter", "another filter"])
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("version", [4, 5])
async def test_each_message_comes_once(
    connect: Connector,
    connect5: Connector5,
    name: str,
    second_gateway: Gateway,
    version: int,
    qos: int,
    way: str,
    where: str,
) -> None:
    """[MQTT-3.8.4-3] (3.1.1, 5.0): the flow of messages is not interrupted."""
    if version == 5:
        client: RawClient = await connect5(name, session_expiry_interval=60)
    else:
        client = await connect(name, clean=False)
    publisher = await connect(f"{name}-publisher", to=second_gateway if where == "elsewhere" else None)
    await client.subscribe(f"{name}/+", qos=0)
    enough = asyncio.Event()
    found: list[Publish] = []
    task = asyncio.create_task(publishing(publisher, f"{name}/a", qos, enough, found))
    changes = since = 0
    other = f"{name}/a" if way == "another filter" else f"{name}/+"
    try:
        while not enough.is_set() or len(found) < await task:
            packet = await client.packet(10)
            if isinstance(packet, Publish):
                found.append(packet)
                if packet.qos:
                    client.ack(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id)
                # It is lowered only when it has been raised; it may be raised before it has been lowered.
                if len(found) >= since + STEP and (not changes % 2 or packet.qos):
                    if changes == CHANGES:
                        enough.set()
                        continue
                    changes, since = changes + 1, len(found)
                    client.send(Subscribe(changes, (Subscription(other, qos if changes % 2 else 0),)))
            elif isinstance(packet, Ack) and packet.kind == PUBREL:
                client.ack(PUBCOMP, packet.packet_id)
            else:
                assert isinstance(packet, Suback | Ack), packet
    except AssertionError as error:
        raise AssertionError(runs(found)) from error
    finally:
        enough.set()
        await task
    assert [int(one.payload) for one in found] == list(range(len(found))), runs(found)
    assert {one.qos for one in found} == {0, qos}
