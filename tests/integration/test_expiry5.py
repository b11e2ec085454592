# SPDX-License-Identifier: Apache-2.0
"""Session expiry intervals of 5.0 clients, and messages that expire."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from mqtt_nats.codec import Disconnect, Publish, Subscription
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBACK
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector, Stored, until

Connector5 = Callable[..., Awaitable[RawClient5]]
BACKSTOP = 86_400


@pytest.fixture
async def connect5(gateway: Gateway) -> AsyncIterator[Connector5]:
    """Connect raw clients of 5.0."""
    clients: list[RawClient5] = []

    async def connect(client_id: str, **options: Any) -> RawClient5:
        client = await RawClient5.connect5(gateway.port, client_id, **options)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.drop()


async def thresholds(stored: Stored, name: str) -> list[float | None]:
    """Seconds without interest after which the consumers of a client would be removed."""
    return [one.config.inactive_threshold for one in await stored.session_consumers(name)]


def counted_down(message: Publish, interval: int, begun: float, waited: float) -> None:
    """What is left of an expiry interval is right [MQTT-3.3.2-6] (5.0); clocks may differ by less than a second.

    Args:
        begun: a time before the publish (``time.monotonic``).
        waited: seconds that have passed at least.
    """
    at_most = int(time.monotonic() - begun) + 1
    left = (message.properties or {})["message_expiry_interval"]
    assert interval - at_most <= left <= interval - int(waited)


async def test_interval_counts_from_the_end_of_the_connection(connect5: Connector5, name: str, stored: Stored) -> None:
    client = await connect5(name, session_expiry_interval=1)
    await client.subscribe5(Subscription(name, 1))
    left = time.monotonic()
    client.drop()
    await stored.gone(name)
    assert time.monotonic() - left > 0.8
    assert not (await connect5(name, clean=False, session_expiry_interval=1)).session_present


async def test_disconnect_changes_the_interval(connect5: Connector5, name: str, stored: Stored) -> None:
    """Section 3.14.2.2.2: a client may give another interval."""
    client = await connect5(name, session_expiry_interval=1)
    await client.subscribe5(Subscription(name, 1))
    await client.disconnect5(session_expiry_interval=3600)
    assert await thresholds(stored, name) == [3600 + BACKSTOP]
    await asyncio.sleep(1.5)  # longer than the first interval
    client = await connect5(name, clean=False, session_expiry_interval=0xFFFFFFFF)
    assert client.session_present

    async def longest() -> None:  # which is less than it asks for
        assert await thresholds(stored, name) == [7 * 86_400 + BACKSTOP]

    await until(longest)
    await client.disconnect5(session_expiry_interval=0)
    await stored.gone(name)


async def test_session_ends_at_once_with_interval_0(connect5: Connector5, name: str, stored: Stored) -> None:
    client = await connect5(name, session_expiry_interval=3600)
    await client.subscribe5(Subscription(name, 1))
    client.drop()
    client = await connect5(name, clean=False)  # interval 0
    assert client.session_present
    client.drop()
    client = await connect5(name, clean=False)
    assert not client.session_present
    client.drop()
    await stored.gone(name)


async def test_interval_cannot_be_given_to_a_session_without(connect5: Connector5, name: str) -> None:
    client = await connect5(name)
    client.send(Disconnect(0, {"session_expiry_interval": 5}))
    await client.expect_disconnect(0x82)


async def test_what_has_expired_is_not_sent_to_a_session(connect5: Connector5, name: str) -> None:
    """[MQTT-3.3.2-5] [MQTT-3.3.2-6] (5.0)"""
    client = await connect5(name, session_expiry_interval=60)
    await client.subscribe5(Subscription(name, 1))
    await client.disconnect5()
    publisher = await connect5(f"{name}-publisher")
    begun = time.monotonic()
    ids = [
        publisher.publish5(name, b"short", 1, message_expiry_interval=1),
        publisher.publish5(name, b"long", 1, message_expiry_interval=60),
        publisher.publish5(name, b"for ever", 1),
    ]
    await publisher.expect_ack(PUBACK, *ids)
    await asyncio.sleep(2)
    client = await connect5(name, clean=False, session_expiry_interval=60)
    counted_down(await client.receive(name, b"long"), 60, begun, 2)
    await client.receive(name, b"for ever", properties=None)
    await client.quiet()


async def test_what_has_expired_is_not_sent_to_a_client_that_does_not_acknowledge(
    connect5: Connector5, name: str
) -> None:
    client = await connect5(name, receive_maximum=1)
    await client.subscribe5(Subscription(name, 1))
    publisher = await connect5(f"{name}-publisher")
    begun = time.monotonic()
    ids = [
        publisher.publish5(name, b"first", 1),
        publisher.publish5(name, b"short", 1, message_expiry_interval=1),
        publisher.publish5(name, b"last", 1, message_expiry_interval=100),
    ]
    await publisher.expect_ack(PUBACK, *ids)
    first = await client.message(name, b"first")
    await asyncio.sleep(1.5)
    client.ack(PUBACK, first.packet_id)
    last = await client.receive(name, b"last")
    counted_down(last, 100, begun, 1.5)
    assert set(last.properties or {}) == {"message_expiry_interval"}
    await client.quiet()


async def test_retained_message_expires(connect5: Connector5, connect: Connector, name: str) -> None:
    publisher = await connect5(f"{name}-publisher")
    begun = time.monotonic()
    ids = [
        publisher.publish5(f"{name}/short", b"x", 1, retain=True, message_expiry_interval=1),
        publisher.publish5(f"{name}/long", b"y", 1, retain=True, message_expiry_interval=60),
    ]
    await publisher.expect_ack(PUBACK, *ids)
    await asyncio.sleep(2)
    client = await connect5(name)
    await client.subscribe5(Subscription(f"{name}/#", 1))
    counted_down(await client.receive(f"{name}/long", b"y", retain=True), 60, begun, 2)
    await client.quiet()
    old = await connect(f"{name}-old")
    await old.subscribe(f"{name}/#")
    await old.receive(f"{name}/long", b"y", retain=True)
    await old.quiet()
