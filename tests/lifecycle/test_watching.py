# SPDX-License-Identifier: Apache-2.0
"""How often the leases of all others are read: the cost does not grow with the square of the number of gateways."""

from __future__ import annotations

import random

import pytest

from mqtt_nats.config.settings import Settings
from mqtt_nats.lifecycle.lease import KNOWN_S, WATCHING
from mqtt_streams.gateways import Entry
from tests.harness.inprocess import running
from tests.harness.nats import NatsServer
from tests.lifecycle.test_busy import lease_of


@pytest.mark.parametrize(("gateways", "least", "most"), [(1, 1.0, 1.0), (WATCHING, 1.0, 1.0), (1000, 0.003, 0.005)])
def test_a_few_of_many(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, gateways: int, least: float, most: float
) -> None:
    settings = Settings.model_validate({"nats": nats_server.url, "listen": "127.0.0.1:0"})
    with running(settings) as gateway:
        lease = lease_of(gateway)
        assert gateway.run(lease.store.count()) == 1, "this gateway is registered"

        async def count() -> int:
            return gateways

        monkeypatch.setattr(lease.store, "count", count)
        monkeypatch.setattr(random, "random", random.Random(7).random)
        times = 20_000

        async def looks() -> int:
            return sum([await lease.watches() for _ in range(times)])

        assert least <= gateway.run(looks()) / times <= most


def test_administrators_who_ask_all_the_time(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each registration is read once in `KNOWN_S` at most, whatever is asked, and how often."""
    settings = Settings.model_validate({"nats": nats_server.url, "listen": "127.0.0.1:0"})
    with running(settings) as gateway:
        lease = lease_of(gateway)
        reads: list[int] = []

        async def entries() -> list[Entry]:
            reads.append(len(reads))
            return [Entry(f"{number}", 0.0, {}, 0, False, "") for number in range(100)]

        monkeypatch.setattr(lease.store, "entries", entries)
        for _ in range(3 * int(100 * KNOWN_S)):
            assert len(gateway.run(lease.registered())) == 100
            monkeypatch.setattr(lease, "_known_at", lease._known_at - 1.0)
        assert len(reads) == 3
