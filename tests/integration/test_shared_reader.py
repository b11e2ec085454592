# SPDX-License-Identifier: Apache-2.0
"""Durable sessions whose messages come through the gateway's shared reader, and go on elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import orjson
import pytest

from mqtt_nats.codec import Publish
from mqtt_streams.hashing import name_hash
from mqtt_streams.positions import Position
from tests.conftest import GatewayFactory, _gateway_factory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.integration.conftest import Connector, Stored, position, until
from tests.integration.resuming import expect_rest, received

PUBREC, PUBREL, PUBCOMP = 5, 6, 7


def _started(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory, *arguments: str) -> Iterator[Gateway]:
    with _gateway_factory(tmp_path_factory.mktemp("gateway")) as start:
        yield start(nats_server, *arguments)


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a shared reader."""
    yield from _started(nats_server, tmp_path_factory)


@pytest.fixture(scope="module")
def other(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One more."""
    yield from _started(nats_server, tmp_path_factory)


async def where(stored: Stored, client_id: str, check: Callable[[Position], bool]) -> None:
    """Wait until the position of a session is as it should be."""

    async def so() -> None:
        at = await position(stored.js, client_id)
        assert check(at), at

    await until(so, 30)


@pytest.mark.parametrize("qos", [1, 2])
async def test_nothing_is_delivered_by_the_consumer(connect: Connector, name: str, stored: Stored, qos: int) -> None:
    """What a live session gets comes through the reader, once and in order, and its position follows."""
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/#", qos=qos)
    await stored.live(name, 2)
    publisher = await connect(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(50)]
    await publisher.deliver_all(f"{name}/a.b/c", payloads, qos)
    got = await received(client, 50)
    assert [one.payload for one in got] == payloads
    assert not any(one.dup for one in got)
    for one in got:
        await client.complete(one)
    await client.quiet()
    last = await stored.last_sequence()
    await where(stored, name, lambda at: at.reached >= last and not at.pending and not at.released)
    for info in await stored.session_consumers(name):
        assert info.delivered is not None
        assert not info.delivered.consumer_seq
        assert not info.num_ack_pending


@pytest.mark.parametrize("goes", ["here", "elsewhere"])
@pytest.mark.parametrize("end", ["lost", "killed"])
async def test_window_of_mixed_states(
    connect: Connector,
    name: str,
    stored: Stored,
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    other: Gateway,
    goes: str,
    end: str,
) -> None:
    """Of six QoS 2 messages two are complete, two are released, two not acknowledged at all [MQTT-4.4.0-1]."""
    near = gateway_factory(nats_server)
    client = await connect(name, clean=False, to=near)
    await client.subscribe(name, qos=2)
    await stored.live(name)
    publisher = await connect(f"{name}-publisher", to=other)
    await publisher.deliver_all(name, [b"%d" % number for number in range(6)], 2)
    ids = [one.packet_id for one in await received(client, 6)]
    client.ack(PUBREC, *ids[:4])
    await client.expect_ack(PUBREL, *ids[:4])
    client.ack(PUBCOMP, *ids[:2])
    last = await stored.last_sequence()
    await where(stored, name, lambda at: at.reached >= last and len(at.pending) == 2 and len(at.released) == 2)
    if end == "killed":
        near.kill()
    client.drop()
    if end == "lost":
        await stored.detached(name)
    await publisher.deliver(name, b"new", 2)
    to = {"here": near if end == "lost" else other, "elsewhere": other}[goes]
    client = await connect(name, clean=False, to=to)
    await expect_rest(client, ids, killed=end == "killed")
    await stored.settled(name)


@pytest.mark.long
@pytest.mark.parametrize("end", ["behind", "lost"])
async def test_window_is_that_of_the_subscription(
    connect: Connector, name: str, stored: Stored, nats_server: NatsServer, gateway_factory: GatewayFactory, end: str
) -> None:
    """Also of what was taken when the session falls behind, or its connection ends."""
    most = ("--max-backlog", "30") if end == "behind" else ()
    near = gateway_factory(nats_server, "--max-inflight", "5", *most)
    client = await connect(name, clean=False, to=near)
    await client.subscribe(name, qos=1)
    await stored.live(name)
    publisher = await connect(f"{name}-publisher")
    count = 1500 if end == "lost" else 60
    payloads = [b"%d" % number for number in range(count)]
    await publisher.deliver_all(name, payloads, 1)
    first = await received(client, 5)
    if end == "lost":
        client.drop()
        await stored.detached(name)
        client = await connect(name, clean=False, to=near)
        again = await received(client, 5)
        assert [one.packet_id for one in again] == [one.packet_id for one in first]
        first = again
    else:
        last = await stored.last_sequence()
        await where(stored, name, lambda at: at.reached < last and len(at.pending) >= 5)
    got = list(first)
    for number in range(count):
        await client.quiet()
        await client.complete(got[number])
        if len(got) < count:
            got += await received(client, 1)
    assert [one.payload for one in got] == payloads
    assert [one.dup for one in got] == [end == "lost"] * 5 + [False] * (count - 5)
    await client.quiet()
    await stored.settled(name)


async def test_further_subscription_has_a_window_of_its_own(
    connect: Connector, name: str, stored: Stored, nats_server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    """Also while that of the first one is full."""
    near = gateway_factory(nats_server, "--max-inflight", "5")
    client = await connect(name, clean=False, to=near)
    await client.subscribe(f"{name}/a", qos=1)
    await stored.live(name)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver_all(f"{name}/a", [b"%d" % number for number in range(5)], 1)
    await received(client, 5)
    await client.subscribe(f"{name}/b", qos=1)
    await publisher.deliver(f"{name}/b", b"answer", 1)
    await client.message(f"{name}/b", b"answer")


async def test_released_before_it_is_stored_never(connect: Connector, name: str, stored: Stored) -> None:
    """PUBREL is sent when the position that has it as owed is stored [MQTT-4.3.3-1]."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=2)
    await stored.live(name)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"1", 2)
    (message,) = await received(client, 1)
    client.ack(PUBREC, message.packet_id)
    await client.expect_ack(PUBREL, message.packet_id)
    at = await position(stored.js, name)
    assert at.released == {message.packet_id: message.packet_id - 1}
    assert not at.pending


