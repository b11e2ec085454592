# SPDX-License-Identifier: Apache-2.0
"""All streams are restored from a backup that was made while gateways ran: one stream is older than another."""

from __future__ import annotations

import nats
import pytest
from nats.aio.client import Client as NatsClient

from mqtt_streams.generations import SUBJECT
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.backup import backup, restore
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBCOMP, PUBREL, RawClient
from tests.integration.conftest import Stored, position, until

MESSAGES = "$MQTT_msgs"


@pytest.mark.parametrize("qos", [1, 2])
async def test_positions_that_are_ahead_of_the_messages(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, qos: int
) -> None:
    """What is new gets sequences that a session has passed; it is sent all the same, and in its order."""
    server = nats_factory()
    gateway = gateway_factory(server)
    async with await nats.connect(server.url) as client:
        await _restored(client, gateway, qos)


async def _restored(client: NatsClient, gateway: Gateway, qos: int) -> None:
    js = client.jetstream()
    stored = Stored(client)
    async with (
        await RawClient.connect(gateway.port, "publisher") as publisher,
        await RawClient.connect(gateway.port, "durable", clean=False) as durable,
    ):
        await durable.subscribe("a", qos=2)
        await stored.live("durable")

        async def exchanged(last: int) -> None:  # up to this sequence
            await publisher.deliver_all("a", [b"%d" % number for number in range(4)], qos)
            for one in await durable.messages(4):
                await durable.complete(one)
            await durable.quiet()

            async def so() -> None:
                at = await position(js, "durable")
                assert (at.reached, at.pending, at.released) == (last, {}, {})

            await until(so, 30)

        await exchanged(4)
        saved = await backup(client, MESSAGES)
        mark = (await js.get_last_msg("$MQTT_shared", SUBJECT)).data or b""
        await exchanged(8)
    assert gateway.term() == 0, gateway.log
    await restore(client, saved)
    await js.publish(SUBJECT, mark)  # the stream was that far when the others were written
    gateway.start()
    async with await RawClient.connect(gateway.port, "publisher") as publisher:
        await publisher.deliver_all("a", [b"new %d" % number for number in range(6)], qos)
        assert (await js.stream_info(MESSAGES)).state.last_seq == 10
        async with await RawClient.connect(gateway.port, "durable", clean=False) as durable:
            for number in range(6):
                identifier = number + 6
                if qos == 2:  # by which the client may know what came after the backup
                    await durable.expect_ack(PUBREL, identifier, timeout=30)
                    durable.ack(PUBCOMP, identifier)
                new = await durable.message("a", b"new %d" % number, 30, packet_id=identifier, qos=qos)
                await durable.complete(new)
            await durable.quiet()
