# SPDX-License-Identifier: Apache-2.0
"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns."""
    every = [heading, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(heading))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in every]


def ago(at: float | None, now: float) -> str:
    """How long ago a Unix time was, roughly."""
    if at is None:
        return ""
    seconds = max(now - at, 0.0)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago" if seconds >= 1 else "now"


def plain(text: str) -> str:
    """A name on one line, without what a terminal would take for a command."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
