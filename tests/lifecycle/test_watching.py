# SPDX-License-Identifier: Apache-2.0
"""How often leases of others are read, and how many: the cost does not grow with the square of their number."""

from __future__ import annotations

import random

import pytest

from mqtt_nats.config.settings import Settings
from mqtt_nats.lifecycle.lease import KNOWN_S, LEASE_WATCHERS, STREAM_CHECKERS
from mqtt_streams import stored
from mqtt_streams.gateways import PREFIX, STREAM, Entry
from mqtt_streams.generations import GenerationStore, Mark
from tests.harness.inprocess import running
from tests.harness.nats import NatsServer
from tests.lifecycle.test_busy import lease_of

LASTS = 3600
"""Seconds of leases that do not lapse while a test runs."""


@pytest.mark.parametrize(
    ("gateways", "least", "most"), [(1, 1.0, 1.0), (LEASE_WATCHERS, 1.0, 1.0), (1000, 0.003, 0.005)]
)
def test_a_few_of_many(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, gateways: int, least: float, most: float
) -> None:
    """How many there are follows from what is written between two renewals: nobody asks for it."""
    settings = Settings.model_validate({"nats": nats_server.url, "listen": "127.0.0.1:0", "gateway_lease": 3600})
    with running(settings) as gateway:
        lease, stream = lease_of(gateway), gateway.account.services.stream

        async def consumers_counted() -> int:
            before = stream.consumers
            stream.count_consumers(100)
            return stream.consumers - before

        async def others_renew() -> None:
            for number in range(gateways - 1):
                sequence, _ = await lease.store.lease(f"other{number}")
                await lease.store.hold(f"other{number}", f"other{number}", sequence, LASTS)
                registration = await lease.store.registered(f"other{number}")
                await lease.store.register(f"other{number}", 0.0, {}, registration)

        gateway.run(lease.renew())
        gateway.run(others_renew())
        gateway.run(lease.renew())
        monkeypatch.setattr(random, "random", random.Random(7).random)
        times = 20_000
        looks = sum(lease.watches(LEASE_WATCHERS) for _ in range(times))
        assert least <= looks / times <= most
        assert 90 * gateways <= gateway.run(consumers_counted()) <= 110 * gateways  # others create as many


@pytest.mark.parametrize(
    ("gateways", "least", "most"), [(1, 100, 100), (STREAM_CHECKERS, 100, 100), (40 * STREAM_CHECKERS, 1, 9)]
)
def test_the_stream_of_messages_is_checked_by_a_few(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, gateways: int, least: int, most: int
) -> None:
    """Each gateway is ready all the same; one that knows of no leader checks at each renewal."""
    settings = Settings.model_validate({"nats": nats_server.url, "listen": "127.0.0.1:0", "gateway_lease": 3600})
    with running(settings) as gateway:
        lease, stream = lease_of(gateway), gateway.account.services.stream
        checks: list[int] = []
        look = GenerationStore.look

        async def counted(store: GenerationStore, new_id: str, lower: int | None = None) -> Mark | None:
            checks.append(len(checks))
            return await look(store, new_id, lower)

        async def renewals() -> None:
            lease._gateways = float(gateways)
            for _ in range(100):
                await lease._look()

        monkeypatch.setattr(GenerationStore, "look", counted)
        monkeypatch.setattr(random, "random", random.Random(7).random)
        before = lease.proven
        gateway.run(renewals())
        assert least <= len(checks) <= most
        assert lease.proven > before
        checks.clear()
        monkeypatch.setattr(type(stream), "has_leader", False)
        gateway.run(renewals())
        assert len(checks) == 100


def test_the_dead_are_found_without_reading_all(nats_server: NatsServer) -> None:
    """Their registrations are the oldest ones, whether a marker is in place of their lease or nothing any more."""
    settings = Settings.model_validate({"nats": nats_server.url, "listen": "127.0.0.1:0"})
    with running(settings) as gateway:
        store = lease_of(gateway).store
        inbox = gateway.account.services.nats.inbox

        async def fill() -> None:
            for entry in await store.entries():
                await store.remove(entry.identity)
            for number in range(40):  # more than a page has
                await store.hold(f"dead{number}", f"dead{number}", 0, LASTS)
                await store.register(f"dead{number}", 0.0, {"version": "0"}, 0)
                if number < 38:
                    await stored.purge(inbox, STREAM, f"{PREFIX}lease.dead{number}")
            await store.hold("dead0", "reaper", 0, LASTS)
            for number in range(200):
                await store.hold(f"living{number}", f"living{number}", 0, LASTS)
                await store.register(f"living{number}", 0.0, {}, 0)

        gateway.run(fill())
        found = gateway.run(store.oldest())
        assert {one.identity for one in found if one.lapsed} == {f"dead{number}" for number in range(1, 38)}
        assert found[0].reaper == "reaper"
        assert found[1].info["version"] == "0"
        assert {one.identity for one in found} >= {"dead38", "dead39"}
        assert len(found) < 100
        every = gateway.run(store.entries())
        assert [one for one in every if one.lapsed] == [one for one in found if one.lapsed]


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
