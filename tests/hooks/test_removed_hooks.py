# SPDX-License-Identifier: Apache-2.0
"""Hooks come and go while messages flow."""

from __future__ import annotations

import asyncio
from functools import partial

from mqtt_nats.client.message_hooks import MessageHooks
from mqtt_nats.hooks import (
    MESSAGE_ACKED,
    MESSAGE_DELIVERED,
    MESSAGE_DROPPED,
    MESSAGE_PUBLISH,
    Drop,
    Published,
    Publishing,
)
from mqtt_nats.messages.delivery_hooks import DeliveryHooks
from tests.harness.inprocess import InProcess
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually
from tests.hooks.conftest import Add


async def test_taps_and_spouts_come_and_go_with_the_hooks(inside: InProcess, add: Add) -> None:
    def kinds() -> tuple[bool, bool]:
        connection = inside.account.registry.clients["plain"].connection
        return isinstance(connection.handler, MessageHooks), isinstance(connection.write_buffer.send, DeliveryHooks)

    hooks = inside.account.services.hooks
    async with await RawClient.connect(inside.port, "plain") as client:
        await client.quiet()
        for point, wanted in (
            (MESSAGE_PUBLISH, (True, False)),
            (MESSAGE_ACKED, (True, True)),
            (MESSAGE_DELIVERED, (False, True)),
            (MESSAGE_DROPPED, (False, True)),
        ):
            assert inside.call(kinds) == (False, False)
            entry = add(point, lambda *arguments: None)
            assert inside.call(kinds) == wanted
            await client.quiet()
            async with await RawClient.connect(inside.port, "new") as new:
                await new.quiet()
                assert (await new.subscribe("x")) == (0,)
            inside.call(partial(hooks.remove, entry))
        assert inside.call(kinds) == (False, False)
        await client.quiet()


async def test_a_hook_that_is_removed_while_it_waits(inside: InProcess, add: Add) -> None:
    go = asyncio.Event()
    begun: list[int] = []

    async def wait(event: Publishing, message: Published | Drop) -> None:
        begun.append(1)
        await go.wait()

    entry = add(MESSAGE_PUBLISH, wait)
    async with await RawClient.connect(inside.port, "w") as client:
        await client.subscribe("w")
        client.publish("w", b"1")
        client.publish("w", b"2")
        await aeventually(lambda: begun)
        inside.call(lambda: inside.account.services.hooks.remove(entry))
        client.publish("w", b"3")
        inside.call(go.set)
        for body in (b"1", b"2", b"3"):
            await client.message("w", body)
        await client.quiet()

        def handler() -> bool:
            one = inside.account.registry.clients["w"]
            return one.connection.handler is one

        await aeventually(lambda: inside.call(handler))
    assert begun == [1]
