# SPDX-License-Identifier: Apache-2.0
"""What a report says, as plain numbers; and how it says it in a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pyspark_mqtt_nats.jobs.progress import count, duration, plural, size

_WIDTHS: Final = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21_600, 43_200, 86_400, 604_800, 2_592_000)
_BARS: Final = 72  # bars of the chart over time, at most
_LINES: Final = 10  # of each list in a terminal
_NAME: Final = 48  # characters of a name in a terminal


@dataclass(frozen=True, slots=True)
class Ranked:
    """What one topic, publisher or QoS has sent; `bytes` of payload. `name` None: unknown."""

    name: str | None
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Bar:
    """Messages that were stored from `start` on, until the next bar."""

    start: datetime
    messages: int


@dataclass(frozen=True, slots=True)
class Gap:
    """`missing` sequences from `first` on have no message."""

    first: int
    missing: int


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A report. Times in UTC, sizes in bytes; `width` of a bar in seconds.

    The lists have the largest, `topics` and so on count all. `coverage`: share of the sequences that have a message, in
    pieces of equal length. `whole` False: only some topics were read, so nothing is known about gaps.
    """

    source: str
    made: datetime
    messages: int = 0
    bytes: int = 0
    topics: int = 0
    publishers: int = 0
    retained: int = 0
    first_sequence: int = 0
    last_sequence: int = 0
    first_time: datetime | None = None
    last_time: datetime | None = None
    smallest: int = 0
    median: int = 0
    largest: int = 0
    width: int = 1
    bars: Sequence[Bar] = ()
    busiest: Sequence[Ranked] = ()
    senders: Sequence[Ranked] = ()
    qos: Sequence[Ranked] = ()
    whole: bool = True
    gaps: Sequence[Gap] = ()
    gap_count: int = 0
    missing: int = 0
    coverage: Sequence[float] = ()

    @property
    def seconds(self) -> float:
        """From the first message to the last."""
        if self.first_time is None or self.last_time is None:
            return 0.0
        return (self.last_time - self.first_time).total_seconds()

    @property
    def per_second(self) -> float:
        """Messages a second, 0 when they came at one moment."""
        return self.messages / self.seconds if self.seconds else 0.0

    def text(self) -> str:
        """The summary for a terminal."""
        if not self.messages or self.first_time is None or self.last_time is None:
            return f"{self.source}: no messages"
        lines = [
            f"{self.source}: {count(self.messages)} messages, {size(self.bytes)} of payload",
            f"  {moment(self.first_time)} to {moment(self.last_time)}, {per_second(self.per_second)}",
            f"  {plural(self.topics, 'topic')}, {plural(self.publishers, 'publisher')}, "
            f"{count(self.retained)} with RETAIN",
            f"  sequences {count(self.first_sequence)} to {count(self.last_sequence)}, {self.gap_text()}",
        ]
        for title, ranking, number in (
            ("busiest topics", self.busiest, self.topics),
            ("publishers", self.senders, self.publishers),
        ):
            lines.append(f"{title}:")
            names = [printable(one.name) for one in ranking[:_LINES]]
            names = [name if len(name) <= _NAME else name[: _NAME - 1] + "…" for name in names]
            wide = max(map(len, names), default=0)
            lines += [
                f"  {name.ljust(wide)}  {count(one.messages):>12}  {one.messages / self.messages:6.1%}"
                for name, one in zip(names, ranking, strict=False)
            ]
            if number > len(names):
                lines.append(f"  and {count(number - len(names))} more")
        return "\n".join(lines)

    def gap_text(self) -> str:
        """The gaps, in a few words."""
        if not self.whole:
            return "gaps unknown: not all topics were read"
        if not self.missing:
            return "no gaps"
        return f"{count(self.missing)} missing in {plural(self.gap_count, 'gap')}"


def width_of_bars(seconds: float) -> int:
    """A width of bars, in seconds, that people can read off an axis."""
    return next((width for width in _WIDTHS if seconds / width < _BARS - 1), _WIDTHS[-1])


def printable(name: str | None) -> str:
    """A name as it may be shown: it may have anything in it."""
    if name is None:
        return "(unknown)"
    return "".join(char if char.isprintable() else "�" for char in name) or "(empty)"


def moment(time: datetime) -> str:
    """A time to the second."""
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def per_second(number: float) -> str:
    """Messages a second, with as many digits as say something."""
    if not number:
        return "all at once"
    if number >= 100:
        return f"{number:,.0f}/s"
    return f"{number:.3g}/s" if number >= 1 else f"1 in {duration(1 / number)}"


def span(seconds: int) -> str:
    """A whole number of seconds as people read it."""
    for unit, name in ((86_400, "day"), (3600, "h"), (60, "min")):
        if not seconds % unit:
            return plural(seconds // unit, name) if name == "day" else f"{seconds // unit} {name}"
    return f"{seconds} s"
