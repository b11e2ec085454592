# SPDX-License-Identifier: Apache-2.0
"""The last hour of a gateway: growth between two points, and no more points than an hour has."""

from __future__ import annotations

from typing import Any

from mqtt_nats.observability.history import POINT_INTERVAL_S, POINTS, RATES, History


def totals(value: int, dropped: dict[str, int] | None = None, stored: tuple[float, int] = (0.0, 0)) -> dict[str, Any]:
    return dict.fromkeys(RATES, value) | {"dropped": dropped or {}, "stored": stored, "lag": (0.0, 0)}


def test_points_have_the_growth_per_second() -> None:
    history = History()
    history.add(100, totals(1000, {"denied": 5, "hook": 1}), {"clients": 1})
    assert history.since(0) == []
    history.add(110, totals(1050, {"denied": 25, "hook": 1, "expired": 10}, (0.5, 10)), {"clients": 2})
    history.add(110, totals(9999), {"clients": 9})  # the same ten seconds
    history.add(130, totals(1050, {"denied": 25, "hook": 1, "expired": 10}, (0.5, 10)), {"clients": 3})
    first, second = history.since(0)
    assert {name: first[name] for name in RATES} == dict.fromkeys(RATES, 5.0)
    assert first["dropped"] == {"denied": 2.0, "expired": 1.0}
    assert (first["time"], first["clients"], first["stored"], first["lag"]) == (110, 2, 0.05, None)
    assert {name: second[name] for name in RATES} == dict.fromkeys(RATES, 0.0)
    assert (second["time"], second["dropped"], second["stored"]) == (130, {}, None)
    assert history.since(110) == [second]


def test_an_hour_is_kept() -> None:
    history = History()
    for number in range(POINTS + 50):
        history.add(number * POINT_INTERVAL_S, totals(number), {})
    found = history.since(0)
    assert len(found) == POINTS == 3600 / POINT_INTERVAL_S
    assert found[-1]["time"] - found[0]["time"] == 3600 - POINT_INTERVAL_S
