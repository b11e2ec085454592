# SPDX-License-Identifier: Apache-2.0
"""Results of all rounds as markdown tables with medians, spreads and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.scenarios import Scenario

BASE = "ours"

METRICS: dict[str, tuple[str, str, bool]] = {
    "rate": ("", "msg/s", True),
    "p50": ("p50", "µs", False),
    "p99": ("p99", "µs", False),
    "connects": ("connects", "/s", True),
    "memory": ("memory per connection", "KB", False),
    "growth": ("memory growth meanwhile", "MB", False),
}
"""Metric → what is added to the title, unit, whether more is better."""

BOUND = 0.9
"""The load generator is marked as the limit if it takes this part of a CPU or more and the broker takes less."""


@dataclass
class Cell:
    """All rounds of one scenario with one peer."""

    runs: list[Mapping[str, object]] = field(default_factory=list)

    @property
    def error(self) -> str | None:
        """The first error of any round: one void round makes the result void."""
        return next((str(run["error"]) for run in self.runs if "error" in run), None)

    def values(self, metric: str) -> list[float]:
        """This metric of each round, nothing if the result is void."""
        if self.error:
            return []
        return [found[metric] for run in self.runs if metric in (found := _floats(run.get("metrics")))]

    def median(self, metric: str) -> float | None:
        """Median over the rounds."""
        values = self.values(metric)
        return statistics.median(values) if values else None

    def spread(self, metric: str) -> float:
        """Half of the range of the rounds as a part of the median."""
        values = self.values(metric)
        middle = statistics.median(values) if values else 0.0
        return (max(values) - min(values)) / 2 / middle if middle else 0.0

    def cost(self) -> dict[str, float]:
        """Median CPU seconds per 1,000 deliveries by process."""
        costs = [_floats(run.get("cpu")) for run in self.runs]
        return {label: statistics.median([each[label] for each in costs if label in each]) for label in costs[0]}

    def busy(self, who: str) -> float:
        """Median part of one CPU that ``broker``, ``generator`` or ``other`` processes took."""
        return statistics.median([_float(run.get(f"{who}_busy")) for run in self.runs])


Results = dict[str, dict[str, Cell]]
"""Scenario name → peer → cell."""


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _floats(value: object) -> dict[str, float]:
    return {str(key): _float(each) for key, each in value.items()} if isinstance(value, Mapping) else {}


def ratio(base: float | None, other: float | None) -> float | None:
    """``base / other``, or None where one of them is missing or zero."""
    return base / other if base is not None and other else None


def figure(value: float) -> str:
    """A number with three significant digits, thousands as k and M."""
    for limit, suffix in ((1e6, " M"), (1e4, " k")):
        if value >= limit:
            scaled = value / (1e6 if suffix == " M" else 1e3)
            return f"{scaled:.3g}{suffix}" if scaled < 1000 else f"{scaled:.0f}{suffix}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main_table(scenarios: Sequence[Scenario], peers: Sequence[str], results: Results) -> list[str]:
    """Median ± spread of every peer and the ratios of ours to the others."""
    others = [peer for peer in peers if peer != BASE] if BASE in peers else []
    rows = [["scenario", "unit", *peers, *(f"{BASE} / {peer}" for peer in others)]]
    for scenario in scenarios:
        cells = results.get(scenario.name, {})
        metrics = [
            each
            for each in METRICS
            if any(cell.values(each) for cell in cells.values()) and (each[0] != "p" or scenario.kind == "latency")
        ]
        for metric in metrics or ["rate"]:
            extra, unit, more = METRICS[metric]
            row = [scenario.title + (f": {extra}" if extra else ""), unit if more else f"{unit}, less is better"]
            row += [_cell(cells.get(peer), metric) for peer in peers]
            base = cells[BASE].median(metric) if BASE in cells else None
            for peer in others:
                found = ratio(base, cells[peer].median(metric) if peer in cells else None)
                row.append("–" if found is None else f"{found:.2f}")
            rows.append(row)
    return table(rows)


def _cell(cell: Cell | None, metric: str) -> str:
    if cell is None or not cell.runs:
        return "–"
    if cell.error:
        return "void"
    value = cell.median(metric)
    return "–" if value is None else f"{figure(value)} ±{cell.spread(metric):.0%}"


def cost_table(scenarios: Sequence[Scenario], peers: Sequence[str], results: Results) -> list[str]:
    """CPU of brokers and generator, delivery times under load, and memory by process."""
    columns = ("scenario", "peer", "broker CPU", "generator CPU", "broker busy", "generator busy", "others busy")
    rows = [[*columns, "p50 / p99 under load"]]
    for scenario in scenarios:
        for peer in peers:
            cell = results.get(scenario.name, {}).get(peer)
            if cell is None or not cell.runs or cell.error:
                continue
            cost = cell.cost()
            own = cost.pop("generator", 0.0)
            parts = ", ".join(f"{label} {value:.4f}" for label, value in cost.items())
            broker = f"{sum(cost.values()):.4f} ({parts})" if len(cost) > 1 else f"{sum(cost.values()):.4f}"
            broker_busy, busy = cell.busy("broker"), cell.busy("generator")
            limit = " (limit)" if busy >= BOUND > broker_busy else ""
            p50, p99 = cell.median("p50"), cell.median("p99")
            times = f"{_time(p50)} / {_time(p99)}" if p50 is not None and p99 is not None else "–"
            for kind, unit in (("memory", "KB"), ("growth", "MB")):
                parts_of = [name for name in _floats(cell.runs[0].get("metrics")) if name.startswith(f"{kind} ")]
                if parts_of:
                    times = f"{kind}: " + ", ".join(
                        f"{each[len(kind) + 1 :]} {cell.median(each) or 0:.1f} {unit}" for each in parts_of
                    )
            shares = [f"{broker_busy:.0%}", f"{busy:.0%}{limit}", f"{cell.busy('other'):.0%}"]
            rows.append([scenario.title, peer, broker, f"{own:.4f}", *shares, times])
    return table(rows)


def _time(microseconds: float) -> str:
    return f"{microseconds:.0f} µs" if microseconds < 1000 else f"{microseconds / 1000:.1f} ms"


def beside_table(scenarios: Sequence[Scenario], peers: Sequence[str], results: Results) -> list[str]:
    """The rates of scenarios that are compared with another one of the same broker; nothing if there is none."""
    titles = {each.name: each.title for each in scenarios}
    rows = [["scenario", "beside", *peers]]
    for scenario in scenarios:
        if scenario.beside not in titles:
            continue
        row = [scenario.title, titles[scenario.beside]]
        for peer in peers:
            own, other = (results.get(name, {}).get(peer, Cell()) for name in (scenario.name, scenario.beside))
            found = ratio(own.median("rate"), other.median("rate"))
            row.append("–" if found is None else f"{found:.2f}")
        rows.append(row)
    return table(rows) if len(rows) > 1 else []


def error_list(scenarios: Sequence[Scenario], peers: Sequence[str], results: Results) -> list[str]:
    """One line for each void result."""
    return [
        f"- {scenario.title}, {peer}: {cell.error}"
        for scenario in scenarios
        for peer in peers
        if (cell := results.get(scenario.name, {}).get(peer)) is not None and cell.error
    ]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as a markdown table, the first one above the line."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines


def document(
    scenarios: Sequence[Scenario],
    peers: Sequence[str],
    results: Results,
    *,
    title: str,
    about: str,
    command: str,
    notes: Sequence[str],
    reached: Sequence[str] = (),
) -> str:
    """The report. ``about``: the machine; ``reached``: the lines that say which targets are reached."""
    errors = error_list(scenarios, peers, results)
    parts = [f"## {title}", "", f"{about}  ", f"`{command}`", "", *(f"- {note}" for note in notes), ""]
    if reached:
        parts += ["### Targets", "", *reached, "", "### Figures", ""]
    parts += [
        *main_table(scenarios, peers, results),
        "",
        "### CPU",
        "",
        "Seconds of CPU per 1,000 deliveries (connections) and parts of one CPU, of the broker's processes and of the",
        "load generator. Where the generator is marked as the limit, the broker can do more than the table says.",
        "Others: what the rest of the machine took meanwhile; with more than a few percent the figures mean little.",
        "",
        *cost_table(scenarios, peers, results),
    ]
    if beside := beside_table(scenarios, peers, results):
        parts += ["", "### Beside each other", "", "The rate as a part of that of another scenario.", "", *beside]
    if errors:
        parts += ["", "### Void results", "", *errors]
    return "\n".join(parts) + "\n"
