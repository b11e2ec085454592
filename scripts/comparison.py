# SPDX-License-Identifier: Apache-2.0
"""The table of the README that compares servers: figures are taken from the pages with the measurements."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[1] / "docs"

RATES: Final = {
    "fan-out 1→100, QoS 0": "1 publisher, 100 subscribers, QoS 0: deliveries per second",
    "10 pairs, batched, QoS 1": "10 publishers, 10 subscribers, QoS 1: messages per second",
    "500 pairs, 1 outstanding, QoS 0": "500 publishers that wait for each message, QoS 0: messages per second",
}
"""Scenario in `docs/benchmarks.md`: text of its row."""

SESSIONS: Final = "1,000"
"""Number of durable sessions whose rate is taken from `docs/growth.md`."""

KILLS: Final = ("R2: the same at QoS 2 from end to end", "R2, nats-server's listener", "R2, mosquitto")
"""Experiments in `docs/reliability.md`, in the order of the columns."""


def cells(page: str, *first: str) -> list[str]:
    """Return the cells after ``first`` of the first row of a page that begins with these and has figures.

    Raises:
        ValueError: there is no such row.
    """
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        found = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and tuple(found[: len(first)]) == first and found[len(first)].startswith(_NUMBERS):
            return found[len(first) :]
    raise ValueError(f"{page} has no row {first}")


_NUMBERS: Final = tuple("0123456789m")
"""First characters of the cell after a name: a figure, or the unit `msg/s`."""


def _rate(cell: str) -> str:
    """Return a rate without its spread."""
    return re.sub(r" ±\d+%", "", cell)


def table() -> str:
    """Return the table."""
    kills = [cells("reliability.md", name) for name in KILLS]
    times = " / ".join(one[1] for one in kills)
    rows = [
        ("MQTT 5.0", "yes", "no", "yes"),
        ("NATS clients on the same topics", "yes", "yes", "no"),
        (
            "PUBACK means",
            "JetStream has stored the message",
            "JetStream has stored the message",
            "the message has arrived",
        ),
        (
            f"{kills[0][0]} messages at QoS 2, while the server is killed {times} times",
            *(f"{one[2]} lost, {one[3]} duplicated" for one in kills),
        ),
        *((text, *map(_rate, cells("benchmarks.md", name, "msg/s")[:3])) for name, text in RATES.items()),
        (
            f"{SESSIONS} durable sessions, QoS 1: messages per second",
            *(cells("growth.md", SESSIONS, peer)[0] for peer in ("ours", "nats", "mosquitto")),
        ),
    ]
    lines = ["| | mqtt-nats | nats-server's listener | mosquitto |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
