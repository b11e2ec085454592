# SPDX-License-Identifier: Apache-2.0
"""Clients that go from gateway to gateway while messages come, some of which they leave unacknowledged.

Each end of a connection is in order, or is a takeover, and what was on its way is read. So all is known: what was sent,
and DUP, the order, the packet identifiers and the window follow from it.
"""

from __future__ import annotations

import asyncio
import time
from random import Random

import pytest

from mqtt_nats.codec import Ack, Disconnect, Packet, Publish, Suback, Subscribe, Subscription
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector5, Stored

DEVICES = 5
MOVES = 15
WINDOWS = (1, 3, 10, 65535)
PAUSES = (0.0, 0.005, 0.02, 0.1, 0.3)
"""Seconds that a connection, or the time between two, lasts at most."""


class Connection:
    """One of a device's, with what it has been sent."""

    def __init__(self, client: RawClient5, window: int, eagerness: float) -> None:
        self.client, self.window, self.eagerness = client, window, eagerness
        self.taken = False
        """Another one took the session: what was acknowledged here may not have been read."""
        self.news = False
        """Something came for the first time."""
        self.unacknowledged: dict[int, int] = {}
        """Numbers by packet identifier."""


class Device:
    """A client with one durable subscription, to numbered messages."""

    def __init__(self, name: str, chance: Random, gateways: list[Gateway], connect: Connector5) -> None:
        self.name, self.chance, self.gateways, self.connect = name, chance, gateways, connect
        self.subscription = Subscription(f"{name}/+", 2)
        self.published = self.next = 0
        self.had: dict[int, tuple[Connection, int]] = {}
        """Connection and packet identifier by which a number came last."""
        self.acknowledged: dict[int, Connection] = {}
        self.settled = False

    async def arrive(self) -> Connection:
        """Connect somewhere."""
        window = self.chance.choice(WINDOWS)
        client = await self.connect(
            self.name,
            clean=False,
            to=self.chance.choice(self.gateways),
            session_expiry_interval=600,
            receive_maximum=window,
        )
        return Connection(client, window, self.chance.choice((1.0, 1.0, 0.8, 0.4, 0.0)))

    async def publish(self) -> None:
        """Publish until the device has settled down."""
        publisher = await self.connect(f"{self.name}-publisher", to=self.chance.choice(self.gateways))
        while not self.settled:
            for _ in range(self.chance.choice((1, 1, 1, 20))):
                await publisher.deliver(f"{self.name}/x", b"%d" % self.published, self.chance.choice((1, 2)))
                self.published += 1
            await asyncio.sleep(self.chance.random() * 0.1)

    def take(self, connection: Connection, packet: Packet, *, answer: bool) -> None:
        """Check what has come, and acknowledge some of it."""
        client = connection.client
        answer = answer and self.chance.random() < connection.eagerness
        match packet:
            case Publish(qos=qos, dup=dup, payload=payload, packet_id=identifier):
                number = int(payload)
                connection.unacknowledged[identifier] = number
                assert len(connection.unacknowledged) <= connection.window  # [MQTT-3.3.4-9] (5.0)
                if number == self.next:
                    assert not dup, f"{number} is sent for the first time"  # [MQTT-3.3.1-1]
                    self.next += 1
                    connection.news = True
                else:
                    before, known = self.had[number]  # else it is out of order [MQTT-4.6.0-1]
                    assert before is not connection
                    assert (dup, known) == (True, identifier)  # [MQTT-4.4.0-1]
                    assert number not in self.acknowledged or self.acknowledged[number].taken, number
                    assert not connection.news, f"{number} comes again, behind what is new"
                self.had[number] = connection, identifier
                if answer:
                    client.ack(PUBACK if qos == 1 else PUBREC, identifier)
                    self.acknowledged[number] = connection
                    if qos == 1:
                        del connection.unacknowledged[identifier]
            case Ack(kind=kind, packet_id=identifier):
                assert kind == PUBREL
                if answer:
                    client.ack(PUBCOMP, identifier)
                    connection.unacknowledged.pop(identifier, None)
            case _:
                assert isinstance(packet, Suback | Disconnect), packet

    async def stay(self, connection: Connection, seconds: float) -> None:
        """Take what comes."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                packet = await connection.client.packet(left)
            except AssertionError as nothing:
                if "within" not in str(nothing):
                    raise
                return
            self.take(connection, packet, answer=True)

    async def rest(self, connection: Connection) -> None:
        """Take what comes until the gateway has closed the connection."""
        while True:
            try:
                packet = await connection.client.packet()
            except AssertionError as end:
                if "the connection was closed" not in str(end):
                    raise
                break
            self.take(connection, packet, answer=False)
        connection.client.drop()

    async def move(self, connection: Connection) -> Connection:
        """Go on with another connection."""
        if self.chance.random() < 0.5:
            connection.taken = True
            ending = asyncio.create_task(self.rest(connection))
            following = await self.arrive()
            await ending
            return following
        connection.client.send(Disconnect())
        await self.rest(connection)
        await asyncio.sleep(self.chance.choice(PAUSES) * self.chance.random())
        return await self.arrive()

    async def roam(self, stored: Stored) -> None:
        """The whole of its life."""
        connection = await self.arrive()
        await connection.client.subscribe5(self.subscription)
        await stored.live(self.name)  # who leaves word of what was sent from now on
        async with asyncio.TaskGroup() as publishing:
            publishing.create_task(self.publish())
            connection = await self.wander(connection)
            self.settled = True
        connection.client.send(Disconnect())
        await self.rest(connection)
        connection = await self.arrive()
        connection.eagerness = 1.0
        deadline = time.monotonic() + 30
        while self.next < self.published or connection.unacknowledged:
            assert time.monotonic() < deadline, (self.next, self.published, connection.unacknowledged)
            await self.stay(connection, 0.05)
        ending = asyncio.create_task(stored.settled(self.name))
        while not ending.done():
            await self.stay(connection, 0.05)
        await ending
        assert not connection.unacknowledged

    async def wander(self, connection: Connection) -> Connection:
        """From gateway to gateway, and subscribe again now and then."""
        for _ in range(MOVES):
            await self.stay(connection, self.chance.choice(PAUSES) * self.chance.random())
            if self.chance.random() < 0.3:
                connection.client.send(Subscribe(connection.client.next_id(), (self.subscription,)))
            connection = await self.move(connection)
        return connection


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
async def test_roaming(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, second_gateway: Gateway, seed: int
) -> None:
    """[MQTT-3.1.2-5], [MQTT-3.3.1-1], [MQTT-3.3.4-9], [MQTT-4.4.0-1], [MQTT-4.6.0-1] (5.0)"""
    chance = Random(seed)
    devices = [
        Device(f"{name}-{number}", Random(chance.random()), [gateway, second_gateway], connect5)
        for number in range(DEVICES)
    ]
    async with asyncio.TaskGroup() as together:
        for device in devices:
            together.create_task(device.roam(stored))
