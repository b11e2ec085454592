# SPDX-License-Identifier: Apache-2.0
"""``ctl history`` and ``ctl audit``: what gateways keep in memory."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mqtt_nats.observability.history import POINT_INTERVAL_S
from tests.ctl.conftest import Fleet
from tests.harness.waiting import eventually


@pytest.mark.long
def test_history(fleet: Fleet) -> None:

    def points() -> dict[str, Any] | None:
        found: dict[str, Any] = fleet.json("history")
        return found if all(one["points"] for one in found["gateways"]) else None

    found = eventually(points, 6 * POINT_INTERVAL_S, what="points of both gateways")
    assert found is not None
    assert [one["gateway"] for one in found["gateways"]] == sorted(fleet.ids)
    point = found["gateways"][0]["points"][-1]
    assert point["time"] % found["step"] == 0
    assert point["memory"] > 10_000_000
    assert point["cpu"] < 2
    assert point["storage"] is not None
    (later,) = fleet.json("history", "--since", str(point["time"]), "--gateway", fleet.ids[0])["gateways"]
    assert all(one["time"] > point["time"] for one in later["points"])
    text = fleet.text("history")
    assert re.search(rf"^{fleet.ids[0]} +\d\d:\d\d:\d0 +\d+ +\d", text, re.MULTILINE), text


def test_audit(fleet: Fleet) -> None:
    """Only what is done over HTTP is in it."""
    fleet.text("publish", "c-audit", "x")
    assert fleet.json("audit") == {"actions": [], "silent": [], "total": 0}
    assert fleet.text("audit") == "none\n"
