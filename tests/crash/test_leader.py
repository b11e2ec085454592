# SPDX-License-Identifier: Apache-2.0
"""The nats-servers of a cluster die, one after the other or all of them: nothing is lost, nothing comes twice."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator

import nats
import orjson
import pytest
from nats.aio.client import Client

from mqtt_nats.codec import Ack, Packet, Publish, Will
from mqtt_streams.definitions import STREAMS
from mqtt_streams.hashing import name_hash
from tests.chaos.points.proxy import Action, Frame, NatsProxy, Trap
from tests.conftest import GatewayFactory
from tests.harness.bystanders import Bystanders
from tests.harness.cluster import Cluster, lead, running_cluster
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.waiting import aeventually, eventually

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

RECOVERY = 60.0
"""Seconds in which an election is over and everything that waited for it is done."""

MESSAGES = "$MQTT_msgs"
POSITIONS = "$MQTT_pos"
OUT = "$MQTT_out"
HELD = "$MQTT_qos2in"
GATEWAYS = "KV_MQTT_gateways"

HELD_UP = re.compile(r"does not store: (no server answers|no answer for 5 s), on \$MQTT\.qos2\.in\.")
ROUTE_CLOSED = "Router connection closed"
"""What nats-server logs."""


@pytest.fixture(scope="module")
def servers(nats_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), backend=nats_backend) as cluster:
        yield cluster


@pytest.fixture
async def cluster(servers: Cluster) -> AsyncIterator[Cluster]:
    """Three servers that run; whatever a test has killed is started again afterwards."""
    yield servers
    await whole(servers)


@pytest.fixture
def near(cluster: Cluster, gateway_factory: GatewayFactory) -> Gateway:
    """A gateway that is connected to the first server, as long as that is there."""
    return gateway_factory(cluster.servers[0].url, "--stream-replicas", "3", "--max-inflight", "10")


@pytest.fixture
async def nc(cluster: Cluster) -> AsyncIterator[Client]:
    client = await nats.connect(cluster.servers[0].url, connect_timeout=10, error_cb=ignore)
    yield client
    await client.close()


async def ignore(error: Exception) -> None:
    """nats-py prints errors where nobody listens for them."""


async def whole(cluster: Cluster) -> None:
    """All servers run, and what they have of the messages is up to date."""
    for server in cluster.servers:
        if not alive(server):
            server.start()
    await aeventually(lambda: cluster.info(""), RECOVERY, what="JetStream of the cluster")
    for stream in STREAMS:
        if await cluster.info(stream) is not None:
            await cluster.settled(stream)


def alive(server: NatsServer) -> bool:
    """Whether a server runs."""
    try:
        return "Server is ready" in server.log and server.process.alive  # type: ignore[attr-defined]
    except OSError:
        return False


async def consumer_of(nc: Client, client_id: str) -> str:
    """The only consumer of a session, as ``CONSUMER.<stream>.<consumer>``."""
    names = orjson.loads((await nc.request(f"$JS.API.CONSUMER.NAMES.{MESSAGES}")).data)["consumers"]
    (found,) = (name for name in names if name.startswith(name_hash(client_id)))
    return f"CONSUMER.{MESSAGES}.{found}"


async def stored(nc: Client, subject: str) -> int:
    """How many messages a subject has in the stream of messages."""
    body = orjson.dumps({"subjects_filter": f"$MQTT.msgs.{subject}"})

    async def count() -> int | None:
        try:
            state = orjson.loads((await nc.request(f"$JS.API.STREAM.INFO.{MESSAGES}", body, timeout=2)).data)["state"]
        except (nats.errors.Error, TimeoutError, KeyError):
            return None
        return 1 + int(sum((state.get("subjects") or {}).values()))

    return await aeventually(count, RECOVERY, what="the state of the stream") - 1


async def once_each(nc: Client, bystanders: Bystanders) -> None:
    """Everything that the bystanders' publisher has sent at QoS 1 and 2 is stored, and nothing of it twice."""
    bystanders.pause()
    subject = bystanders.topic.replace("/", ".")
    wanted = len(bystanders.sent[1]), len(bystanders.sent[2])

    async def all_there() -> bool:
        return (await stored(nc, f"{subject}.1"), await stored(nc, f"{subject}.2")) >= wanted

    await aeventually(all_there, RECOVERY, what=f"{wanted} stored messages")
    assert (await stored(nc, f"{subject}.1"), await stored(nc, f"{subject}.2")) == wanted
    bystanders.resume()


async def publish(publisher: RawClient, topic: str, numbers: range) -> None:
    """Publish numbers at QoS 1, however long it takes until they are acknowledged."""
    ids = [publisher.publish(topic, b"%d" % number, 1) for number in numbers]
    await publisher.expect_ack(PUBACK, *ids, timeout=RECOVERY)


