# SPDX-License-Identifier: Apache-2.0
"""For which versions of Python wheels are built, and with which interpreters."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import wheels
from tests.harness.nats import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_versions_are_everywhere_the_same() -> None:
    """In the classifiers, for cibuildwheel, for `make wheels`; the lowest is the one that is required."""
    versions = [f"3.{minor}" for minor in wheels.MINORS]
    named = [one.rpartition(" ")[2] for one in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert named == versions
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"
    assert PROJECT["tool"]["cibuildwheel"]["build"] == [f"cp{one.replace('.', '')}-*" for one in versions]


def test_cibuildwheel_accepts_no_wheel_of_the_sources() -> None:
    settings = PROJECT["tool"]["cibuildwheel"]
    assert settings["environment"] == {"MQTT_NATS_BUILD": "compiled"}
    assert "(compiled)" in settings["test-command"]
    assert (settings["linux"]["archs"], settings["macos"]["archs"]) == (["x86_64", "aarch64"], ["x86_64", "arm64"])


def test_one_interpreter_of_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    says = {
        sys.executable: "cpython 3 12",
        "python3.11": "cpython 3 11",
        "python3.12": "cpython 3 12",
        "python3.14": "pypy 3 14",
        "old": "cpython 3 10",
        "/opt/new": "cpython 3 13",
    }
    monkeypatch.setattr(wheels, "_says", lambda python: says.get(python, ""))
    assert list(wheels.interpreters([])) == [sys.executable, "python3.11"]
    assert list(wheels.interpreters(["/opt/new", "python3.12", "/opt/new"])) == ["/opt/new", "python3.12"]


@pytest.mark.parametrize(("python", "says"), [("old", "cpython 3 10"), ("python3.14", "pypy 3 14"), ("/opt/none", "")])
def test_a_given_interpreter_that_does_not_fit(
    python: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is built, and nothing removed."""
    monkeypatch.setattr(wheels, "_says", lambda python: says)
    (tmp_path / "former.whl").touch()
    with pytest.raises(SystemExit) as ended:
        wheels.main([str(tmp_path), python])
    assert ended.value.code == 2
    assert f"{python}: {says or 'it does not run'}; wheels are built for" in capsys.readouterr().err
    assert (tmp_path / "former.whl").exists()


@pytest.mark.processes
def test_what_an_interpreter_says(tmp_path: Path) -> None:
    version = sys.version_info
    assert wheels._says(sys.executable) == f"{sys.implementation.name} {version.major} {version.minor}"
    assert wheels._says(str(tmp_path / "python3.11")) == ""
