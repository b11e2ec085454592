# SPDX-License-Identifier: Apache-2.0
"""A gateway that stood still: who has just connected."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mqtt_nats.backbone.connect import NatsLinks
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.lifecycle import pause_detection as standstill
from mqtt_nats.sessions.services import Registry
from mqtt_nats.transport.connection import Clock, Hold


class Unread:
    """A client that nothing is read from."""

    def __init__(self, connection: Any, greeted: bool) -> None:
        self.connection, self.greeted = connection, greeted


@pytest.mark.parametrize("greeted", [True, False])
async def test_who_connects_when_it_goes_on_has_all_the_time_for_connect(greeted: bool) -> None:
    """It was accepted by a clock that had stood still too, and is not to be ended for that."""
    now = asyncio.get_running_loop().time()
    held: list[int] = []
    connection = SimpleNamespace(opened=now - 30, hold=held.append)
    connection.restart_timeout = partial(setattr, connection, "opened")
    begun: list[str] = []

    def spawn(work: Any, name: str) -> None:
        work.close()
        begun.append(name)

    services: Any = SimpleNamespace(
        clock=Clock(now - 30),
        registry=Registry(),
        tasks=SimpleNamespace(spawn=spawn),
    )
    services.registry.connections.add(Unread(connection, greeted))
    nothing: Any = None
    store: Any = SimpleNamespace(excuse=lambda seconds: None)
    services.nats = NatsLinks(NatsConnection(), NatsConnection(), NatsConnection(), nothing, store)
    services.clock.read = time.monotonic() - 30
    standstill._begin(services)
    assert begun == ["standstill"]
    assert held == [Hold.STANDSTILL]
    assert services.clock.now >= now
    assert (connection.opened >= now) is not greeted
