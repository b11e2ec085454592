# SPDX-License-Identifier: Apache-2.0
"""Two of three nats-servers are killed for long: JetStream has no majority, and clients stay connected all the time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import nats
import nats.errors
import pytest
from nats.aio.client import Client

from mqtt_nats.codec import (
    PINGREQ,
    Ack,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Publish,
    ReasonCode,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
)
from tests.conftest import GatewayFactory
from tests.crash.lag import Lag
from tests.harness.cluster import Cluster, lead, running_cluster
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

RECOVERY: Final = 60.0
"""Seconds in which the leaders of all streams are elected."""

AT_ONCE: Final = 2.0
"""Seconds after the first answers of all leaders in which everything that has waited is done."""

SLACK: Final = 3.0
"""Seconds by which a busy machine may be late, besides those in which it holds up this process too."""

UNDECIDED: Final = 12.0
"""Seconds: a write is repeated after 5, and a leader without followers steps down after about 10."""

KEEP_ALIVE: Final = 10

STORED: Final = b'"seq"'
NOT_FOUND: Final = b"no message found"

PROBED: Final = {
    "$MQTT.msgs.probe": STORED,
    "$MQTT.sess.probe": STORED,
    "$MQTT.qos2.in.probe.1": STORED,
    "$KV.MQTT_gateways.probe": STORED,
    **{
        f"$JS.API.STREAM.MSG.GET.$MQTT_{name}": NOT_FOUND
        for name in ("out", "pos", "rmsgs", "shared", "timers", "wills")
    },
    "$JS.API.CONSUMER.DELETE.$MQTT_msgs.probe": b"consumer not found",
}
"""What only a leader answers, and how (a regular expression).

