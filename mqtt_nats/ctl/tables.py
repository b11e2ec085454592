# SPDX-License-Identifier: Apache-2.0
"""Text tables and readable values for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

CELL: Final = 60
"""Most characters of a name in a table."""


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns."""
    every = [heading, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(heading))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in every]


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
    """Return a rounded number of bytes as text."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


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


def cut(found: dict[str, Any], name: str, limit: int) -> dict[str, Any]:
    """Return a result with at most ``limit`` entries of a list (0: all), and the total number of entries."""
    total = len(found[name])
    return {**found, name: found[name][:limit] if limit else found[name], "total": total}


def rest(found: dict[str, Any], name: str) -> list[str]:
    """Return the line below a table that does not contain all entries; empty for a complete table."""
    there = len(found[name])
    return [] if there == found["total"] else [f"{there:,} of {found['total']:,} are shown"]
