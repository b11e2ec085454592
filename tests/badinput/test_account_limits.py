# SPDX-License-Identifier: Apache-2.0
"""A JetStream account with limits of its own: a gateway uses what the account allows, and refuses the rest."""

from typing import Any

import nats
import pytest
from nats.js.api import ConsumerConfig

from mqtt_nats.codec import Subscription
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5

CONSUMERS = 4
ACK_PENDING = 50
CONFIG = """
accounts {
  A { jetstream { max_consumers: %d, max_ack_pending: %d, max_streams: %d }, users: [{ user: a, password: a }] }
}
no_auth_user: a
"""


@pytest.mark.anyio
async def test_few_consumers_and_a_small_window(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    """Subscriptions are granted when the consumers are used up: the gateway's reader serves them all."""
    server = nats_factory(config=CONFIG % (CONSUMERS, ACK_PENDING, 30))
    gateway = gateway_factory(server)
    log = gateway.log
    assert log.count(f"the account allows {CONSUMERS} consumers of a stream") == 1
    assert log.count(f"the account allows max_ack_pending of {ACK_PENDING}") == 1
    async with (
        await RawClient5.connect5(gateway.port, "five", clean=False, session_expiry_interval=100) as five,
        await RawClient.connect(gateway.port, "three", clean=False) as three,
        await RawClient.connect(gateway.port, "publisher") as publisher,
    ):
        for number in range(2 * CONSUMERS):
            assert await five.subscribe5(Subscription(f"five/{number}", 1)) == (1,)
        assert await three.subscribe("more", qos=1) == (1,)
        assert await three.subscribe("plain", qos=0) == (0,)
        # More messages than the account lets a consumer have unacknowledged.
        payloads = [b"%d" % number for number in range(2 * ACK_PENDING)]
        await publisher.deliver_all("five/0", payloads, 1)
        for payload in payloads:
            await five.receive("five/0", payload, qos=1)
        for client, topic in ((five, f"five/{2 * CONSUMERS - 1}"), (three, "more")):
            await publisher.deliver(topic, b"last", 1)
            await client.receive(topic, b"last", qos=1)


@pytest.mark.anyio
@pytest.mark.parametrize("others", [0, 3])
async def test_readers_have_a_place(nats_factory: NatsFactory, gateway_factory: GatewayFactory, others: int) -> None:
    """Consumers that only show a session leave some to readers; they go where ``others`` have used up the rest."""
    server = nats_factory(config=CONFIG % (2 * CONSUMERS - 2, ACK_PENDING, 30))
    gateway = gateway_factory(server, "--session-positions", "consumers")
    options: dict[str, Any] = {"clean": False, "session_expiry_interval": 100}
    five = await RawClient5.connect5(gateway.port, "five", **options)
    for number in range(2 if others else 2 * CONSUMERS):
        assert await five.subscribe5(Subscription(f"five/{number}", 1)) == (1,)
    await five.disconnect5()
    client = await nats.connect(server.url)
    for number in range(others):
        await client.jetstream().add_consumer("$MQTT_msgs", ConsumerConfig(durable_name=f"other{number}"))
    await client.close()
    payloads = [b"%d" % number for number in range(10)]
    async with await RawClient.connect(gateway.port, "publisher") as publisher:
        await publisher.deliver_all("five/0", payloads, 1)
    async with await RawClient5.connect5(gateway.port, "five", **options) as five:
        for payload in payloads:
            await five.receive("five/0", payload, qos=1)
        await five.quiet()


@pytest.mark.anyio
async def test_a_shared_subscription_with_a_small_window(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory
) -> None:
    server = nats_factory(config=CONFIG % (100, ACK_PENDING, 30))
    gateway = gateway_factory(server)
    async with (
        await RawClient5.connect5(gateway.port, "member", clean=False, session_expiry_interval=100) as member,
        await RawClient.connect(gateway.port, "publisher") as publisher,
    ):
        assert await member.subscribe5(Subscription("$share/group/jobs/+", 1)) == (1,)
        payloads = [b"%d" % number for number in range(2 * ACK_PENDING)]
        await publisher.deliver_all("jobs/1", payloads, 1)
        for payload in payloads:
            await member.receive("jobs/1", payload, qos=1)


@pytest.mark.anyio
async def test_too_few_streams(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    server = nats_factory(config=CONFIG % (100, ACK_PENDING, 3))
    gateway = gateway_factory(server, start=False)
    gateway.launch()
    assert gateway.wait() == 1
    (line,) = gateway.log.splitlines()
    assert "cannot be created" in line
    assert "raise the account's limit of streams" in line
