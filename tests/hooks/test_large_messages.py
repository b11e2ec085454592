# SPDX-License-Identifier: Apache-2.0
"""Large messages at QoS 0, which are read into buffers of their own, as hooks and traces see them."""

from __future__ import annotations

from typing import Any

import pytest

from mqtt_nats.control.packet_watch import WatchedSend
from mqtt_nats.hooks import MESSAGE_DELIVERED, MESSAGE_PUBLISH
from mqtt_nats.messages.delivery_hooks import DeliveryHooks
from mqtt_nats.transport.large_reads import Bulk
from tests.harness.inprocess import InProcess
from tests.harness.rawclient import RawClient
from tests.hooks.conftest import Add

pytestmark = pytest.mark.anyio


async def test_large_messages(inside: InProcess, add: Add) -> None:
    """They are bytes there, and each is seen once."""
    seen: list[tuple[str, bytes]] = []
    watched: list[bytes] = []

    def reading() -> object:
        transport: Any = inside.account.registry.clients["large-writer"].connection.transport
        return transport.get_protocol()

    def watch() -> None:
        spout = inside.account.registry.clients["large-reader"].write_buffer.send
        assert isinstance(spout, DeliveryHooks)
        spout.send = WatchedSend(spout.send, watched.append)

    add(MESSAGE_DELIVERED, lambda event: seen.append((event.topic, event.payload)))
    async with (
        await RawClient.connect(inside.port, "large-reader") as reader,
        await RawClient.connect(inside.port, "large-writer") as writer,
    ):
        await reader.subscribe("large")
        inside.call(watch)
        bodies = [number.to_bytes(4, "big") * 75_000 for number in range(4)]
        for body in bodies:
            writer.publish("large", body)
        for body in bodies:
            await reader.message("large", body)
        assert isinstance(inside.call(reading), Bulk)
        assert seen == [("large", body) for body in bodies]
        assert {type(body) for _, body in seen} == {bytes}
        add(MESSAGE_PUBLISH, lambda event, message: seen.append((message.topic, message.payload)))
        for body in bodies:
            writer.publish("large", body)
        for body in bodies:
            await reader.message("large", body)
        assert {type(body) for _, body in seen} == {bytes}
        assert len(seen) == 12
    assert {type(body) for body in watched} == {bytes}
