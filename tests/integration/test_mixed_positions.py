# SPDX-License-Identifier: Apache-2.0
"""Clients that alternate between gateways of different `session_positions`: their sessions move at each connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any, Final

import pytest

from mqtt_nats.codec import Ack, Disconnect, Packet, Publish, Subscription
from tests.conftest import _gateway_factory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import DEADLINE, PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector, Connector5, Stored
from tests.integration.test_world import live_through

KINDS: Final = (
    ("--session-positions", "records"),
    ("--session-positions", "consumers"),
    ("--session-positions", "auto"),
)
"""Flags of the gateways."""

CUTS: Final = ("", "PUBLISH", "answer", "PUBREL", "PUBCOMP")
"""What a connection ends after, received or sent, for its last message; empty: the client reads nothing."""

ENDS: Final = ("drop", "disconnect", "take over")
PAUSES: Final = (0.0, 0.0, 0.1, 0.5)
"""Seconds without a connection: less and more than PUBREL records stay after an exchange."""

CONNECTIONS: Final = 12
QUIET: Final = 1.5
"""Seconds without a packet after which the gateway sends nothing that must not come."""


@pytest.fixture(scope="module")
def gateways(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Gateway]]:
    with _gateway_factory(tmp_path_factory.mktemp("gateway")) as start:
        yield [start(nats_server, *flags) for flags in KINDS]


@pytest.fixture(scope="module")
def gateway(gateways: list[Gateway]) -> Gateway:
    return gateways[0]


class Receiver:
    """What the client's application has got, over all connections."""

    def __init__(self, qos: int) -> None:
        self.qos = qos
        self.payloads: list[int] = []
        self.held: dict[int, bytes] = {}
        """QoS 2 messages that are not released, by packet identifier."""

    async def take(self, client: RawClient5, count: int, cut: str) -> None:
        """Read so many messages, and end at the cut for the last one, or earlier if nothing comes."""
        came = 0
        while True:
            packet = await self._next(client, 0.2)
            if packet is None:
                return
            came += isinstance(packet, Publish)
            last = came == count
            if self._received(packet) and last and cut == type(packet).__name__.upper():
                return
            if isinstance(packet, Ack) and last and cut == "PUBREL":
                return
            self._answer(client, packet)
            if last and cut == ("answer" if isinstance(packet, Publish) else "PUBCOMP"):
                return

    async def take_rest(self, client: RawClient5, published: int) -> None:
        """Read until all that was published has come and is released, and then until nothing comes any more."""
        while True:
            complete = len(set(self.payloads)) == published and not self.held
            packet = await self._next(client, QUIET if complete else DEADLINE)
            if packet is None:
                return
            self._received(packet)
            self._answer(client, packet)

    async def _next(self, client: RawClient5, seconds: float) -> Packet | None:
        try:
            return await client.packet(seconds)
        except AssertionError as error:
            if "closed" in str(error):
                raise
            return None

    def _received(self, packet: Packet) -> bool:
        """Take a PUBLISH; False for any other packet."""
        if not isinstance(packet, Publish):
            return False
        assert packet.qos == self.qos
        if packet.qos == 1 or packet.packet_id not in self.held:
            self.payloads.append(int(packet.payload))
        if packet.qos == 2:
            assert self.held.setdefault(packet.packet_id, packet.payload) == packet.payload
        return True

    def _answer(self, client: RawClient5, packet: Packet) -> None:
        if isinstance(packet, Publish):
            client.ack(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id)
        else:
            assert isinstance(packet, Ack)
            assert packet.kind == PUBREL
            self.held.pop(packet.packet_id, None)
            client.ack(PUBCOMP, packet.packet_id)

    async def leave(self, client: RawClient5) -> None:
        """Send DISCONNECT, and take what comes meanwhile."""
        client.send(Disconnect())
        with pytest.raises(AssertionError, match="closed"):
            await self._read_on(client)

    async def _read_on(self, client: RawClient5) -> None:
        while True:
            self._received(await client.packet())


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("window", [1, 3, 20])
async def test_exchanges_that_are_cut_anywhere(
    connect5: Connector5, name: str, stored: Stored, gateways: list[Gateway], window: int, qos: int
) -> None:
    """Each message comes in order, at QoS 2 once [MQTT-4.3.3-2], however connections and exchanges end."""
    chance = Random(window)
    options: dict[str, Any] = {"clean": False, "session_expiry_interval": 300, "receive_maximum": window}
    client = await connect5(name, to=gateways[0], **options)
    await client.subscribe5(Subscription(f"{name}/#", qos), Subscription(f"{name}/a", qos))
    publisher = await connect5(f"{name}-publisher", to=gateways[1])
    receiver, published = Receiver(qos), 0
    for _ in range(CONNECTIONS):
        count, absent = chance.choice((0, 1, 5, 30)), chance.random() < 0.5
        payloads = [b"%d" % number for number in range(published, published + count)]
        published += count
        if not absent:
            await publisher.deliver_all(f"{name}/a", payloads, qos)
        if cut := chance.choice(CUTS):
            await receiver.take(client, chance.randint(1, 5), cut)
        former, end, to = client, chance.choice(ENDS), chance.choice(gateways)
        if end == "drop":
            former.drop()
        elif end == "disconnect":
            await receiver.leave(former)
        if end != "take over":
            await asyncio.sleep(chance.choice(PAUSES))
        if absent:
            await publisher.deliver_all(f"{name}/a", payloads, qos)
        client = await connect5(name, to=to, **options)
        assert client.session_present
    await receiver.take_rest(client, published)
    assert list(dict.fromkeys(receiver.payloads)) == [*range(published)]
    assert qos == 1 or len(receiver.payloads) == published
    assert not receiver.held
    await stored.settled(name)


@pytest.mark.parametrize(
    "seeds",
    [
        range(100, 102),
        pytest.param(range(102, 152), marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
    ids=["two", "fifty"],
)
async def test_everybody_gets_what_it_asks_for(
    connect: Connector,
    connect5: Connector5,
    name: str,
    stored: Stored,
    gateways: list[Gateway],
    seeds: range,
) -> None:
    """The clients of `test_world`: every option of a subscription, retained messages, takeovers, small windows."""
    await live_through(seeds, name, stored, gateways, connect, connect5)
