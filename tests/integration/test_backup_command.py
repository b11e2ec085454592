# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats backup`` while clients publish and subscribe, and ``mqtt-nats restore`` beside gateways and without."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest

from mqtt_nats.codec import Publish, Subscription, Will
from mqtt_streams.definitions import EVERY
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.backup_command import begin, fail, run, succeed
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.gateway import Gateway
from tests.harness.rawclient import RawClient, topic_of
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually, free_port

REGIMES = (
    {"MQTT_NATS_SESSION_POSITIONS": "records"},
    {"MQTT_NATS_SESSION_POSITIONS": "consumers"},
)

KEEP = 3600
"""Seconds for which sessions are kept."""

PATIENCE = 60.0

COUNT = 200
"""Messages at each QoS that are acknowledged before the backup begins."""


async def _collected(client: RawClient, wanted: set[bytes]) -> list[Publish]:
    """All messages up to the last wanted one, and those that come at once behind it."""
    found: list[Publish] = []
    missing = set(wanted)
    while missing:
        (one,) = await client.messages(1, PATIENCE)
        await client.complete(one)
        found.append(one)
        missing.discard(one.payload)
    return found


async def _publish(port: int, name: str, qos: int, ended: asyncio.Event, sent: list[bytes]) -> None:
    """Publish as fast as acknowledgements come."""
    async with await RawClient.connect(port, name) as client:
        while not ended.is_set():
            payloads = [b"%b %d" % (name.encode(), len(sent) + one) for one in range(20)]
            await client.deliver_all("t/live", payloads, qos)
            sent += payloads


async def _change(port: int, topics: int, ended: asyncio.Event) -> None:
    """Change retained messages all the time."""
    async with await RawClient.connect(port, "retainer") as client:
        while not ended.is_set():
            for number in range(topics):
                await client.deliver(f"r/{number}", os.urandom(2000), 1, retain=True)


async def _come_and_go(port: int, ended: asyncio.Event) -> None:
    """Write a session record all the time."""
    while not ended.is_set():
        async with await RawClient5.connect5(port, "restless", clean=False, session_expiry_interval=KEEP) as client:
            await client.subscribe5(Subscription("nothing", 1))
            await client.disconnect5()


async def _receive(client: RawClient, ended: asyncio.Event) -> None:
    while not ended.is_set():
        try:
            (one,) = await client.messages(1, 0.5)
        except (AssertionError, TimeoutError):
            continue
        await client.complete(one)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("regime", REGIMES, ids=("records", "consumers"))
async def test_a_backup_of_a_busy_service(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path, regime: dict[str, str]
) -> None:
    """An absent client gets what was acknowledged before the backup: all, once, and in order."""
    old = nats_factory()
    ports = [gateway_factory(old, env=regime).port for _ in range(2)]
    before = {qos: [b"%d %d" % (qos, number) for number in range(COUNT)] for qos in (1, 2)}
    ended = asyncio.Event()
    async with (
        await RawClient5.connect5(ports[0], "absent", session_expiry_interval=KEEP) as absent,
        await RawClient.connect(ports[1], "present", clean=False) as present,
        await RawClient.connect(ports[0], "publisher") as publisher,
    ):
        assert await absent.subscribe5(Subscription("t/#", 2)) == (2,)
        await absent.disconnect5()
        assert await present.subscribe("t/#", qos=2) == (2,)
        for number in range(300):
            await publisher.deliver(f"r/{number}", os.urandom(2000), 1, retain=True)
        for qos, payloads in before.items():
            await publisher.deliver_all("t/before", payloads, qos)
        sent: dict[str, list[bytes]] = {"one": [], "two": []}
        work: list[asyncio.Task[None]] = [
            asyncio.create_task(_publish(ports[0], "one", 1, ended, sent["one"])),
            asyncio.create_task(_publish(ports[1], "two", 2, ended, sent["two"])),
            asyncio.create_task(_change(ports[0], 300, ended)),
            asyncio.create_task(_come_and_go(ports[1], ended)),
            asyncio.create_task(_receive(present, ended)),
        ]
        await aeventually(lambda: all(sent.values()), PATIENCE)
        at_begin = {payload for some in sent.values() for payload in some}
        output = await succeed("backup", old.url, tmp_path / "saved")
        assert "complete" in output
        ended.set()
        await asyncio.gather(*work)

    new = nats_factory()
    await succeed("restore", new.url, tmp_path / "saved")
    port = gateway_factory(new, env=regime).port
    async with await RawClient5.connect5(port, "absent", clean=False, session_expiry_interval=KEEP) as absent:
        assert absent.session_present
        found = await _collected(absent, {*before[1], *before[2], *at_begin})
        payloads = [one.payload for one in found]
        for qos in (1, 2):
            assert [one for one in payloads if one in set(before[qos])] == before[qos]
        assert [payload for payload, times in Counter(payloads).items() if times > 1] == []
    for name in ("present", "restless"):
        async with await RawClient5.connect5(port, name, clean=False, session_expiry_interval=KEEP) as client:
            assert client.session_present, name
    async with await RawClient.connect(port, "reader") as reader:
        await reader.subscribe("r/#")
        retained = await reader.messages(300, PATIENCE)
        assert len({topic_of(one) for one in retained}) == 300


