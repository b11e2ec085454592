# SPDX-License-Identifier: Apache-2.0
"""The table of clients: on the terminal, and in docs/compatibility.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.clients.scenarios import NAMES

BEGIN = "<!-- begin: clients (make clients) -->"
END = "<!-- end -->"
_HEAD = ["Client", "Version", "MQTT", *(name[0].upper() + name[1:] for name in NAMES), "Seconds"]


class Row(NamedTuple):
    """What came out for a client and a version of MQTT."""

    client: str
    version: str
    mqtt: str
    outcomes: Mapping[str, str]
    """Scenario → empty when it passed, else what went wrong; scenarios that a client does not have are left out."""
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong."""
        return not any(self.outcomes.values())

    def cells(self) -> list[str]:
        """The cells of the table."""
        found = ["yes" if self.outcomes.get(name) == "" else "no" if name in self.outcomes else "–" for name in NAMES]
        return [self.client, self.version, self.mqtt, *found, f"{self.seconds:.0f}"]


def rows_in(text: str) -> dict[tuple[str, str], str]:
    """The rows of a page, by client and version of MQTT."""
    part = text.partition(BEGIN)[2].partition(END)[0]
    rows = [line for line in part.splitlines() if line.startswith("| ")][1:]
    return {(cells[1], cells[3]): line for line in rows if (cells := re.split(r" *\| *", line))}


def write(path: Path, rows: Sequence[Row], order: Sequence[tuple[str, str]]) -> None:
    """Put rows into the table of a page, sorted as ``order`` has client and version of MQTT.

    A client that could not be had this time keeps its row; what is not in ``order`` goes.

    Raises:
        ValueError: the page has no place for the table.
    """
    text = path.read_text(encoding="utf-8")
    start, end = text.find(BEGIN), text.find(END, text.find(BEGIN))
    if not 0 <= start < end:
        raise ValueError(f"{path} has no line {BEGIN!r} with a line {END!r} after it")
    known = rows_in(text) | {(row.client, row.mqtt): _line(row.cells()) for row in rows}
    lines = [_line(_HEAD), "|---" * 3 + "|:-:" * len(NAMES) + "|--:|", *(known[key] for key in order if key in known)]
    path.write_text(text[:start] + "\n".join([BEGIN, *lines, ""]) + text[end:], encoding="utf-8")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def terminal(cells: Sequence[str]) -> str:
    """A line for the terminal."""
    widths = [21, 14, 6, *(max(len(name), 4) for name in NAMES), 7]
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


HEAD = terminal(_HEAD)
