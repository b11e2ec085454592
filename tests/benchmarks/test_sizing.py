# SPDX-License-Identifier: Apache-2.0
"""The table of docs/sizing.md, in small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import sizing

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("title", "least"),
    [("retained message of 128 bytes", 128), ("durable session with a subscription at QoS 1, away", 300)],
)
def test_what_one_more_takes(title: str, least: int, tmp_path: Path) -> None:
    report = tmp_path / "sizing.md"
    sizing.main(["--small", "--only", title, "--report", str(report)])
    (line,) = (line for line in report.read_text().splitlines() if title in line)
    cells = [int(cell.replace(",", "")) for cell in re.split(r" *\| *", line)[2:-1]]
    assert len(cells) == 4
    assert least < cells[-1] < 20_000, "bytes of files"
