# SPDX-License-Identifier: Apache-2.0
"""The table of gateways without clients, in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gateways

pytestmark = pytest.mark.processes


def test_two_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "growth.md"
    gateways.main(["--gateways", "1,2", "--seconds", "2", "--settle", "0", "--report", str(report)])
    assert "## Gateways without clients" in capsys.readouterr().out
    rows = [line.split("|")[1:3] for line in report.read_text().splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in rows[1:]] == ["1", "2"]
    assert all(float(row[1]) > 0 for row in rows[1:])
