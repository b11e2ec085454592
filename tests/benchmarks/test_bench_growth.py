# SPDX-License-Identifier: Apache-2.0
"""The growth curves from end to end, on the smallest values, and what their page says of a result that is void."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.growth import CURVES, Point, draw, main, rows


def test_curves_are_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = "durable,filters,connections,retained"
    assert main(["--only", only, "--most", "100", "--peers", "nats", "--seconds", "0.2", "--docs", str(tmp_path)]) == 0
    text = (tmp_path / "growth.md").read_text()
    for name in ("durable", "filters", "connections"):
        assert f"charts/growth-{name}.svg" in text
        assert (tmp_path / "charts" / f"growth-{name}.svg").read_text().startswith("<?xml")
    assert "nats-server" in text
    assert "void" not in text
    assert "round 1: filters 100, nats: " in capsys.readouterr().out


def test_a_void_point(tmp_path: Path) -> None:
    good = Point(10, [3.0, 1.0, 2.0], {"nats-server": [1.0, 2.0, 3.0]})
    found = {"ours": [good, Point(100, error="lost")]}
    assert [line.split("|")[3].strip() for line in rows(found, "filters")[2:]] == ["2", "void"]
    draw(CURVES[0], found, tmp_path / "a.svg")
    draw(CURVES[0], found, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_wrong_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "no curve is called 'nothing'; there are durable" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--peers", "nobody"])
    assert "no peer is called 'nobody'" in capsys.readouterr().err
