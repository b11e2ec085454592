# SPDX-License-Identifier: Apache-2.0
"""What was removed stays removed when nats-server is killed: records of every stream, each replaced before.

nats-server deletes a message on the disk when it is deleted, purged or expired, or when a later one asks for it by the
header `Nats-Rollup`. A message that has gone because of `max_msgs_per_subject` is back after SIGKILL.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import nats
import orjson
import pytest
from nats.aio.client import Client

from mqtt_nats.codec import Properties, Publish, Subscription, Will
from mqtt_streams.definitions import EVERY, load_definition
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pages import PAGE_FIRST
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.retained import retained_subject
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.cluster import Cluster, lead, running_cluster
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

PATIENCE = 60.0

Records = frozenset[tuple[str, str]]
"""Streams and subjects of stored records."""


class World:
    """A gateway with its nats-servers, in which records are made, replaced and removed."""

    def __init__(self, gateway: Gateway, url: str, client: Client) -> None:
        self.gateway, self.url, self.client = gateway, url, client

    @property
    def port(self) -> int:
        """Port of MQTT."""
        return self.gateway.port

    async def durable(self, name: str, *, expiry: int = 600) -> RawClient5:
        """Connect a client of 5.0 whose session stays."""
        return await RawClient5.connect5(self.port, name, clean=False, session_expiry_interval=expiry)

    async def ctl(self, *arguments: str) -> None:
        """Run a command of `ctl`."""
        command = [sys.executable, "-m", "mqtt_nats", "ctl", "--nats", self.url, *arguments]
        done = await anyio.run_process(command, cwd=ROOT, check=False)
        assert done.returncode == 0, (done.stdout, done.stderr)


KEPT = tuple(stream for stream in EVERY if stream != MESSAGES)


async def records(client: Client, only: tuple[str, ...] = KEPT) -> Records:
    """Return all records as the leaders of the streams have them."""
    found: set[tuple[str, str]] = set()
    for stream in only:
        reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", b'{"subjects_filter":">"}', timeout=PATIENCE)
        info = orjson.loads(reply.data)
        assert "error" not in info or info["error"]["err_code"] == 10059, info
        found.update((stream, subject) for subject in (info.get("state") or {}).get("subjects") or ())
    return frozenset(found)


# -- what is removed ----------------------------------------------------------------------------------


async def retained_messages(world: World) -> None:
    """Messages that were changed, then cleared: each protocol and QoS, and by `ctl`."""
    async with await RawClient.connect(world.port, "old") as old, await RawClient5.connect5(world.port, "new") as new:
        for name, client in (("4", old), ("5", new)):
            for qos in (0, 1, 2):
                for payload in (b"1", b"2", b"3", b""):
                    await client.deliver(f"r/{name}/{qos}", payload, qos, retain=True)
        for payload in (b"1", b"2"):
            await old.deliver("r/ctl", payload, 1, retain=True)
        await old.deliver("r/ctl", b"3", 1)
        await world.ctl("retained", "delete", "r/ctl")


async def expired_retained_message(world: World) -> None:
    """A message without an end, replaced by one that expires."""
    async with await RawClient5.connect5(world.port, "brief") as client:
        await client.deliver("e/1", b"1", 1, retain=True)
        client.publish5("e/1", b"2", 1, retain=True, message_expiry_interval=1)
        await client.packet()


async def clean_start(world: World) -> None:
    """Sessions that a clean start ends: 3.1.1 and 5.0."""
    for _ in range(2):
        async with await RawClient.connect(world.port, "plain", clean=False) as client:
            await client.subscribe("s/1", qos=1)
            await client.disconnect()
    async with await RawClient.connect(world.port, "plain") as client:
        await client.disconnect()
    for _ in range(2):
        async with await world.durable("five") as client5:
            await client5.subscribe5(Subscription("s/2", 2))
            await client5.disconnect5()
    async with await RawClient5.connect5(world.port, "five") as client5:
        await client5.disconnect5()


async def expired_session(world: World) -> None:
    """A session whose time is over; its timer was set several times."""
    for expiry in (600, 600, 1):
        async with await world.durable("expiring", expiry=expiry) as client:
            await client.subscribe5(Subscription("s/3", 1))
            await client.disconnect5()


async def session_given_up(world: World) -> None:
    """DISCONNECT takes the expiry interval to 0."""
    for _ in range(2):
        async with await world.durable("leaving") as client:
            await client.subscribe5(Subscription("s/4", 1))
            await client.disconnect5()
    async with await world.durable("leaving") as client:
        await client.disconnect5(session_expiry_interval=0)


async def session_cleaned(world: World) -> None:
    """An operator ends a session."""
    for _ in range(2):
        async with await world.durable("idle") as client:
            await client.subscribe5(Subscription("s/5", 1))
            await client.disconnect5()
    await world.ctl("sessions", "clean", "idle")


async def position(world: World) -> None:
    """A session that took messages, at each QoS, and has ended: with it its position, or its consumers."""
    async with await world.durable("reader") as client, await RawClient.connect(world.port, "writer") as writer:
        await client.subscribe5(Subscription("p/#", 2))
        for number in range(6):
            await writer.deliver("p/1", b"%d" % number, 1 + number % 2)
            await client.receive("p/1", b"%d" % number)

        async def complete() -> bool:
            return not await records(world.client, (OUT,))

        await aeventually(complete)  # else the next connection is asked for PUBCOMP again
        await client.disconnect5()
    async with await world.durable("reader") as client:
        await client.disconnect5(session_expiry_interval=0)


async def wills(world: World) -> None:
    """Wills: replaced by those of later connections, with and without delay."""
    async with AsyncExitStack() as stack:
        for text in (b"1", b"2", b"3"):
            client = await RawClient5.connect5(world.port, "mortal", will=Will("w/1", text, 1, False, None))
            await stack.enter_async_context(client)
        await client.disconnect5()
    late: Properties = {"will_delay_interval": 60}
    for text in (b"1", b"2"):
        async with await RawClient5.connect5(
            world.port, "late", clean=False, session_expiry_interval=600, will=Will("w/2", text, 1, False, late)
        ):
            pass
    async with await world.durable("late") as client:
        await client.disconnect5(session_expiry_interval=0)


async def bans(world: World) -> None:
    """A ban that is shortened, and is over."""
    await world.ctl("bans", "add", "client", "mallory", "--for", "1h")
    await world.ctl("bans", "add", "client", "mallory", "--for", "1s")


async def group(world: World) -> None:
    """A member of a group that joins again, and leaves; QoS 2 messages that were the member's."""
    async with await world.durable("worker") as client, await RawClient.connect(world.port, "boss") as boss:
        for qos in (1, 2):
            await client.subscribe5(Subscription("$share/g/job", qos))
        for number in range(3):
            await boss.deliver("job", b"%d" % number, 2)
            await client.receive("job", b"%d" % number)
        await client.unsubscribe("$share/g/job")
        await client.disconnect5(session_expiry_interval=0)


