# SPDX-License-Identifier: Apache-2.0
"""Targets that are reached or not, the comparison with an earlier run, and the pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import compare, flame, targets
from benchmarks.__main__ import main
from benchmarks.chart import Line, Panel, bounds, chart, ticks
from benchmarks.compare import Kept, change_table, changes, failed, load, save
from benchmarks.report import Cell
from benchmarks.scenarios import SCENARIOS
from benchmarks.targets import TARGETS, Target, Verdict, judge, judged, target_table

PAIRS = Target("pairs10-q0", 1.2)
LATENCY = Target("latency-q0", 1.3, "nats", "p50", at_most=True)


def cell(*values: float, metric: str = "rate") -> Cell:
    return Cell([{"metrics": {metric: value}} for value in values])


def test_targets_are_of_scenarios_that_exist() -> None:
    names = {each.name for each in SCENARIOS}
    assert {each.scenario for each in TARGETS} | set(compare.CHECKED) | targets.scenarios() <= names
    assert len({each.key for each in TARGETS}) == len(TARGETS)
    for each in TARGETS:
        assert each.peer or not each.against or each.against in names
        assert each.title
        assert each.text()
    assert targets.needed("pairs10-q0") == {"ours", "nats", "mosquitto"}
    assert targets.needed("monitor") == {"ours"}


def test_ratio_and_its_spread() -> None:
    found = judge(PAIRS, {"pairs10-q0": {"ours": cell(100, 300, 200), "nats": cell(100, 100, 100)}})
    assert (found.value, found.spread, found.own, found.other) == (2.0, 0.5, 200, 100)
    assert found.reached
    assert not judge(PAIRS, {"pairs10-q0": {"ours": cell(110), "nats": cell(100)}}).reached
    nothing = judge(PAIRS, {"pairs10-q0": {"ours": cell(0.0), "nats": cell(100)}})
    assert (nothing.value, nothing.spread, nothing.reached) == (0.0, 0.0, False)


def test_less_may_be_better() -> None:
    for p50, reached in ((130.0, True), (131.0, False)):
        cells = {"ours": cell(p50, metric="p50"), "nats": cell(100, metric="p50")}
        assert judge(LATENCY, {"latency-q0": cells}).reached is reached


def test_absolute_and_between_scenarios() -> None:
    memory = Target("connections", 8.0, "", "memory gateway", at_most=True)
    found = judge(memory, {"connections": {"ours": cell(7.9, metric="memory gateway")}})
    assert (found.value, found.reached) == (7.9, True)
    beside = Target("from-nats", 0.6, "pairs10-q0")
    results = {"from-nats": {"ours": cell(50)}, "pairs10-q0": {"ours": cell(100), "nats": cell(1)}}
    assert judge(beside, results).value == 0.5
    assert [each.target for each in judged(set(results), ["ours"], results)] == [beside]


def test_a_void_result_is_said_and_not_reached() -> None:
    lost = Cell([{"error": "lost"}])
    found = judge(PAIRS, {"pairs10-q0": {"ours": lost, "nats": cell(100)}})
    other = judge(PAIRS, {"pairs10-q0": {"ours": cell(100), "nats": lost}})
    assert (found.value, found.void, found.reached, other.void) == (None, "ours", False, "nats")
    lines = target_table([found, other])
    assert "void (the gateway)" in lines[2]
    assert "void (nats-server)" in lines[3]
    assert lines[-1] == "0 of 2 targets are reached."
    assert target_table([]) == []


def verdict(value: float | None, spread: float = 0.02, target: Target = PAIRS, void: str = "") -> Verdict:
    return Verdict(target, value, spread, void=void)


@pytest.mark.parametrize(
    ("before", "now", "status"),
    [
        (Kept(2.0, 0.02), verdict(1.85), "same"),
        (Kept(2.0, 0.02), verdict(1.79), "worse"),
        (Kept(2.0, 0.02), verdict(2.21), "better"),
        (Kept(2.0, 0.10), verdict(1.79), "same"),  # the spread explains more
        (Kept(2.0, 0.10), verdict(1.60, 0.03), "worse"),
        (Kept(2.0, 0.30), verdict(1.60, 0.10), "unclear"),
        (Kept(2.0, 0.30), verdict(0.60, 0.10), "worse"),
        (Kept(1.0, 0.02), verdict(1.15, target=LATENCY), "worse"),
        (Kept(1.0, 0.02), verdict(0.85, target=LATENCY), "better"),
        (Kept(2.0, 0.02), verdict(None, void="ours"), "void"),
        (Kept(2.0, 0.02), verdict(None, void="nats"), "unclear"),
        (None, verdict(2.0), "new"),
    ],
)
def test_change(before: Kept | None, now: Verdict, status: str) -> None:
    kept = {} if before is None else {now.target.key: before}
    (found,) = changes([now], kept)
    assert found.status == status
    assert failed([found]) is (status in ("worse", "void"))
    lines = change_table([found])
    assert status in lines[2].lower()
    assert lines[-1] == f"1 ratios: 1 {status}"


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "ratios.json"
    save(path, "a machine", [verdict(2.0, 0.1), verdict(None, target=LATENCY)])
    assert load(path) == ("a machine", {PAIRS.key: Kept(2.0, 0.1)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not there: `make bench` writes it"),
        ("{", "is no report"),
        ("[]", "is no report"),
        ('{"machine": "", "rows": [{"value": 1}]}', "is no report"),
    ],
)
def test_no_earlier_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str) -> None:
    path = tmp_path / "ratios.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["--check", str(path)])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.processes
def test_check_fails_clearly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run in which the gateway does not start is void; one with an impossible ratio before it is a regression."""
    path = tmp_path / "ratios.json"
    row = {"scenario": "from-nats", "metric": "rate", "against": "pairs10-q0", "value": 1e6, "spread": 0.01}
    path.write_text(json.dumps({"machine": "another", "rows": [row]}))
    times = ["--rounds", "1", "--seconds", "0.1", "--warmup", "0.1"]
    assert main(["--check", str(path), "--peers", "ours", "--only", "from-nats,pairs10-q0", *times]) == 1
    output = capsys.readouterr().out
    assert "then: another" in output
    assert "| WORSE " in output
    assert "REGRESSION" in output


