# SPDX-License-Identifier: Apache-2.0
"""Packets of a client take effect in the order in which they came: what is behind a SUBSCRIBE does not overtake it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from mqtt_nats.codec import (
    PINGREQ,
    Ack,
    PingResp,
    Publish,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    encode,
)
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient, key_of
from tests.integration.conftest import Connector, Connector5

ROUNDS = 50
"""Rounds of one session; with ``--rounds``, further sessions have the others."""

DURABLE: dict[str, Any] = {"session_expiry_interval": 60}

KINDS = ["3.1.1", "3.1.1 durable", "5.0", "5.0 durable"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat each test with a session of its own, until there were so many rounds."""
    sessions = -(-metafunc.config.getoption("--rounds") // ROUNDS)
    metafunc.parametrize("session", range(sessions), indirect=True)


@pytest.fixture(scope="module", autouse=True)
def load(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--load``, as many processes as there are processors compute all the time."""
    count = (os.cpu_count() or 1) if request.config.getoption("--load") else 0
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    yield
    for one in processes:
        one.kill()
        one.wait()


@pytest.fixture(autouse=True)
async def session(request: pytest.FixtureRequest, connect: Connector, name: str) -> AsyncIterator[int]:
    """Number of the session, which is removed at the end: the next one finds no more consumers."""
    number: int = request.param
    yield number
    (await connect(name)).drop()


async def connected(connect: Connector, connect5: Connector5, kind: str, name: str) -> RawClient:
    """A client of such a kind."""
    durable = kind.endswith("durable")
    if kind.startswith("5.0"):
        return await connect5(name, **(DURABLE if durable else {}))
    return await connect(name, clean=not durable)


async def answered(client: RawClient, kind: type[Suback] | type[Unsuback], own: int, qos: int) -> list[Publish]:
    """What a client gets until a request, and its own publish behind it, are answered and nothing more comes."""
    found: list[Publish] = []
    left = {("request", 0)} | ({(PUBACK, own)} if qos == 1 else {(PUBCOMP, own)} if qos == 2 else set())
    while left:
        packet = await client.packet()
        if isinstance(packet, kind):
            left.discard(("request", 0))
        elif isinstance(packet, Publish):
            found.append(packet)
        elif isinstance(packet, Ack):
            if (packet.kind, packet.packet_id) == (PUBREC, own):
                client.ack(PUBREL, own)
            left.discard((packet.kind, packet.packet_id))
    return found


async def get(client: RawClient, found: list[Publish], count: int) -> list[Publish]:
    """Add to what was found until there are so many, and complete each."""
    while len(found) < count:
        packet = await client.packet(5)
        if isinstance(packet, Publish):
            found.append(packet)
    for one in found:
        await client.complete(one)
    return found


@pytest.mark.parametrize("wanted", ["plain", "wild"])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_publish_behind_a_subscribe(
    connect: Connector, connect5: Connector5, name: str, kind: str, qos: int, wanted: str
) -> None:
    """[MQTT-3.8.4-4] (3.1.1, 5.0): in one write; the subscriber is its publisher."""
    client = await connected(connect, connect5, kind, name)
    for number in range(ROUNDS):
        topic = f"{name}/{number}"
        own = 2 * number + 2
        client.send(
            Subscribe(2 * number + 1, (Subscription(f"+/{number}" if wanted == "wild" else topic, qos),)),
            Publish(qos, False, False, key_of(topic), own if qos else 0, b"own"),
        )
        found = await get(client, await answered(client, Suback, own, qos), 1)
        assert [(one.payload, one.qos) for one in found] == [(b"own", qos)], number


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_publish_before_a_subscribe(
    connect: Connector, connect5: Connector5, name: str, kind: str, qos: int
) -> None:
    """It came before there was a subscription."""
    client = await connected(connect, connect5, kind, name)
    for number in range(ROUNDS):
        topic = f"{name}/{number}"
        own = 2 * number + 2
        client.send(
            Publish(min(qos, 1), False, False, key_of(topic), own if qos else 0, b"own"),
            Subscribe(2 * number + 1, (Subscription(topic, qos),)),
        )
        assert not await answered(client, Suback, own, min(qos, 1)), number
    await client.quiet()


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_publish_of_another_client_behind_a_subscribe(
    connect: Connector, connect5: Connector5, name: str, kind: str, qos: int
) -> None:
    """At the same gateway, which has read the SUBSCRIBE: it has answered what was behind it."""
    client = await connected(connect, connect5, kind, name)
    publisher = await connect(f"{name}-publisher")
    early = 0
    for number in range(ROUNDS):
        topic = f"{name}/{number}"
        client.write(encode(Subscribe(number + 1, (Subscription(topic, qos),)), client.version) + PINGREQ)
        packet = await client.packet()
        early += isinstance(packet, PingResp)
        if isinstance(packet, Suback):
            await client.expect(PingResp)
        publisher.publish(topic, b"other", qos, packet_id=1)
        found = await answered(client, Suback, 0, 0) if isinstance(packet, PingResp) else []
        found = await get(client, found, 1)
        assert [(one.payload, one.qos) for one in found] == [(b"other", qos)], number
    assert early, "SUBACK has always been there before"


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_publish_behind_an_unsubscribe(
    connect: Connector, connect5: Connector5, name: str, kind: str, qos: int
) -> None:
    """[MQTT-3.10.4-2] (3.1.1, 5.0): nothing more is added."""
    client = await connected(connect, connect5, kind, name)
    for number in range(ROUNDS):
        topic = f"{name}/{number}"
        own = 3 * number + 3
        client.send(Subscribe(3 * number + 1, (Subscription(topic, qos),)))
        await client.expect(Suback)
        client.send(
            Unsubscribe(3 * number + 2, (topic,)),
            Publish(qos, False, False, key_of(topic), own if qos else 0, b"own"),
        )
        assert not await answered(client, Unsuback, own, qos), number
    await client.quiet()


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("durable", [False, True])
async def test_two_subscribes_and_a_publish(connect5: Connector5, name: str, qos: int, durable: bool) -> None:
    """[MQTT-3.3.4-4] (5.0): the message has both identifiers."""
    client = await connect5(name, **(DURABLE if durable else {}))
    for number in range(ROUNDS):
        topic = f"{name}/{number}/a"
        own = 3 * number + 3
        client.send(
            Subscribe(3 * number + 1, (Subscription(topic, qos),), {"subscription_identifier": [1]}),
            Subscribe(3 * number + 2, (Subscription(f"{name}/{number}/+", qos),), {"subscription_identifier": [2]}),
            Publish(qos, False, False, key_of(topic), own if qos else 0, b"own"),
        )
        found = await answered(client, Suback, own, qos)
        found = await get(client, found, 1)
        assert [sorted((one.properties or {}).get("subscription_identifier", [])) for one in found] == [[1, 2]], number
        client.send(Unsubscribe(own, (topic, f"{name}/{number}/+")))
        while not isinstance(await client.packet(), Unsuback):
            pass


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_retained_comes_before_what_is_new(
    connect: Connector, connect5: Connector5, name: str, kind: str, qos: int
) -> None:
    """A retained publish behind the SUBSCRIBE is new to it."""
    client = await connected(connect, connect5, kind, name)
    publisher = await connect(f"{name}-publisher")
    for number in range(ROUNDS):
        await publisher.deliver(f"{name}/{number}", b"kept", 1, retain=True)
    for number in range(ROUNDS):
        topic = f"{name}/{number}"
        own = 2 * number + 2
        client.send(
            Subscribe(2 * number + 1, (Subscription(topic, qos),)),
            Publish(qos, True, False, key_of(topic), own if qos else 0, b"own"),
        )
        found = await get(client, await answered(client, Suback, own, qos), 2)
        assert [(one.payload, one.retain) for one in found] == [(b"kept", True), (b"own", False)], number


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("durable", [False, True])
async def test_a_publish_behind_a_shared_subscribe(connect5: Connector5, name: str, qos: int, durable: bool) -> None:
    """[MQTT-4.8.2-4] (5.0): it is for the group, which has one member."""
    client = await connect5(name, **(DURABLE if durable else {}))
    for number in range(ROUNDS):
        topic = f"{name}/{number}"
        own = 2 * number + 2
        client.send(
            Subscribe(2 * number + 1, (Subscription(f"$share/{name}/{topic}", qos),)),
            Publish(qos, False, False, key_of(topic), own if qos else 0, b"own"),
        )
        found = await get(client, await answered(client, Suback, own, qos), 1)
        assert [one.payload for one in found] == [b"own"], number


@pytest.mark.parametrize("kind", KINDS)
async def test_options_and_qos_change_at_once(connect: Connector, connect5: Connector5, name: str, kind: str) -> None:
    """[MQTT-3.8.4-3] (3.1.1, 5.0): what is behind the second SUBSCRIBE comes as that one asks."""
    client = await connected(connect, connect5, kind, name)
    identifier = 0
    for number in range(ROUNDS):
        topic = f"{name}/{number}"
        sent: list[Publish | Subscribe] = []
        for qos in (1, 0, 2, 0, 1):
            identifier += 2
            sent.append(Subscribe(identifier - 1, (Subscription(topic, qos),)))
            sent.append(Publish(1, False, False, key_of(topic), identifier, b"%d" % qos))
        client.send(*sent)
        found: list[Publish] = []
        while len(found) < 5:
            packet = await client.packet(5)
            if isinstance(packet, Publish):
                found.append(packet)
                await client.complete(packet)
        assert [(one.payload, one.qos) for one in found] == [(b"1", 1), (b"0", 0), (b"2", 1), (b"0", 0), (b"1", 1)], (
            number
        )
        identifier += 1
        await _settle(client)


async def _settle(client: RawClient) -> None:
    """Nothing but answers to requests comes until a ping is answered."""
    client.write(PINGREQ)
    while not isinstance(packet := await client.packet(), PingResp):
        assert not isinstance(packet, Publish), packet
