# SPDX-License-Identifier: Apache-2.0
"""The gateway's NATS user may not do everything: whoever asks for the rest is told, and nobody else notices."""

from collections.abc import AsyncIterator, Iterator

import nats
import pytest
from nats.js.client import JetStreamContext

from mqtt_nats.codec import Will
from mqtt_streams.hashing import name_hash
from tests.conftest import GatewayFactory, _nats_factory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually

RESTRICTED = """
authorization {
  users: [
    { user: "admin", password: "admin" }
    { user: "gateway", password: "gateway", permissions: {
        publish: { deny: ["closed.>", "$MQTT.msgs.closed.>", "mute.>"] }
        subscribe: { deny: ["closed.>", "*.dark"] }
    } }
  ]
}
"""


@pytest.fixture(scope="module")
def server(nats_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with _nats_factory(nats_backend, tmp_path_factory.mktemp("nats")) as start:
        yield start(config=RESTRICTED)


@pytest.fixture
def local(server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(server, env={"MQTT_NATS_NATS_USER": "gateway", "MQTT_NATS_NATS_PASSWORD": "gateway"})


@pytest.fixture
async def js(server: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(server.url, user="admin", password="admin")
    yield client.jetstream()
    await client.close()


@pytest.mark.anyio
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_subscribe(local: Gateway, js: JetStreamContext, clean: bool, qos: int) -> None:
    client_id = f"subscriber {clean} {qos}"
    async with (
        await RawClient.connect(local.port, client_id, clean=clean) as client,
        await RawClient.connect(local.port, f"other {clean} {qos}") as other,
    ):
        for _ in range(2):
            assert await client.subscribe("closed/a", qos=qos) == (0x80,)
            assert await client.subscribe("closed/#", "open/#", "+/dark", "+/light", qos=qos) == (0x80, qos, 0x80, qos)
        await other.deliver("open/a", b"x", qos)
        await client.receive("open/a", b"x", qos=qos)

        prefix = name_hash(client_id)

        async def left() -> bool:
            # "open/#" has two, "+/light" has one; those of "+/dark" may still have to be asked for the rest.
            consumers = [one for one in await js.consumers_info("$MQTT_msgs") if one.name.startswith(prefix)]
            return len(consumers) == (3 if qos and not clean else 0)

        assert await aeventually(left)
    if not clean:
        async with await RawClient.connect(local.port, client_id):
            pass  # ends the session


@pytest.mark.anyio
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("retain", [False, True])
async def test_publish(local: Gateway, qos: int, retain: bool) -> None:
    async with (
        await RawClient.connect(local.port, "subscriber") as subscriber,
        await RawClient.connect(local.port, "bystander") as bystander,
        await RawClient.connect(local.port, "publisher") as publisher,
    ):
        assert await subscriber.subscribe("open/#", qos=2) == (2,)
        for number in range(20):
            await bystander.deliver("open/a", b"%d" % number, 1)
            await subscriber.receive("open/a", b"%d" % number)
        if qos == 0:
            await publisher.deliver("closed/a", b"x", 0)
        else:
            packet_id = publisher.publish("closed/a", b"x", qos, retain=retain)
            if qos == 2:  # held under a subject that is allowed
                await publisher.expect_ack(5, packet_id)
                publisher.ack(6, packet_id)
            await publisher.expect_closed()
        # A store that cannot be must not hold up those of others: it would within five seconds.
        for number in range(20):
            await bystander.deliver("open/a", b"%d" % number, 2)
            await subscriber.receive("open/a", b"%d" % number)


@pytest.mark.anyio
async def test_a_bare_copy_that_may_not_be_published(local: Gateway) -> None:
    async with await RawClient.connect(local.port, "publisher") as publisher:
        for _ in range(3):
            await publisher.deliver("mute/a", b"x", 1)
            await publisher.deliver("mute/a", b"x", 2)
    assert await aeventually(lambda: "publish to" in local.log)
    assert local.log.count("NATS refused") == 1, "the same refusal, again and again"


@pytest.mark.anyio
async def test_will(local: Gateway) -> None:
    will = Will("closed/will", b"gone", 1, False)
    async with await RawClient.connect(local.port, "bystander") as bystander:
        (await RawClient.connect(local.port, "doomed", will=will)).drop()
        assert await aeventually(lambda: "the will on 'closed/will' was not stored" in local.log)
        await bystander.deliver("open/a", b"x", 1)
