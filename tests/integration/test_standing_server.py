# SPDX-License-Identifier: Apache-2.0
"""nats-server stands still and goes on: what it had not acknowledged is not stored a second time."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import nats
import pytest
from nats.js.client import JetStreamContext
from nats.js.errors import ServiceUnavailableError

from mqtt_nats.codec import Ack, Will
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.cluster import Cluster, lead, running_cluster
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PATIENCE = 60.0
"""Seconds in which everything is acknowledged after the standstill."""

PUBLISHERS = 4
AT_ONCE = 5

MESSAGES = "$MQTT_msgs"


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture(scope="module")
def cluster(nats_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), backend=nats_backend) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def jetstream(url: str) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(url)
    try:
        yield client.jetstream()
    finally:
        await client.close()


async def _payloads_in(url: str, stream: str = MESSAGES) -> Counter[bytes]:
    """How often a stream has each payload."""
    found: Counter[bytes] = Counter()
    async with jetstream(url) as js:
        state = (await js.stream_info(stream)).state
        for sequence in range(max(state.first_seq, 1), state.last_seq + 1):  # a stream that never had a message says 0
            with contextlib.suppress(nats.js.errors.NotFoundError):
                found[bytes((await js.get_msg(stream, sequence)).data or b"")] += 1
    return found


async def payloads_in(url: str, stream: str = MESSAGES) -> Counter[bytes]:
    """Payloads in a stream with their numbers, once JetStream has a leader again."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await _payloads_in(url, stream)
            except (ServiceUnavailableError, TimeoutError):
                await asyncio.sleep(0.1)


async def stand(server: NatsServer, seconds: float) -> None:
    """Let a server stand still."""
    server.pause()
    try:
        await asyncio.sleep(seconds)  # what is tested is that time passes
    finally:
        server.resume()


class Publishers:
    """Clients of both versions that publish at QoS 1, several messages at once."""

    def __init__(self, clients: list[RawClient], topic: str) -> None:
        self._clients = clients
        self._topic = topic
        self._waiting: list[list[int]] = [[] for _ in clients]
        self.sent: list[bytes] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, port: int, topic: str) -> AsyncIterator["Publishers"]:
        async with contextlib.AsyncExitStack() as stack:
            clients: list[RawClient] = []
            for at in range(PUBLISHERS):
                connect = RawClient5.connect5 if at % 2 else RawClient.connect
                clients.append(await stack.enter_async_context(await connect(port, f"{topic}{at}")))
            yield cls(clients, topic)

    def publish(self) -> None:
        for at, client in enumerate(self._clients):
            for _ in range(AT_ONCE):
                payload = b"%b %d" % (self._topic.encode(), len(self.sent))
                self.sent.append(payload)
                self._waiting[at].append(client.publish(f"{self._topic}/{at}", payload, 1))

    async def acknowledged(self) -> None:
        for client, waiting in zip(self._clients, self._waiting, strict=True):
            await client.expect_ack(PUBACK, *waiting, timeout=PATIENCE)
            waiting.clear()

    async def go_through(self, server: NatsServer, seconds: float) -> None:
        """Publish before, during and after a standstill."""
        self.publish()
        await self.acknowledged()
        server.pause()
        try:
            for _ in range(2):
                self.publish()
                await asyncio.sleep(seconds / 2)  # what is tested is that time passes
        finally:
            server.resume()
        self.publish()
        await self.acknowledged()


@pytest.mark.parametrize("seconds", [6, 12, pytest.param(40, marks=pytest.mark.soak)])
async def test_nothing_is_stored_twice(server: NatsServer, gateway_factory: GatewayFactory, seconds: float) -> None:
    """The gateway gives up its connection after 30 seconds."""
    gateway = gateway_factory(server)
    async with Publishers.connected(gateway.port, "p") as publishers:
        await publishers.go_through(server, seconds)
    assert await payloads_in(server.url) == Counter(dict.fromkeys(publishers.sent, 1))


