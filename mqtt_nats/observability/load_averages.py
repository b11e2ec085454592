# SPDX-License-Identifier: Apache-2.0
"""Load averages of counters, as mosquitto publishes them below `$SYS/broker/load/`."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from typing import Final

MINUTES: Final = (1, 5, 15)
"""Time constants of the averages in minutes."""


class Averages:
    """Exponentially damped averages of the growth of counters per minute."""

    def __init__(self) -> None:
        self.loads: dict[str, list[float]] = {}
        """Averages by the counter's name, one for each of `MINUTES`."""
        self._before: dict[str, int] = {}

    def update(self, totals: Mapping[str, int], seconds: float) -> None:
        """Update the averages with the present counters, ``seconds`` after the last update."""
        for name, total in totals.items():
            before = self._before.get(name)
            loads = self.loads.setdefault(name, [0.0] * len(MINUTES))
            if before is not None and seconds > 0:
                rate = (total - before) * 60 / seconds
                for place, minutes in enumerate(MINUTES):
                    loads[place] = rate + exp(-seconds / (60 * minutes)) * (loads[place] - rate)
            self._before[name] = total
