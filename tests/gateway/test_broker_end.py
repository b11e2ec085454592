# SPDX-License-Identifier: Apache-2.0
"""A gateway that ends is not kept by what is begun, or given up, in its last moments."""

import asyncio
from typing import cast

import pytest

from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.backbone.transport import NatsTransport
from mqtt_nats.base.tasks import Tasks
from tests.harness.doubles import stands_for


@stands_for(asyncio.Transport)
class FakeTransport:
    """Stands for `asyncio.Transport`: it takes everything."""

    def write(self, data: bytes) -> None:
        """Send nothing."""


@stands_for(NatsTransport)
class FakeWire:
    """Stands for `NatsTransport`: a connection to a server that does not answer."""

    def __init__(self) -> None:
        self.transport = FakeTransport()


async def test_nothing_is_begun_after_the_end() -> None:
    begun: list[str] = []

    async def work() -> None:
        begun.append("work")

    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group)
        tasks.cancel()
        await tasks.spawn(work(), "work")
    assert not begun


@pytest.mark.parametrize("ending", [False, True])
async def test_a_lost_connection_is_told_unless_this_is_the_end(ending: bool) -> None:
    """Also where both happen at the same moment."""
    link = NatsConnection()
    link.wire = cast(NatsTransport, FakeWire())
    task = asyncio.create_task(link.stop(5))
    await asyncio.sleep(0)
    link._lose_wire()
    if ending:
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() if ending else isinstance(task.exception(), TimeoutError)
