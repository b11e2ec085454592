# SPDX-License-Identifier: Apache-2.0
"""The table of docs/reliability.md: one row for each experiment and broker, replaced when it is run again."""

from __future__ import annotations

import re
from pathlib import Path

from tests.chaos.experiment import Experiment, Result

BEGIN = "<!-- figures: python -m tests.chaos --long --report docs/reliability.md -->"
END = "<!-- end of figures -->"

_HEAD = (
    "| Experiment | Messages | Kills | Lost | Duplicated | Longest pause | More figures | Kept |\n"
    "|---|--:|--:|--:|--:|--:|---|---|\n"
)
_COLUMNS = (("messages", "acked"), ("kills",), ("lost",), ("duplicated",), ("longest pause", "longest_pause_ms"))

Figures = dict[str, int | float | str]


def value_of(name: str, value: float | str) -> str:
    """A figure for readers: thousands are set off, milliseconds have their unit."""
    if isinstance(value, str):
        return value
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
    if name.endswith("_ms"):
        return f"{text} ms" if value < 10_000 else f"{value / 1000:,.1f} s"
    return text


def text_of(figures: Figures) -> str:
    """All figures in a line."""
    return ", ".join(f"{_label(name)} {value_of(name, value)}" for name, value in figures.items())


def has_place(text: str) -> bool:
    """Whether a page has the lines between which the table belongs."""
    return 0 <= text.find(BEGIN) < text.find(END)


def write(path: Path, experiment: Experiment, result: Result, *, long: bool = True) -> None:
    """Put the rows of an experiment into the table of the file at ``path``, in place of those that it has there.

    Those of a short version say so.

    Raises:
        ValueError: the file has no place for the table.
    """
    text = path.read_text(encoding="utf-8")
    if not has_place(text):
        raise ValueError(f"{path} has no line {BEGIN!r} with a line {END!r} after it")
    start, end = text.find(BEGIN), text.find(END)
    rows = [line for line in text[start:end].splitlines() if re.match(r"\| \w", line)][1:]
    rows = [row for row in rows if _name_in(row) != experiment.name] + rows_of(experiment, result, long=long)
    rows.sort(key=lambda row: int(re.sub(r"\D", "", _name_in(row)) or 99))  # stable: peers stay behind their experiment
    table = _HEAD + "\n".join(rows)
    path.write_text(f"{text[:start]}{BEGIN}\n\n{table}\n\n{text[end:]}", encoding="utf-8")


def rows_of(experiment: Experiment, result: Result, *, long: bool) -> list[str]:
    """The rows of an experiment: ours, and one for each other broker."""
    rows = [_row(f"{experiment.name}: {experiment.title}{'' if long else ' (short)'}", result)]
    rows.extend(_row(f"{experiment.name}, {name}", one) for name, one in result.peers.items())
    return rows


def _row(title: str, result: Result) -> str:
    left = dict(result.figures)
    cells = [title]
    for names in _COLUMNS:
        found = [value_of(name, left.pop(name)) for name in names if name in left]
        cells.append(found[0] if found else "")
    more = [text_of(left), *result.remarks]
    kinds = dict.fromkeys(line.partition(":")[0] for line in result.violations)
    cells += ["; ".join(filter(None, more)), f"no: {', '.join(kinds)}" if kinds else "yes"]
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"


def _name_in(row: str) -> str:
    found = re.match(r"\| (\w+)", row)
    return found[1] if found else ""


def _label(name: str) -> str:
    return name.removesuffix("_ms").replace("_", " ")
