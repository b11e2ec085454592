# SPDX-License-Identifier: Apache-2.0
"""Clients, and the gateway itself, that end while NATS is away."""

import nats
import pytest

from mqtt_nats.codec import Connack, Connect, Subscribe, Subscription
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
def local(server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(server)


async def away(server: NatsServer, gateway: Gateway) -> None:
    """Kill nats-server and wait until the gateway knows."""
    server.kill()
    assert await aeventually(lambda: "the connection to NATS is lost" in gateway.log)


async def records(server: NatsServer) -> tuple[int, int]:
    """Session records written so far, and those that there are."""
    client = await nats.connect(server.url)
    state = (await client.jetstream().stream_info("$MQTT_sess")).state
    await client.close()
    return state.last_seq, state.messages


@pytest.mark.long
async def test_a_gateway_ends_while_nats_is_away(server: NatsServer, local: Gateway) -> None:
    async with (
        await RawClient.connect(local.port, "regular") as regular,
        await RawClient.connect(local.port, "durable", clean=False) as durable,
        await RawClient.open(local.port) as new,
    ):
        await durable.subscribe("a", qos=1)
        await away(server, local)
        for client in (regular, durable):
            client.send(Subscribe(1000, (Subscription("b", 1),)))
        new.send(Connect(4, "new", True, 0, None, None, None))
        assert local.term() == 0


@pytest.mark.long
async def test_clients_that_give_up_are_forgotten(server: NatsServer, gateway_factory: GatewayFactory) -> None:
    local = gateway_factory(server, env={"MQTT_NATS_CONNECT_TIMEOUT": "2"})
    async with await RawClient.connect(local.port, "witness") as witness:
        before, _ = await records(server)
        await away(server, local)
        for number in range(200):
            async with await RawClient.open(local.port) as client:
                client.send(Connect(4, f"impatient {number}", number % 2 == 0, 0, None, None, None))
        async with await RawClient.open(local.port) as patient:
            patient.send(Connect(4, "patient", True, 0, None, None, None))
            await patient.expect(Connack, code=3)
            await patient.expect_closed()
        server.start()
        await witness.subscribe("a", qos=1)
        await witness.deliver("b", b"x", 1)
        # A claim is one write; whoever was gone before NATS was back claims nothing.
        assert (await records(server))[0] - before < 20


async def test_regular_sessions_that_end_leave_no_record(server: NatsServer, local: Gateway) -> None:
    clients = [await RawClient.connect(local.port, f"regular {number}") for number in range(20)]
    held = [client.publish("held", b"x", 2) for client in clients]
    for client, packet_id in zip(clients, held, strict=True):
        await client.expect_ack(5, packet_id)
    assert (await records(server))[1] == 20
    await away(server, local)
    for client in clients:
        client.drop()
    server.start()

    async def gone() -> bool:
        return (await records(server))[1] == 0

    assert await aeventually(gone)
    direct = await nats.connect(server.url)
    assert (await direct.jetstream().stream_info("$MQTT_qos2in")).state.messages == 0
    await direct.close()
