# SPDX-License-Identifier: Apache-2.0
"""A gateway that stood still: who has just connected."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest

from mqtt_nats.backbone.connect import NatsLinks
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.client.client import Client
from mqtt_nats.lifecycle import pause_detection as standstill
from mqtt_nats.transport.connection import Clock, Connection, Hold
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeServices, as_services


@stands_for(Connection)
class FakeHeldConnection:
    """Stands for `Connection`: since when it is open, and why nothing is read from it."""

    def __init__(self, opened: float) -> None:
        self.opened = opened
        self.fake_holds: list[int] = []

    def hold(self, reason: int) -> None:
        self.fake_holds.append(reason)

    def restart_timeout(self, now: float) -> None:
        self.opened = now


@stands_for(Client)
class FakeUnread:
    """Stands for `Client`, which nothing is read from."""

    def __init__(self, connection: FakeHeldConnection, greeted: bool) -> None:
        self.connection, self.greeted = connection, greeted


@pytest.mark.parametrize("greeted", [True, False])
async def test_who_connects_when_it_goes_on_has_all_the_time_for_connect(greeted: bool) -> None:
    """It was accepted by a clock that had stood still too, and is not to be ended for that."""
    now = asyncio.get_running_loop().time()
    connection = FakeHeldConnection(now - 30)
    services = FakeServices()
    services.registry.connections.add(cast(Client, FakeUnread(connection, greeted)))
    links = services.nats
    services.nats = NatsLinks(NatsConnection(), NatsConnection(), NatsConnection(), links.inbox, links.store)
    services.clock = clock = Clock(now - 30)
    clock.read = time.monotonic() - 30
    standstill._begin(as_services(services))
    (begun,) = services.tasks.fake_spawned
    assert begun.get_name() == "standstill"
    assert connection.fake_holds == [Hold.STANDSTILL]
    assert clock.now >= now
    assert (connection.opened >= now) is not greeted
    begun.cancel()
    await asyncio.wait([begun])
