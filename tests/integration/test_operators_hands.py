# SPDX-License-Identifier: Apache-2.0
"""Somebody purges or removes streams, or pauses consumers, beside gateways that run: the log says so, and who waits."""

from __future__ import annotations

from collections.abc import AsyncIterator

import nats
import orjson
import pytest
from nats.aio.client import Client as NatsClient

from mqtt_nats.codec import Subscription
from mqtt_streams.hashing import name_hash
from mqtt_streams.shared import CONSUMER_PREFIX
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.integration.conftest import Stored
from tests.lifecycle.watchful import WATCHFUL

FAST = ("--gateway-lease", "2")
"""Gateways look at the streams twice a second."""

PATIENCE = 30.0
KEEP = 3600
RECORDS = {"MQTT_NATS_SESSION_POSITIONS": "records"}
CONSUMERS = {"MQTT_NATS_SESSION_POSITIONS": "consumers"}
REGIMES = {"records": RECORDS, "consumers": CONSUMERS}


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[NatsClient]:
    client = await nats.connect(server.url)
    yield client
    await client.close()


async def absent_session(port: int, name: str, *topics: str) -> None:
    """A durable session with a message that waits on each topic."""
    async with await RawClient.connect(port, name, clean=False) as client:
        await client.subscribe(*topics, qos=1)
        await client.disconnect()
    async with await RawClient.connect(port, "publisher") as publisher:
        for topic in topics:
            await publisher.deliver(topic, b"waits", 1)