def running(bystanders: Bystanders, more: int = 20) -> None:
    """Wait until messages go through."""
    before = len(bystanders.delays)
    eventually(lambda: len(bystanders.delays) > before + more, RECOVERY, what="messages that go through")


async def test_the_leader_of_the_messages_is_killed(cluster: Cluster, near: Gateway, nc: Client) -> None:
    """Publishers wait for the next one; nobody is disconnected, and nothing is stored twice."""
    await lead(nc, f"STREAM.{MESSAGES}", "n1")
    with Bystanders(near.port) as bystanders:
        running(bystanders)
        cluster.servers[1].kill()
        assert await cluster.leader(MESSAGES) is not cluster.servers[1]
        running(bystanders)
        bystanders.check(leaders_change=True, timeout=RECOVERY)
        await once_each(nc, bystanders)


async def test_the_gateways_own_server_is_killed_which_leads(cluster: Cluster, near: Gateway) -> None:
    """The gateway goes to another one."""
    survivor = await nats.connect(cluster.servers[2].url, error_cb=ignore)
    try:
        await lead(survivor, f"STREAM.{MESSAGES}", "n0")
        with Bystanders(near.port) as bystanders:
            running(bystanders)
            cluster.servers[0].kill()
            running(bystanders)
            bystanders.check(lossy=True, leaders_change=True, timeout=RECOVERY)
            await once_each(survivor, bystanders)
        assert "connected to NATS again" in near.log
    finally:
        await survivor.close()


async def test_rolling_restart(cluster: Cluster, near: Gateway, nc: Client) -> None:
    """Each server in turn is stopped in an orderly way and started again, under load."""
    with Bystanders(near.port) as bystanders:
        for server in reversed(cluster.servers):  # the gateway's own comes last
            running(bystanders)
            server.stop()
            running(bystanders)
            server.start()
            await cluster.settled(MESSAGES)
        running(bystanders)
        bystanders.check(lossy=True, leaders_change=True, timeout=RECOVERY)
        client = await nats.connect(cluster.servers[0].url, error_cb=ignore)
        await once_each(client, bystanders)
        await client.close()


async def test_no_server_for_half_a_minute(cluster: Cluster, near: Gateway, gateway_factory: GatewayFactory) -> None:
    """As long as the duplicate window, and longer than a lease: nothing twice, and no false wills."""
    other = gateway_factory(cluster.url, "--stream-replicas", "3")
    async with (
        await RawClient.connect(near.port, "watcher") as watcher,
        await RawClient.connect(other.port, "alive", will=Will("wills/alive", b"dead", 1, False)) as living,
    ):
        await watcher.subscribe("wills/#", qos=1)
        with Bystanders(near.port) as bystanders:
            running(bystanders)
            for server in cluster.servers:
                server.kill()
            gone = time.monotonic()
            eventually(lambda: time.monotonic() > gone + 31, 40)
            for server in cluster.servers:
                server.start()
            running(bystanders)
            bystanders.check(lossy=True, leaders_change=True, timeout=RECOVERY)
            client = await nats.connect(cluster.url.split(","), error_cb=ignore)
            await once_each(client, bystanders)
            await client.close()
        await living.deliver("wills/end", b"end", 1)
        assert (await watcher.messages(1, RECOVERY))[0].payload == b"end"
    for gateway in (near, other):
        assert "considered dead" not in gateway.log
        assert "has not renewed" not in gateway.log


async def hold_up(cluster: Cluster, near: Gateway, nc: Client, client: RawClient) -> tuple[int, str]:
    """Have a client publish at QoS 2 when that is not stored; returns the identifier, and how the gateway notices."""
    await lead(nc, f"STREAM.{MESSAGES}", "n0")
    await lead(nc, f"STREAM.{HELD}", "n1")
    before = len(near.log)
    closed = cluster.servers[0].log.count(ROUTE_CLOSED)
    cluster.servers[1].kill()
    await aeventually(lambda: cluster.servers[0].log.count(ROUTE_CLOSED) > closed, RECOVERY, what="a lost route")
    identifier = client.publish("parts/held", b"held", 2)
    return identifier, (await aeventually(lambda: HELD_UP.search(near.log[before:]), RECOVERY))[1]