async def halfway(world: World) -> None:
    """A QoS 2 message that was incomplete at the ends of two connections."""
    async with await world.durable("slow") as client, await RawClient.connect(world.port, "quick") as quick:
        await client.subscribe5(Subscription("h", 2))
        await quick.deliver("h", b"1", 2)
        await client.expect(Publish)
    for _ in range(2):
        async with await world.durable("slow") as client:
            await client.expect(Publish)
    async with await world.durable("slow") as client:
        await client.receive("h", b"1", dup=True)
        await client.disconnect5(session_expiry_interval=0)


async def held_publish(world: World) -> None:
    """A QoS 2 publish that is held, comes again, and is released; the identifier is used again."""
    async with await RawClient.connect(world.port, "sender") as sender:
        for _ in range(2):
            identifier = sender.publish("q", b"1", 2, packet_id=7)
            await sender.expect_ack(PUBREC, identifier)
            sender.publish("q", b"1", 2, packet_id=7, dup=True)
            await sender.expect_ack(PUBREC, identifier)
            sender.ack(PUBREL, identifier)
            await sender.expect_ack(PUBCOMP, identifier)


EVERYTHING: tuple[Callable[[World], Awaitable[None]], ...] = (
    retained_messages,
    expired_retained_message,
    clean_start,
    expired_session,
    session_given_up,
    session_cleaned,
    position,
    wills,
    bans,
    group,
    halfway,
    held_publish,
)


