# SPDX-License-Identifier: Apache-2.0
"""Somebody deletes what the gateway has in JetStream: it goes on with what is created again."""

from collections.abc import AsyncIterator

import nats
import pytest
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError

from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually
from tests.integration.conftest import settled
from tests.integration.inprocess import running

pytestmark = pytest.mark.anyio

STREAMS = ("$MQTT_sess", "$MQTT_msgs", "$MQTT_rmsgs", "$MQTT_qos2in", "$MQTT_out")


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
def local(server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(server)


@pytest.fixture
async def js(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(server.url)
    yield client.jetstream()
    await client.close()


async def _exists(js: JetStreamContext, stream: str) -> bool:
    try:
        await js.stream_info(stream)
    except NotFoundError:
        return False
    return True


@pytest.mark.parametrize("stream", STREAMS)
async def test_a_stream(local: Gateway, js: JetStreamContext, stream: str) -> None:
    async with (
        await RawClient.connect(local.port, "publisher") as publisher,
        await RawClient.connect(local.port, "subscriber") as subscriber,
    ):
        await subscriber.subscribe("a/#", qos=2)
        await js.delete_stream(stream)
        for qos in (1, 2):
            await publisher.deliver("a/b", b"x", qos, retain=True)
            await subscriber.receive("a/b", b"x", qos=qos)

        async def subscribes() -> bool:
            async with await RawClient.connect(local.port, "durable", clean=False) as durable:
                return await durable.subscribe("c", qos=2) == (2,)

        assert await aeventually(subscribes)
        assert await aeventually(lambda: f"stream {stream} was deleted" in local.log)
        assert await aeventually(lambda: _exists(js, stream))
        async with await RawClient.connect(local.port, "durable", clean=False) as durable:
            await publisher.deliver("c", b"y", 2)
            await durable.receive("c", b"y", qos=2)


async def test_the_consumer_of_the_timers(
    server: NatsServer, gateway_factory: GatewayFactory, js: JetStreamContext
) -> None:
    gateway = gateway_factory(server, env={"MQTT_NATS_SESSION_EXPIRY_INTERVAL": "1"})
    await js.delete_consumer("$MQTT_timers", "gateways")
    await (await RawClient.connect(gateway.port, "durable", clean=False)).disconnect()

    async def expired() -> bool:
        return (await js.stream_info("$MQTT_sess")).state.messages == 0

    assert await aeventually(expired)


async def consumers(js: JetStreamContext, client_id: str) -> list[str]:
    """Names of a session's consumers."""
    found = await js.consumers_info("$MQTT_msgs")
    return [one.name for one in found if one.name.startswith(name_hash(client_id))]


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_consumer_of_a_connected_client(local: Gateway, js: JetStreamContext, qos: int) -> None:
    async with (
        await RawClient.connect(local.port, "durable", clean=False) as client,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        await client.subscribe("a", "b/+", qos=qos)
        for topic in ("a", "b/c"):
            await publisher.deliver(topic, b"before", qos)
            await client.receive(topic, b"before", qos=qos)
        names = await consumers(js, "durable")
        assert len(names) == 2
        for name in names:
            await js.delete_consumer("$MQTT_msgs", name)
        for topic in ("a", "b/c"):
            await publisher.deliver(topic, b"after", qos)
        got = await client.messages(2)
        assert {one.payload for one in got} == {b"after"}
        for one in got:
            await client.complete(one)
        await client.quiet()

        async def back() -> bool:
            return sorted(await consumers(js, "durable")) == sorted(names)

        assert await aeventually(back)
        # What is ended in an orderly way does not come back.
        await client.unsubscribe("a", "b/+")
        await client.subscribe("c", qos=0)

        async def none() -> bool:
            return not await consumers(js, "durable")

        assert await aeventually(none)
        await client.quiet()
        assert not await consumers(js, "durable")


async def test_a_consumer_of_an_absent_client(local: Gateway, js: JetStreamContext) -> None:
    async with await RawClient.connect(local.port, "absent", clean=False) as client:
        await client.subscribe("a", qos=1)
    await js.delete_consumer("$MQTT_msgs", (await consumers(js, "absent"))[0])
    async with (
        await RawClient.connect(local.port, "absent", clean=False) as client,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        assert client.session_present
        assert await aeventually(lambda: consumers(js, "absent"))
        await publisher.deliver("a", b"x", 1)
        await client.receive("a", b"x", qos=1)


@pytest.mark.long
@pytest.mark.parametrize("connected", [True, False])
async def test_the_messages_of_a_session_with_overlapping_subscriptions(
    server: NatsServer, gateway_factory: GatewayFactory, js: JetStreamContext, connected: bool
) -> None:
    """A stream that begins anew counts from 1: below everything that the session has seen."""
    gateway = gateway_factory(server)
    async with await RawClient.connect(gateway.port, "publisher") as publisher:
        await publisher.deliver_all("a/b", [b"%d" % number for number in range(20)], 1)
        async with await RawClient.connect(gateway.port, "durable", clean=False) as client:
            await client.subscribe("a/+", "+/b", qos=1)
            await publisher.deliver("a/b", b"before", 1)
            await client.receive("a/b", b"before", qos=1)
            if connected:
                await js.delete_stream("$MQTT_msgs")
                await client.expect_closed()
        if not connected:
            await js.delete_stream("$MQTT_msgs")
        await publisher.deliver("b", b"x", 1)  # has the stream created

        async def back() -> RawClient | None:
            try:
                return await RawClient.connect(gateway.port, "durable", clean=False)
            except AssertionError:
                return None

        async with await aeventually(back) as client:
            assert client.session_present
            for number in range(30):
                await publisher.deliver("a/b", b"%d" % number, 1)
                await client.receive("a/b", b"%d" % number, qos=1)
            await client.quiet()
            await settled(js, "durable")
        async with await RawClient.connect(gateway.port, "durable", clean=False) as client:
            await client.quiet()
            await publisher.deliver("a/b", b"again", 1)
            await client.receive("a/b", b"again", qos=1)


async def test_publishes_at_qos_2_after_others(local: Gateway, js: JetStreamContext) -> None:
    """Held under other sequences than those before, for which the messages would be taken."""
    async with (
        await RawClient.connect(local.port, "publisher") as publisher,
        await RawClient.connect(local.port, "regular") as regular,
        await RawClient.connect(local.port, "durable", clean=False) as durable,
    ):
        for client in (regular, durable):
            await client.subscribe("a", qos=2)
        for number in range(10):
            if number == 5:
                await js.delete_stream("$MQTT_qos2in")
            await publisher.deliver("a", b"%d" % number, 2)
            for client in (regular, durable):
                await client.receive("a", b"%d" % number, qos=2)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_takeover_after_others(
    server: NatsServer, gateway_factory: GatewayFactory, js: JetStreamContext, elsewhere: bool
) -> None:
    """The later claim of a session wins, also against one from before."""
    here = gateway_factory(server)
    there = gateway_factory(server) if elsewhere else here

    async def connected() -> RawClient | None:
        try:
            return await RawClient.connect(there.port, "device", clean=False)
        except AssertionError:  # the stream is not there again yet
            return None

    async with await RawClient.connect(here.port, "device", clean=False) as former:
        for _ in range(20):
            await former.subscribe("a", qos=1)
        await js.delete_stream("$MQTT_sess")
        later = await aeventually(connected)
        assert later is not None
        async with later:
            await former.expect_closed()
            await later.deliver("b", b"x", 1)
            await later.quiet()


def test_streams_that_a_first_start_has_created_are_not_looked_for_again(nats_factory: NatsFactory) -> None:
    """Nobody had created them before: a second look would undo what an operator changes meanwhile."""
    with running(nats=nats_factory().url) as first:
        (account,) = first.gateway.tenants.accounts.values()
        assert not account.services.nats.inbox.unheard
