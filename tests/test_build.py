# SPDX-License-Identifier: Apache-2.0
"""What decides whether modules are compiled, and a compiled copy of a small checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hatchling.bridge.app import Application

import hatch_build
from tests.harness.doubles import stands_for

PYPROJECT = """
[tool.hatch.build.targets.wheel.hooks.custom]
modules = ["mqtt_nats/one.py", "mqtt_nats/two.py"]
"""

SOURCES = {
    "pyproject.toml": PYPROJECT,
    "mqtt_nats/__init__.py": "",
    "mqtt_nats/__main__.py": "import mqtt_nats.two\n\nprint(mqtt_nats.two.__file__, mqtt_nats.two.twice(3))\n",
    "mqtt_nats/one.py": "def once(number: int) -> int:\n    return number\n",
    "mqtt_nats/two.py": (
        "from mqtt_nats.one import once\n\n\ndef twice(number: int) -> int:\n    return once(number) + once(number)\n"
    ),
    "streams/mqtt_streams/__init__.py": "",
    "spark/pyspark_mqtt_nats/__init__.py": "",
}

PREFIX = "/nowhere/cc"


class Replaced(Exception):
    """The process would run another program now."""


@stands_for(Application)
class FakeApplication:
    """Stands for `Application`: it keeps the warnings."""

    def __init__(self) -> None:
        self.fake_warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.fake_warnings.append(text)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name, text in SOURCES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shutil.copy(hatch_build.__file__, root / "hatch_build.py")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def included(root: Path, version: str = "standard") -> tuple[dict[str, str], list[str]]:
    """What the build hook adds to a wheel of a checkout, by its name there, as text; and the warnings."""
    app = FakeApplication()
    modules = {"modules": ["mqtt_nats/one.py", "mqtt_nats/two.py"]}
    hook: Any = hatch_build.CompiledModules(str(root), modules, None, None, "", "wheel", app)  # type: ignore[arg-type]
    data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    try:
        hook.initialize(version, data)
        found = {name: Path(file).read_text(errors="replace") for file, name in data["force_include"].items()}
        assert data["pure_python"] is not any(name.endswith(".so") for name in found)
    finally:
        hook.finalize(version, data, "")
    assert not any(Path(file).exists() for file in data["force_include"])
    return found, app.fake_warnings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The copies that `run` has made meanwhile; to become another program raises Replaced, with its arguments."""
    found: list[Path] = []

    def become(path: str, arguments: list[str], environ: dict[str, str]) -> None:
        raise Replaced(arguments[1:], environ.get("PYTHONPATH", ""), environ.get(hatch_build.REASON, ""))

    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setattr(hatch_build, "compile_meanwhile", lambda root, copy: found.append(copy))
    for name in (hatch_build.BUILD, hatch_build.REASON, "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    return found


def ran(checkout: Path, copy: Path) -> tuple[str, str]:
    """PYTHONPATH of the program that `run` becomes, and the reason for pure Python that it is told."""
    with pytest.raises(Replaced) as replaced:
        hatch_build.run(checkout, copy, ["serve"])
    arguments, path, reason = replaced.value.args
    assert arguments == ["-P", "-m", "mqtt_nats", "serve"]
    return path, reason


def mark_fresh(checkout: Path, copy: Path) -> None:
    copy.mkdir(exist_ok=True)
    (copy / hatch_build.STAMP).write_text(hatch_build.digest(checkout))


def test_a_copy_is_fresh_until_a_source_changes(checkout: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert not hatch_build.is_fresh(checkout, copy)
    for name in ("mqtt_nats/one.py", "streams/mqtt_streams/__init__.py", "pyproject.toml", "hatch_build.py"):
        mark_fresh(checkout, copy)
        assert hatch_build.is_fresh(checkout, copy)
        with (checkout / name).open("a") as source:
            source.write("\n")
        assert not hatch_build.is_fresh(checkout, copy)
    mark_fresh(checkout, copy)
    (checkout / "mqtt_nats/three.py").write_text("")
    assert not hatch_build.is_fresh(checkout, copy)


def test_the_first_start_runs_the_sources_and_compiles_meanwhile(
    checkout: Path, tmp_path: Path, started: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    reason = "the modules are not compiled yet"
    assert ran(checkout, copy) == ("", reason)
    assert started == [copy]
    assert capsys.readouterr().out.startswith(f"Pure Python: {reason}. They are compiled meanwhile, for the next start")


@pytest.mark.processes
def test_sources_that_have_changed_are_what_runs(
    checkout: Path, tmp_path: Path, started: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody looks for a fault in code that does not run."""
    copy = tmp_path / "copy"
    mark_fresh(checkout, copy)
    assert ran(checkout, copy)[0].startswith(str(copy))
    with (checkout / "mqtt_nats/one.py").open("a") as source:
        source.write("# more\n")
    reason = "the compiled modules are of other sources"
    assert ran(checkout, copy) == ("", reason)
    assert started == [copy]
    assert capsys.readouterr().out.startswith(f"Pure Python: {reason}. They are compiled meanwhile, for the next start")


@pytest.mark.processes
def test_a_start_runs_the_copy_that_has_the_same_sources(
    checkout: Path, tmp_path: Path, started: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    mark_fresh(checkout, copy)
    path, reason = ran(checkout, copy)
    assert reason == ""
    assert path.split(os.pathsep) == [str(copy), str(copy / "streams"), str(copy / "spark")]
    assert started == []
    monkeypatch.setenv(hatch_build.BUILD, "pure")
    assert ran(checkout, copy) == ("", "MQTT_NATS_BUILD=pure")
    assert started == []
    monkeypatch.setenv(hatch_build.BUILD, "fast")
    with pytest.raises(ValueError, match="pure or compiled, not 'fast'"):
        hatch_build.run(checkout, copy, ["serve"])


@pytest.mark.processes
def test_a_start_of_the_copy_takes_over_what_is_not_compiled(
    checkout: Path, tmp_path: Path, started: list[Path]
) -> None:
    """Pages of the dashboard, definitions of streams; and a test that is gone is not run in the copy."""
    copy = tmp_path / "copy"
    page, other = "mqtt_nats/static/page.js", "streams/mqtt_streams/definitions/one.json"
    for name, text in ((page, "1"), (other, "{}"), ("tests/test_gone.py", "")):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    mark_fresh(checkout, copy)
    ran(checkout, copy)
    assert (copy / "tests/test_gone.py").exists()
    extension = copy / "mqtt_nats/one.cpython-311.so"
    extension.write_text("")
    (checkout / page).write_text("2")
    (checkout / "tests/test_gone.py").unlink()
    ran(checkout, copy)
    assert ((copy / page).read_text(), (copy / other).read_text()) == ("2", "{}")
    assert not (copy / "tests/test_gone.py").exists()
    assert extension.exists()
    assert started == []


def test_without_a_compiler_the_start_says_so(
    checkout: Path,
    tmp_path: Path,
    started: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CC", PREFIX)
    reason = f"there is no C compiler ({PREFIX})"
    assert ran(checkout, tmp_path / "copy") == ("", reason)
    assert started == []
    assert reason in capsys.readouterr().out


def test_a_wheel_without_a_compiler_is_of_the_sources(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", PREFIX)
    monkeypatch.delenv(hatch_build.BUILD, raising=False)
    reason = f"there is no C compiler ({PREFIX})"
    found, (warning,) = included(checkout)
    assert found == {hatch_build.REASON_FILE: f"{reason}\n"}
    assert warning.startswith(f"pure Python: {reason}")


def test_a_build_that_is_to_compile_nothing(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hatch_build.BUILD, "pure")
    assert included(checkout) == ({hatch_build.REASON_FILE: "built with MQTT_NATS_BUILD=pure\n"}, [])


def test_an_editable_install_compiles_nothing(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hatch_build.BUILD, "compiled")
    assert included(checkout, "editable") == ({}, [])


@pytest.mark.parametrize(("processors", "most"), [(1, 1), (3, 3), (64, hatch_build.COMPILERS_MOST)])
def test_compilers_at_a_time(processors: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as this process has processors, the largest files first; never so many that they need all memory."""
    if sys.platform == "linux":
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    files = []
    for number in range(most + 2):
        file = tmp_path / f"{number}.c"
        file.write_text("x" * number)
        files.append(str(file))
    together = threading.Barrier(most)
    began: list[str] = []
    running: set[str] = set()

    def compile_files(names: list[str], *, debug: bool) -> list[str]:
        began.extend(names)
        running.update(names)
        assert len(running) <= most
        if len(began) <= most:
            together.wait(60)
        running.difference_update(names)
        return [f"{name}.o" for name in names]

    made = hatch_build.compile_together(compile_files, files, debug=False)
    assert sorted(made) == sorted(f"{name}.o" for name in files)
    assert files[0] not in began[:most]


@pytest.mark.processes
def test_what_cannot_be_compiled_is_taken_as_it_is(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the compiled build was asked for."""
    (checkout / "mqtt_nats/one.py").write_text("def once(number: int) -> int:\n    return str(number)\n")
    monkeypatch.delenv(hatch_build.BUILD, raising=False)
    monkeypatch.setattr(hatch_build, "missing_for_compiler", lambda: "")
    found, (warning,) = included(checkout)
    assert found == {hatch_build.REASON_FILE: "the modules could not be compiled\n"}
    assert "could not be compiled" in warning
    monkeypatch.setenv(hatch_build.BUILD, "compiled")
    with pytest.raises(subprocess.CalledProcessError):
        included(checkout)


@pytest.mark.processes
@pytest.mark.skipif(bool(hatch_build.missing_for_compiler()), reason=hatch_build.missing_for_compiler())
def test_a_compiled_copy(checkout: Path) -> None:
    copy = checkout / "build" / "compiled"
    left_over = checkout / "build" / "compiled-of-one-that-was-killed"
    left_over.mkdir(parents=True)
    command = [sys.executable, "hatch_build.py", "copy", str(copy)]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True, timeout=300)
    assert hatch_build.is_fresh(checkout, copy)
    assert not left_over.exists()
    made = (copy / hatch_build.STAMP).stat().st_mtime_ns
    subprocess.run(command, cwd=checkout, check=True, capture_output=True, timeout=300)
    assert (copy / hatch_build.STAMP).stat().st_mtime_ns == made
    running = [sys.executable, "hatch_build.py", "run", str(copy)]
    printed = subprocess.run(running, cwd=checkout, check=True, capture_output=True, text=True, timeout=60).stdout
    where, number = printed.split()
    assert (Path(where).suffix, number) == (".so", "6")
