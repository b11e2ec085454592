# SPDX-License-Identifier: Apache-2.0
"""Pages of long lists: a part, in an order, with the total; the same from two gateways as from one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.ctl.conftest import Fleet
from tests.ctl.test_sessions import leave
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import eventually

NAMES = [f"c-page-{number}" for number in range(5)]


@pytest.fixture
def clients(fleet: Fleet) -> Iterator[None]:
    """Five clients at two gateways in turn; each has subscribed two filters, one of them in a group of two."""
    with ExitStack() as stack:
        for number, name in enumerate(NAMES):
            port = (fleet.one.port, fleet.two.port)[number % 2]
            client = stack.enter_context(Raw5.open(port, name))
            shared = f"$share/g{number // 2}/c-page/work"
            assert client.subscribed((f"c-page/{number}", number % 2), (shared, 0)) == (number % 2, 0)
        yield


def part(fleet: Fleet, key: str, *arguments: str) -> tuple[list[Any], int]:
    """The names that are listed, and the total."""
    found = fleet.json(*arguments)
    (entries,) = (value for name, value in found.items() if name not in ("silent", "total"))
    return [one[key] for one in entries], found["total"]


def test_clients(fleet: Fleet, clients: None) -> None:
    every = ("clients", "--match", "c-page-*", "--sort", "client")
    assert part(fleet, "client", *every) == (NAMES, 5)
    assert part(fleet, "client", *every, "--limit", "2") == (NAMES[:2], 5)
    assert part(fleet, "client", *every, "--limit", "2", "--offset", "3") == (NAMES[3:], 5)
    assert part(fleet, "client", *every, "--offset", "9") == ([], 5)
    assert part(fleet, "client", *every, "--limit", "2", "--offset", "1", "--reverse") == (NAMES[3:1:-1], 5)
    since = ("clients", "--match", "c-page-*", "--gateway", fleet.ids[0], "--sort", "since", "--limit", "2")
    assert part(fleet, "client", *since) == ([NAMES[0], NAMES[2]], 3)
    for sort in ("slowest", "user", "unread", "queued", "inflight", "dropped"):
        found = part(fleet, "client", "clients", "--match", "c-page-*", "--sort", sort, "--limit", "3")
        assert found == (NAMES[:3], 5), sort


def test_subscriptions(fleet: Fleet, clients: None) -> None:
    every = ("subscriptions", "--match", "c-page-*")
    plain = [f"c-page/{number}" for number in range(5)]
    assert part(fleet, "filter", *every, "--filter", "c-page/*") == (plain, 5)
    assert part(fleet, "filter", *every, "--limit", "2", "--offset", "6") == (plain[1:3], 10)
    assert part(fleet, "client", *every, "--sort", "client", "--limit", "3") == (["c-page-0"] * 2 + ["c-page-1"], 10)
    assert part(fleet, "qos", *every, "--sort", "qos", "--reverse", "--limit", "3") == ([1, 1, 0], 10)
    assert part(fleet, "client", *every, "--shared") == (NAMES, 5)


def test_groups(fleet: Fleet, clients: None) -> None:
    wanted = ("groups", "--filter", "*c-page*")
    found = fleet.json(*wanted)
    assert [(one["group"], one["filter"], one["members"]) for one in found["groups"]] == [
        ("g0", "c-page/work", 2),
        ("g1", "c-page/work", 2),
        ("g2", "c-page/work", 1),
    ]
    assert [sorted(one["gateways"]) for one in found["groups"]] == [*[sorted(fleet.ids)] * 2, [fleet.ids[0]]]
    assert part(fleet, "group", *wanted, "--sort", "members", "--limit", "2") == (["g2", "g0"], 3)
    assert part(fleet, "group", *wanted, "--reverse", "--limit", "1", "--offset", "1") == (["g1"], 3)
    assert "g0     c-page/work  2" in fleet.text(*wanted)


def test_sessions(fleet: Fleet) -> None:
    for number in (2, 0, 1):
        leave(fleet, f"c-absent-{number}", "c-absent/#")
    names = [f"c-absent-{number}" for number in range(3)]
    try:
        every = ("sessions", "list", "--match", "c-absent-*", "--state", "disconnected", "--sort", "client")
        assert part(fleet, "client", *every) == (names, 3)
        assert part(fleet, "client", *every, "--limit", "1", "--offset", "1") == (names[1:2], 3)
        assert part(fleet, "client", *every, "--reverse", "--limit", "2") == (names[:0:-1], 3)
        whole, total = part(fleet, "client", "sessions", "list", "--sort", "written")
        assert total == len(whole)
        for offset in range(total):
            some = ("sessions", "list", "--sort", "written", "--limit", "2", "--offset", str(offset))
            assert part(fleet, "client", *some) == (whole[offset : offset + 2], total)
        backwards = ("sessions", "list", "--sort", "written", "--reverse", "--limit", "3")
        assert part(fleet, "client", *backwards) == (whole[::-1][:3], total)
        with Raw5.open(fleet.one.port, names[1], prop(SESSION_EXPIRY, 600), clean=False):
            pass
        fleet.text("publish", "c-absent/x", "x", "--qos", "1")
        most = ("sessions", "list", "--match", "c-absent-*", "--sort", "queued", "--reverse")
        found = eventually(lambda: one if (one := fleet.json(*most))["sessions"][0]["queued"] == 1 else None)
        assert [one["client"] for one in found["sessions"]] == names[::-1]
        assert part(fleet, "client", *most, "--limit", "1", "--offset", "2") == (names[:1], 3)
    finally:
        fleet.run("sessions", "clean", "--match", "c-absent-*")


def test_topics_and_retained(fleet: Fleet) -> None:
    for topic, payload in (("c-top/a", "1"), ("c-top/b", "333"), ("c-top/c", "22")):
        fleet.text("publish", topic, payload, "--qos", "1", "--retain")
    fleet.text("publish", "c-top/a", "again", "--qos", "1")
    try:
        retained = ("retained", "list", "c-top/#")
        assert part(fleet, "topic", *retained, "--limit", "2", "--offset", "1") == (["c-top/b", "c-top/c"], 3)
        assert part(fleet, "bytes", *retained, "--sort", "bytes", "--reverse") == ([3, 2, 1], 3)
        assert part(fleet, "topic", *retained, "--sort", "stored", "--limit", "1") == (["c-top/a"], 3)
        topics = ("topics", "c-top/#")
        assert part(fleet, "topic", *topics, "--limit", "1", "--offset", "1") == (["c-top/b"], 3)
        assert part(fleet, "topic", *topics, "--reverse", "--limit", "2") == (["c-top/c", "c-top/b"], 3)
        assert part(fleet, "stored", *topics, "--sort", "stored", "--reverse") == ([2, 1, 1], 3)
    finally:
        fleet.run("retained", "delete", "c-top/#")