async def _removed_all(js: JetStreamContext) -> bool:
    """Remove all streams; False while JetStream has no leader."""
    try:
        for stream in await js.streams_info():
            await js.delete_stream(str(stream.config.name))
    except ServiceUnavailableError:
        return False
    return True


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("own", [True, False], ids=["own server", "leader elsewhere"])
async def test_one_server_of_three_stands_still(
    cluster: Cluster, gateway_factory: GatewayFactory, replicas: int, own: bool
) -> None:
    """The server to which the gateway is connected leads the stream, or another one does."""
    near = cluster.servers[0]
    gateway = gateway_factory(near.url if not own else cluster.url, "--stream-replicas", str(replicas), start=False)
    topic = f"{'own' if own else 'other'}{replicas}"
    async with jetstream(near.url) as js:
        await aeventually(partial(_removed_all, js), PATIENCE)
    await asyncio.to_thread(gateway.start)
    if replicas > 1:
        async with jetstream(near.url) as js:
            await lead(js._nc, f"STREAM.{MESSAGES}", "n0" if own else "n1")
    still = await cluster.leader(MESSAGES)
    async with Publishers.connected(gateway.port, topic) as publishers:
        await publishers.go_through(still, 12)
    if replicas > 1:
        await cluster.settled(MESSAGES)
    assert await payloads_in(near.url) == Counter(dict.fromkeys(publishers.sent, 1))
    await asyncio.to_thread(gateway.term)


@pytest.mark.parametrize("version", [4, 5])
async def test_held_messages_releases_and_retained_messages(
    server: NatsServer, gateway_factory: GatewayFactory, version: int
) -> None:
    """A publish at QoS 2 that is held, one that is released, and a retained message at QoS 1; a durable subscriber."""
    gateway = gateway_factory(server)
    connect = RawClient5.connect5 if version == 5 else RawClient.connect
    async with (
        await RawClient.connect(gateway.port, "reader", clean=False) as reader,
        await connect(gateway.port, "publisher") as publisher,
    ):
        await reader.subscribe("a/#", qos=2)
        publisher.publish("a/released", b"released", 2, packet_id=1)
        await publisher.expect_ack(PUBREC, 1)
        standing = asyncio.create_task(stand(server, 12))
        await aeventually(lambda: server_stands(server))
        publisher.ack(PUBREL, 1)
        publisher.publish("a/held", b"held", 2, packet_id=2)
        publisher.publish("a/retained", b"retained", 1, packet_id=3, retain=True)
        await standing
        answers = [await publisher.packet(PATIENCE) for _ in range(3)]
        acks = sorted((one.kind, one.packet_id) for one in answers if isinstance(one, Ack))
        assert acks == [(PUBACK, 3), (PUBREC, 2), (PUBCOMP, 1)]
        publisher.ack(PUBREL, 2)
        await publisher.expect_ack(PUBCOMP, 2)
        await publisher.deliver("a/end", b"end", 1)
        got: list[bytes] = []
        while not got or got[-1] != b"end":
            (message,) = await reader.messages(1)
            got.append(message.payload)
            await reader.complete(message)
    everything = [b"released", b"held", b"retained", b"end"]
    assert sorted(got) == sorted(everything)
    assert await payloads_in(server.url) == Counter(dict.fromkeys(everything, 1))
    assert await payloads_in(server.url, "$MQTT_rmsgs") == Counter([b"retained"])


async def test_wills(server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """Connections end while nats-server stands still."""
    gateway = gateway_factory(server)
    everything = [b"1", b"2", b"3", b"4"]
    clients: list[RawClient] = []
    for payload in everything:
        qos = 1 + int(payload) % 2
        connect = RawClient.connect if int(payload) < 3 else RawClient5.connect5
        clients.append(await connect(gateway.port, f"c{payload!r}", will=Will("will", payload, qos, False)))
    server.pause()
    for client in clients:
        client.drop()
    await asyncio.sleep(12)  # what is tested is that time passes
    server.resume()

    async def published() -> bool:
        return sum((await payloads_in(server.url)).values()) >= len(everything)

    await aeventually(published, PATIENCE)
    async with await RawClient.connect(gateway.port, "last") as last:
        await last.deliver("end", b"end", 1)
    assert await payloads_in(server.url) == Counter(dict.fromkeys([*everything, b"end"], 1))


def server_stands(server: NatsServer) -> bool:
    """Whether the server's process is stopped."""
    pid = server.process.pid  # type: ignore[attr-defined]
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"
