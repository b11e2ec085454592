# SPDX-License-Identifier: Apache-2.0
"""What the gateway is to reach, as ratios in one run, and whether it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.peers import PEERS
from benchmarks.report import BASE, METRICS, Cell, Results, figure, ratio, table
from benchmarks.scenarios import SCENARIOS

FLAT: Final = 10.0
"""MB that the gateway may grow while it sends 100,000 retained messages: well below the 40 MB that they would take."""

NAMES: Final = {"nats": "nats-server", BASE: "the gateway"}
"""What some peers are called in the table."""


@dataclass(frozen=True)
class Target:
    """A metric of a scenario, ``at_most`` or at least ``bound``.

    ``against`` a peer: the ratio to its figure; a scenario: the ratio to the gateway's own figure there; empty: the
    figure itself.
    """

    scenario: str
    bound: float
    against: str = "nats"
    metric: str = "rate"
    at_most: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells one target from another."""
        return self.scenario, self.metric, self.against

    @property
    def peer(self) -> str:
        """The peer that it needs beside the gateway; empty: none."""
        return self.against if self.against in PEERS else ""

    @property
    def title(self) -> str:
        """The scenario in words, with the metric where that is not the rate."""
        title = next(each.title for each in SCENARIOS if each.name == self.scenario)
        kind, _, label = self.metric.partition(" ")
        extra = METRICS[kind][0] + (f" ({label})" if label else "")
        return f"{title}: {extra}" if extra else title

    def text(self) -> str:
        """The bound in words."""
        sign = "≤" if self.at_most else "≥"
        if not self.against:
            return f"{sign} {self.bound:g} {METRICS[self.metric.partition(' ')[0]][1]}"
        if self.peer:
            return f"{sign} {self.bound:g} × {NAMES.get(self.against, self.against)}"
        beside = next(each.title for each in SCENARIOS if each.name == self.against)
        return f"{sign} {self.bound:g} × “{beside}”"


def _table() -> Iterator[Target]:
    for names, nats, mosquitto in (
        ("pairs10-q0", 1.2, 10.0),
        ("pairs500-q0", 1.5, 1.1),
        ("fanout100-q0 fanout1000-q0", 2.0, 15.0),
        ("fanin50-q0", 0.9, 5.0),
        ("pairs10-q1", 1.5, 0.8),
        ("pairs500-q1", 10.0, 0.8),
        ("fanout100-q1", 4.0, 0.8),
        ("pairs10-q1-durable", 1.0, 0.0),
        ("pairs500-q1-durable", 5.0, 0.0),
        ("fanout100-q1-durable", 1.5, 0.0),
        ("drain", 1.0, 0.0),
        ("pairs10-q2 pairs10-q2-durable", 1.3, 0.0),
        ("split-q0 split-q1", 0.8, 0.0),
        ("payload10kb-q0 payload10kb-q1 payload256kb-q0 payload256kb-q1", 1.0, 0.0),
        ("retained", 1.5, 0.0),
    ):
        for name in names.split():
            yield Target(name, nats)
            if mosquitto:
                yield Target(name, mosquitto, "mosquitto")
    yield Target("retained", FLAT, "", "growth gateway", at_most=True)
    yield Target("monitor", 0.8, "fanout1000-q1-durable")
    yield Target("from-nats", 0.6, "pairs10-q0")
    yield Target("to-nats", 0.6, "pairs10-q0")
    for name in ("latency-q0", "latency-q1"):
        for metric in ("p50", "p99"):
            yield Target(name, 1.3, "nats", metric, at_most=True)
    yield Target("connections", 2.0, "nats", "connects")
    yield Target("connections", 8.0, "", "memory gateway", at_most=True)
    yield Target("connections", 8.0, "", "memory", at_most=True)


TARGETS: Final = tuple(_table())


def scenarios() -> set[str]:
    """The names of the scenarios that have a target, or that one is compared with."""
    names = {each.name for each in SCENARIOS}
    return {name for target in TARGETS for name in (target.scenario, target.against) if name in names}


def needed(scenario: str) -> set[str]:
    """The peers whose figures the targets of a scenario need."""
    return {BASE} | {each.peer for each in TARGETS if each.scenario == scenario and each.peer}


@dataclass(frozen=True)
class Verdict:
    """What came out. ``spread``: half of the range over the rounds as a part of ``value``."""

    target: Target
    value: float | None
    spread: float = 0.0
    own: float | None = None
    """The gateway's median."""
    other: float | None = None
    """That of what it is compared with."""
    void: str = ""
    """Who has no result because a run was void; empty: nobody."""

    @property
    def reached(self) -> bool:
        """Whether the target is reached; False also where there is no figure."""
        if self.value is None:
            return False
        return self.value <= self.target.bound if self.target.at_most else self.value >= self.target.bound


def judge(target: Target, results: Results) -> Verdict:
    """Compare the medians of all rounds."""
    here = results.get(target.scenario, {})
    own = here.get(BASE, Cell())
    if not target.against:
        other = None
    elif target.peer:
        other = here.get(target.peer, Cell())
    else:
        other = results.get(target.against, {}).get(BASE, Cell())
    void = BASE if own.error else (target.peer or BASE) if other is not None and other.error else ""
    value, metric = own.median(target.metric), target.metric
    if other is None:
        return Verdict(target, value, own.spread(metric), value, None, void)
    found = ratio(value, other.median(metric))
    if found is None:
        return Verdict(target, None, 0.0, value, other.median(metric), void)
    each = [one / two for one, two in zip(own.values(metric), other.values(metric), strict=False) if two]
    spread = (max(each) - min(each)) / 2 / found if found else 0.0
    return Verdict(target, found, spread, value, other.median(metric))


def judged(names: set[str], peers: Sequence[str], results: Results) -> list[Verdict]:
    """The verdicts on all targets whose scenarios and peers were measured."""
    return [
        judge(target, results)
        for target in TARGETS
        if target.scenario in names
        and (not target.peer or target.peer in peers)
        and (target.peer or not target.against or target.against in names)
    ]


def target_table(verdicts: Sequence[Verdict]) -> list[str]:
    """One line for each target, and one that counts; nothing where there is none."""
    if not verdicts:
        return []
    rows = [["scenario", "target", "found", "reached", "the gateway", "the other"]]
    for each in verdicts:
        if each.value is None:
            found = f"void ({NAMES.get(each.void, each.void)})" if each.void else "–"
        else:
            found = (figure(each.value) if not each.target.against else f"{each.value:.2f}") + f" ±{each.spread:.0%}"
        shown = ["–" if value is None else figure(value) for value in (each.own, each.other)]
        rows.append([each.target.title, each.target.text(), found, "yes" if each.reached else "**no**", *shown])
    count = sum(each.reached for each in verdicts)
    return [*table(rows), "", f"{count} of {len(verdicts)} targets are reached."]
