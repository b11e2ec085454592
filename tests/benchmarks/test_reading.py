# SPDX-License-Identifier: Apache-2.0
"""The table of what a shared reader reads, in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import reading

pytestmark = pytest.mark.processes


def test_two_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of a gateway with sessions is given what they want, and little else."""
    monkeypatch.setattr(reading, "TOPICS", 1000)
    monkeypatch.setattr(reading, "SETTLED_S", 2.0)
    report = tmp_path / "growth.md"
    reading.main(["--sessions", "0,200", "--messages", "1000", "--report", str(report)])
    assert "## What a shared reader reads" in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")] for line in report.read_text().splitlines() if line[:2] == "| "]
    assert [row[1:6] for row in rows[1:]] == [["0", "0", "1,000", "0", "0"], ["200", "200", "1,000", "200", "200"]]
