# SPDX-License-Identifier: Apache-2.0
"""The table of lists of sessions, in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import listing

pytestmark = pytest.mark.processes


def test_two_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "growth.md"
    listing.main(["--sessions", "10,1200", "--report", str(report)])
    assert "## Lists of sessions" in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")] for line in report.read_text().splitlines() if line[:2] == "| "]
    assert [row[1] for row in rows[1:]] == ["10", "1,200"]
    assert all(float(row[2].split()[0]) > 0 and int(row[6].split()[0]) > 10 for row in rows[1:])
