# SPDX-License-Identifier: Apache-2.0
"""The command line of the experiments, and the table that it keeps in docs/reliability.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.experiments import all_experiments
from tests.chaos.report import BEGIN, END, text_of, write
from tests.harness.nats import ROOT


async def nothing(setting: Setting) -> Result:
    return Result()


ONE = Experiment("R7", "a title", "what must come out", nothing)
OTHER = Experiment("R12", "another", "something", nothing)
PAGE = f"# Page\n\n{BEGIN}\n{END}\n\nMore.\n"


def rows(path: Path) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in path.read_text().splitlines()
        if line.startswith("| R")
    ]


def test_a_table_is_written_and_its_rows_are_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    result = Result({"messages": 100_000, "kills": 30, "lost": 0, "longest_pause_ms": 1234, "clients": 7})
    result.peers["mosquitto"] = Result({"messages": 5, "lost": 2}, ["lost: a", "lost: b", "session gone: c"])
    write(page, OTHER, Result({"files": 3.25}, remarks=["so | so"]))
    write(page, ONE, result)
    assert rows(page) == [
        ["R7: a title", "100,000", "30", "0", "", "1,234 ms", "clients 7", "yes"],
        ["R7, mosquitto", "5", "", "2", "", "", "", "no: lost, session gone"],
        ["R12: another", "", "", "", "", "", "files 3.2; so / so", "yes"],
    ]
    write(page, ONE, Result({"longest_pause_ms": 45_600}, ["lost: x"]), long=False)
    assert rows(page) == [
        ["R7: a title (short)", "", "", "", "", "45.6 s", "", "no: lost"],
        ["R12: another", "", "", "", "", "", "files 3.2; so / so", "yes"],
    ]
    text = page.read_text()
    assert text.startswith("# Page\n\n")
    assert text.endswith("More.\n")
    assert text.count("| Experiment |") == 1


def test_the_row_of_an_experiment_without_a_number_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    write(page, Experiment("workers", "processes are killed", "nothing lost", nothing), Result({"kills": 3}))
    write(page, ONE, Result({"kills": 2}))
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [line.partition(":")[0] for line in lines[1:]] == ["| R7", "| workers"]


def test_a_page_without_a_place_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    with pytest.raises(ValueError, match="has no line"):
        write(page, ONE, Result())
    assert page.read_text() == "# Page\n"


def test_figures_in_a_line() -> None:
    assert text_of({"lost": 0, "longest_delay_ms": 12, "what": "x"}) == "lost 0, longest delay 12 ms, what x"


def test_the_page_has_rows_of_experiments_only() -> None:
    page = ROOT / "docs" / "reliability.md"
    names = {re.match(r"\w+", row[0])[0] for row in rows(page)}  # type: ignore[index]
    assert names <= set(all_experiments())
    assert {"R1", "R2"} <= names
    assert BEGIN in page.read_text(encoding="utf-8")
    assert END in page.read_text(encoding="utf-8")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.chaos", *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )


@pytest.mark.processes
def test_an_experiment_by_name(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    ended = run("R19", "--report", str(page))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "R19: " in ended.stdout
    assert "kept, " in ended.stdout
    assert [row[0][:4] for row in rows(page)] == ["R19:"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["R0"], "no experiment is called R0"),
        (["R19", "--report", "/nonexistent/page.md"], "there is no file /nonexistent/page.md"),
        (["R19", "--report", "README.md"], "README.md has no lines between which the figures belong"),
        (["R19", "--positions", "memory"], "argument --positions: invalid choice: 'memory'"),
        (["R19", "--positions", "auto", "--report", "README.md"], "--report and --positions exclude each other"),
        (["R19", "--seed", "x"], "invalid int value: 'x'"),
    ],
)
def test_wrong_usage(arguments: list[str], complaint: str) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2
    assert complaint in ended.stderr
    assert "Traceback" not in ended.stderr
