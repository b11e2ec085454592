# SPDX-License-Identifier: Apache-2.0
"""How many subscriptions a session has room for."""

import pytest

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import PINGRESP, SUBACK, Raw
from tests.harness.rawclient import RawClient

pytestmark = pytest.mark.anyio

PINGREQ = b"\xc0\0"


@pytest.mark.long
async def test_500_filters_in_one_packet_of_a_durable_session(
    nats_server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    gateway = gateway_factory(nats_server)
    filters = [f"homeassistant/sensor/device-{number:04}/state/+" for number in range(500)]
    async with await RawClient.connect(gateway.port, "durable", clean=False) as client:
        assert await client.subscribe(*filters, qos=1) == (1,) * 500


@pytest.mark.long
async def test_what_a_record_has_no_room_for_is_refused(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory
) -> None:
    gateway = gateway_factory(nats_factory(config="max_payload: 1MB"))
    filters = [f"{'level/' * 30}{number:04}/#" for number in range(400)]
    async with (
        await RawClient.connect(gateway.port, "verbose", clean=False) as client,
        await RawClient.connect(gateway.port, "publisher") as publisher,
    ):
        codes = await client.subscribe(*filters, qos=1)
        granted = codes.count(1)
        assert codes == (1,) * granted + (0x80,) * (400 - granted)
        assert 200 < granted < 400
        assert await client.subscribe(filters[0], qos=1) == (1,), "a subscription that there is takes no room"
        assert await client.subscribe("one/more", qos=0) in ((0,), (0x80,))
        await publisher.deliver(filters[0].replace("#", "x"), b"there", 1)
        await client.receive(filters[0].replace("#", "x"), b"there", qos=1)


async def test_3000_filters_of_a_session_that_ends_with_its_connection(
    nats_server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    gateway = gateway_factory(nats_server)
    filters = [f"homeassistant/sensor/device-{number:04}/state" for number in range(3000)]
    async with (
        await RawClient.connect(gateway.port, "regular") as client,
        await RawClient.connect(gateway.port, "publisher") as publisher,
    ):
        for start in range(0, 3000, 100):
            assert await client.subscribe(*filters[start : start + 100], qos=1) == (1,) * 100
        await publisher.deliver(filters[-1], b"there", 1)
        await client.receive(filters[-1], b"there", qos=1)


async def test_a_ping_is_answered_before_a_long_subscribe(
    nats_server: NatsServer, gateway_factory: GatewayFactory
) -> None:
    gateway = gateway_factory(nats_server)
    filters = [(f"long/{number:04}", 1) for number in range(1000)]
    with Raw.connected(gateway.port, "long", clean=False) as client:
        client.send(raw.subscribe(*filters) + PINGREQ)
        client.expect(PINGRESP)
        client.send(PINGREQ)
        client.expect(PINGRESP)
        assert client.expect(SUBACK).body[2:] == b"\1" * 1000
