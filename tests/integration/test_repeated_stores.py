# SPDX-License-Identifier: Apache-2.0
"""A store's acknowledgement is lost: the message is sent again, and is not stored twice."""

import asyncio
from collections.abc import AsyncIterator

import nats
import pytest
from nats.js.client import JetStreamContext

from tests.chaos.points.proxy import Action, NatsProxy
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio

PATIENCE = 30.0
"""Seconds: a store without an answer is noticed after five, and tried again two seconds later."""


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
async def js(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(server.url)
    yield client.jetstream()
    await client.close()


@pytest.fixture
async def proxy(server: NatsServer) -> AsyncIterator[NatsProxy]:
    """Between the gateway and nats-server."""
    between = NatsProxy(server.port, lambda: None)
    await between.start()
    yield between
    await between.close()


async def begin(gateway: Gateway) -> Gateway:
    """Start a gateway behind a proxy of this event loop."""
    await asyncio.to_thread(gateway.start)
    return gateway


async def stored(js: JetStreamContext) -> int:
    """Messages in the stream of messages."""
    return (await js.stream_info("$MQTT_msgs")).state.messages


async def shorten(js: JetStreamContext) -> None:
    """Let the stream forget ids after a second."""
    config = (await js.stream_info("$MQTT_msgs")).config
    config.duplicate_window = 1
    await js.update_stream(config)


async def deliver(client: RawClient, payloads: list[bytes], qos: int) -> None:
    """As ``deliver_all``, however long it takes."""
    ids = [client.publish("a/b", payload, qos) for payload in payloads]
    if qos == 1:
        await client.expect_ack(PUBACK, *ids, timeout=PATIENCE)
        return
    await client.expect_ack(PUBREC, *ids, timeout=PATIENCE)
    client.ack(PUBREL, *ids)
    await client.expect_ack(PUBCOMP, *ids, timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("qos", [1, 2])
async def test_the_stream_recognises_what_it_has(
    js: JetStreamContext, proxy: NatsProxy, gateway_factory: GatewayFactory, qos: int
) -> None:
    gateway = await begin(gateway_factory(proxy.url, "--message-ids", "always", start=False))
    async with await RawClient.connect(gateway.port, "publisher") as publisher:
        proxy.set("answer", "$MQTT.msgs.", Action.DROP, 2)
        await deliver(publisher, [b"%d" % number for number in range(5)], qos)
    assert await stored(js) == 5
    assert (await js.stream_info("$MQTT_msgs")).config.duplicate_window == 30
    await asyncio.to_thread(gateway.term)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["answer", "up"])
@pytest.mark.parametrize("lost", [False, True], ids=["connected", "connection lost"])
async def test_without_ids_a_message_is_looked_for(
    js: JetStreamContext, proxy: NatsProxy, gateway_factory: GatewayFactory, way: str, lost: bool
) -> None:
    """The answer did not come, or the message did not arrive: it is there once in either case."""
    gateway = await begin(gateway_factory(proxy.url, start=False))
    async with await RawClient.connect(gateway.port, "publisher") as publisher:
        trap = proxy.set(way, "$MQTT.msgs.", Action.DROP, 2)
        ids = [publisher.publish("a/b", payload, 1) for payload in (b"1", b"2", b"3")]
        await asyncio.wait_for(trap.sprung.wait(), PATIENCE)
        if lost:
            await publisher.expect_ack(PUBACK, ids.pop(0))
            proxy.cut()
        await publisher.expect_ack(PUBACK, *ids, timeout=PATIENCE)
    assert await stored(js) == 3
    assert (await js.stream_info("$MQTT_msgs")).config.duplicate_window == 120
    await asyncio.to_thread(gateway.term)


@pytest.mark.slow
@pytest.mark.parametrize("qos", [1, 2])
async def test_what_the_stream_has_forgotten_is_looked_for(
    js: JetStreamContext, proxy: NatsProxy, gateway_factory: GatewayFactory, qos: int
) -> None:
    """The duplicate window is over when the message would be sent again."""
    gateway = await begin(gateway_factory(proxy.url, "--message-ids", "always", start=False))
    await shorten(js)
    await asyncio.to_thread(gateway.restart)
    async with (
        await RawClient.connect(gateway.port, "subscriber", clean=False) as subscriber,
        await RawClient.connect(gateway.port, "publisher") as publisher,
    ):
        await subscriber.subscribe("a/b", qos=2)
        proxy.set("answer", "$MQTT.msgs.", Action.DROP, 2)
        lost = proxy.set("up", "$MQTT.msgs.", Action.DROP, 4)
        await deliver(publisher, [b"%d" % number for number in range(5)], qos)
        assert lost.sprung.is_set()
        payloads = []
        for _ in range(5):
            received = await subscriber.messages(1)
            payloads.append(received[0].payload)
            await subscriber.complete(received[0])
        await publisher.deliver("a/b", b"end", 1)
        assert (await subscriber.messages(1))[0].payload == b"end"
    assert "messages without an acknowledgement were stored" in gateway.log
    assert sorted(payloads) == [b"%d" % number for number in range(5)]
    await asyncio.to_thread(gateway.term)


@pytest.mark.slow
async def test_a_release_that_another_gateway_has_made_long_ago(
    js: JetStreamContext, server: NatsServer, proxy: NatsProxy, gateway_factory: GatewayFactory
) -> None:
    """It was to be made here when NATS was lost, and the stream has forgotten its id."""
    late = await begin(gateway_factory(proxy.url, "--gateway-lease", "60", start=False))
    await shorten(js)
    await asyncio.to_thread(late.restart)
    other = await begin(gateway_factory(server, start=False))
    async with await RawClient.connect(late.port, "publisher", clean=False) as publisher:
        publisher.publish("a/b", b"1", 2, packet_id=1)
        await publisher.expect_ack(PUBREC, 1)
        proxy.lose()
        await aeventually(lambda: "connection to NATS is lost" in late.log)
        publisher.ack(PUBREL, 1)
        await publisher.quiet()
    async with await RawClient.connect(other.port, "publisher", clean=False) as publisher:
        publisher.ack(PUBREL, 1)
        await publisher.expect_ack(PUBCOMP, 1)
        await asyncio.sleep(2)  # what is tested is that time passes
        proxy.away = False
        await aeventually(lambda: "JetStream stores again to $MQTT_msgs" in late.log)
        async with await RawClient.connect(late.port, "probe") as probe:
            await probe.deliver("a/b", b"2", 1)
    assert await stored(js) == 2
    for gateway in (late, other):
        await asyncio.to_thread(gateway.term)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("payload", "since", "expected"),
    [
        pytest.param(b"1", None, [b"1"], id="set"),
        pytest.param(b"", None, [], id="removed"),
        pytest.param(b"1", b"2", [b"2"], id="something newer"),
    ],
)
async def test_a_release_that_is_not_retained(
    js: JetStreamContext,
    server: NatsServer,
    proxy: NatsProxy,
    gateway_factory: GatewayFactory,
    payload: bytes,
    since: bytes | None,
    expected: list[bytes],
) -> None:
    """The gateway that has made it, long ago, has passed it on and was lost before it was retained."""
    late = await begin(gateway_factory(proxy.url, "--gateway-lease", "60", start=False))
    await shorten(js)
    other = await begin(gateway_factory(server, start=False))
    await asyncio.to_thread(late.restart)
    async with await RawClient.connect(late.port, "publisher", clean=False) as publisher:
        await publisher.deliver("a/b", b"0", 1, retain=True)
        trap = proxy.set("up", "$MQTT.rmsgs.", Action.DROP)
        publisher.publish("a/b", payload, 2, retain=True, packet_id=1)
        await publisher.expect_ack(PUBREC, 1)
        publisher.ack(PUBREL, 1)
        await asyncio.wait_for(trap.sprung.wait(), PATIENCE)

        async def passed_on() -> bool:
            return await stored(js) == 2

        await aeventually(passed_on)
        proxy.lose()
    if since is not None:
        async with await RawClient.connect(other.port, "another") as another:
            await another.deliver("a/b", since, 1, retain=True)
    await asyncio.sleep(2)  # what is tested is that time passes
    async with await RawClient.connect(other.port, "publisher", clean=False) as publisher:
        publisher.ack(PUBREL, 1)
        await publisher.expect_ack(PUBCOMP, 1)
    assert await stored(js) == (2 if since is None else 3)
    async with await RawClient.connect(other.port, "subscriber") as subscriber:
        await subscriber.subscribe("a/b", qos=0)
        assert [one.payload for one in await subscriber.messages(len(expected))] == expected
        await subscriber.quiet()
    for gateway in (late, other):
        await asyncio.to_thread(gateway.term)
