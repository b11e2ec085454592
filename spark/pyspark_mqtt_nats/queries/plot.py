# SPDX-License-Identifier: Apache-2.0
"""The result of a query as a chart on one HTML page, which loads nothing and has no scripts.

The first column is the horizontal axis. Times and numbers there give lines, one for each column of numbers; with one
column of texts beside it, one line for each text. Texts in the first column give bars.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from html import escape
from typing import Any, Final

from pyspark.sql.types import (
    DateType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pyspark_mqtt_nats.jobs import JobError, charts
from pyspark_mqtt_nats.jobs.page import document, section
from pyspark_mqtt_nats.queries.tables import cell

ROWS_MOST: Final = 10_000
"""Rows of a chart."""

LINES_MOST: Final = 12
BARS_MOST: Final = 100
TABLE_MOST: Final = 1000
"""Rows of the table below the chart."""

_WIDTH: Final = 960
_HEIGHT: Final = 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 12, 12, 30
_TICKS: Final = 5
_MARGIN: Final = 1e-12
"""Part of a number below which the numbers of an axis are taken for one."""

_NUMBER_MOST: Final = 1e300
"""What is larger is not drawn: the length of an axis would be infinite."""

_HUES: Final = 137  # degrees from one line's colour to the next one's: neighbours differ most

Point = tuple[float, float]


@dataclass(frozen=True)
class _Axis:
    """Scale of an axis, from data to the width or height of the chart."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "_Axis":
        low, high = min(values), max(values)
        # Half of one is less than the distance of two neighbours of a large number.
        margin = max(0.5, abs(low) * _MARGIN)
        return cls(low, high) if high - low > abs(low) * _MARGIN else cls(low - margin, high + margin)

    def place(self, value: float, size: float) -> float:
        return (value - self.low) / (self.high - self.low) * size

    def ticks(self) -> list[float]:
        """Return round numbers within the axis."""
        rough = (self.high - self.low) / _TICKS
        scale = 10.0 ** math.floor(math.log10(rough))
        step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= rough)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def check(schema: StructType) -> None:
    """Raise JobError when a result with these columns cannot be drawn."""
    if not _numbers(schema.fields[1:]):
        names = ", ".join(f"{field.name} {field.dataType.simpleString().upper()}" for field in schema.fields)
        text = (
            "give a query whose first column is a time, a number or a text, and that has a column of numbers after it"
        )
        raise JobError(f"--plot: a result of {names} cannot be drawn; {text}")


def render(title: str, schema: StructType, rows: Sequence[Any], more: bool) -> str:
    """Return the page; `more`: the result has more rows than these. Raises JobError as `check` does."""
    check(schema)
    if not rows:
        return document(title, "<p>The result has no rows.</p>")
    note = f"the first {len(rows):,} rows" if more else ""
    if isinstance(schema.fields[0].dataType, (TimestampType, TimestampNTZType, DateType, NumericType)):
        lines, left_out = _lines(schema, rows)
        drawn = _drawn(lines, schema.fields[0])
        if left_out:
            note = ", ".join(filter(None, (note, f"{left_out} more lines are left out")))
    else:
        drawn = _bars(schema, rows[:BARS_MOST])
        if len(rows) > BARS_MOST:
            note = f"the first {BARS_MOST} of {len(rows):,} rows"
    body = section(schema.names[0], f'<div class="wide">{drawn}</div>', note)
    return document(title, body + section("Result", _table(schema, rows[:TABLE_MOST])))


def _numbers(fields: Sequence[StructField]) -> list[str]:
    return [field.name for field in fields if isinstance(field.dataType, NumericType)]


def _number(value: Any) -> float | None:
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
    return None if value is None or not abs(value) <= _NUMBER_MOST else float(value)


