# SPDX-License-Identifier: Apache-2.0
"""A JetStream account with limits of its own: a gateway uses what the account allows, and refuses the rest."""

import pytest

from mqtt_nats.client.client import Client
from mqtt_nats.codec import Subscription
from mqtt_streams.api import ApiError
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.integration.inprocess import running

CONSUMERS = 4
ACK_PENDING = 50
CONFIG = """
accounts {
  A { jetstream { max_consumers: %d, max_ack_pending: %d, max_streams: %d }, users: [{ user: a, password: a }] }
}
no_auth_user: a
"""


@pytest.mark.anyio
@pytest.mark.parametrize("shared_reader", ["never", "auto"])
async def test_few_consumers_and_a_small_window(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, shared_reader: str
) -> None:
    server = nats_factory(config=CONFIG % (CONSUMERS, ACK_PENDING, 30))
    gateway = gateway_factory(server, "--shared-reader", shared_reader)
    log = gateway.log
    assert log.count(f"the account allows {CONSUMERS} consumers of a stream") == 1
    assert log.count(f"the account allows max_ack_pending of {ACK_PENDING}") == 1
    async with (
        await RawClient5.connect5(gateway.port, "five", clean=False, session_expiry_interval=100) as five,
        await RawClient.connect(gateway.port, "three", clean=False) as three,
        await RawClient.connect(gateway.port, "publisher") as publisher,
    ):
        for number in range(CONSUMERS):
            codes = await five.subscribe5(Subscription(f"five/{number}", 1))
            if codes == (0x97,):
                break
            assert codes == (1,)
        # The shared reader serves a subscription also if it has no consumer.
        refused = shared_reader == "never"
        assert await five.subscribe5(Subscription("more", 1)) == (0x97 if refused else 1,)
        assert await three.subscribe("more", qos=1) == (0x80 if refused else 1,)
        assert await three.subscribe("plain", qos=0) == (0,)
        # More messages than the account lets a consumer have unacknowledged.
        payloads = [b"%d" % number for number in range(2 * ACK_PENDING)]
        await publisher.deliver_all("five/0", payloads, 1)
        for payload in payloads:
            await five.receive("five/0", payload, qos=1)


def test_a_consumer_is_refused_and_the_subscription_cannot_end_yet(
    nats_factory: NatsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole SUBSCRIBE is refused, and its retained messages do not come; the client stays."""
    server = nats_factory(config=CONFIG % (CONSUMERS, ACK_PENDING, 30))
    asked: list[Client] = []

    async def refused_once(client: Client) -> None:
        asked.append(client)
        if len(asked) == 1:
            raise ApiError(400, 10026, "maximum consumers limit reached")

    with (
        running(nats=(server.url,), allow_anonymous=True) as inside,
        Raw5.open(inside.port, "five", prop(SESSION_EXPIRY, 100)) as five,
    ):
        five.deliver("five/more", b"kept", flags=1)
        number = 0
        while five.subscribed((f"five/{number}", 1)) == (1,):
            number += 1
        monkeypatch.setattr("mqtt_nats.client.subscribe.leave_reader_unless_wholly_live", refused_once)
        assert five.subscribed(("five/more", 1)) == (0x97,)
        assert len(asked) == 2
        assert five.subscribed(("five/more", 1), ("plain", 0)) == (0x97, 0)
        assert five.subscribed(("five/more", 0)) == (0,)
        assert five.message().payload == b"kept"


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
