# SPDX-License-Identifier: Apache-2.0
"""A durable client that keeps one message unacknowledged, while all packet identifiers are used by others.

The identifier that a message would have is in use by the kept one: it gets another one, over reconnects and moves, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Container, Iterator
from typing import Any

import pytest

from mqtt_nats.codec import Ack, Packet, Publish, Subscription
from mqtt_nats.protocol.durable_sender import ID_SPACE, RETAINED_SPACE, packet_id, retained_id
from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Stored, position, until

POSITIONS = {
    "consumers": ("--session-positions", "consumers"),
    "records": ("--session-positions", "records"),
}
"""Arguments of a gateway, by where it has the positions of its sessions."""

STAGES = {
    "PUBACK": (1, PUBACK),
    "PUBREC": (2, PUBREC),
    "PUBCOMP": (2, PUBCOMP),
}
"""What the client does not send for the message that it keeps, with the QoS of all messages."""


def versions() -> list[Any]:
    """Each way to keep positions, each stage, and both versions; one version of each in the usual run."""
    found = []
    for at, positions in enumerate(POSITIONS):
        for on, stage in enumerate(STAGES):
            for version in (4, 5):
                usual = (at + on) % 2 == version % 2
                found.append(pytest.param(positions, stage, version, marks=() if usual else [pytest.mark.soak]))
    return found


class Device:
    """A client whose session stays, on one connection after the other."""

    def __init__(self, name: str, version: int) -> None:
        self.name, self.version = name, version
        self.client: RawClient | None = None

    async def connect(self, gateway: Gateway, *, present: bool = True) -> RawClient:
        """Begin a connection; the last one has ended."""
        self.drop()
        if self.version == 5:
            self.client = await RawClient5.connect5(
                gateway.port, self.name, clean=not present, session_expiry_interval=1000
            )
        else:
            self.client = await RawClient.connect(gateway.port, self.name, clean=False)
        assert self.client.session_present is present
        return self.client

    async def subscribe(self, gateway: Gateway, topic_filter: str, qos: int) -> RawClient:
        """Begin the session, with one subscription."""
        client = await self.connect(gateway, present=False)
        if isinstance(client, RawClient5):
            await client.subscribe5(Subscription(topic_filter, qos))
        else:
            await client.subscribe(topic_filter, qos=qos)
        return client

    def drop(self) -> None:
        """Break the connection."""
        if self.client is not None:
            self.client.drop()


@pytest.fixture
def device(name: str, version: int) -> Iterator[Device]:
    """A client of a version of MQTT."""
    found = Device(name, version)
    yield found
    found.drop()


@pytest.fixture
async def publisher(name: str, far: Gateway) -> AsyncIterator[RawClient]:
    """Another client, at the gateway that stays."""
    client = await RawClient.connect(far.port, f"{name}-publisher")
    yield client
    client.drop()


@pytest.fixture
def near(nats_server: NatsServer, gateway_factory: GatewayFactory, positions: str) -> Gateway:
    """A gateway that is killed."""
    return gateway_factory(nats_server, *POSITIONS[positions])


@pytest.fixture
def far(nats_server: NatsServer, gateway_factory: GatewayFactory, positions: str) -> Gateway:
    """A gateway that stays."""
    return gateway_factory(nats_server, *POSITIONS[positions])


async def fill(stored: Stored, name: str, last: int) -> None:
    """Have other messages of the account stored, which the client does not get, up to a sequence of the stream."""
    for _ in range(last - await stored.last_sequence()):
        await stored.nats.publish(f"$MQTT.msgs.{name}-others", b"")
    await fence(stored.nats)

    async def stored_all() -> None:
        assert await stored.last_sequence() == last

    await until(stored_all)


async def fill_retained(stored: Stored, name: str, last: int) -> None:
    """Have another retained message stored again and again, up to a sequence of its stream."""
    for _ in range(last - await stored.last_sequence("$MQTT_rmsgs")):
        await stored.nats.publish(f"$MQTT.rmsgs.{name}-others", b"")
    await fence(stored.nats)

    async def stored_all() -> None:
        assert await stored.last_sequence("$MQTT_rmsgs") == last

    await until(stored_all)


async def keep(client: RawClient, publish: Publish, kind: int) -> None:
    """Answer a message, but not with packets of ``kind``."""
    if kind == PUBCOMP:
        client.ack(PUBREC, publish.packet_id)
        await client.released(publish.packet_id, answer=False)


async def let_go(client: RawClient, identifier: int, kind: int) -> None:
    """Answer a message that was kept."""
    client.ack(kind, identifier)
    if kind == PUBREC:
        await client.released(identifier)


async def following(client: RawClient, former: Container[bytes], owed: Ack | None = None) -> Packet:
    """The next packet, after those of exchanges that are complete; they are answered.

    What the client has answered within the last moments may come again, anywhere between other messages: PUBREL, or a
    message at QoS 1. Those behind a kept retained message stay owed.

    Args:
        former: payloads that the client has acknowledged on former connections.
        owed: a PUBREL that is not complete.
    """
    while (packet := await client.packet()) != owed:
        if isinstance(packet, Ack):
            assert packet.kind == PUBREL
            client.ack(PUBCOMP, packet.packet_id)
        elif isinstance(packet, Publish) and packet.payload in former and (packet.qos, packet.dup) == (1, True):
            client.ack(PUBACK, packet.packet_id)
        else:
            break
    return packet


async def comes_again(
    client: RawClient, payload: bytes, identifier: int, kind: int, former: Container[bytes] = ()
) -> None:
    """A kept message, or its PUBREL, comes to a new connection under its packet identifier [MQTT-4.4.0-1]."""
    owed = Ack(PUBREL, identifier, 0)
    packet = await following(client, former, owed)
    if kind == PUBCOMP:
        assert packet == owed
    else:
        assert isinstance(packet, Publish)
        assert (packet.payload, packet.packet_id, packet.dup) == (payload, identifier, True)


async def next_publish(client: RawClient, topic: str, payload: bytes, former: Container[bytes]) -> Publish:
    """The next message, which must be this one, after packets of exchanges that are complete."""
    packet = await following(client, former)
    assert isinstance(packet, Publish)
    assert (topic_of(packet), packet.payload) == (topic, payload)
    return packet


async def two_left(stored: Stored, name: str, kind: int) -> None:
    """Wait until JetStream knows that the client has acknowledged all but two messages, or all but two PUBRELs."""
    last = await stored.last_sequence()

    async def written() -> None:
        at = await position(stored.js, name)
        assert not at.live or at.reached >= last
        plain = [one for one in await stored.session_consumers(name) if one.name not in at.live]
        unacknowledged = sum(one.num_ack_pending or 0 for one in plain) + len(at.pending)
        assert unacknowledged == (0 if kind == PUBCOMP else 2)
        # PUBRELs of the position are in records, too, when a connection has ended in order.
        records = await stored.count("$MQTT_out", f"$MQTT.out.pubrel.{name_hash(name)}")
        assert max(records, len(at.released)) == (2 if kind == PUBCOMP else 0)

    await until(written)


async def nothing_allocated(stored: Stored, name: str) -> None:
    """Wait until no packet identifier is allocated in a session's position."""

    async def none() -> None:
        assert not (await position(stored.js, name)).identifiers

    await until(none)