def _lines(schema: StructType, rows: Sequence[Any]) -> tuple[dict[str, list[Point]], int]:
    """Return the points of each line by its name, and how many lines are left out."""
    texts = [field.name for field in schema.fields[1:] if isinstance(field.dataType, StringType)]
    numbers = _numbers(schema.fields[1:])
    found: dict[str, list[Point]] = {}
    for row in rows:
        across = _number(row[0])
        for name in numbers:
            up = _number(row[name])
            if across is None or up is None:
                continue
            parts = [cell(row[text]) for text in texts[:1]] + ([name] if len(numbers) > 1 or not texts else [])
            found.setdefault(", ".join(parts), []).append((across, up))
    kept = sorted(found, key=lambda name: (-len(found[name]), name))[:LINES_MOST]
    return {name: sorted(found[name]) for name in sorted(kept)}, len(found) - len(kept)


def _drawn(lines: Mapping[str, Sequence[Point]], first: StructField) -> str:
    points = [point for line in lines.values() for point in line]
    if not points:
        return '<p class="soft">There are no numbers to draw.</p>'
    across, up = _Axis.of([x for x, _ in points]), _Axis.of([y for _, y in points])
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Chart of the result">']
    for value in up.ticks():
        y = _TOP + tall - up.place(value, tall)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y + 4:.1f}">{escape(f"{value:.6g}")}</text>')
    for index in range(_TICKS + 1):
        value = across.low + (across.high - across.low) * index / _TICKS
        x = _LEFT + across.place(value, wide)
        anchor = "end" if index == _TICKS else "middle" if index else "start"
        label = escape(_label(value, first, across))
        parts.append(f'<text class="tick" text-anchor="{anchor}" x="{x:.1f}" y="{_HEIGHT - 8}">{label}</text>')
    for index, (name, line) in enumerate(lines.items()):
        colour = f"hsl({(210 + index * _HUES) % 360} 60% 50%)"
        path = " ".join(f"{_LEFT + across.place(x, wide):.1f},{_TOP + tall - up.place(y, tall):.1f}" for x, y in line)
        shape = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        if len(line) == 1:
            left, top = path.split(",")
            shape = f'<circle cx="{left}" cy="{top}" r="3" fill="{colour}"/>'
        parts.append(f"<g><title>{escape(name)}</title>{shape}</g>")
    parts.append("</svg>")
    legend = "".join(
        f'<span class="soft" style="margin-right:16px"><svg width="12" height="12"><rect width="12" height="12" '
        f'fill="hsl({(210 + index * _HUES) % 360} 60% 50%)"/></svg> {escape(name)}</span>'
        for index, name in enumerate(lines)
    )
    return f"{''.join(parts)}<p>{legend}</p>"


def _label(value: float, first: StructField, axis: _Axis) -> str:
    if isinstance(first.dataType, NumericType):
        return f"{value:.6g}"
    begin, end = datetime.fromtimestamp(axis.low, UTC), datetime.fromtimestamp(axis.high, UTC)
    width = 86_400 if isinstance(first.dataType, DateType) else max(1, int((axis.high - axis.low) / _TICKS))
    return f"{datetime.fromtimestamp(value, UTC):{charts.label_form(begin, end, width)}}"


def _bars(schema: StructType, rows: Sequence[Any]) -> str:
    name = _numbers(schema.fields[1:])[0]
    values = [_number(row[name]) or 0.0 for row in rows]
    most = max(map(abs, values)) or 1.0
    made = [f'<table><tr><th>{escape(schema.names[0])}</th><th class="number">{escape(name)}</th></tr>']
    for row, value in zip(rows, values, strict=True):
        label = escape(cell(row[0]))
        bar = charts.share(max(0, round(value / most * 1000)), 1000)
        made.append(f'<tr><td><div class="name" title="{label}">{label}</div>{bar}</td>')
        made.append(f'<td class="number">{escape(cell(row[name]))}</td></tr>')
    return "".join([*made, "</table>"])


def _table(schema: StructType, rows: Sequence[Any]) -> str:
    numeric = set(_numbers(schema.fields))
    classes = ["number" if name in numeric else "name" for name in schema.names]
    heading = "".join(
        f'<th class="{kind}">{escape(name)}</th>' for name, kind in zip(schema.names, classes, strict=True)
    )
    lines = "".join(
        "<tr>"
        + "".join(f'<td class="{kind}">{escape(cell(value))}</td>' for value, kind in zip(row, classes, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{heading}</tr>{lines}</table></div>'
