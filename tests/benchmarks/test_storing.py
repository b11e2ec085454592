# SPDX-License-Identifier: Apache-2.0
"""The table of what it costs nats-server to store a message, in small."""

from __future__ import annotations

import re

import pytest

from benchmarks import storing


@pytest.mark.processes
def test_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    storing.main(["--count", "2000", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    for title in storing.WAYS:
        (line,) = (line for line in lines if title in line)
        assert re.fullmatch(r"\| .* \| +\d+\.\d +\|", line)


@pytest.mark.parametrize("arguments", [["--count", "100"], ["--count", "0"], ["--rounds", "0"]])
def test_what_it_cannot_measure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        storing.main(arguments)
    assert "multiple of 200" in capsys.readouterr().err