@pytest.mark.timeout(240)
async def test_a_restore_beside_gateways(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """The gateways tell their clients, serve nobody meanwhile, and go on with what is restored."""
    server = nats_factory()
    gateways = [gateway_factory(server) for _ in range(2)]
    port = gateways[0].port
    async with (
        await RawClient5.connect5(port, "absent", session_expiry_interval=KEEP) as absent,
        await RawClient.connect(port, "willing", clean=False, will=Will("gone", b"lost", 1, False)),
        await RawClient.connect(port, "publisher") as publisher,
    ):
        await absent.subscribe5(Subscription("t", 2), Subscription("gone", 1))
        await absent.disconnect5()
        await publisher.deliver_all("t", [b"%d" % number for number in range(22)], 2)
        await succeed("backup", server.url, tmp_path / "saved")
        await publisher.deliver("t", b"after", 2)
        async with await RawClient5.connect5(gateways[1].port, "new", session_expiry_interval=KEEP) as new:
            await new.subscribe5(Subscription("t", 1))
            await new.disconnect5()
    async with (
        await RawClient5.connect5(gateways[0].port, "five") as five,
        await RawClient.connect(gateways[1].port, "three") as three,
    ):
        line = await fail("restore", server.url, tmp_path / "saved")
        assert "would be lost: " in line
        assert "$MQTT_sess (" in line
        assert "--replace" in line
        await five.quiet()
        await succeed("restore", server.url, tmp_path / "saved", "--replace")
        await five.expect_disconnect(0x8B)
        await three.expect_closed()
    client = await _reconnected(gateways[1], "absent")
    async with client:
        assert client.session_present
        found = [await client.messages(1, PATIENCE) for _ in range(23)]
        for (one,) in found:
            await client.complete(one)
        assert [one.payload for (one,) in found if topic_of(one) == "t"] == [b"%d" % number for number in range(22)]
        assert [one.payload for (one,) in found if topic_of(one) == "gone"] == [b"lost"]
        await client.quiet()
    async with await _reconnected(gateways[0], "new") as again:
        assert not again.session_present
        await again.deliver("t", b"later", 2)
    for gateway in gateways:
        assert "all gateways pause" in gateway.log
        assert "is created again" not in gateway.log


async def _reconnected(gateway: Gateway, name: str) -> RawClient5:
    async def connected() -> RawClient5 | None:
        try:
            return await RawClient5.connect5(gateway.port, name, clean=False, session_expiry_interval=KEEP)
        except (AssertionError, OSError):
            return None

    return await aeventually(connected, PATIENCE)


async def _some_sessions(port: int, *names: str) -> None:
    """Durable sessions, each with a message that waits."""
    for name in names:
        async with await RawClient5.connect5(port, name, session_expiry_interval=KEEP) as client:
            await client.subscribe5(Subscription(name, 1))
            await client.disconnect5()
    async with await RawClient.connect(port, "publisher") as publisher:
        for name in names:
            await publisher.deliver(name, b"waits", 1)


@pytest.mark.timeout(240)
async def test_a_restore_that_is_killed(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """Gateways serve nobody and make no streams, also those that start, until the restore has been run again."""
    server = nats_factory()
    gateway = gateway_factory(server)
    await _some_sessions(gateway.port, "device")
    async with await RawClient.connect(gateway.port, "publisher") as publisher:
        for _ in range(3):
            await publisher.deliver_all("bulk", [os.urandom(50_000) for _ in range(200)], 1)
    await succeed("backup", server.url, tmp_path / "saved")
    async with await nats.connect(server.url) as client:
        deletions = await client.subscribe("$JS.EVENT.ADVISORY.STREAM.DELETED.$MQTT_msgs")
        await client.flush()
        process = await begin("restore", server.url, tmp_path / "saved", "--replace")
        await deletions.next_msg(PATIENCE)
        process.kill()
        await process.wait()
        await aeventually(lambda: "paused: " in gateway.log, PATIENCE)
        other = gateway_factory(server, port=free_port(), start=False)
        other.launch()
        await aeventually(lambda: "paused: " in other.log, PATIENCE)
        with pytest.raises((AssertionError, OSError)):
            await RawClient.connect(gateway.port, "early")
        refused = await fail("backup", server.url, tmp_path / "another")
        assert "another backup or restore runs" in refused or "restore was interrupted" in refused

        async def again() -> bool:
            status, output = await run("restore", server.url, tmp_path / "saved")
            assert status == 0 or "was stopped less than" in output, output
            return status == 0

        await aeventually(again, 90.0)
        assert "created " not in other.log
    async with await _reconnected(gateway, "device") as device:
        assert device.session_present
        await device.receive("device", b"waits", qos=1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path / "cluster") as cluster:
        yield cluster


@pytest.mark.timeout(240)
async def test_from_three_servers_to_one_and_back(
    cluster: Cluster, nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """Replicas follow the servers, or --replicas."""
    first = gateway_factory(cluster.url)
    await _some_sessions(first.port, "device")
    await cluster.settled("$MQTT_msgs")
    await succeed("backup", cluster.url, tmp_path / "three")
    alone = nats_factory()
    assert "replicas is refused" in await fail("restore", alone.url, tmp_path / "three", "--replicas", "3")
    await succeed("restore", alone.url, tmp_path / "three")
    second = gateway_factory(alone)
    async with await _reconnected(second, "device") as device:
        assert device.session_present
        await device.receive("device", b"waits", qos=1)
    await _some_sessions(second.port, "other")
    await succeed("backup", alone.url, tmp_path / "one")
    await succeed("restore", cluster.url, tmp_path / "one", "--replicas", "3", "--replace")
    info = await cluster.info("$MQTT_sess")
    assert info is not None
    assert info["config"]["num_replicas"] == 3
    async with await _reconnected(first, "other") as other:
        assert other.session_present
        await other.receive("other", b"waits", qos=1)


@pytest.mark.timeout(120)
async def test_one_stream(nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    """Sessions go on with the messages of the backup; the other streams stay."""
    server = nats_factory()
    gateway = gateway_factory(server)
    await _some_sessions(gateway.port, "one")
    await succeed("backup", server.url, tmp_path / "saved")
    await _some_sessions(gateway.port, "two")
    line = await fail("restore", server.url, tmp_path / "saved", "--stream", "$MQTT_nothing")
    assert "has no stream $MQTT_nothing" in line
    await succeed("restore", server.url, tmp_path / "saved", "--stream", "$MQTT_msgs", "--replace")
    async with await _reconnected(gateway, "two") as two:
        assert two.session_present
        async with await _reconnected(gateway, "one") as one:
            assert one.session_present
            await one.receive("one", b"waits", qos=1)
            await one.deliver("two", b"later", 1)
        await two.receive("two", b"later", qos=1)
        await two.quiet()


@pytest.mark.timeout(120)
async def test_what_is_refused(nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    """Nothing is changed, and the error says what to do."""
    server, saved = nats_factory(), tmp_path / "saved"
    assert "no gateway has run" in await fail("backup", server.url, saved)
    gateway = gateway_factory(server)
    await _some_sessions(gateway.port, "device")
    await succeed("backup", server.url, saved)
    assert "is not empty" in await fail("backup", server.url, saved)
    assert {oct(path.stat().st_mode)[-3:] for path in saved.iterdir()} == {"600"}
    assert oct(saved.stat().st_mode)[-3:] == "700"
    users = "accounts { A { jetstream: enabled, users: [{user: a, password: a}] } }\nno_auth_user: a\n"
    other = nats_factory(config=users)
    line = await fail("restore", other.url, saved)
    assert "is of account $G, and this is account A" in line
    await succeed("restore", other.url, saved, "--account", "$G")
    async with await nats.connect(server.url) as client:
        names = {one.config.name for one in await client.jetstream().streams_info()}
        assert names == set(EVERY)


@pytest.mark.timeout(120)
async def test_a_paused_backup(nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    """No message is in the middle of its way: a subscriber at QoS 2 gets nothing twice after a restore."""
    old = nats_factory()
    gateway = gateway_factory(old)
    got: list[bytes] = []
    async with (
        await RawClient.connect(gateway.port, "durable", clean=False) as durable,
        await RawClient.connect(gateway.port, "publisher") as publisher,
    ):
        await durable.subscribe("t", qos=2)
        await publisher.deliver_all("t", [b"%d" % number for number in range(50)], 2)
        for one in await durable.messages(25):
            await durable.complete(one)
            got.append(one.payload)
        await succeed("backup", old.url, tmp_path / "saved", "--pause")
        durable.drop()
    new = nats_factory()
    await succeed("restore", new.url, tmp_path / "saved")
    async with await RawClient.connect(gateway_factory(new).port, "durable", clean=False) as durable:
        assert durable.session_present
        for one in await durable.messages(25, PATIENCE):
            await durable.complete(one)
            got.append(one.payload)
        await durable.quiet()
    assert got == [b"%d" % number for number in range(50)]
