# SPDX-License-Identifier: Apache-2.0
"""JetStream has room for a small message, but not for the large one before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import nats
import pytest
from nats.js.client import JetStreamContext

from mqtt_nats.codec import Ack, Publish
from mqtt_nats.config.settings import Settings
from mqtt_streams.messages import STREAM as MESSAGES
from tests.conftest import NatsFactory
from tests.harness.inprocess import InProcess, running
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL, RawClient, key_of
from tests.harness.rawclient5 import RawClient5

pytestmark = pytest.mark.anyio

LARGE: Final = bytes(600_000)

CONFIG: Final = """
accounts {
  A { jetstream: { max_file: 4M, max_mem: 4M }, users: [{ user: a, password: a }] }
}
"""


@pytest.fixture
async def full(nats_factory: NatsFactory) -> AsyncIterator[tuple[InProcess, JetStreamContext]]:
    """A gateway for which JetStream has no room for a large message."""
    server = nats_factory(config=CONFIG)
    values = {"listen": "127.0.0.1:0", "nats": (server.url,), "nats_user": "a", "nats_password": "a"}
    with running(Settings.model_validate(values)) as gateway:
        async with await RawClient5.connect5(gateway.port, "fills") as fills:
            refused = 0
            while not refused:
                fills.publish("fill", LARGE, 1, packet_id=1)
                refused = (await fills.expect(Ack)).reason
        client = await nats.connect(server.url, user="a", password="a")
        yield gateway, client.jetstream()
        await client.close()


@pytest.mark.parametrize("retain", [False, True])
async def test_a_small_message_does_not_overtake_a_large_one(
    full: tuple[InProcess, JetStreamContext], retain: bool
) -> None:
    """[MQTT-4.6.0-5] (3.1.1): the connection ends, so that the client sends both again, in order."""
    gateway, js = full

    def both(dup: bool) -> list[Publish]:
        payloads = enumerate((LARGE, b"small"), 1)
        return [Publish(1, retain, dup, key_of("t"), number, payload) for number, payload in payloads]

    async with await RawClient.connect(gateway.port, "subscriber", clean=False) as subscriber:
        assert await subscriber.subscribe("t", qos=1) == (1,)
        async with await RawClient.connect(gateway.port, "publisher", clean=False) as publisher:
            publisher.send(*both(dup=False))
            await publisher.expect_closed()
        await js.purge_stream(MESSAGES, subject="$MQTT.msgs.fill")
        async with await RawClient.connect(gateway.port, "publisher", clean=False) as publisher:
            publisher.send(*both(dup=True))
            for number in (1, 2):
                await publisher.expect_ack(PUBACK, number)
        assert [one.payload for one in await subscriber.messages(3)] == [b"small", LARGE, b"small"]
        await subscriber.quiet()
    if retain:
        async with await RawClient.connect(gateway.port, "later") as later:
            await later.subscribe("t", qos=1)
            await later.receive("t", b"small", qos=1, retain=True)


async def test_a_small_message_waits_for_the_hold_of_a_large_one(full: tuple[InProcess, JetStreamContext]) -> None:
    """[MQTT-4.6.0-3] (3.1.1): its PUBREC comes behind that of the large one, and so does its release."""
    gateway, js = full
    async with (
        await RawClient.connect(gateway.port, "subscriber", clean=False) as subscriber,
        await RawClient.connect(gateway.port, "publisher", clean=False) as publisher,
    ):
        assert await subscriber.subscribe("t", qos=2) == (2,)
        for number, payload in enumerate((LARGE, b"small"), 1):
            publisher.publish("t", payload, 2, packet_id=number)
        await publisher.quiet()
        await js.purge_stream(MESSAGES, subject="$MQTT.msgs.fill")
        for number in (1, 2):
            await publisher.expect_ack(PUBREC, number)
            publisher.ack(PUBREL, number)
        for number in (1, 2):
            await publisher.expect_ack(PUBCOMP, number)
        assert [one.payload for one in await subscriber.messages(2)] == [LARGE, b"small"]