# -- what comes back ----------------------------------------------------------------------------------


@pytest.fixture(params=["records", "consumers"])
def gateway_regime(request: pytest.FixtureRequest) -> dict[str, str]:
    """Where the positions of sessions are."""
    return {"MQTT_NATS_SESSION_POSITIONS": request.param}


async def use(world: World, done: tuple[Callable[[World], Awaitable[None]], ...]) -> Records:
    """Have records made, replaced and removed, and return the others once all of these are gone."""
    client = world.client
    async with await world.durable("first") as first:  # what the first session leaves for all
        await first.subscribe5(Subscription("first", 2))
        await first.disconnect5(session_expiry_interval=0)
    await aeventually(lambda: _none_of_clients(client), PATIENCE)
    baseline = await records(client)
    for remove in done:
        await remove(world)

    async def gone() -> bool:
        return not await records(client) - baseline

    try:
        await aeventually(gone, PATIENCE)
    except AssertionError:
        raise AssertionError(f"not removed: {sorted(await records(client) - baseline)}") from None
    return baseline


async def _none_of_clients(client: Client) -> bool:
    return not await records(client, ("$MQTT_sess", "$MQTT_shared", "$MQTT_timers", "$MQTT_out")) - SHARED_BY_ALL


SHARED_BY_ALL = frozenset({("$MQTT_shared", "$MQTT.shared.generation")})


async def noticed(world: World) -> None:
    """No client notices what was removed: neither retained messages nor sessions are there."""
    async with await RawClient5.connect5(world.port, "witness") as witness:
        await witness.subscribe5(Subscription("#", 1))
        witness.publish("seen", b"x")
        await witness.message("seen", b"x")
    for name in ("five", "expiring", "leaving", "idle", "reader", "late", "worker", "slow", "mallory"):
        async with await world.durable(name) as client:
            assert not client.session_present, name
            await client.disconnect5(session_expiry_interval=0)
    async with await RawClient.connect(world.port, "plain", clean=False) as plain:
        assert not plain.session_present
        await plain.disconnect()
    async with await RawClient.connect(world.port, "plain") as plain:
        await plain.disconnect()
    await aeventually(lambda: _none_of_clients(world.client), PATIENCE)


@asynccontextmanager
async def connected(server: NatsServer) -> AsyncIterator[Client]:
    """A NATS client of this server."""
    client = await nats.connect(server.url, allow_reconnect=False, error_cb=_quiet)
    try:
        yield client
    finally:
        await client.close()


async def _quiet(error: Exception) -> None:
    """Take an error of the connection: the server is killed."""


PAUSES = (0, 3, *(pytest.param(wait, marks=[pytest.mark.soak, pytest.mark.timeout(600)]) for wait in (30, 70, 150)))