@pytest.mark.parametrize(("positions", "stage", "version"), versions())
async def test_an_identifier_in_use_is_passed_over(
    name: str,
    stored: Stored,
    near: Gateway,
    far: Gateway,
    device: Device,
    publisher: RawClient,
    positions: str,
    stage: str,
) -> None:
    """At once, in order; both messages come again under their identifiers: at the same gateway, and at another one."""
    qos, kind = STAGES[stage]
    client = await device.subscribe(near, name, qos)
    await stored.live(name)
    await publisher.deliver(name, b"kept", qos)
    first = await stored.last_sequence()
    kept = await client.message(name, b"kept", packet_id=packet_id(first))
    await keep(client, kept, kind)
    await fill(stored, name, first + ID_SPACE - 2)
    await publisher.deliver_all(name, [b"before", b"other", b"after"], qos)
    before, other, after = await client.messages(3)
    assert [one.payload for one in (before, other, after)] == [b"before", b"other", b"after"]
    assert (before.packet_id, after.packet_id) == (packet_id(first - 1), packet_id(first + 1))
    assert other.packet_id != kept.packet_id
    assert (await position(stored.js, name)).identifiers == {first + ID_SPACE: other.packet_id}
    await client.complete(before)
    await client.complete(after)
    await keep(client, other, kind)
    former: list[bytes] = []
    for to, payload in ((near, b"new"), (far, b"newer")):
        await client.quiet()
        await two_left(stored, name, kind)
        if to is far:
            near.kill()
        client = await device.connect(to)
        await comes_again(client, b"kept", kept.packet_id, kind, former)
        await comes_again(client, b"other", other.packet_id, kind, former)
        await publisher.deliver(name, payload, qos)
        await client.complete(await next_publish(client, name, payload, former))
        former.append(payload)
    await let_go(client, other.packet_id, kind)
    await nothing_allocated(stored, name)
    await let_go(client, kept.packet_id, kind)
    await client.quiet()
    await stored.settled(name)