def words(picture: str) -> str:
    """Everything that an SVG picture says; it must be well-formed."""
    return " ".join(ET.fromstring(picture).itertext())


def test_ticks_and_bounds() -> None:
    assert ticks(0.9, 12) == [1, 2, 5, 10]
    assert ticks(10, 100_000) == [10, 100, 1000, 10_000, 100_000]
    low, high = bounds([100.0, 100.0])
    assert (round(low * high), round(high / low)) == (10_000, 10)


def test_chart() -> None:
    panel = Panel("Rate", "filters <n>", [Line("ours & more", "ours", [(10, 5.0), (100, 0.0), (1000, 50.0)])])
    picture = chart("A title", [panel, Panel("Empty", "x", [Line("nats", "nats", [])])])
    assert {"ours & more", "filters <n>", "1,000", "no figures"} <= {
        part.strip() for part in ET.fromstring(picture).itertext()
    }
    assert picture.count("<circle") == 2
    assert "prefers-color-scheme:dark" in picture


STACKS = [
    "main (mqtt_nats/cli.py:1);loop (uvloop/loop.c:5);packets (/x/mqtt_nats/client/client.py:7);find (a/b.py:2) 30",
    "main (mqtt_nats/cli.py:1);loop (uvloop/loop.c:6);packets (/x/mqtt_nats/client/client.py:9) 50",
    "main (mqtt_nats/cli.py:1);loop (uvloop/loop.c:6);"
    "flush (/x/mqtt_nats/transport/write_buffer.py:9);write (libc.so.6) 20",
    "main (mqtt_nats/cli.py:1);loop (uvloop/loop.c:6);epoll_pwait (libc.so.6) 900",
    "",
]


def test_folded_stacks() -> None:
    root = flame.tree(STACKS)
    assert root.total == 100
    assert flame.longest(root, 2) == [("packets (client/client.py)", 0.5), ("find (b.py)", 0.3)]
    assert flame.layer_shares(root) == {"gateway": 0.5, "python": 0.3, "native": 0.2}
    assert flame.trimmed(root).name == "loop (loop.c)"
    picture = flame.graph(root, "A <title>")
    assert picture == flame.graph(flame.tree(STACKS), "A <title>")
    said = words(picture)
    for part in ("A <title>", "packets (client/client.py): 80.0%", "gateway 50%"):
        assert part in said
    assert "main" not in said


@pytest.mark.parametrize(
    ("frame", "name", "layer"),
    [
        (
            "Outlet.flush (mqtt_nats/transport/write_buffer.py:3)",
            "Outlet.flush (transport/write_buffer.py)",
            "transport",
        ),
        ("match (/a/mqtt_nats/pubsub/filter_trie.py)", "match (pubsub/filter_trie.py)", "pubsub"),
        ("check (/a/mqtt_nats/access/acl.py)", "check (access/acl.py)", "gateway"),
        ("parse (/a/mqtt_streams/stored.py:1)", "parse (stored.py)", "streams"),
        ("run (asyncio/runners.py)", "run (runners.py)", "python"),
        ("uv_run (core.c)", "uv_run (core.c)", "native"),
        ("0x7f48c7f8bb75 (libc.so.6)", "unnamed (libc.so.6)", "native"),
        ("0x7f", "0x7f", "native"),
    ],
)
def test_layers(frame: str, name: str, layer: str) -> None:
    assert flame.place(frame) == (name, layer)


def test_no_stack() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        flame.tree(["py-spy failed"])
