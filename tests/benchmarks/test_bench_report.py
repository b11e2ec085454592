# SPDX-License-Identifier: Apache-2.0
"""Medians, spreads and ratios of the benchmark table."""

from __future__ import annotations

import pytest

from benchmarks.report import Cell, document, figure, main_table, ratio
from benchmarks.scenarios import SCENARIOS, select


def runs(*rates: float, broker_busy: float = 0.5) -> Cell:
    """One throughput result per round."""
    cost = {"cpu": {"broker": 0.5, "generator": 0.25}, "generator_busy": 0.95, "broker_busy": broker_busy}
    return Cell([{"metrics": {"rate": rate}, **cost} for rate in rates])


def row(cells: dict[str, Cell]) -> list[str]:
    lines = main_table(select(["pairs10-q0"]), list(cells), {"pairs10-q0": cells})
    assert len(lines) == 3
    return [text.strip() for text in lines[2].strip("|").split("|")]


def test_median_spread_and_ratio() -> None:
    found = row({"ours": runs(300_000, 100_000, 200_000), "nats": runs(100_000, 100_000, 100_000)})
    assert found == ["10 pairs, batched, QoS 0", "msg/s", "200 k ±50%", "100 k ±0%", "2.00"]


def test_one_void_round_makes_the_result_void() -> None:
    bad = runs(1.0, 2.0)
    bad.runs.append({"error": "2 of 10 deliveries missing"})
    found = row({"ours": bad, "nats": runs(5.0)})
    assert found[2:] == ["void", "5 ±0%", "–"]
    scenarios = select(["pairs10-q0"])
    text = document(scenarios, ["ours"], {"pairs10-q0": {"ours": bad}}, title="t", about="m", command="c", notes=[])
    assert "- 10 pairs, batched, QoS 0, ours: 2 of 10 deliveries missing" in text.splitlines()


def test_generator_at_its_limit_is_marked() -> None:
    scenarios = select(["pairs10-q0"])
    for broker_busy, limit in ((0.5, " (limit)"), (1.0, "")):
        results = {"pairs10-q0": {"nats": runs(1.0, broker_busy=broker_busy)}}
        lines = document(scenarios, ["nats"], results, title="t", about="m", command="c", notes=[]).splitlines()
        cells = [text.strip() for text in lines[-1].strip("|").split("|")]
        assert cells[1:6] == ["nats", "0.5000", "0.2500", f"{broker_busy:.0%}", f"95%{limit}"]


def test_several_metrics_are_several_rows() -> None:
    cells = {
        name: Cell([{"metrics": {"p50": p50, "p99": 1000.0}, "cpu": {}}])
        for name, p50 in (("ours", 90.0), ("mosquitto", 30.0))
    }
    lines = main_table(select(["latency-q1"]), ["ours", "mosquitto"], {"latency-q1": cells})
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["3.00", "1.00"]


@pytest.mark.parametrize(
    ("base", "other", "found"), [(6.0, 4.0, 1.5), (None, 4.0, None), (6.0, None, None), (6.0, 0.0, None)]
)
def test_ratio(base: float | None, other: float | None, found: float | None) -> None:
    assert ratio(base, other) == found


@pytest.mark.parametrize(
    ("value", "text"), [(1_500_000, "1.5 M"), (74_321, "74.3 k"), (1_234, "1,234"), (12.34, "12.3")]
)
def test_figure(value: float, text: str) -> None:
    assert figure(value) == text


def test_selection() -> None:
    assert select([]) == list(SCENARIOS)
    assert {each.qos for each in select(["fanin50-q[12]"])} == {1, 2}
    with pytest.raises(ValueError, match="no scenario is called 'nothing'"):
        select(["nothing"])


def test_scenarios_bound_what_is_outstanding() -> None:
    assert len({each.name for each in SCENARIOS}) == len(SCENARIOS)
    for each in SCENARIOS:
        links = each.subscribers if each.publishers in (1, each.subscribers) else each.publishers
        assert 1 <= each.outstanding <= 2000
        assert each.outstanding * links <= 100_000