Each stream elects one of its own, up to five seconds after another one, and so do the consumers, and the metadata of
JetStream, without which no consumer is made or deleted: work goes on after the last of them.
"""


@pytest.fixture
def cluster(nats_backend: str, tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path, backend=nats_backend) as cluster:
        yield cluster


@pytest.fixture
async def survivor(cluster: Cluster) -> AsyncIterator[Client]:
    """A connection to the server that is not killed."""
    client = await nats.connect(cluster.servers[2].url)
    yield client
    await client.close()


class Device:
    """A client that pings all the time, and keeps the packets that it gets."""

    def __init__(self, name: str, client: RawClient) -> None:
        self.name, self.client = name, client
        self.durable = "durable" in name
        self.got: list[Packet] = []
        self.closed = False
        self._work = [asyncio.create_task(self._read()), asyncio.create_task(self._ping())]

    @classmethod
    async def connect(cls, port: int, version: int, clean: bool) -> Device:
        name = f"{port}-{version}-{'clean' if clean else 'durable'}"
        client: RawClient
        if version == 4:
            client = await RawClient.connect(port, name, clean=clean, keepalive=KEEP_ALIVE)
        else:
            expiry = 0 if clean else 1000
            client = await RawClient5.connect5(
                port, name, clean=clean, keepalive=KEEP_ALIVE, session_expiry_interval=expiry
            )
        assert await client.subscribe("t/#", qos=2) == (2,)
        assert await client.subscribe(f"ends/{name}", qos=1) == (1,)
        return cls(name, client)

    async def _read(self) -> None:
        with contextlib.suppress(AssertionError):
            while True:
                packet = await self.client.packet(1000.0)
                self.got.append(packet)
                if isinstance(packet, Publish):
                    self._answer(packet)
                elif isinstance(packet, Ack) and packet.kind == PUBREL:
                    self.client.ack(PUBCOMP, packet.packet_id)
        self.closed = True

    def _answer(self, packet: Publish) -> None:
        if packet.qos:
            self.client.ack(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id)

    async def _ping(self) -> None:
        while True:
            self.client.write(PINGREQ)
            await asyncio.sleep(KEEP_ALIVE / 5)

    async def end(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self.client.drop()

    def request(self) -> None:
        """Publish at each QoS, and subscribe and unsubscribe."""
        client = self.client
        for qos in (0, 1, 2):
            client.publish(f"t/{self.name}", b"meanwhile %d" % qos, qos, packet_id=100 + qos)
        client.send(Subscribe(110, (Subscription(f"new/{self.name}", 1),)))
        client.send(Unsubscribe(111, (f"ends/{self.name}",)))
        client.publish(f"t/{self.name}", b"behind", 1, packet_id=112)

    def acknowledged(self) -> set[tuple[int, int]]:
        """Kinds and identifiers of the acknowledgements of what :meth:`request` has sent."""
        found = {(one.kind, one.packet_id) for one in self.got if isinstance(one, Ack) and 100 <= one.packet_id < 120}
        return found | {
            (9 if isinstance(one, Suback) else 11, one.packet_id)
            for one in self.got
            if isinstance(one, Suback | Unsuback) and one.packet_id >= 100
        }

    def has_all(self, wanted: set[tuple[int, int]]) -> bool:
        """Whether exactly these acknowledgements have come."""
        return self.acknowledged() == wanted

    def got_from(self, name: str, wanted: list[bytes]) -> bool:
        """Whether exactly these payloads have come from a device."""
        return self.payloads(name) == wanted

    def payloads(self, name: str) -> list[bytes]:
        """What has come from a device, sorted; repetitions at QoS 1 once."""
        found = [one for one in self.got if isinstance(one, Publish) and topic_of(one) == f"t/{name}"]
        once = {one.payload for one in found if one.qos == 1}
        return sorted([one.payload for one in found if one.qos != 1] + list(once))


async def consumers(survivor: Client) -> dict[str, bytes]:
    """What the leaders of the present consumers answer, as `PROBED`; others answer that one is deleted."""
    jetstream = survivor.jetstream()
    return {
        f"$JS.API.CONSUMER.INFO.{stream}.{one.name}": b'"leader":"n|consumer not found'
        for stream in ("$MQTT_msgs", "$MQTT_out", "$MQTT_timers")
        for one in await jetstream.consumers_info(stream)
        if one.config.num_replicas != 1  # else it is made again
    }


async def first_answers(survivor: Client, more: Mapping[str, bytes] = MappingProxyType({})) -> float:
    """Wait until everybody of `PROBED` and ``more`` has answered; the loop time of the last first answer."""

    async def answer(subject: str, wanted: bytes) -> None:
        body = b'{"seq":1000000000}' if wanted == NOT_FOUND else b"" if subject.startswith("$JS.") else b"probe"

        async def answered() -> bool:
            try:
                return re.search(wanted, (await survivor.request(subject, body, timeout=0.3)).data) is not None
            except (nats.errors.Error, TimeoutError):
                return False

        await aeventually(answered, RECOVERY, what=f"an answer to {subject}")

    await asyncio.gather(*(answer(*one) for one in (dict(PROBED) | dict(more)).items()))
    return asyncio.get_running_loop().time()


async def refusal(port: int, version: int) -> ReasonCode | int | None:
    """The code of a CONNACK that refuses a client; None: the connection was closed without one, or is accepted."""
    client = await (RawClient if version == 4 else RawClient5).open(port)
    try:
        client.send(Connect(version, "refused", True, 0))
        packet = await client.packet(RECOVERY)
        assert isinstance(packet, Connack)
        return packet.code
    except AssertionError:
        return None
    finally:
        client.drop()


async def let_in(port: int) -> None:
    """Connect, again and again, until that is accepted."""

    async def accepted() -> bool:
        return await refusal(port, 5) == 0

    await aeventually(accepted, RECOVERY, what="an accepted client")


@pytest.mark.parametrize(
    ("positions", "outage"),
    [("consumers", 40.0), ("records", 40.0), pytest.param("consumers", 100.0, marks=pytest.mark.soak)],
)
async def test_no_majority(
    cluster: Cluster, survivor: Client, gateway_factory: GatewayFactory, positions: str, outage: float
) -> None:
    """One gateway stays connected to the server that is left, the other one has to move to it."""
    arguments = ("--session-positions", positions)
    gateways = [gateway_factory(cluster.servers[number].url, *arguments) for number in (0, 2)]
    devices = [
        await Device.connect(gateway.port, version, clean)
        for gateway in gateways
        for version in (4, 5)
        for clean in (True, False)
    ]
    now = asyncio.get_running_loop().time
    leaders = await consumers(survivor)
    try:
        for server in cluster.servers[:2]:
            server.kill()
        begun = now()
        await aeventually(lambda: all("not ready: " in one.log for one in gateways), RECOVERY)
        for device in devices:
            device.request()
        for gateway in gateways:
            for version in (4, 5):
                assert await refusal(gateway.port, version) in (
                    None,
                    3,
                    ReasonCode.SERVER_UNAVAILABLE,
                    ReasonCode.SERVER_BUSY,
                )
        await aeventually(lambda: now() > begun + outage, outage + 1)
        for device in devices:
            assert not device.closed, device.name
            # Subscriptions of clean sessions are not stored.
            assert device.acknowledged() <= (set() if device.durable else {(9, 110), (11, 111)}), device.name

        for server in cluster.servers[:2]:
            server.start()
        joined = asyncio.gather(*(let_in(gateway.port) for gateway in gateways))
        there = await first_answers(survivor, leaders)
        done = {(PUBACK, 101), (PUBREC, 102), (9, 110), (11, 111), (PUBACK, 112)}
        with Lag() as lag:
            for device in devices:
                await aeventually(partial(device.has_all, done), what=device.name)
            await joined
            assert now() - there < AT_ONCE + SLACK + lag.seconds
        for device in devices:
            device.client.ack(PUBREL, 102)
        wanted = [b"behind", b"meanwhile 0", b"meanwhile 1", b"meanwhile 2"]
        for device in devices:
            await aeventually(partial(device.has_all, {*done, (PUBCOMP, 102)}), what=device.name)
            for other in devices:
                await aeventually(partial(device.got_from, other.name, wanted), what=f"{other.name} at {device.name}")
            assert not device.closed
    finally:
        for device in devices:
            await device.end()
    for gateway in gateways:
        for text in ("cannot be read", "considered dead", "has not renewed"):
            assert f"{text} [" not in gateway.log, text
        await aeventually(partial(getattr, gateway, "ready"), RECOVERY)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_a_session_that_has_moved_before(
    cluster: Cluster, survivor: Client, gateway_factory: GatewayFactory
) -> None:
    """Its former gateway could not hear that, and learns it when records can be read again: 0x8E."""
    former = gateway_factory(cluster.servers[0].url, "--gateway-lease", "300")
    latter = gateway_factory(cluster.servers[2].url, "--gateway-lease", "300")
    now = asyncio.get_running_loop().time
    async with (
        await RawClient5.connect5(former.port, "moves", session_expiry_interval=1000) as before,
        await RawClient.connect(former.port, "stays", clean=False) as stays,
    ):
        assert await stays.subscribe("t", qos=1) == (1,)
        _stop(former)
        async with await RawClient5.connect5(latter.port, "moves", clean=False, session_expiry_interval=1000) as after:
            await after.deliver("t", b"before", 1)
            for server in cluster.servers[:2]:
                server.kill()
            os.kill(former.pid, signal.SIGCONT)
            begun = now()
            await aeventually(lambda: "not ready: " in former.log, RECOVERY)
            await aeventually(lambda: now() > begun + 35.0, 40.0)
            for server in cluster.servers[:2]:
                server.start()
            await before.expect(Disconnect, RECOVERY, reason=ReasonCode.SESSION_TAKEN_OVER)
            await before.expect_closed()
            await after.deliver("t", b"again", 1)
            await stays.receive("t", b"before")
            await stays.receive("t", b"again")
            await after.quiet()


async def test_the_server_that_is_left_has_led_the_records(
    cluster: Cluster, survivor: Client, gateway_factory: GatewayFactory
) -> None:
    """A leader without followers refuses a second write of a record while the first is on its way: no takeover."""
    gateway = gateway_factory(cluster.servers[0].url)
    await cluster.settled("$MQTT_sess")
    await lead(survivor, "STREAM.$MQTT_sess", "n2")
    now = asyncio.get_running_loop().time
    async with (
        await RawClient.connect(gateway.port, "old", clean=False) as old,
        await RawClient5.connect5(gateway.port, "new", session_expiry_interval=1000) as new,
    ):
        for server in cluster.servers[:2]:
            server.kill()
        begun = now()
        await aeventually(lambda: "not ready: " in gateway.log, RECOVERY)
        await aeventually(lambda: now() > begun + UNDECIDED, UNDECIDED + 1)
        for client in (old, new):
            await client.quiet()
        for server in cluster.servers[:2]:
            server.start()
        for client in (old, new):
            client.publish("t", b"meanwhile", 1, packet_id=1)
            await client.expect_ack(PUBACK, 1, timeout=RECOVERY)
        await first_answers(survivor)
        await aeventually(partial(getattr, gateway, "ready"), RECOVERY)
        for client in (old, new):  # their records are theirs again
            assert await client.subscribe("t", qos=1) == (1,)
    assert "another connection has claimed the session" not in gateway.log


def _stop(gateway: Gateway) -> None:
    os.kill(gateway.pid, signal.SIGSTOP)
