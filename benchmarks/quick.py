# SPDX-License-Identifier: Apache-2.0
"""``make bench-quick``: the figures of the README's table, measured beside each other in one run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.report import BASE, METRICS, Cell, Results, figure, ratio, table

LISTENER: Final = "nats"
"""The peer that ratios are to: nats-server's own listener."""

COLUMNS: Final = {BASE: "mqtt-nats", LISTENER: "nats-server's listener", "mosquitto": "mosquitto"}
"""Peers, and the headings of their columns."""


@dataclass(frozen=True)
class Row:
    """A metric of a scenario. ``text``: what is measured, for a reader who does not know the scenario."""

    scenario: str
    text: str
    metric: str = "rate"


ROWS: Final = (
    Row("pairs500-q0", "500 publishers that wait for each message, QoS 0: messages per second"),
    Row("pairs500-q1", "500 publishers that wait for each message, QoS 1: messages per second"),
    Row("pairs500-q1-durable", "the same, to 500 durable sessions: messages per second"),
    Row("pairs10-q1", "10 publishers, 10 subscribers, QoS 1, batched: messages per second"),
    Row("fanout100-q0", "1 publisher, 100 subscribers, QoS 0, batched: deliveries per second"),
    Row("latency-q1", "2,000 messages per second one by one, QoS 1: median latency, µs", "p50"),
    Row("latency-q1", "the same: 99th percentile, µs", "p99"),
    Row("connections", "5,000 connections with a subscription each: memory per connection, KB", "memory"),
)

SCENARIOS: Final = tuple(dict.fromkeys(row.scenario for row in ROWS))


def _cell(cell: Cell, metric: str) -> str:
    if not cell.runs:
        return "–"
    value = cell.median(metric)
    return "void" if value is None else figure(value)


def _ratio(here: Mapping[str, Cell], metric: str) -> str:
    """Return the ratio of the medians to the listener's, and half the range of the rounds' ratios."""
    ours, theirs = here.get(BASE, Cell()), here.get(LISTENER, Cell())
    found = ratio(ours.median(metric), theirs.median(metric))
    if found is None:
        return "–"
    each = [one / two for one, two in zip(ours.values(metric), theirs.values(metric), strict=True) if two]
    less = "" if METRICS[metric][2] else ", less is better"
    return f"{found:.2f} ±{(max(each) - min(each)) / 2 / found:.0%}{less}"


def rows(results: Results) -> list[list[str]]:
    """Return text, figure of each column and ratio of each row of `ROWS`."""
    found = []
    for row in ROWS:
        here = results.get(row.scenario, {})
        cells = [_cell(here.get(peer, Cell()), row.metric) for peer in COLUMNS]
        found.append([row.text, *cells, _ratio(here, row.metric)])
    return found


def shown(found: Sequence[Sequence[str]], about: str) -> str:
    """Return rows as a table, with the line that says how they were measured."""
    heading = ["", *COLUMNS.values(), "mqtt-nats / listener"]
    return "\n".join([*table([heading, *found]), "", about])


def others(results: Results) -> float:
    """Return the part of one processor that all other processes took, the median over all runs."""
    runs = [run for cells in results.values() for cell in cells.values() for run in cell.runs]
    return statistics.median([float(str(run["other_busy"])) for run in runs if "other_busy" in run] or [0.0])


def conditions(machine: str, *, payload: int, rounds: int, seconds: float, busy: float) -> str:
    """Return the line that says how rows were measured.

    ``machine``: hardware, versions and date. ``busy``: part of one processor that other processes took meanwhile; with
    more than a few percent the figures mean little.
    """
    return (
        f"`make bench-quick`: {payload}-byte payload; median of {rounds} interleaved rounds of {seconds:g} s, ± half "
        "the range of their ratios; batched: a publisher writes many messages at once, at QoS 1 with at most 20 "
        f"unacknowledged; the load generator shares the processors; other programs took {busy:.0%} of one; {machine}"
    )


def save(path: Path, found: Sequence[Sequence[str]], about: str) -> None:
    """Write rows and their conditions for the README, which `python -m scripts.reference` makes."""
    path.write_text(json.dumps({"about": about, "rows": found}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