async def test_session_that_moved_is_let_go(connect: Connector, name: str, stored: Stored, other: Gateway) -> None:
    """A former owner's position is not written over the new one's, and no PUBREL leaves."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=2)
    await stored.live(name)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"1", 2)
    (message,) = await received(client, 1)
    # Somebody else has claimed the session, and this gateway has not been told.
    record = await stored.record(name)
    record["v5"]["nonce"] = "another"
    await stored.js.publish(f"$MQTT.sess.{name_hash(name)}", orjson.dumps(record))
    at = await position(stored.js, name)
    await stored.js.publish(f"$MQTT.pos.{name_hash(name)}", at.encode())
    client.ack(PUBREC, message.packet_id)
    await client.expect_closed()


async def test_overlapping_subscriptions(connect: Connector, name: str, stored: Stored) -> None:
    """One message, once, at the highest QoS [MQTT-3.3.5-1]; one subscription ends while messages come."""
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/a", qos=1)
    await stored.live(name)
    await client.subscribe(f"{name}/+", qos=2)
    await stored.live(name, 2)
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver_all(f"{name}/a", [b"1", b"2"], 2)
    got = await received(client, 2)
    assert [(one.payload, one.qos) for one in got] == [(b"1", 2), (b"2", 2)]
    await client.unsubscribe(f"{name}/a")
    await stored.live(name)
    await publisher.deliver_all(f"{name}/a", [b"3"], 2)
    got += await received(client, 1)
    assert got[2].payload == b"3"
    for one in got:
        await client.complete(one)
    await client.quiet()
    await stored.settled(name)


async def test_session_that_ends_leaves_no_position(connect: Connector, name: str, stored: Stored) -> None:
    """A clean start removes it with everything else [MQTT-3.1.2-6]."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    await stored.live(name)
    await client.disconnect()
    await stored.detached(name)
    client = await connect(name, clean=True)
    await client.disconnect()

    async def gone() -> None:
        assert not await stored.count("$MQTT_pos", f"$MQTT.pos.{name_hash(name)}")

    await until(gone, 30)


async def test_deleted_consumer_and_reader_are_made_again(connect: Connector, name: str, stored: Stored) -> None:
    """Whatever somebody deletes, nothing is lost and nothing comes twice."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    await stored.live(name)
    publisher = await connect(f"{name}-publisher")
    (consumer,) = await stored.session_consumers(name)
    await stored.js.delete_consumer("$MQTT_msgs", consumer.name)
    for reader in [one.name for one in await stored.js.consumers_info("$MQTT_msgs") if "_reader_" in one.name]:
        await stored.js.delete_consumer("$MQTT_msgs", reader)
    payloads = [b"%d" % number for number in range(20)]
    await publisher.deliver_all(name, payloads, 1)
    got = await received(client, 20)
    assert [one.payload for one in got] == payloads
    for one in got:
        await client.complete(one)

    async def there() -> None:
        assert await stored.session_consumers(name)

    await until(there, 30)
    await client.quiet()


async def test_client_that_falls_behind(connect: Connector, name: str, stored: Stored) -> None:
    """It is given no more than waits; when its client has taken that, it reads the rest, and is live again."""
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=1)
    await stored.live(name)
    publisher = await connect(f"{name}-publisher")
    payloads = [b"%d" % number for number in range(4400)]
    for start in range(0, 4400, 200):
        await publisher.deliver_all(name, payloads[start : start + 200], 1)
    last = await stored.last_sequence()
    await where(stored, name, lambda at: bool(at.live) and at.reached < last)
    got: list[Publish] = []
    while len(got) < len(payloads):
        (one,) = await received(client, 1)
        got.append(one)
        await client.complete(one)
    assert [one.payload for one in got] == payloads
    assert not any(one.dup for one in got)
    await client.quiet()
    await stored.live(name)
    await stored.settled(name)
