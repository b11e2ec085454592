# SPDX-License-Identifier: Apache-2.0
"""`session_positions = "auto"`: sessions have consumers up to a number of them in the account; others have records."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import pytest
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig

from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.fence import fence
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually
from tests.integration.conftest import Connector, Stored, until
from tests.integration.resuming import expect_rest, left, mixed_window, received
from tests.integration.test_session_positions import consumerless

BOUND = 20
AUTO = ("--session-positions", "auto", "--session-consumers", f"{BOUND}", "--gateway-lease", "8")
"""Gateways look at the number of consumers four times in the time of a lease."""

BEYOND = 2 * BOUND
"""Consumers of others with which sessions get records."""


@pytest.fixture
def nats_server(nats_factory: NatsFactory) -> NatsServer:
    """A nats-server without consumers of other tests."""
    return nats_factory()


@pytest.fixture
def gateway(nats_server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(nats_server, *AUTO)


@pytest.fixture
def other(nats_server: NatsServer, gateway_factory: GatewayFactory, gateway: Gateway) -> Gateway:
    return gateway_factory(nats_server, *AUTO)


class Others:
    """Consumers of others, by which the number of consumers is above the bound or below it."""

    def __init__(self, stored: Stored, connect: Connector, name: str) -> None:
        self._stored, self._connect, self._probe = stored, connect, f"{name}-probe"

    async def come(self, to: Gateway) -> None:
        """Bring the number above the bound, and wait until a gateway knows it."""
        for number in range(BEYOND):
            config = ConsumerConfig(durable_name=f"other{number}", filter_subject="$MQTT.msgs.other")
            await self._stored.js.add_consumer("$MQTT_msgs", config)
        await until(partial(self._moves, to, records=True))

    async def go(self, to: Gateway) -> None:
        """Bring the number below the bound, and wait until a gateway knows it."""
        for number in range(BEYOND):
            await self._stored.js.delete_consumer("$MQTT_msgs", f"other{number}")
        await until(partial(self._moves, to, records=False))

    async def _moves(self, to: Gateway, *, records: bool) -> None:
        """Check that a session moves when its client connects."""
        client = await self._connect(self._probe, clean=False, to=to)
        await client.subscribe(self._probe, qos=1)
        await self._stored.live(self._probe)
        await client.disconnect()
        assert await in_records(self._stored, self._probe) is records


@pytest.fixture
def others(stored: Stored, connect: Connector, name: str) -> Others:
    return Others(stored, connect, name)


async def in_records(stored: Stored, client_id: str) -> bool:
    """Whether a session has no consumers, by its record."""
    return bool((await stored.record(client_id))["v5"].get("consumerless"))


async def with_consumers(stored: Stored, client_id: str, number: int = 1) -> None:
    """Wait until a session is served by the shared reader, and has its consumers."""
    await stored.live(client_id, number)

    async def has() -> None:
        assert len(await stored.session_consumers(client_id)) == number
        assert not await in_records(stored, client_id)

    await until(has)


async def expect(client: RawClient, payloads: list[bytes]) -> None:
    """These messages, once, in order and without DUP."""
    got = await received(client, len(payloads))
    assert [(one.payload, one.dup) for one in got] == [(payload, False) for payload in payloads]
    for one in got:
        await client.complete(one)
    await client.quiet()


@pytest.mark.parametrize("goes", ["here", "other"])
@pytest.mark.parametrize("qos", [1, 2])
async def test_a_session_moves_in_both_directions(
    connect: Connector, name: str, stored: Stored, gateway: Gateway, other: Gateway, others: Others, qos: int, goes: str
) -> None:
    """What it has missed comes once and in order; its consumers go, and come again."""
    to = {"here": gateway, "other": other}[goes]
    publisher = await connect(f"{name}-publisher")
    client = await connect(name, clean=False)
    await client.subscribe(f"{name}/#", qos=qos)
    await with_consumers(stored, name, 2)
    for move in range(4):
        await client.disconnect()
        await left(stored, name)
        payloads = [b"%d %d" % (move, number) for number in range(5)]
        await publisher.deliver_all(f"{name}/a", payloads, qos)
        await (others.go(to) if move % 2 else others.come(to))
        client = await connect(name, clean=False, to=to)
        await expect(client, payloads)
        if move % 2:
            await with_consumers(stored, name, 2)
        else:
            await consumerless(stored, name, 2)
        await publisher.deliver(name, b"present", qos)
        await expect(client, [b"present"])
        await stored.settled(name)


@pytest.mark.parametrize("end", ["lost", "killed"])
@pytest.mark.parametrize("direction", ["to records", "to consumers"])
async def test_window_of_mixed_states(
    connect: Connector,
    name: str,
    stored: Stored,
    gateway: Gateway,
    other: Gateway,
    others: Others,
    end: str,
    direction: str,
) -> None:
    """Of six QoS 2 messages two are complete, two are released, two not acknowledged at all [MQTT-4.4.0-1]."""
    if direction == "to consumers":
        await others.come(gateway)
    client = await connect(name, clean=False)
    await client.subscribe(name, qos=2)
    await (consumerless(stored, name) if direction == "to consumers" else with_consumers(stored, name))
    publisher = await connect(f"{name}-publisher", to=other)
    ids = await mixed_window(client, publisher, stored, name)
    if end == "killed":
        gateway.kill()
    client.drop()
    if end == "lost":
        await left(stored, name)
    await publisher.deliver(name, b"new", 2)
    await (others.go(other) if direction == "to consumers" else others.come(other))
    client = await connect(name, clean=False, to=other)
    await expect_rest(client, ids, killed=end == "killed")
    await stored.settled(name)
    await (with_consumers(stored, name) if direction == "to consumers" else consumerless(stored, name))


async def test_new_sessions_beyond_the_bound(connect: Connector, name: str, stored: Stored) -> None:
    """They come at once, before anybody looks at the number; later ones take the place of those that have ended."""
    names = [f"{name}-{number}" for number in range(2 * BOUND)]
    clients = await asyncio.gather(*(connect(one, clean=False) for one in names))
    await asyncio.gather(*(client.subscribe(name, qos=1) for client in clients))
    kept = [one for one in names if not await in_records(stored, one)]
    assert BOUND // 2 < len(kept) <= BOUND
    assert len(await stored.consumers("$MQTT_msgs")) <= BOUND + 1  # the gateway's reader
    publisher = await connect(f"{name}-publisher")
    await publisher.deliver(name, b"to all", 1)
    for client in clients:
        await expect(client, [b"to all"])
    for one in kept[: BOUND // 2]:
        await (await connect(one)).disconnect()  # the session ends

    async def a_new_one_has_a_consumer() -> None:
        fresh = f"{name}-fresh"
        client = await connect(fresh, clean=False)
        await client.subscribe(name, qos=1)
        records = await in_records(stored, fresh)
        await (await connect(fresh)).disconnect()
        assert not records

    await until(a_new_one_has_a_consumer)


async def test_many_that_return_at_once(
    connect: Connector, name: str, stored: Stored, others: Others, gateway: Gateway
) -> None:
    """Only so many get consumers as there is room for, although all are resumed before anybody looks at the number."""
    await others.come(gateway)
    names = [f"{name}-{number}" for number in range(2 * BOUND)]
    publisher = await connect(f"{name}-publisher")
    for one in names:
        client = await connect(one, clean=False)
        await client.subscribe(name, qos=1)
        assert await in_records(stored, one)
        await client.disconnect()
    await publisher.deliver(name, b"missed", 1)
    await others.go(gateway)
    clients = await asyncio.gather(*(connect(one, clean=False) for one in names))
    for client in clients:
        await expect(client, [b"missed"])
    moved = [one for one in names if not await in_records(stored, one)]
    assert 1 < len(moved) < BOUND
    for one in names:
        assert len(await stored.session_consumers(one)) == (one in moved)


async def test_between_the_bounds_nobody_moves(connect: Connector, name: str, stored: Stored, gateway: Gateway) -> None:
    """A quarter below and above the bound; other sessions come and go there."""
    names = [f"{name}-{number}" for number in range(BOUND + 4)]
    for one in names:
        client = await connect(one, clean=False)
        await client.subscribe(one, qos=1)
    before = [await in_records(stored, one) for one in names]
    assert 0 < sum(before) < len(before)
    publisher = await connect(f"{name}-publisher")
    for number in range(2):
        for one in names:
            client = await connect(one, clean=False)
            await publisher.deliver(one, b"%d" % number, 1)
            await expect(client, [b"%d" % number])
    assert [await in_records(stored, one) for one in names] == before


async def test_everything_is_killed(
    connect: Connector, name: str, stored: Stored, gateway: Gateway, nats_server: NatsServer, others: Others
) -> None:
    """Sessions of either kind go on, and move, after their gateway and nats-server have started again."""
    kinds = [f"{name}-consumers", f"{name}-records"]
    publisher = await connect(f"{name}-publisher", clean=False)
    for one in kinds:
        client = await connect(one, clean=False)
        await client.subscribe(name, qos=2)
        await stored.live(one)
        assert await in_records(stored, one) is (one == kinds[1])
        if one == kinds[0]:
            await others.come(gateway)
    gateway.kill()
    nats_server.kill()
    nats_server.start()
    gateway.start()
    publisher = await connect(f"{name}-publisher", clean=False)
    await publisher.deliver_all(name, [b"%d" % number for number in range(3)], 2)
    for one in kinds:
        client = await connect(one, clean=False)
        got = await received(client, 3)
        assert [message.payload for message in got] == [b"0", b"1", b"2"]
        for message in got:
            await client.complete(message)
        await client.quiet()
        await consumerless(stored, one)


def was_set(subjects: list[str]) -> bool:
    """Whether a consumer was set to a position."""
    return any(".CONSUMER.RESET." in one for one in subjects)


async def test_below_the_bound_it_costs_nothing(
    connect: Connector, name: str, stored: Stored, nats_server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    """SUBSCRIBE, and CONNECT that resumes, ask JetStream for the same as with `session_positions = "consumers"`."""
    asked: dict[str, Counter[str]] = {}
    for positions in ("consumers", "auto"):
        gateway = gateway_factory(nats_server, "--session-positions", positions)
        client_id = f"{name}-{positions}"
        subjects: list[str] = []

        async def note(message: Msg, into: list[str] = subjects) -> None:
            into.append(message.subject)

        seen = [await stored.nats.subscribe(one, cb=note) for one in ("$JS.API.>", "$MQTT.sess.>")]
        await fence(stored.nats)
        client = await connect(client_id, clean=False, to=gateway)
        await client.subscribe(client_id, qos=1)
        await stored.live(client_id)
        await client.disconnect()
        await left(stored, client_id)
        await aeventually(partial(was_set, subjects), what="the consumer that is set to the position")
        client = await connect(client_id, clean=False, to=gateway)
        await stored.live(client_id)
        (consumer,) = await stored.session_consumers(client_id)
        await client.quiet()
        await fence(stored.nats)
        for one in seen:
            await one.unsubscribe()
        looks = ".GET.$MQTT_pos."  # this test's
        own = [one for one in subjects if name_hash(client_id) in one and looks not in one]
        asked[positions] = Counter(one.replace(consumer.name, "c").replace(name_hash(client_id), "h") for one in own)
    # How often consumers are asked is a matter of time; how often the record is written is not.
    assert asked["auto"]["$MQTT.sess.h"] == asked["consumers"]["$MQTT.sess.h"] > 0
    assert set(asked["auto"]) == set(asked["consumers"])
