# SPDX-License-Identifier: Apache-2.0
"""Text tables and readable values for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Final

from mqtt_nats.base.logs import plain

CELL: Final = 60
"""Most characters of a name in a table."""


WIDTH: Final[ContextVar[int]] = ContextVar("mqtt_nats_width", default=0)
"""Most characters of a line of a table; 0: no limit, as for programs and files."""

CELL_LEAST: Final = 12
"""Characters to which a cell is shortened at most, so that a table fits the terminal."""


class Table:
    """Text table with aligned columns, within `WIDTH`, that is made part by part: a part does not wait for the next.

    Args:
        drop: headings, separated by commas, of the columns that are left out where the terminal is too narrow for the
            first part, the least important first; then the widest cells are shortened.
        none: the line of a table without rows.
    """

    def __init__(self, heading: Sequence[str], drop: str = "", none: str = "none") -> None:
        self._heading, self._drop, self._none = list(heading), list(filter(None, drop.split(", "))), none
        self._columns = list(range(len(heading)))
        """Columns that are shown."""
        self._widths: list[int] = []
        """Characters of each of them so far; a later part may need more. Empty: no part has been made."""

    def lines(self, rows: Sequence[Sequence[str]]) -> list[str]:
        """Return the lines of the next rows; the first ones follow the heading."""
        if not rows:
            return []
        every = [list(row) for row in rows]
        if not self._widths:
            every.insert(0, self._heading)
            self._hide(every)
        every = [[row[column] for column in self._columns] for row in every]
        widths = _widths(every)
        if self._widths:
            widths = [max(pair) for pair in zip(widths, self._widths, strict=True)]
        while not _fits(widths) and max(widths) > CELL_LEAST:
            column = widths.index(max(widths))
            most = max(CELL_LEAST, widths[column] - (sum(widths) + 2 * len(widths) - 2 - WIDTH.get()))
            for row in every:
                row[column] = row[column] if len(row[column]) <= most else row[column][: most - 1] + "…"
            widths[column] = most
        self._widths = widths
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in every]

    def footer(self) -> list[str]:
        """Return the lines below the last part."""
        hidden = [name for name in self._drop if self._heading.index(name) not in self._columns]
        return [self._none] if not self._widths else [f"--wide also shows: {', '.join(hidden)}"] if hidden else []

    def _hide(self, every: Sequence[Sequence[str]]) -> None:
        widths = _widths(every)
        for name in self._drop:
            if _fits([widths[column] for column in self._columns]):
                break
            self._columns.remove(self._heading.index(name))


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], drop: str = "", none: str = "none") -> list[str]:
    """Return the lines of a whole `Table`."""
    made = Table(heading, drop, none)
    return [*made.lines(rows), *made.footer()]


def _widths(every: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[column]) for row in every) for column in range(len(every[0]))]


def _fits(widths: Sequence[int]) -> bool:
    return not WIDTH.get() or sum(widths) + 2 * (len(widths) - 1) <= WIDTH.get()


def sheet(*entries: tuple[str, str]) -> list[str]:
    """Return lines of aligned names and values, one entry per line."""
    width = max(len(name) for name, _ in entries)
    return [f"{name.ljust(width)}  {value}".rstrip() for name, value in entries]


def ago(at: float | None, now: float) -> str:
    """Return the rounded time since a Unix time as text; empty for None."""
    if at is None:
        return ""
    seconds = max(now - at, 0.0)
    return f"{span(seconds)} ago" if seconds >= 1 else "now"


def span(seconds: float) -> str:
    """Return a rounded duration as text."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def quantity(size: float) -> str:
    """Return a rounded number of bytes as text, in the units of the settings."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def cell(text: str) -> str:
    """Return a name as `plain`, shortened for a table."""
    parts = list(map(plain, text[: CELL + 1]))
    if sum(map(len, parts)) <= CELL:
        return "".join(parts)
    while sum(map(len, parts)) >= CELL:
        parts.pop()
    return "".join(parts) + "…"


def rest(shown: int, total: int) -> list[str]:
    """Return the line below a table that does not contain all ``total`` entries; empty for a complete table."""
    return [] if shown == total else [f"{shown:,} of {total:,} are shown"]
