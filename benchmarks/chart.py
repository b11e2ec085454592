# SPDX-License-Identifier: Apache-2.0
"""Lines over logarithmic axes, as SVG written by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks import svg
from benchmarks.report import figure

COLOURS: Final = {
    "ours": ("#0969da", "#58a6ff"),
    "nats": ("#bc4c00", "#f0883e"),
    "mosquitto": ("#1a7f37", "#56d364"),
    "aedes": ("#8250df", "#bc8cff"),
    "amqtt": ("#bf3989", "#f778ba"),
    "emqx": ("#57606a", "#adbac7"),
}
"""On light pages, and on dark ones."""
_OTHER: Final = ("#57606a", "#adbac7")

_WIDTH, _HEIGHT, _LEFT, _TOP = 360, 250, 62, 34
_GAP: Final = 40
_ROW: Final = 18  # of the legend
_DASHES: Final = ("", "6 4", "2 3", "9 3 2 3")


@dataclass(frozen=True)
class Line:
    """One line: ``peer`` gives its colour, ``dash`` (0: none) its pattern."""

    label: str
    peer: str
    points: Sequence[tuple[float, float]]
    dash: int = 0


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    across: str
    lines: Sequence[Line]


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten in a range, or the powers only where that would be many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return [each for each in found if low * 0.999 <= each <= high * 1.001]


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """A range with some room that holds all values, at least a decade."""
    low, high = min(values) / 1.3, max(values) * 1.3
    if high / low < 10:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(10), middle * math.sqrt(10)
    return low, high


def _number(value: float) -> str:
    return figure(value).replace(" ", "")


def _panel(panel: Panel, left: float) -> list[str]:
    lines = [[(x, y) for x, y in line.points if x > 0 and y > 0] for line in panel.lines]
    points = [point for line in lines for point in line]
    out = [svg.text(left, 18, panel.title, "h")]
    if not points:
        return [*out, svg.text(left + _WIDTH / 2, _TOP + _HEIGHT / 2, "no figures", anchor="middle")]
    xs = [x for x, _ in points]
    low_x, high_x = min(xs) / 1.15, max(xs) * 1.15
    low_y, high_y = bounds([y for _, y in points])

    def at(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / low_x) / math.log(high_x / low_x)
        up = math.log(y / low_y) / math.log(high_y / low_y)
        return left + across * _WIDTH, _TOP + (1 - up) * _HEIGHT

    for value in ticks(low_y, high_y):
        y = at(low_x, value)[1]
        out.append(f'<path class="g" d="M{left:.1f} {y:.1f}h{_WIDTH}"/>')
        out.append(svg.text(left - 6, y + 4, _number(value), anchor="end"))
    for value in sorted(set(xs)):
        x = at(value, low_y)[0]
        out.append(f'<path class="g" d="M{x:.1f} {_TOP}v{_HEIGHT}"/>')
        out.append(svg.text(x, _TOP + _HEIGHT + 16, _number(value), anchor="middle"))
    out.append(svg.text(left + _WIDTH / 2, _TOP + _HEIGHT + 34, panel.across, anchor="middle"))
    for line, found in zip(panel.lines, lines, strict=True):
        if not found:
            continue
        there = [at(*point) for point in found]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in there)
        dashes = f' stroke-dasharray="{_DASHES[line.dash]}"' if line.dash else ""
        out.append(f'<path class="l s-{line.peer}" d="{path}"{dashes}/>')
        out += [f'<circle class="f-{line.peer}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in there]
    return out


def _legend(lines: Sequence[Line], left: float) -> list[str]:
    out = []
    for row, line in enumerate(lines):
        y = _TOP + _HEIGHT + 56 + row * _ROW
        dashes = f' stroke-dasharray="{_DASHES[line.dash]}"' if line.dash else ""
        out.append(f'<path class="l s-{line.peer}" d="M{left:.1f} {y:.1f}h32"{dashes}/>')
        out.append(svg.text(left + 40, y + 4, line.label))
    return out


def chart(title: str, panels: Sequence[Panel]) -> str:
    """The panels beside each other, each with its legend below. The same figures give the same file."""
    body: list[str] = []
    left: float = _LEFT
    for panel in panels:
        body += _panel(panel, left) + _legend(panel.lines, left)
        left += _WIDTH + _LEFT + _GAP
    rows = max(len(panel.lines) for panel in panels)
    style = {
        "text": (f"{svg.FONT};font-size:12px;fill:#24292f", "fill:#e6edf3"),
        ".h": ("font-weight:600;font-size:13px", "font-weight:600"),
        ".g": ("stroke:#d0d7de;fill:none", "stroke:#3d444d"),
        ".l": ("stroke-width:2;fill:none", "stroke-width:2"),
    }
    for peer in dict.fromkeys(line.peer for panel in panels for line in panel.lines):
        light, dark = COLOURS.get(peer, _OTHER)
        style[f".s-{peer}"] = (f"stroke:{light}", f"stroke:{dark}")
        style[f".f-{peer}"] = (f"fill:{light}", f"fill:{dark}")
    height = _TOP + _HEIGHT + 56 + rows * _ROW
    return svg.picture(round(left - _GAP - _LEFT + 24), height, title, svg.rules(style), body)