async def test_purged_session_records(server: NatsServer, client: NatsClient, gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory(server, *FAST)
    async with (
        await RawClient.connect(gateway.port, "one", clean=False),
        await RawClient5.connect5(gateway.port, "two", session_expiry_interval=KEEP),
    ):
        await client.jetstream().purge_stream("$MQTT_sess")
        text = "stream $MQTT_sess has 0 records, and 2 durable sessions are connected here: somebody has purged it"
        await aeventually(lambda: text in gateway.log, PATIENCE)
    assert gateway.log.count("somebody has purged it") == 1


async def test_purged_messages(server: NatsServer, client: NatsClient, gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory(server, *FAST)
    await absent_session(gateway.port, "absent", "a", "b")
    await aeventually(lambda: _looked(client, 2), PATIENCE)
    await client.jetstream().purge_stream("$MQTT_msgs")
    text = "stream $MQTT_msgs: 2 messages were removed before their time: somebody has purged it"
    await aeventually(lambda: text in gateway.log, PATIENCE)
    async with await RawClient.connect(gateway.port, "absent", clean=False) as absent:
        assert absent.session_present
        await absent.deliver("a", b"new", 1)
        await absent.receive("a", b"new", qos=1)
        await absent.quiet()


async def _looked(client: NatsClient, last: int) -> bool:
    """Whether a gateway has looked at the stream since its last message."""
    message = await client.jetstream().get_last_msg("$MQTT_shared", "$MQTT.shared.generation")
    return int(orjson.loads(message.data or b"{}")["last"]) == last


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("removal", ["remove", "purge"])
async def test_positions_that_are_gone(
    server: NatsServer, client: NatsClient, gateway_factory: GatewayFactory, removal: str, version: int
) -> None:
    """A session without consumers does not know any more what it has had: it does not come back as if it did."""
    js = client.jetstream()
    gateway = gateway_factory(server, *FAST, env=RECORDS)
    await absent_session(gateway.port, "absent", "a")
    assert not await Stored(client).session_consumers("absent")
    if removal == "remove":
        await js.delete_stream("$MQTT_pos")
    else:
        await js.purge_stream("$MQTT_pos")

    async def connect() -> RawClient:
        if version == 5:
            return await RawClient5.connect5(gateway.port, "absent", clean=False, session_expiry_interval=KEEP)
        return await RawClient.connect(gateway.port, "absent", clean=False)

    async with await connect() as absent:
        assert not absent.session_present
        await absent.subscribe("a", qos=1) if version == 4 else None
        if isinstance(absent, RawClient5):
            await absent.subscribe5(Subscription("a", 1))
        await absent.deliver("a", b"new", 1)
        await absent.receive("a", b"new", qos=1)
    assert "its position is gone from stream $MQTT_pos; a new session begins" in gateway.log

    async def stored() -> bool:
        return (await js.stream_info("$MQTT_pos")).state.messages == 1

    await aeventually(stored, PATIENCE)
    async with await connect() as absent:
        assert absent.session_present


@pytest.mark.long
@pytest.mark.parametrize("regime", REGIMES)
async def test_removed_shared_records(
    server: NatsServer, client: NatsClient, gateway_factory: GatewayFactory, regime: str
) -> None:
    """The stream of messages is still there: nobody is disconnected, and messages go on."""
    js = client.jetstream()
    gateways = [gateway_factory(server, *FAST, env=REGIMES[regime], module=WATCHFUL) for _ in range(2)]
    await absent_session(gateways[0].port, "absent", "a")
    async with (
        await RawClient.connect(gateways[0].port, "one", clean=False) as one,
        await RawClient.connect(gateways[1].port, "two", clean=False) as two,
        await RawClient.connect(gateways[1].port, "publisher") as publisher,
    ):
        for each in (one, two):
            await each.subscribe("a", qos=2)
        await js.delete_stream("$MQTT_shared")
        late = gateway_factory(server, *FAST, env=REGIMES[regime], module=WATCHFUL)

        async def marked() -> bool:
            return (await js.stream_info("$MQTT_shared")).state.messages > 0

        await aeventually(marked, PATIENCE)
        for number in range(3):
            await publisher.deliver("a", b"%d" % number, 2)
            for each in (one, two):
                await each.receive("a", b"%d" % number, qos=2)
        for gateway in (*gateways, late):
            assert "was replaced" not in gateway.log
    async with await RawClient.connect(late.port, "absent", clean=False) as absent:
        assert absent.session_present
        await absent.receive("a", b"waits", qos=1)


PAUSE = b'{"pause_until":"2099-01-01T00:00:00Z"}'


async def pause(client: NatsClient, stream: str, name: str) -> None:
    """Pause a consumer, as ``nats consumer pause`` does."""
    answer = orjson.loads((await client.request(f"$JS.API.CONSUMER.PAUSE.{stream}.{name}", PAUSE)).data)
    assert answer["paused"], answer


async def names(client: NatsClient, stream: str, prefix: str) -> list[str]:
    found = [one.name for one in await client.jetstream().consumers_info(stream)]
    return [name for name in found if name.startswith(prefix)]


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("connected", [True, False])
async def test_a_paused_consumer_of_a_session(
    server: NatsServer, client: NatsClient, gateway_factory: GatewayFactory, connected: bool, qos: int
) -> None:
    """Messages come all the same. It is resumed: nats-server's listener may need it."""
    gateway = gateway_factory(server, env=CONSUMERS)

    async def comes(durable: RawClient) -> None:
        async with await RawClient.connect(gateway.port, "publisher") as publisher:
            await publisher.deliver("a", b"x", qos)
        await durable.receive("a", b"x", qos=qos)
        await durable.quiet()
        text = f"consumer {name} of stream $MQTT_msgs was paused, and is resumed"
        await aeventually(lambda: text in gateway.log, PATIENCE)

    async with await RawClient.connect(gateway.port, "durable", clean=False) as durable:
        await durable.subscribe("a", qos=qos)
        (name,) = await names(client, "$MQTT_msgs", name_hash("durable"))
        if connected:
            await pause(client, "$MQTT_msgs", name)
            await comes(durable)
    if not connected:
        assert gateway.term() == 0  # nobody hears of the pause
        await pause(client, "$MQTT_msgs", name)
        gateway.start()
        async with await RawClient.connect(gateway.port, "durable", clean=False) as durable:
            assert durable.session_present
            await comes(durable)


@pytest.mark.parametrize("running", [True, False])
async def test_a_paused_consumer_of_a_group(
    server: NatsServer, client: NatsClient, gateway_factory: GatewayFactory, running: bool
) -> None:
    gateway = gateway_factory(server)
    async with await RawClient5.connect5(gateway.port, "member", session_expiry_interval=KEEP) as member:
        assert await member.subscribe5(Subscription("$share/g/a", 1)) == (1,)
        (name,) = await names(client, "$MQTT_msgs", CONSUMER_PREFIX)
        if running:
            await pause(client, "$MQTT_msgs", name)
            async with await RawClient.connect(gateway.port, "publisher") as publisher:
                await publisher.deliver("a", b"x", 1)
            await member.receive("a", b"x", qos=1)
    if not running:
        assert gateway.term() == 0
        await pause(client, "$MQTT_msgs", name)
        gateway.start()
        async with (
            await RawClient.connect(gateway.port, "publisher") as publisher,
            await RawClient5.connect5(gateway.port, "member", clean=False, session_expiry_interval=KEEP) as member,
        ):
            await publisher.deliver("a", b"x", 1)
            await member.receive("a", b"x", qos=1)
    await aeventually(lambda: f"consumer {name} of stream $MQTT_msgs was paused" in gateway.log, PATIENCE)


@pytest.mark.parametrize("running", [True, False])
async def test_the_paused_consumer_of_the_timers(
    server: NatsServer, client: NatsClient, gateway_factory: GatewayFactory, running: bool
) -> None:
    gateway = gateway_factory(server)
    if not running:
        assert gateway.term() == 0
    await pause(client, "$MQTT_timers", "gateways")
    if not running:
        gateway.start()
    async with await RawClient5.connect5(gateway.port, "brief", session_expiry_interval=1) as brief:
        await brief.disconnect5()

    async def expired() -> bool:
        return (await client.jetstream().stream_info("$MQTT_sess")).state.messages == 0

    await aeventually(expired, PATIENCE)
    await aeventually(lambda: "consumer gateways of stream $MQTT_timers was paused" in gateway.log, PATIENCE)
