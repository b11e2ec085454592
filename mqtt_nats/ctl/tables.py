# SPDX-License-Identifier: Apache-2.0
"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

CELL: Final = 60
"""Characters of a name in a table."""


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns."""
    every = [heading, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(heading))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in every]


def sheet(*entries: tuple[str, str]) -> list[str]:
    """Lines of names and what they have, one thing to a line."""
    width = max(len(name) for name, _ in entries)
    return [f"{name.ljust(width)}  {value}".rstrip() for name, value in entries]


def ago(at: float | None, now: float) -> str:
    """How long ago a Unix time was, roughly."""
    if at is None:
        return ""
    seconds = max(now - at, 0.0)
    return f"{span(seconds)} ago" if seconds >= 1 else "now"


def span(seconds: float) -> str:
    """A time that something takes, roughly."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def quantity(size: float) -> str:
    """Bytes, roughly."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def plain(text: str) -> str:
    """A name on one line; what cannot be seen, or what a terminal would take for a command, is spelled."""
    return "".join(map(_seen, text))


def cell(text: str) -> str:
    """The same for a table that has more columns: its beginning, where it is long."""
    parts = list(map(_seen, text[: CELL + 1]))
    if sum(map(len, parts)) <= CELL:
        return "".join(parts)
    while sum(map(len, parts)) >= CELL:
        parts.pop()
    return "".join(parts) + "…"


def _seen(one: str) -> str:
    return one if one.isprintable() else f"\\u{{{ord(one):x}}}"


def cut(found: dict[str, Any], name: str, limit: int) -> dict[str, Any]:
    """A result with so many entries of a list at most (0: all), and how many there are."""
    total = len(found[name])
    return {**found, name: found[name][:limit] if limit else found[name], "total": total}


def rest(found: dict[str, Any], name: str) -> list[str]:
    """What is said below a table that does not have all of them."""
    there = len(found[name])
    return [] if there == found["total"] else [f"{there:,} of {found['total']:,} are shown"]