async def test_a_stream_without_a_leader_holds_up_no_other(cluster: Cluster, near: Gateway, nc: Client) -> None:
    """What it is to store waits for the election; what the others store is acknowledged meanwhile."""
    async with (
        await RawClient.connect(near.port, "held-up") as exact,
        await RawClient.connect(near.port, "goes-on") as other,
        await RawClient.connect(near.port, "looks-on") as subscriber,
    ):
        await subscriber.subscribe("parts/#", qos=2)
        for _ in range(5):
            before = len(near.log)
            identifier, noticed = await hold_up(cluster, near, nc, exact)
            if noticed == "no server answers":
                break
            # It went to the server that was killed: its silence is noticed when there is a leader again.
            await exact.expect_ack(PUBREC, identifier, timeout=RECOVERY)
            exact.ack(PUBREL, identifier)
            await exact.expect_ack(PUBCOMP, identifier, timeout=RECOVERY)
            await subscriber.complete((await subscriber.messages(1, RECOVERY))[0])
            cluster.servers[1].start()
        else:
            pytest.fail("the stream always had a leader again before that was noticed")
        await publish(other, "parts/other", range(100))
        assert " JetStream stores again" not in near.log[before:]
        assert "on $MQTT.msgs." not in near.log[before:]
        await exact.expect_ack(PUBREC, identifier, timeout=RECOVERY)
        exact.ack(PUBREL, identifier)
        await exact.expect_ack(PUBCOMP, identifier, timeout=RECOVERY)
        for number in range(100):
            (message,) = await subscriber.messages(1)
            assert message.payload == b"%d" % number
            await subscriber.complete(message)
        (message,) = await subscriber.messages(1)
        assert message.payload == b"held"


class Deaf(NatsProxy):
    """No leader gets a request to remove something, until one is asked to hand over."""

    asked = ""

    def trapped(self, frame: Frame) -> Trap | None:
        if frame.way == "up" and ".LEADER.STEPDOWN." in frame.subject:
            self.asked = frame.subject
        if frame.way == "up" and ".STREAM.MSG.DELETE." in frame.subject and not self.asked:
            return Trap("up", "", Action.DROP)
        return super().trapped(frame)


async def test_a_leader_that_answers_no_request_hands_over(
    cluster: Cluster, nc: Client, gateway_factory: GatewayFactory
) -> None:
    """What nats-server does now and then: it stores, and is silent about removals, which PUBCOMP waits for."""
    proxy = Deaf(cluster.servers[0].port, lambda: None)
    await proxy.start()
    gateway = gateway_factory(proxy.url, "--stream-replicas", "3", start=False)
    await asyncio.to_thread(gateway.start)
    async with await RawClient.connect(gateway.port, "waits-for-removal") as publisher:
        await lead(nc, f"STREAM.{HELD}", "n1")
        identifier = publisher.publish("removal", b"", 2)
        await publisher.expect_ack(PUBREC, identifier)
        publisher.ack(PUBREL, identifier)
        await publisher.expect_ack(PUBCOMP, identifier, timeout=RECOVERY)
    assert proxy.asked == f"$JS.API.STREAM.LEADER.STEPDOWN.{HELD}"
    assert f"n1, the leader of stream {HELD}, does not answer requests" in gateway.log
    assert (await cluster.info(HELD) or {})["cluster"]["leader"] in ("n0", "n2")
    await asyncio.to_thread(gateway.term)
    await proxy.close()


async def test_a_confirmation_while_the_positions_have_no_leader(cluster: Cluster, near: Gateway, nc: Client) -> None:
    """The message is not done before JetStream says so: it does not come again after a reconnect."""
    async with await RawClient.connect(near.port, "confirm-publisher") as publisher:
        async with await RawClient.connect(near.port, "confirm", clean=False) as subscriber:
            await subscriber.subscribe("confirm", qos=2)
            await publisher.deliver("confirm", b"once", 2)
            (message,) = await subscriber.messages(1)
            await lead(nc, f"STREAM.{POSITIONS}", "n1")
            await lead(nc, f"STREAM.{OUT}", "n2")
            cluster.servers[1].kill()
            subscriber.ack(PUBREC, message.packet_id)
            await subscriber.released(message.packet_id, answer=False)
            subscriber.ack(PUBCOMP, message.packet_id)
            await subscriber.quiet()

        identifier = publisher.publish("confirm", b"end", 2)
        await publisher.expect_ack(PUBREC, identifier, timeout=RECOVERY)
        publisher.ack(PUBREL, identifier)
        await publisher.expect_ack(PUBCOMP, identifier, timeout=RECOVERY)

        async def resumed() -> list[Packet]:
            """What comes first; refused, or ended, until JetStream has leaders again."""
            try:
                async with await RawClient.connect(near.port, "confirm", clean=False) as again:
                    found = [await again.packet(RECOVERY)]
                    if isinstance(found[0], Ack):  # JetStream had not said so by then
                        found.append(await again.packet(RECOVERY))
                    return found
            except AssertionError:
                return []

        *released, last = await aeventually(resumed, RECOVERY, what="the session")
        assert released in ([], [Ack(PUBREL, message.packet_id, 0)])
        assert isinstance(last, Publish)
        assert last.payload == b"end"


