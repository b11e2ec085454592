# SPDX-License-Identifier: Apache-2.0
"""One gateway of a nats-server announces it; one of each server answers a gateway that has connected."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import nats
from nats.aio.msg import Msg

from mqtt_nats.pubsub.interest_propagation import REPEAT
from mqtt_streams.gateway_subjects import HERE
from tests.conftest import GatewayFactory
from tests.harness.nats import NatsServer
from tests.harness.waiting import aeventually

GATEWAYS = 3
REPEATS = 2


async def test_announcements_of_several_gateways(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """They are about as many as of one gateway."""
    for _ in range(GATEWAYS):
        gateway_factory(nats_server)
    client = await nats.connect(nats_server.url)
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        await client.subscribe(HERE.decode(), cb=hear)
        await asyncio.sleep(REPEATS * 2 * REPEAT)
        assert REPEATS <= len(heard) <= 2 * REPEATS + 1
        assert len(set(heard)) == 1
        answers: list[bytes] = []

        async def answer(message: Msg) -> None:
            answers.append(message.data)

        inbox = client.new_inbox()
        await client.subscribe(inbox, cb=answer)
        await client.publish(HERE.decode(), b"ANOTHER", reply=inbox)
        await client.flush()
        await aeventually(lambda: bool(answers))
        await asyncio.sleep(1)
        assert answers == [heard[0]]
