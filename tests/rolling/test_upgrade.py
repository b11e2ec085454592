# SPDX-License-Identifier: Apache-2.0
"""Upgrades: a gateway goes on with what an earlier one has stored; gateways are replaced one at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from mqtt_nats.codec import MqttError, Publish, Subscription
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer, ProcessNatsServer
from tests.harness.rawclient import RawClient, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.rolling import golden
from tests.rolling.halves import end_all, go_on

KEEP = 3600
"""Seconds for which sessions are kept."""

AGAIN = 0.1
"""Seconds after which a client that was disconnected connects again."""

LOST = (AssertionError, ConnectionError, OSError, MqttError)
"""Errors of a client that has lost its gateway."""

PATIENCE = 120.0


class Fleet:
    """The gateways in service. Clients connect to the first of them."""

    def __init__(self, start: Callable[[], Gateway]) -> None:
        self._start = start
        self.gateways: list[Gateway] = []

    @property
    def port(self) -> int:
        return self.gateways[0].port

    async def add(self) -> None:
        self.gateways.append(await asyncio.to_thread(self._start))

    async def replace_first(self) -> None:
        """Take the first gateway out of service, end it in good order, and start another one."""
        gone = self.gateways.pop(0)
        assert await asyncio.to_thread(gone.term) == 0, gone.log
        await self.add()


class Publisher:
    """Publishes numbers at QoS 1 without end; what was not acknowledged is published again."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.acknowledged = 0

    async def run(self) -> None:
        while True:
            with contextlib.suppress(*LOST):
                async with await RawClient.connect(self._fleet.port, "publisher") as client:
                    while True:
                        await client.deliver(f"up/{self.acknowledged}", b"%d" % self.acknowledged, 1)
                        self.acknowledged += 1
                        await asyncio.sleep(0.01)
            await asyncio.sleep(AGAIN)


class Subscriber:
    """Has a durable session, and connects again whenever it was disconnected."""

    def __init__(self, fleet: Fleet, name: str, qos: int) -> None:
        self._fleet = fleet
        self.name = name
        self._qos = qos
        self.got: list[int] = []
        self.resumed: list[bool] = []
        """Whether each connection after the first has found the session."""

    async def begin(self) -> None:
        async with await RawClient5.connect5(self._fleet.port, self.name, session_expiry_interval=KEEP) as client:
            assert await client.subscribe5(Subscription("up/#", self._qos)) == (self._qos,)

    async def run(self) -> None:
        while True:
            with contextlib.suppress(*LOST):
                async with await RawClient5.connect5(
                    self._fleet.port, self.name, clean=False, session_expiry_interval=KEEP
                ) as client:
                    self.resumed.append(client.session_present)
                    while True:
                        packet = await client.packet(PATIENCE)
                        if isinstance(packet, Publish):
                            await client.complete(packet)
                            assert topic_of(packet) == f"up/{int(packet.payload)}"
                            self.got.append(int(packet.payload))
            await asyncio.sleep(AGAIN)

    def has(self, count: int) -> bool:
        return {*self.got} >= {*range(count)}


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
def fleet(server: NatsServer, gateway_factory: GatewayFactory) -> Fleet:
    return Fleet(lambda: gateway_factory(server))


@pytest.mark.parametrize("positions", ["consumers", "records"])
@pytest.mark.parametrize("name", golden.STORES)
async def test_what_an_earlier_gateway_has_stored(
    gateway_factory: GatewayFactory, tmp_path: Path, name: str, positions: str
) -> None:
    """Its sessions go on, whatever they had under way, and the clients that it had when it died are dealt with."""
    left = golden.unpack(name, tmp_path / "nats")
    server = ProcessNatsServer(tmp_path / "nats")
    try:
        server.start()
        arguments = ("--message-retention", golden.RETENTION, "--gateway-lease", "2", "--session-positions", positions)
        gateway = gateway_factory(server, *arguments)
        async with await RawClient.connect(gateway.port, "watcher") as watcher:
            await go_on(gateway.port, left)
            await watcher.subscribe("wills/#", qos=1)
            await watcher.receive("wills/1", b"x", timeout=PATIENCE, qos=1)
        await end_all(gateway.port)
        client = await nats.connect(server.url)
        try:
            for stream in ("$MQTT_sess", "$MQTT_pos", "$MQTT_qos2in", "$MQTT_wills", "$MQTT_shared"):
                assert await aeventually(lambda stream=stream: _is_empty(client, stream), PATIENCE, what=stream)
        finally:
            await client.close()
    finally:
        server.discard()


async def _is_empty(client: Client, stream: str) -> bool:
    """Whether nothing of any session is left in a stream."""
    info = await client.jetstream().stream_info(stream, subjects_filter=">")
    left = {*(info.state.subjects or ())} - {"$MQTT.shared.generation"}
    assert not left
    return True


async def test_gateways_are_replaced_one_at_a_time(fleet: Fleet, server: NatsServer) -> None:
    """Every acknowledged message comes to every session; retained messages and absent sessions stay."""
    for _ in range(2):
        await fleet.add()
    publisher = Publisher(fleet)
    there = [Subscriber(fleet, f"there-{qos}", qos) for qos in (1, 2)]
    absent = Subscriber(fleet, "absent", 1)
    for one in (*there, absent):
        await one.begin()
    async with await RawClient.connect(fleet.port, "retainer") as client:
        await client.deliver("kept", b"before", 1, retain=True)
    running = [asyncio.create_task(one) for one in (publisher.run(), *(each.run() for each in there))]
    try:
        for _ in range(2):
            before = publisher.acknowledged
            assert await aeventually(lambda before=before: publisher.acknowledged >= before + 50, PATIENCE)  # type: ignore[misc]
            await fleet.replace_first()
        count = publisher.acknowledged + 50
        assert await aeventually(lambda: publisher.acknowledged >= count, PATIENCE)
        running.append(asyncio.create_task(absent.run()))
        for one in (*there, absent):
            assert await aeventually(lambda one=one: one.has(count), PATIENCE), one.name  # type: ignore[misc]
            assert one.resumed
            assert all(one.resumed), one.name
        exactly_once = [number for number in there[1].got if number < count]
        again = len(exactly_once) - len({*exactly_once})
        assert again <= 2, "the publisher alone publishes a message again, once for each gateway that ends"
        async with await RawClient.connect(fleet.port, "reader") as client:
            await client.subscribe("kept", qos=1)
            await client.receive("kept", b"before", retain=True)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
