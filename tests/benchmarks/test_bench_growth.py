# SPDX-License-Identifier: Apache-2.0
"""The growth curves from end to end, on the smallest values, and what their page says of a result that is void."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.growth import CURVES, Point, draw, main, rows
from benchmarks.page import put


@pytest.mark.processes
def test_curves_are_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = "durable,filters,connections,retained"
    assert main(["--only", only, "--most", "100", "--peers", "nats", "--seconds", "0.2", "--docs", str(tmp_path)]) == 0
    text = (tmp_path / "growth.md").read_text()
    for name in ("durable", "filters", "connections"):
        assert f"charts/growth-{name}.svg" in text
        assert (tmp_path / "charts" / f"growth-{name}.svg").read_text().startswith("<svg")
    assert "nats-server" in text
    assert "void" not in text
    assert "round 1: filters 100, nats: " in capsys.readouterr().out


@pytest.mark.processes
def test_another_build_of_ours(tmp_path: Path) -> None:
    """The command that starts it is told, without the directory in which it was called."""
    program = f"{sys.executable} -m mqtt_nats"
    ours = f"env WHERE={Path.cwd()} {peers.OURS_COMMAND.replace('mqtt-nats', program, 1)}"
    arguments = ["--only", "payload", "--most", "32", "--peers", "ours", "--ours", ours, "--seconds", "0.2"]
    assert main([*arguments, "--docs", str(tmp_path)]) == 0
    text = (tmp_path / "growth.md").read_text()
    assert "--ours 'env WHERE=$PWD " in text
    assert str(Path.cwd()) not in text
    with pytest.raises(SystemExit):
        main(["--peers", "ours", "--ours", "/nowhere/to/be/found"])


def test_a_void_point() -> None:
    good = Point(10, [3.0, 1.0, 2.0], {"nats-server": [1.0, 2.0, 3.0], "gateway": [1.0]})
    found = {"ours": [good, Point(100, error="lost")], "amqtt": [Point(10, error="lost")]}
    assert [line.split("|")[3].strip() for line in rows(found, "filters")[2:]] == ["2", "void", "void"]
    assert "joined" not in rows(found, "filters")[0]
    picture = draw(CURVES[0], found)
    assert picture == draw(CURVES[0], found)
    for label in ("ours: nats-server", "ours: gateway", "amqtt"):
        assert f">{label}</text>" in picture


def test_those_who_stand_by() -> None:
    point = Point(100, [2.0], {"gateway": [1.0]}, joined=[5000.0, 1.0, 6000.0], memory=[7.04], effort=[12.0])
    assert [text.strip() for text in rows({"ours": [point]}, "filters")[2].split("|")[5:8]] == [
        "5,000",
        "12 µs",
        "7.0 KB",
    ]


def test_one_curve_leaves_the_others_and_what_is_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "growth.md"
    put(path, "How cost grows", "growth filters", "old filters")
    path.write_text(path.read_text() + "\nby hand\n")
    put(path, "How cost grows", "growth payload", "payload")
    put(path, "How cost grows", "growth filters", r"new \1 filters")
    text = path.read_text()
    assert text.startswith("# How cost grows\n")
    assert [each in text for each in ("old filters", r"new \1 filters", "by hand", "payload")] == [0, 1, 1, 1]
    assert text.index("new") < text.index("by hand") < text.index("payload")


def test_wrong_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "no curve is called 'nothing'; there are durable" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--peers", "nobody"])
    assert "no peer is called 'nobody'" in capsys.readouterr().err
