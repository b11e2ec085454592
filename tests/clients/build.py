# SPDX-License-Identifier: Apache-2.0
"""Clients are installed from their registries, and built, below ``.cache/clients``, once for each version."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.harness.nats import ROOT

CACHE = ROOT / ".cache" / "clients"
PROGRAMS = Path(__file__).parent / "programs"

INSTALL_WAIT_S = 900


class MissingError(Exception):
    """A client cannot be had here; the text says why."""


def find(*programs: str) -> str:
    """The first of these programs that is installed.

    Raises:
        MissingError: none is.
    """
    for name in programs:
        if found := shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin"):
            return found
    raise MissingError(f"`{'` or `'.join(programs)}` is not installed")


def run(command: Sequence[str], directory: Path) -> None:
    """Run a step of an installation.

    Raises:
        MissingError: it fails, or takes too long.
    """
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_WAIT_S,
        )
    except subprocess.TimeoutExpired:
        raise MissingError(f"`{Path(command[0]).name}` took more than {INSTALL_WAIT_S} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        reason = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise MissingError(f"`{Path(command[0]).name} {' '.join(command[1:3])}` failed: {reason[:200]}")


def made(name: str, sources: Sequence[Path], steps: Sequence[Sequence[str]]) -> Path:
    """A folder with copies of ``sources``, in which ``steps`` have been run; again when one of both has changed.

    Raises:
        MissingError: a step fails.
    """
    directory = CACHE / name
    state = "\n".join([*(one.read_text(encoding="utf-8") for one in sources), *map(str, steps)])
    stamp = directory / "made"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == state:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    for one in sources:
        target = directory / one.relative_to(PROGRAMS / name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(one, target)
    for step in steps:
        run(step, directory)
    stamp.write_text(state, encoding="utf-8")
    return directory


def pip(*requirements: str) -> Path:
    """A folder for PYTHONPATH with these packages, and nothing of ours."""
    name = "pip-" + "-".join(requirements).replace("==", "-")
    return made(name, [], [[sys.executable, "-m", "pip", "install", "--quiet", "--target", ".", *requirements]])


def npm(package: str) -> Path:
    """The folder ``node_modules`` with a package of the npm registry, such as ``mqtt@5.10.1``."""
    command = [find("npm"), "install", "--silent", "--no-audit", "--no-fund", "--prefix", ".", package]
    return made(f"npm-{package}", [], [command]) / "node_modules"


def sources(name: str) -> list[Path]:
    """The files of a program that is a folder."""
    return sorted(path for path in (PROGRAMS / name).rglob("*") if path.is_file())


def pinned(name: str, file: str, pattern: str) -> str:
    """The version that a file of a program pins: the first group of ``pattern``."""
    found = re.search(pattern, (PROGRAMS / name / file).read_text(encoding="utf-8"))
    assert found is not None, f"{file} of {name} has no {pattern}"
    return found[1]


def output(command: Sequence[str]) -> str:
    """What a command prints, whatever its exit status."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30).stdout.strip()
