# SPDX-License-Identifier: Apache-2.0
"""The table of slow clients, in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import slow

pytestmark = pytest.mark.processes


def test_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of five clients gets a message for each that it acknowledges, one a second."""
    monkeypatch.setattr(slow, "SETTLE_S", 2.5)
    report = tmp_path / "growth.md"
    slow.main(["--clients", "5", "--waiting", "60", "--seconds", "4", "--report", str(report)])
    assert "## Slow clients" in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")] for line in report.read_text().splitlines() if line[:2] == "| "]
    assert [row[1] for row in rows[1:]] == ["5"]
    assert 4 <= int(rows[1][2]) <= 6