@pytest.mark.parametrize("pause", PAUSES)
async def test_nothing_comes_back_after_a_kill(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, gateway_regime: dict[str, str], pause: float
) -> None:
    """nats-server is killed some seconds after the removals."""
    server = nats_factory()
    gateway = gateway_factory(server, env=gateway_regime)
    async with connected(server) as client:
        world = World(gateway, server.url, client)
        baseline = await use(world, EVERYTHING)
        await anyio.sleep(pause)
        if pause > 100:  # nats-server has written its index, which no longer counts after another write
            await use(world, (retained_messages, clean_start, bans, wills, group))
    gateway.process.send(signal.SIGSTOP)
    server.kill()
    server.start()
    async with connected(server) as client:
        assert sorted(await records(client) - baseline) == []
        gateway.process.send(signal.SIGCONT)
        await aeventually(lambda: "connected to NATS again" in gateway.log and gateway.ready, PATIENCE)
        await noticed(World(gateway, server.url, client))


@pytest.fixture(scope="module")
def cluster(nats_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three servers, which are killed."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), backend=nats_backend) as found:
        yield found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("together", [False, True], ids=["in turn", "together"])
async def test_no_replica_brings_anything_back(
    cluster: Cluster, gateway_factory: GatewayFactory, together: bool
) -> None:
    """Three servers are killed; afterwards all replicas have the same records, and clients at each server see none."""
    gateways = [gateway_factory(server) for server in cluster.servers]
    async with connected(cluster.servers[0]) as client:
        baseline = await use(World(gateways[0], cluster.url, client), EVERYTHING)
    for some in [cluster.servers] if together else [[server] for server in cluster.servers]:
        for server in some:
            server.kill()
        for server in some:
            server.start()
        for stream in KEPT:
            await cluster.settled(stream)
    for gateway in gateways:
        await aeventually(lambda gateway=gateway: gateway.ready, PATIENCE)  # type: ignore[misc]
    async with connected(cluster.servers[0]) as client:
        for stream in KEPT:
            for number in range(3):
                await lead(client, f"STREAM.{stream}", f"n{number}")
                assert sorted(await records(client, (stream,)) - baseline) == [], f"n{number}"
        for gateway in gateways:
            await noticed(World(gateway, cluster.url, client))


async def test_former_records_from_before_the_upgrade(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory
) -> None:
    """They are back after a kill, beside the present ones: clients and operators see the present ones, each once."""
    server = nats_factory()
    topics = [f"{number:03}" for number in range(PAGE_FIRST + 50)]
    async with connected(server) as client:
        older = load_definition(RETAINED) | {"max_msgs_per_subject": 1, "allow_rollup_hdrs": False}
        await client.request(f"$JS.API.STREAM.CREATE.{RETAINED}", orjson.dumps(older), timeout=PATIENCE)
        for payload in (b"1", b"2", b"3"):
            for topic in topics:
                headers = {"Nmqtt-RTopic": topic, "Nmqtt-RFlags": "3", "Nmqtt-ROrigin": "older001"}
                await client.request(retained_subject(topic), payload, headers=headers, timeout=PATIENCE)
    gateway = gateway_factory(server)
    assert f"changed stream {RETAINED}: allow_rollup_hdrs = true, max_msgs_per_subject = 16" in gateway.log
    server.kill()
    server.start()
    async with connected(server) as client:
        reply = await client.request(f"$JS.API.STREAM.INFO.{RETAINED}", timeout=PATIENCE)
        assert orjson.loads(reply.data)["state"]["messages"] > len(topics)
        await aeventually(lambda: "connected to NATS again" in gateway.log and gateway.ready, PATIENCE)
        async with await RawClient.connect(gateway.port, "reader") as reader:
            await reader.subscribe("+", qos=1)
            found = []
            for _ in topics:
                found.append(await reader.expect(Publish))
                reader.ack(PUBACK, found[-1].packet_id)
            await reader.quiet()
            assert sorted(topic_of(one) for one in found) == topics
            assert {one.payload for one in found} == {b"3"}
        async with await RawClient.connect(gateway.port, "writer") as writer:
            for topic in topics:
                await writer.deliver(topic, b"", 1, retain=True)
        await aeventually(lambda: _empty(client), PATIENCE)


async def _empty(client: Client) -> bool:
    return not await records(client, (RETAINED,))
