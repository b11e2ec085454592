# SPDX-License-Identifier: Apache-2.0
"""The rows of the README's table: from the results of a run, and from a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import quick
from benchmarks.__main__ import main
from benchmarks.report import Cell, Results
from benchmarks.scenarios import SCENARIOS
from scripts import comparison


def cell(metric: str, *values: float) -> Cell:
    return Cell([{"metrics": {metric: value}} for value in values])


def by_text(found: list[list[str]]) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in found}


def test_rows_have_medians_and_the_ratio_to_the_listener() -> None:
    results: Results = {
        "pairs10-q1": {
            "ours": cell("rate", 100_000, 150_000, 140_000),
            "nats": cell("rate", 100_000, 100_000, 100_000),
            "mosquitto": cell("rate", 70_000, 69_000, 68_000),
        },
        "latency-q1": {"ours": cell("p50", 70.4, 71.0), "nats": cell("p50", 140, 142), "mosquitto": Cell()},
        "connections": {"ours": Cell([{"error": "refused"}]), "nats": cell("memory", 20.0)},
    }
    rows = {row.scenario + " " + row.metric: row.text for row in quick.ROWS}
    found = by_text(quick.rows(results))
    assert found[rows["pairs10-q1 rate"]] == ["140 k", "100 k", "69 k", "1.40 ±18%"]
    assert found[rows["latency-q1 p50"]] == ["70.7", "141", "–", "0.50 ±0%, less is better"]
    assert found[rows["connections memory"]] == ["void", "20", "–", "–"]
    assert found[rows["fanout100-q0 rate"]] == ["–", "–", "–", "–"]


def test_what_others_took_meanwhile_is_said() -> None:
    runs = [{"metrics": {}, "other_busy": value} for value in (0.02, 1.5, 0.04)]
    results: Results = {"pairs10-q1": {"ours": Cell([*runs, {"error": "refused"}]), "nats": Cell()}}
    assert quick.others(results) == 0.04
    assert quick.others({}) == 0.0
    line = quick.conditions("2 CPUs", payload=128, rounds=3, seconds=0.7, busy=0.04)
    assert "other programs took 4% of one; 2 CPUs" in line


def test_its_scenarios_exist_and_one_sends_one_message_at_a_time() -> None:
    known = {each.name: each for each in SCENARIOS}
    assert set(quick.SCENARIOS) <= set(known)
    assert any(known[name].window == 1 and known[name].lag == 1 for name in quick.SCENARIOS)


def test_the_readme_has_the_rows_that_the_command_measures() -> None:
    """With payload, batching, machine, versions and date in one line."""
    figures = json.loads(comparison.FIGURES.read_text(encoding="utf-8"))
    assert [row[0] for row in figures["rows"]] == [row.text for row in quick.ROWS]
    assert all(len(row) == 2 + len(quick.COLUMNS) for row in figures["rows"])
    for part in ("`make bench", "-byte payload", "batched: ", " CPUs (", "(compiled)", "; 20"):
        assert part in figures["about"], part
    text = comparison.table()
    assert text.endswith(f"\n\n{figures['about']}")
    assert all(f"| {' | '.join(row)} |" in text for row in figures["rows"])


@pytest.mark.processes
def test_a_run_prints_the_rows_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "quick.json"
    arguments = ["--quick", "--only", "pairs10-q1", "--peers", "nats", "--rounds", "1", "--seconds", "0.2"]
    assert main([*arguments, "--warmup", "0.1", "--figures", str(file)]) == 0
    written = json.loads(file.read_text())
    (measured,) = [row for row in written["rows"] if row[2] != "–"]
    assert "median of 1 interleaved rounds of 0.2 s" in written["about"]
    assert "nats-server: v2." in written["about"]
    printed = capsys.readouterr().out
    assert all(text in printed for text in (written["about"], measured[0], measured[2]))
