# SPDX-License-Identifier: Apache-2.0
"""The benchmark of events that concern many sessions, with a few of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import mass, peers


@pytest.mark.processes
@pytest.mark.parametrize("positions", ["records", "consumers"])
def test_sessions_expire(monkeypatch: pytest.MonkeyPatch, positions: str) -> None:
    monkeypatch.setattr(mass, "SPARE_S", 12.0)
    row = mass.expiry(20, positions, 1)
    assert (row.sessions, row.positions, row.gateways) == (20, positions, 1)
    assert 0 < row.took < 60
    assert 0 < row.before.p99 <= row.before.longest
    assert 0 < row.meanwhile.p99 <= row.meanwhile.longest
    text = mass.document_expiry([row], "command")
    assert "## Expiry of sessions" in text
    assert f"| 20       | {positions}" in text
    assert f" {row.before} " in text
    assert f" {row.meanwhile} " in text


@pytest.mark.processes
def test_sessions_that_are_due_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that was left to make them is over before all are made."""
    monkeypatch.setattr(mass, "SPARE_S", 0.0)
    monkeypatch.setattr(mass, "SLOWER", 0.0)
    with pytest.raises(peers.PeerError, match=r"due already: [0-9,]+ were made in a second, and [0-9,]+ of the others"):
        mass.expiry(20, "records", 1)


@pytest.mark.processes
@pytest.mark.parametrize(("event", "gateways"), [("killed", 2), ("rolling", 2)])
def test_clients_come_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], event: str, gateways: int
) -> None:
    """All are served again and have their messages; each has lost its connection."""
    monkeypatch.setattr(mass, "SETTLE_S", 0.5)
    report = tmp_path / "growth.md"
    arguments = [event, "--clients", "10", "--positions", "records", "--gateways", str(gateways)]
    mass.main([*arguments, "--report", str(report)])
    (row,) = [line for line in report.read_text().splitlines() if line.startswith(f"| {mass.EVENTS[event]}")]
    cells = [cell.strip() for cell in row.split("|")][2:]
    assert cells[:3] == ["10", "records", "2"]
    took, median, longest = (float(cell.removesuffix(" s")) for cell in cells[3:6])
    assert 0 <= median <= longest <= took
    assert "## Return of many clients" in capsys.readouterr().out


@pytest.mark.processes
def test_a_table_tells_why_connections_failed() -> None:
    rows = [
        mass.Return("killed", 10, "records", 2, 3.0, 1.0, 2.0, {}, (0.001, 0.001)),
        mass.Return("killed", 20, "records", 2, 3.0, 1.0, 2.0, {"closed": 1000, "busy": 2}, (0.001, 0.001)),
    ]
    *_, before, last = mass.document_return(rows, "command").splitlines()
    assert before == ""
    assert last == "- Refused or lost, 20 clients, records: 2 × busy, 1,000 × closed"