@pytest.mark.parametrize(("positions", "stage", "version"), versions())
async def test_an_identifier_of_a_retained_message_is_passed_over(
    name: str,
    stored: Stored,
    near: Gateway,
    far: Gateway,
    device: Device,
    publisher: RawClient,
    stage: str,
) -> None:
    """The other retained messages, and new ones, do not wait for it; both come again under their identifiers."""
    qos, kind = STAGES[stage]
    await publisher.deliver(f"{name}/kept", b"kept", qos, retain=True)
    first = await stored.last_sequence("$MQTT_rmsgs")
    await fill_retained(stored, name, first + RETAINED_SPACE - 1)
    for payload in (b"other", b"after"):
        await publisher.deliver(f"{name}/{payload.decode()}", payload, qos, retain=True)
    client = await device.subscribe(near, f"{name}/#", qos)
    kept, other, after = await client.messages(3)
    assert [one.payload for one in (kept, other, after)] == [b"kept", b"other", b"after"]
    assert (kept.packet_id, after.packet_id) == (retained_id(first), retained_id(first + 1))
    assert other.packet_id not in (kept.packet_id, after.packet_id)
    for one in (kept, other):
        await keep(client, one, kind)
    await client.complete(after)
    former: list[bytes] = []
    for to, payload in ((near, b"new"), (far, b"newer")):
        await client.quiet()
        if to is far:
            near.kill()
        client = await device.connect(to)
        await comes_again(client, b"kept", kept.packet_id, kind, former)
        await comes_again(client, b"other", other.packet_id, kind, former)
        if kind == PUBACK:  # a replay goes on at the first message that is not acknowledged
            await client.complete(await next_publish(client, f"{name}/after", b"after", former))
        await publisher.deliver(f"{name}/new", payload, qos)
        new = await next_publish(client, f"{name}/new", payload, former)
        assert new.packet_id not in (kept.packet_id, other.packet_id)
        await client.complete(new)
        former.append(payload)
    for one in (other, kept):
        await let_go(client, one.packet_id, kind)
    await nothing_allocated(stored, name)
    await client.quiet()
    await stored.settled(name)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize(("positions", "version"), [("consumers", 4), ("records", 5)])
async def test_70_000_messages_go_on(
    name: str, stored: Stored, far: Gateway, device: Device, publisher: RawClient, positions: str, qos: int
) -> None:
    """While the client keeps the first one."""
    client = await device.subscribe(far, name, qos)
    await stored.live(name)
    await publisher.deliver(name, b"kept", qos)
    kept = await client.message(name, b"kept")
    for start in range(0, 70_000, 100):
        payloads = [b"%d" % number for number in range(start, start + 100)]
        publisher._last_id = 0
        await publisher.deliver_all(name, payloads, qos)
        came = 0
        while came < 100:
            one = await client.packet()
            if isinstance(one, Publish):
                assert one.payload == payloads[came]
                assert one.packet_id != kept.packet_id
                client.ack(PUBACK if qos == 1 else PUBREC, one.packet_id)
                came += 1
            else:
                assert isinstance(one, Ack)
                client.ack(PUBCOMP, one.packet_id)
    await client.complete(kept)
    await nothing_allocated(stored, name)