async def test_acknowledgements_while_the_positions_have_no_leader(cluster: Cluster, near: Gateway, nc: Client) -> None:
    """Their places in the window are free at once: nothing waits for the position."""
    async with (
        await RawClient.connect(near.port, "window-publisher") as publisher,
        await RawClient.connect(near.port, "window", clean=False) as subscriber,
    ):
        await subscriber.subscribe("window", qos=1)
        await publish(publisher, "window", range(10))
        first = await subscriber.messages(10)
        await lead(nc, f"STREAM.{POSITIONS}", "n1")
        await lead(nc, f"STREAM.{MESSAGES}", "n2")
        cluster.servers[1].kill()
        for message in first:
            await subscriber.complete(message)
        await publish(publisher, "window", range(10, 40))
        for number in range(10, 40):
            (message,) = await subscriber.messages(1, RECOVERY)
            assert (message.payload, message.dup) == (b"%d" % number, False)
            await subscriber.complete(message)


async def test_a_group_whose_consumer_loses_its_leader(cluster: Cluster, near: Gateway, nc: Client) -> None:
    """Its members' requests are lost with it; they ask again, and nothing comes twice."""
    async with (
        await RawClient.connect(near.port, "group-publisher") as publisher,
        await RawClient.connect(near.port, "group-member", clean=False) as member,
    ):
        await member.subscribe("$share/group/shared", qos=1)
        await publisher.deliver("shared", b"0", 1)
        await member.receive("shared", b"0")
        names = orjson.loads((await nc.request(f"$JS.API.CONSUMER.NAMES.{MESSAGES}")).data)["consumers"]
        (name,) = (name for name in names if name.startswith("share_"))
        await lead(nc, f"CONSUMER.{MESSAGES}.{name}", "n1")
        await lead(nc, f"STREAM.{MESSAGES}", "n2")
        cluster.servers[1].kill()
        await publish(publisher, "shared", range(1, 20))
        for number in range(1, 20):
            (message,) = await member.messages(1, 30.0)  # before the request is taken for lost in any case
            assert message.payload == b"%d" % number
            await member.complete(message)
        await member.quiet()


async def test_a_dormant_consumer_has_no_leader(cluster: Cluster, nc: Client, gateway_factory: GatewayFactory) -> None:
    """A message is lost, and the connection to NATS: it comes before what followed all the same."""
    proxy = NatsProxy(cluster.servers[0].port, lambda: None)
    await proxy.start()
    gateway = gateway_factory(proxy.url, "--stream-replicas", "3", start=False)
    await asyncio.to_thread(gateway.start)
    async with (
        await RawClient.connect(gateway.port, "leaderless-publisher") as publisher,
        await RawClient.connect(gateway.port, "leaderless", clean=False) as subscriber,
    ):
        await subscriber.subscribe("leaderless", qos=1)
        await publisher.deliver("leaderless", b"0", 1)
        await subscriber.receive("leaderless", b"0")
        await lead(nc, await consumer_of(nc, "leaderless"), "n1")
        for stream in (MESSAGES, "$MQTT_sess"):
            await lead(nc, f"STREAM.{stream}", "n2")
        lost = proxy.set("down", "$MQTT.msgs.leaderless", Action.DROP)
        await publisher.deliver("leaderless", b"1", 1)
        await lost.sprung.wait()
        cluster.servers[1].kill()
        proxy.cut()
        await publish(publisher, "leaderless", range(2, 10))
        for number in range(1, 10):
            (message,) = await subscriber.messages(1, RECOVERY)
            assert message.payload == b"%d" % number
            await subscriber.complete(message)
    await asyncio.to_thread(gateway.term)
    await proxy.close()


async def test_a_gateway_and_the_leader_of_the_leases_die(
    cluster: Cluster, near: Gateway, nc: Client, gateway_factory: GatewayFactory
) -> None:
    """The wills of the one are published, once; nobody else is taken for dead."""
    dying = gateway_factory(cluster.servers[0].url, "--stream-replicas", "3")
    async with (
        await RawClient.connect(near.port, "will-watcher", clean=False) as watcher,
        await RawClient.connect(near.port, "will-alive", will=Will("wills/alive", b"dead", 1, False)) as living,
    ):
        await watcher.subscribe("wills/#", qos=2)
        lost = [
            await RawClient.connect(dying.port, f"will-{qos}", will=Will(f"wills/{qos}", b"%d" % qos, qos, False))
            for qos in (1, 2)
        ]
        await lead(nc, f"STREAM.{GATEWAYS}", "n1")
        dying.kill()
        cluster.servers[1].kill()
        found = set()
        for message in await watcher.messages(2, 3 * RECOVERY):
            await watcher.complete(message)
            found.add(message.payload)
        assert found == {b"1", b"2"}
        await living.deliver("wills/end", b"end", 1)
        assert (await watcher.messages(1, RECOVERY))[0].payload == b"end"
        for client in lost:
            client.drop()
    assert "considered dead" not in near.log
