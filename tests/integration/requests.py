# SPDX-License-Identifier: Apache-2.0
"""What tests of requests and answers between NATS and MQTT 5.0 clients share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeout

from mqtt_nats.codec import Publish
from tests.harness.fence import fence
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.harness.rawclient5 import RawClient5
from tests.integration.conftest import Connector5, Stored

NOT_AUTHORIZED = 0x87
TOPIC_NAME_INVALID = 0x90

QOS = pytest.mark.parametrize("qos", [0, 1, 2])


def response_topic(message: Publish) -> str:
    """The Response Topic of a request from NATS."""
    topic = (message.properties or {}).get("response_topic", "")
    assert topic.startswith("$reply/"), message
    assert len(topic) > 25  # nobody can guess it
    return topic


async def answer(client: RawClient5, topic: str, payload: bytes, qos: int = 0, **properties: Any) -> None:
    """Publish an answer and see it acknowledged."""
    packet_id = client.publish5(topic, payload, qos, **properties)
    if qos == 0:
        await client.quiet()
    elif qos == 1:
        await client.expect_ack(PUBACK, packet_id)
    else:
        await client.expect_ack(PUBREC, packet_id)
        client.ack(PUBREL, packet_id)
        await client.expect_ack(PUBCOMP, packet_id)


@contextlib.asynccontextmanager
async def asked(stored: Stored, subject: str, payload: bytes = b"question", **options: Any) -> AsyncIterator[Any]:
    """A NATS request under way; its answer can be awaited."""
    task = asyncio.ensure_future(stored.nats.request(subject, payload, timeout=8, **options))
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, NatsTimeout, NoRespondersError):
            await task


async def service(client: NatsClient, subject: str, respond: Callable[[Msg], Awaitable[None]]) -> asyncio.Queue[Msg]:
    """A NATS service; the requests that it has answered."""
    seen: asyncio.Queue[Msg] = asyncio.Queue()

    async def handle(message: Msg) -> None:
        await respond(message)
        await seen.put(message)

    await client.subscribe(subject, cb=handle)
    await fence(client)
    return seen


async def subscriber(connect5: Connector5, client_id: str, *filters: str, qos: int = 0, **options: Any) -> RawClient5:
    client = await connect5(client_id, **options)
    await client.subscribe(*filters, qos=qos)
    return client
