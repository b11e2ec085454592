# SPDX-License-Identifier: Apache-2.0
"""The last hour of a gateway, for charts: rates and present numbers every ten seconds, in memory of a fixed size."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

log = logging.getLogger("mqtt_nats.broker")

POINT_INTERVAL_S: Final = 10
"""Seconds between two points, which are at multiples of it in Unix time: those of all gateways are together."""

POINTS: Final = 360
"""Points in memory: an hour."""

RATES: Final = ("connects", "received", "sent", "received_bytes", "sent_bytes", "cpu")
"""Values that are told as growth per second. The rate of ``cpu`` is a share of a core."""


class History:
    """Ring of points of one gateway process, and of its own account."""

    def __init__(self) -> None:
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self._before: dict[str, Any] = {}
        """The counters of the last point."""

    def since(self, then: float) -> list[dict[str, Any]]:
        """Return the points after a Unix time in seconds, the oldest first."""
        return [one for one in self._points if one["time"] > then]

    def add(self, at: float, totals: dict[str, Any], present: dict[str, Any]) -> None:
        """Add a point. The first call adds none: there is nothing yet to which ``totals`` could have grown.

        Args:
            at: Unix time in seconds.
            totals: counters by the names in `RATES`; ``dropped`` by reason; sums and counts of histograms by name.
            present: numbers that are told as they are.
        """
        before = self._before
        if before and at <= before["time"]:
            return
        self._before = {"time": at, **totals}
        if not before:
            return
        seconds = at - before["time"]
        rates = {name: max(totals[name] - before[name], 0) / seconds for name in RATES}
        dropped = {
            reason: (count - before["dropped"].get(reason, 0)) / seconds
            for reason, count in totals["dropped"].items()
            if count > before["dropped"].get(reason, 0)
        }
        means = {name: _mean(totals[name], before[name]) for name in ("stored", "lag")}
        self._points.append({"time": at, **rates, "dropped": dropped, **means, **present})

    async def record_points(self, look: Callable[[], Awaitable[tuple[dict[str, Any], dict[str, Any]]]]) -> None:
        """Add a point every `POINT_INTERVAL_S` while the gateway runs.

        Args:
            look: returns the present totals and numbers, as for `add`.
        """
        while True:
            try:
                totals, present = await look()
                self.add(time.time() // POINT_INTERVAL_S * POINT_INTERVAL_S, totals, present)
            except Exception:
                log.exception("a point of the gateway's history is missing")
            await asyncio.sleep(POINT_INTERVAL_S - time.time() % POINT_INTERVAL_S)


def _mean(now: tuple[float, int], before: tuple[float, int]) -> float | None:
    """Return the mean of what was observed meanwhile, in seconds; None: nothing was."""
    count = now[1] - before[1]
    return (now[0] - before[0]) / count if count > 0 else None
