# SPDX-License-Identifier: Apache-2.0
"""What one client makes the gateway remember: within its own budget and that of the gateway."""

from __future__ import annotations

import tracemalloc

import pytest

from mqtt_nats.base.bucket import MemoryBudget
from mqtt_nats.pubsub.data_path import ALIAS_BYTES, DECISION_BYTES, ClientMemory
from mqtt_nats.pubsub.routing_table import Table
from mqtt_nats.pubsub.subject_mapping import parse_mappings
from tests.pubsub.support import Bench, Subscriber

KIB = 1024
LONG = "x" * 3000


def key(topic: str) -> bytes:
    """A topic as it stands in a packet."""
    data = topic.encode()
    return len(data).to_bytes(2) + data


def test_the_routes_of_one_client_are_bounded_and_those_of_others_stay() -> None:
    budget = MemoryBudget(10_000 * KIB, 200 * KIB)
    table = Table(budget=budget)
    modest, greedy = ClientMemory(budget), ClientMemory(budget)
    kept = modest.route(table, key("modest"))
    for number in range(1000):
        greedy.route(table, key(f"{number}/{LONG}"))
        assert len(table.routes) < 1 + 200 * KIB // len(LONG)
        assert budget.used < 300 * KIB
    assert modest.route(table, key("modest")) is kept
    greedy.free_all()
    assert list(table.routes) == [key("modest")]
    assert list(table.by_subject.values()) == [kept]
    modest.free_all()
    assert budget.used == 0
    assert not table.by_subject


def test_routes_of_all_clients_are_bounded() -> None:
    budget = MemoryBudget(400 * KIB, 200 * KIB)
    table = Table(budget=budget)
    for client in range(60):
        memory = ClientMemory(budget)
        for number in range(20):
            memory.route(table, key(f"{client}/{number}/{LONG}"))
            memory.decide((key(f"{client}/{number}/{LONG}"), 0, False), True)
        assert budget.used <= 400 * KIB


def test_what_is_counted_is_all_of_it() -> None:
    """Also of clients that go on, and of routes that the table has dropped since."""
    budget = MemoryBudget(1000 * KIB, 500 * KIB)
    table = Table(budget=budget)
    tracemalloc.start()
    clients = [ClientMemory(budget) for _ in range(60)]
    for number in range(100):
        for client, memory in enumerate(clients):
            memory.route(table, key(f"{client}/{number}/{LONG}"))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(clients) == 60
    assert used < 1500 * KIB


def test_a_route_that_was_dropped_is_found_anew() -> None:
    """By its topic and by every spelling of its subject; a later subscription is seen by all of them."""
    bench = Bench()
    memory = ClientMemory(MemoryBudget(10_000 * KIB, 100 * KIB))
    first = memory.route(bench.table, key("a/b"))
    assert bench.table.route_of_subject(b"a.b/") is first
    assert bench.table.route_of_subject(b"a.b") is first
    memory.free_all()
    one = Subscriber(bench, "one")
    bench.subscribe(one, "a/b", 0)
    for subject in (b"a.b", b"a.b/"):
        found = bench.table.route_of_subject(subject)
        assert found is not None
        assert found is not first
        assert [write_buffer for group in found.groups.values() for write_buffer in group.zero] == [one.write_buffer]
    bench.table.leave(one)
    for subject in (b"a.b", b"a.b/"):
        found = bench.table.route_of_subject(subject)
        assert found is not None
        assert not found.groups


def test_many_topics_that_are_mapped_to_one() -> None:
    budget = MemoryBudget(10_000 * KIB, 100 * KIB)
    table = Table(mappings=parse_mappings({"in.*": "out"}), budget=budget)
    memory = ClientMemory(budget)
    arriving = table.route_of_subject(b"out")
    for number in range(2000):
        assert memory.route(table, key(f"in/{number}")).topic == "out"
    assert len(table.routes) < 110
    assert budget.used < 150 * KIB
    memory.free_all()
    assert not table.routes
    assert table.route_of_subject(b"out") is arriving
    assert list(table._apart.values()) == [[arriving]]


def test_nothing_is_left_of_topics_that_are_mapped_to_many() -> None:
    budget = MemoryBudget(10_000 * KIB, 10_000 * KIB)
    table = Table(mappings=parse_mappings({"in.*": "out.$1"}), budget=budget)
    memory = ClientMemory(budget)
    for number in range(100):
        assert memory.route(table, key(f"in/{number}")).topic == f"out/{number}"
    assert len(table._apart) == 100
    memory.free_all()
    assert not table.routes
    assert not table._apart


def test_decisions_are_bounded() -> None:
    budget = MemoryBudget(1000 * KIB, 100 * KIB)
    memory = ClientMemory(budget)
    for number in range(1000):
        asked = key(f"{number}/{LONG}"), 1, False
        assert memory.decided(asked) is None
        memory.decide(asked, number % 2 == 0)
        assert memory.decided(asked) is (number % 2 == 0)
        assert budget.used <= 100 * KIB
    memory.forget_decisions()
    assert memory.decided(asked) is None
    assert budget.used == 0


@pytest.mark.parametrize("size", [10, 3000])
def test_aliases_are_bounded(size: int) -> None:
    budget = MemoryBudget(1000 * KIB, 100 * KIB)
    memory = ClientMemory(budget)
    taken = [alias for alias in range(1, 2001) if memory.set_alias(alias, b"x" * size)]
    assert len(taken) == 100 * KIB // (ALIAS_BYTES + size)
    assert memory.set_alias(1, b"y" * size), "another topic of the same length takes no more"
    assert memory.aliases is not None
    assert memory.aliases[1] == b"y" * size
    memory.free_all()
    assert budget.kept == 0


def test_every_client_has_room_for_some_aliases() -> None:
    """However many others there are with as many as they may have."""
    budget = MemoryBudget(1000 * KIB, 100 * KIB)
    greedy = [ClientMemory(budget) for _ in range(30)]
    for one in greedy:
        for alias in range(1, 200):
            one.set_alias(alias, b"x" * 3000)
    modest = ClientMemory(budget)
    assert all(modest.set_alias(alias, b"x" * 300) for alias in range(1, 33))
    assert DECISION_BYTES < budget.kept < 1000 * KIB + 31 * 16 * KIB
