# SPDX-License-Identifier: Apache-2.0
"""What the experiment with clean sessions finds in the histories of its clients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.experiments.gaps import ON_ITS_WAY, UNDER_WAY, judge
from tests.chaos.history import Event

SECOND = 1_000_000_000


def event(second: float, who: str, what: str, **fields: Any) -> Event:
    return Event(int(second * SECOND), who, what, fields)


def publish(second: float, n: int, acked: float = 0.1) -> list[Event]:
    """A message, and its acknowledgement so many seconds later."""
    topic = {"topic": "g/p/0", "n": n}
    return [event(second, "p", "publish", qos=1, **topic), event(second + acked, "p", "acked", **topic)]


def found(*gets: int, leaves: float = 1000.0, more: tuple[Event, ...] = ()) -> dict[str, Any]:
    """Messages 1 to 5 of which the first is older than the subscription; the subscriber gets some, in this order."""
    events = [
        *publish(1, 1),
        event(2, "s", "subscribe", filter="g/#", qos=1),
        event(3, "s", "subscribed", filter="g/#", qos=1),
        *(one for n in range(2, 6) for one in publish(2 + n, n)),
        *(event(10, "s", "delivered", of="p", n=n, topic="g/p/0") for n in gets),
        *more,
        event(leaves, "s", "leaves"),
    ]
    result = judge(sorted(events, key=lambda one: one.t))
    kinds = {name: result.figures[name] for name in ("lost", "duplicated", "old", "out of order")}
    return {name: count for name, count in kinds.items() if count} | {"violations": len(result.violations)}


def test_what_was_promised() -> None:
    assert found(2, 3, 4, 5) == {"violations": 0}


def test_what_is_found() -> None:
    assert found(2, 4, 5) == {"lost": 1, "violations": 1}
    assert found(2, 3, 3, 4, 5) == {"duplicated": 1, "violations": 1}
    assert found(1, 2, 3, 4, 5) == {"old": 1, "violations": 1}
    assert found(2, 4, 3, 5) == {"out of order": 1, "violations": 1}


def test_what_is_not_promised() -> None:
    """Messages that were never acknowledged, or of SUBSCRIBE to SUBACK, or on their way when the client leaves."""
    assert found(2, 3, 4, 5, more=(event(8, "p", "publish", qos=1, topic="g/p/0", n=6),)) == {"violations": 0}
    assert found(2, 3, 4, 5, more=tuple(publish(2.5, 7))) == {"violations": 0}
    assert found(2, 3, 4, leaves=8 + UNDER_WAY) == {"lost": 1, "violations": 1}
    assert found(2, 3, 4, leaves=7 + UNDER_WAY) == {"violations": 0}


@pytest.mark.parametrize(("acked", "cluster"), [(0.1, False), (0.1, True), (3.0, False), (3.0, True)])
def test_what_a_new_leader_may_do(acked: float, cluster: bool) -> None:
    """The second message comes before the first one: only if that was not acknowledged when the second was sent."""
    events = [
        event(2, "s", "subscribe", filter="g/#", qos=1),
        event(3, "s", "subscribed", filter="g/#", qos=1),
        *publish(4, 1, acked),
        *publish(5, 2, 4.0),
        *(event(10, "s", "delivered", of="p", n=n, topic="g/p/0") for n in (2, 1)),
    ]
    result = judge(sorted(events, key=lambda one: one.t), cluster=cluster)
    excused = cluster and acked > 1
    assert (result.figures["out of order"], result.figures["overtaken"]) == (not excused, excused)
    assert len(result.violations) == (not excused)


@pytest.mark.parametrize("cluster", [False, True])
def test_what_is_on_its_way_between_two_servers(cluster: bool) -> None:
    """Only in a cluster may a message come that was acknowledged just before SUBSCRIBE."""
    events = [
        *publish(1, 1, 0.5),
        *publish(1, 2, 3.0 - ON_ITS_WAY),
        event(4, "s", "subscribe", filter="g/#", qos=1),
        event(5, "s", "subscribed", filter="g/#", qos=1),
        *(event(6, "s", "delivered", of="p", n=n, topic="g/p/0") for n in (1, 2)),
    ]
    assert judge(sorted(events, key=lambda one: one.t), cluster=cluster).figures["old"] == (1 if cluster else 2)


def test_a_connection_that_ends() -> None:
    assert found(2, 3, 4, 5, more=(event(11, "s", "lost", reason="closed"),)) == {"violations": 1}


@pytest.mark.parametrize("accepted", [False, True])
def test_a_connection_without_connack(accepted: bool) -> None:
    """The client tries again: nothing has ended."""
    begins = event(0.1, "s", "connect", conn=7)
    answered = (event(0.2, "s", "connected", conn=7),) if accepted else ()
    ends = event(0.3, "s", "lost", reason="no CONNACK", conn=7)
    assert found(2, 3, 4, 5, more=(begins, *answered, ends)) == {"violations": int(accepted)}
