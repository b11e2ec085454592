# SPDX-License-Identifier: Apache-2.0
"""The table of what a session with many filters waits for, in small."""

from __future__ import annotations

import re

import pytest

from benchmarks import durable_filters


@pytest.mark.processes
def test_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    durable_filters.main(["--filters", "40", "--waiting", "3", "--stored", "250", "--rounds", "1"])
    rows = [line for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"\| .* \| +\d+\.\d{3} +\|", line)]
    assert len(rows) == 6
    for title in ("SUBACK", "PINGRESP", "first message", "nats-server alone"):
        assert any(title in row for row in rows)


@pytest.mark.parametrize("arguments", [["--waiting", "0"], ["--filters", "2", "--waiting", "3"], ["--rounds", "0"]])
def test_what_it_cannot_measure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        durable_filters.main(arguments)
    assert "there has to be" in capsys.readouterr().err
