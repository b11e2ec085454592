# SPDX-License-Identifier: Apache-2.0
"""`make test` and `make test-long`: together they run every test once, and CI runs both."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import durations, positions
from tests.harness.durations import LONG, ONE_IN, SAMPLED, SHORT, has_long_tests, is_long, seconds
from tests.harness.nats import ROOT
from tests.harness.positions import CONSUMERS, needs_consumers

LIMIT_S = 200.0

FETCHED = ("mosquitto", "mosquitto_pub", "chromium", "npm", "promtool", "nats")
"""Programs that `.ci/run` fetches where they are not there."""

MAKE = """#!/bin/sh
echo "make $1"
[ "$1" != "$FAILS" ]
"""


def collected(*arguments: str) -> set[str]:
    """Node ids that pytest selects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line}


def expression(target: str) -> str:
    """What `make` selects tests by for a target."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(rf'^{target}:.*\n\t.*-m pytest .*-m "([\w ]+)" ', makefile, re.MULTILINE)
    assert found is not None, target
    return found[1]


def test_the_table_names_what_exists() -> None:
    assert LONG
    for path in LONG:
        assert (ROOT / path).is_dir() or re.search(r"/test_\w+\.py$", path), path
        assert (ROOT / path).exists(), path
    for test in SHORT:
        assert seconds(test.partition("::")[0]), f"{test} is of no long file"


def test_the_innermost_entry_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    short = frozenset(("tests/made/test_a.py::test_1", "tests/made/test_a.py::test_2[x]", "tests/made/test_e.py"))
    monkeypatch.setattr(durations, "LONG", {"tests/made": 5, "tests/made/up/test_b.py": 7})
    monkeypatch.setattr(durations, "SHORT", short)
    seconds.cache_clear()
    try:
        paths = ("made/test_a", "made/up/test_b", "made/up/test_c", "other/test_d")
        assert [seconds(f"tests/{one}.py") for one in paths] == [5, 7, 5, 0]
        tests = ("test_1[y]", "test_2[x]", "test_2[y]", "test_3")
        assert [is_long(f"tests/made/test_a.py::{one}") for one in tests] == [False, False, True, True]
        assert not is_long("tests/other/test_d.py::test_1")
        assert not is_long("tests/made/test_e.py::test_1[x]")
    finally:
        seconds.cache_clear()


@pytest.mark.long
@pytest.mark.processes
def test_each_test_of_a_long_file_is_in_one_part() -> None:
    """A test that starts no process is short wherever it stands."""
    paths = ("tests/chaos/test_report.py", "tests/crash/test_dead_gateway.py", "tests/spark/test_monitor.py")
    everything = collected("-m", "not soak", *paths)
    short, long = (collected("-m", expression(target), *paths) for target in ("test-short", "test-long"))
    assert not short & long
    assert short | long == everything == collected("-m", expression("test-both"), *paths)
    assert long
    assert collected("--unit", *paths) < short


@pytest.mark.long
@pytest.mark.processes
def test_what_stays_short_is_there() -> None:
    short = collected("-m", expression("test-short"), *sorted({one.partition("::")[0] for one in SHORT}))
    names = {name for test in short for name in (test, test.partition("[")[0], test.partition("::")[0])}
    assert names >= SHORT


def test_files_with_a_marked_test_are_loaded() -> None:
    """`make test-long` loads no others, but those of the table."""
    assert has_long_tests(ROOT / "tests" / "ctl" / "test_history.py", "tests/ctl/test_history.py")
    other = ROOT / "tests" / "codec" / "test_topics.py"
    assert has_long_tests(other, "tests/crash/test_topics.py")
    assert has_long_tests(other, min(SAMPLED))
    assert not has_long_tests(other, "tests/codec/test_topics.py")


def test_some_cases_of_a_test_stay_short() -> None:
    """The first one, and about one in `ONE_IN` of the others."""
    path = min(SAMPLED - LONG.keys() - {one for one in SAMPLED if seconds(one)})
    cases = [f"{path}::test_1[{number}]" for number in range(1000)]
    long = [one for one in cases if is_long(one, first=False)]
    assert 1 / ONE_IN - 0.05 < 1 - len(long) / len(cases) < 1 / ONE_IN + 0.05
    assert not any(map(is_long, cases))
    assert not is_long("tests/codec/test_topics.py::test_1[1]", first=False)
    for one in SAMPLED:
        assert (ROOT / one).is_file(), one


@pytest.mark.long
@pytest.mark.processes
def test_what_needs_consumers_is_there() -> None:
    """`make test-records` runs the rest of the same folders."""
    tests = collected(*sorted({one.partition("::")[0] for one in CONSUMERS}))
    names = {name for test in tests for name in (test, test.partition("[")[0], test.partition("::")[0])}
    assert names >= CONSUMERS
    assert needs_consumers("tests/integration/test_auto_positions.py::test_any[1]")
    assert not needs_consumers("tests/integration/test_durable.py::test_any")


@pytest.mark.parametrize("folder", positions.FOLDERS)
def test_each_folder_has_files_with_records_and_with_consumers(folder: str) -> None:
    files = {f"tests/{folder}/{one.name}::test_any" for one in (ROOT / "tests" / folder).glob("test_*.py")}
    with_records = {one for one in files if positions.has_records(one)}
    assert with_records
    assert files > with_records
    assert not any(needs_consumers(one.partition("::")[0]) for one in with_records)


def test_gateways_with_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test says itself goes first."""
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/v5/test_qos.py::test_any (setup)")
    assert positions.settings(["--listen", "x"], {"MQTT_NATS_LOG"}) == {"MQTT_NATS_SESSION_POSITIONS": "records"}
    assert not positions.settings(["--session-positions=consumers"], {})
    assert not positions.settings([], {"MQTT_NATS_SESSION_POSITIONS"})
    for other in ("tests/integration/test_auto_positions.py::test_any", "tests/interop/test_listener.py::test_any", ""):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", other)
        assert not positions.settings([], {})


@pytest.mark.processes
@pytest.mark.parametrize(("fails", "status"), [("", 0), ("test-all", 1)])
def test_ci_runs_both_parts(tmp_path: Path, fails: str, status: int) -> None:
    for name in FETCHED:
        (tmp_path / name).symlink_to("/bin/true")
    for name in ("bash", "dirname", "mktemp", "rm"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "make").write_text(MAKE, encoding="utf-8")
    (tmp_path / "make").chmod(0o755)
    environment = {**os.environ, "PATH": str(tmp_path), "FAILS": fails}
    command = [str(tmp_path / "bash"), str(ROOT / ".ci" / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.splitlines()[-1] == "make test-all", done.stdout + done.stderr
    assert done.returncode == status
