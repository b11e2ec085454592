# SPDX-License-Identifier: Apache-2.0
"""Text tables and readable values for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final

CELL: Final = 60
"""Most characters of a name in a table."""


WIDTH: Final[ContextVar[int]] = ContextVar("mqtt_nats_width", default=0)
"""Most characters of a line of a table; 0: no limit, as for programs and files."""

CELL_LEAST: Final = 12
"""Characters to which a cell is shortened at most, so that a table fits the terminal."""


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], drop: str = "", none: str = "none") -> list[str]:
    """Return lines with aligned columns, within `WIDTH`.

    Args:
        drop: headings, separated by commas, of the columns that are left out where the terminal is too narrow, the
            least important first; then the widest cells are shortened.
        none: the line of a table without rows.
    """
    if not rows:
        return [none]
    every = [list(heading), *map(list, rows)]
    hidden = []
    for name in filter(None, drop.split(", ")):
        if _fits(every):
            break
        column = every[0].index(name)
        hidden.append(name)
        every = [row[:column] + row[column + 1 :] for row in every]
    widths = _widths(every)
    while not _fits(every) and max(widths) > CELL_LEAST:
        column = widths.index(max(widths))
        most = max(CELL_LEAST, widths[column] - (sum(widths) + 2 * len(widths) - 2 - WIDTH.get()))
        for row in every:
            row[column] = row[column] if len(row[column]) <= most else row[column][: most - 1] + "…"
        widths = _widths(every)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in every]
    return [*lines, f"--wide also shows: {', '.join(hidden)}"] if hidden else lines


def _widths(every: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[column]) for row in every) for column in range(len(every[0]))]


def _fits(every: Sequence[Sequence[str]]) -> bool:
    widths = _widths(every)
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


def plain(text: str) -> str:
    """Return a name on one line; characters that are not printable, such as terminal controls, are escaped."""
    return "".join(map(_seen, text))


def cell(text: str) -> str:
    """Return a name as `plain`, shortened for a table."""
    parts = list(map(_seen, text[: CELL + 1]))
    if sum(map(len, parts)) <= CELL:
        return "".join(parts)
    while sum(map(len, parts)) >= CELL:
        parts.pop()
    return "".join(parts) + "…"


def _seen(one: str) -> str:
    return one if one.isprintable() else f"\\u{{{ord(one):x}}}"


def rest(found: dict[str, Any], name: str) -> list[str]:
    """Return the line below a table that does not contain all entries; empty for a complete table.

    Args:
        found: a result with a list of this name, and the ``total`` number of entries.
    """
    there = len(found[name])
    return [] if there == found["total"] else [f"{there:,} of {found['total']:,} are shown"]
