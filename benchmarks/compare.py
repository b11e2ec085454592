# SPDX-License-Identifier: Apache-2.0
"""The ratios of a run beside those of an earlier one: what has become worse by more than the spread explains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.report import BASE, table
from benchmarks.targets import Verdict

CHECKED: Final = (
    "pairs10-q0",
    "fanout100-q0",
    "fanin50-q0",
    "pairs10-q1",
    "fanout100-q1",
    "pairs10-q1-durable",
    "pairs10-q2",
    "payload10kb-q1",
    "from-nats",
    "latency-q1",
    "connections",
)
"""The scenarios of the short form."""

LEAST: Final = 0.1
"""Of a ratio: no smaller change is called one."""

FACTOR: Final = 1.5
"""Half the range of 3 to 5 rounds is about one standard deviation, and the medians of two runs differ by less than
three of them in their sum; so much of the sum of both half ranges is left to chance."""

MOST: Final = 0.5
"""Where chance may take more than this part of a ratio, the run says nothing."""

Status = Literal["same", "better", "worse", "void", "unclear", "new"]


class ReportError(Exception):
    """The earlier report cannot be read."""


@dataclass(frozen=True)
class Kept:
    """What is kept of a verdict: ``value`` and its ``spread`` (a part of it)."""

    value: float
    spread: float


@dataclass(frozen=True)
class Change:
    """One ratio then and now. ``loss``: the part by which it is worse (negative: better)."""

    verdict: Verdict
    before: Kept | None
    tolerance: float
    loss: float
    status: Status


def save(path: Path, machine: str, verdicts: Sequence[Verdict]) -> None:
    """Write what `load` reads."""
    rows = [
        {
            "scenario": each.target.scenario,
            "metric": each.target.metric,
            "against": each.target.against,
            "value": each.value,
            "spread": each.spread,
            "bound": each.target.bound,
            "reached": each.reached,
        }
        for each in verdicts
    ]
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1, ensure_ascii=False) + "\n")


def load(path: Path) -> tuple[str, dict[tuple[str, str, str], Kept]]:
    """The machine, and what is kept by `Target.key`; raises `ReportError`."""
    try:
        found: Mapping[str, Any] = json.loads(path.read_text())
        rows = {
            (each["scenario"], each["metric"], each["against"]): Kept(float(each["value"]), float(each["spread"]))
            for each in found["rows"]
            if each["value"] is not None
        }
        return str(found["machine"]), rows
    except FileNotFoundError:
        raise ReportError(f"{path} is not there: `make bench` writes it") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ReportError(f"{path} is no report of `make bench` ({type(error).__name__}: {error})") from None


def changes(verdicts: Sequence[Verdict], before: Mapping[tuple[str, str, str], Kept]) -> list[Change]:
    """Each verdict beside what it was."""
    return [_change(each, before.get(each.target.key)) for each in verdicts]


def _change(now: Verdict, before: Kept | None) -> Change:
    if now.value is None:
        return Change(now, before, 0.0, 0.0, "void" if now.void == BASE else "unclear")
    if before is None:
        return Change(now, None, 0.0, 0.0, "new")
    worse, better = (before.value, now.value) if now.target.at_most else (now.value, before.value)
    loss = 1 - worse / better if better else 0.0
    tolerance = max(LEAST, FACTOR * (before.spread + now.spread))
    status: Status = "worse" if loss > tolerance else "better" if loss < -tolerance else "same"
    if tolerance > MOST and status != "worse":
        status = "unclear"
    return Change(now, before, tolerance, loss, status)


def failed(found: Sequence[Change]) -> bool:
    """Whether something is worse, or the gateway has lost, repeated or reordered a message."""
    return any(each.status in ("worse", "void") for each in found)


def change_table(found: Sequence[Change]) -> list[str]:
    """One line each, what is worse first, and a summary."""
    order: list[Status] = ["void", "worse", "unclear", "new", "better", "same"]
    rows = [["", "scenario", "compared with", "then", "now", "change", "tolerance"]]
    for each in sorted(found, key=lambda change: order.index(change.status)):
        target, now = each.verdict.target, each.verdict
        rows.append(
            [
                each.status.upper() if each.status in ("worse", "void") else each.status,
                target.title,
                target.against or "–",
                "–" if each.before is None else f"{each.before.value:.2f} ±{each.before.spread:.0%}",
                "–" if now.value is None else f"{now.value:.2f} ±{now.spread:.0%}",
                "–" if each.before is None or now.value is None else f"{-each.loss:+.0%}",
                "–" if each.before is None or now.value is None else f"{each.tolerance:.0%}",
            ]
        )
    counts = ", ".join(f"{count} {each}" for each in order if (count := sum(one.status == each for one in found)))
    return [*table(rows), "", f"{len(found)} ratios: {counts}"]
