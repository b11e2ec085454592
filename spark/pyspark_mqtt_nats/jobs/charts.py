# SPDX-License-Identifier: Apache-2.0
"""Charts as inline SVG. Colours are CSS variables of the page, so that they fit its light and its dark form."""

import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from html import escape
from typing import Final

from pyspark_mqtt_nats.jobs.figures import Bar, moment
from pyspark_mqtt_nats.jobs.progress import count, plural

_WIDTH: Final = 960
_HEIGHT: Final = 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 30
_LABELS: Final = 8  # on the time axis, at most


def over_time(bars: Sequence[Bar], width: int) -> str:
    """Messages over time, as columns. `bars` in order, without those of no messages; `width` in seconds."""
    first = bars[0].start
    number = round((bars[-1].start - first).total_seconds() / width) + 1
    top, step = axis(max(bar.messages for bar in bars))
    plot, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    slot = plot / number
    gap = min(2.0, slot * 0.2)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Messages over time">']
    for value in range(0, top + 1, step):
        y = _TOP + height - height * value / top
        kind = "axis" if not value else "grid"
        parts.append(f'<line class="{kind}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y + 4:.1f}">{short(value)}</text>')
    for bar in bars:
        index = round((bar.start - first).total_seconds() / width)
        x = _LEFT + index * slot + gap / 2
        tall = max(1.0, height * bar.messages / top)
        wide = min(max(0.5, slot - gap), 48.0)
        x += max(0.0, (slot - gap - wide) / 2)
        end = bar.start + timedelta(seconds=width)
        title = f"{moment(bar.start)} to {moment(end)}: {plural(bar.messages, 'message')}"
        parts.append(
            f'<rect class="bar" x="{x:.1f}" y="{_TOP + height - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}" '
            f'rx="{min(2.0, wide / 4):.1f}"><title>{escape(title)}</title></rect>'
        )
    every = -(-number // _LABELS)
    form = label_form(first, bars[-1].start, width)
    for index in range(0, number, every):
        x = _LEFT + (index + 0.5) * slot
        text = f"{first + timedelta(seconds=index * width):{form}}"
        parts.append(f'<text class="tick middle" x="{x:.1f}" y="{_HEIGHT - 8}">{escape(text)}</text>')
    parts.append("</svg>")
    return "".join(parts)


def share(value: int, most: int) -> str:
    """A bar as long as its part of the longest one."""
    wide = 100 * value / most if most else 0
    return (
        '<svg class="share" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="10"/>'
        f'<rect class="bar" width="{max(wide, 0.4):.2f}" height="10"/></svg>'
    )


def coverage(pieces: Sequence[float], first: int, last: int) -> str:
    """Which sequences have a message: a strip, full where all have one."""
    width, height = _WIDTH - _LEFT - _RIGHT, 36
    total = last - first + 1
    number = len(pieces)
    parts = [
        f'<svg class="strip" viewBox="0 0 {_WIDTH} {height + 24}" role="img" aria-label="Sequences with a message">'
        f'<rect class="hole" x="{_LEFT}" y="0" width="{width}" height="{height}"/>'
    ]
    for index, part in enumerate(pieces):
        begin = first + total * index // number
        end = first + total * (index + 1) // number - 1
        title = f"sequences {count(begin)} to {count(end)}: {percent(part)} have a message"
        # What is not quite full must look like it.
        tall = height if part >= 1 else min(round(height * part), height - 3)
        x = _LEFT + width * index // number
        wide = _LEFT + width * (index + 1) // number - x
        parts.append(
            f'<g><title>{title}</title><rect class="clear" x="{x}" y="0" width="{wide}" height="{height}"/>'
            f'<rect class="bar" x="{x}" y="{height - tall}" width="{wide}" height="{tall}"/></g>'
        )
    parts.append(f'<text class="tick" x="{_LEFT}" y="{height + 18}">{count(first)}</text>')
    parts.append(f'<text class="tick end" x="{_WIDTH - _RIGHT}" y="{height + 18}">{count(last)}</text></svg>')
    return "".join(parts)


def axis(most: int) -> tuple[int, int]:
    """The top of an axis for whole numbers up to `most`, and the step between its lines."""
    if most <= 4:
        return max(most, 1), 1
    scale = 10 ** math.floor(math.log10(most / 4))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor * 5 >= most)
    return -(-most // step) * step, step


def short(value: int) -> str:
    """A number on an axis: 1,500 as 1.5k."""
    for size, unit in ((1_000_000_000, "G"), (1_000_000, "M"), (1000, "k")):
        if value >= size:
            return f"{value / size:.12g}{unit}"
    return str(value)


def percent(part: float) -> str:
    """A share; what is not quite all is not 100%."""
    if part >= 1:
        return "100%"
    return f"{math.floor(part * 1000) / 10:.1f}%"


def label_form(first: datetime, last: datetime, width: int) -> str:
    """How the time axis writes its times."""
    if width >= 86_400:
        return "%Y-%m-%d" if first.year != last.year else "%b %d"
    if first.date() != last.date():
        return "%b %d %H:%M"
    return "%H:%M:%S" if width < 60 else "%H:%M"
