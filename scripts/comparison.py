# SPDX-License-Identifier: Apache-2.0
"""The table of the README that compares servers: figures are taken from what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[1] / "docs"

FIGURES: Final = DOCS / "bench-quick.json"
"""What `make bench-quick` has measured: rows of cells, and how they were measured."""

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


_NUMBERS: Final = tuple("0123456789")
"""First characters of the cell after a name."""


def table() -> str:
    """Return the table, and the line that says how its figures were measured."""
    kills = [cells("reliability.md", name) for name in KILLS]
    times = " / ".join(one[1] for one in kills)
    measured = json.loads(FIGURES.read_text(encoding="utf-8"))
    stored, arrived = "JetStream has stored the message", "the message has arrived"
    rows = [
        ("MQTT 5.0", "yes", "no", "yes", ""),
        ("NATS clients on the same topics", "yes", "yes", "no", ""),
        ("PUBACK means", stored, stored, arrived, ""),
        (
            f"{kills[0][0]} messages at QoS 2, while the server is killed {times} times",
            *(f"{one[2]} lost, {one[3]} duplicated" for one in kills),
            "",
        ),
        *measured["rows"],
    ]
    lines = ["| | mqtt-nats | nats-server's listener | mosquitto | mqtt-nats / listener |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), "", measured["about"]])
