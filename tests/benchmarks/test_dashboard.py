# SPDX-License-Identifier: Apache-2.0
"""The table of what an open dashboard costs."""

from __future__ import annotations

import pytest

from benchmarks import dashboard
from benchmarks.dashboard import NO_TAB, Row, document


def test_a_row_is_the_median_of_its_rounds() -> None:
    rows = [Row("clients", 0.03, 0.01, 0.5), Row("clients", 0.01, 0.02, 0.1), Row("clients", 0.02, 0.09, 0.2)]
    assert dashboard._median(rows) == Row("clients", 0.02, 0.02, 0.2)


@pytest.mark.processes
def test_the_table_has_what_a_tab_adds_and_what_its_browser_takes() -> None:
    text = document([Row(NO_TAB, 0.01, 0.005, 0.0), Row("clients", 0.02, 0.01, 0.004)], "python")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == ["view", "gateway", "nats-server", "both, beyond no tab", "Chromium"]
    assert lines[2:] == [["no tab", "1.0%", "0.5%", "", ""], ["clients", "2.0%", "1.0%", "1.5%", "0.4%"]]
