# SPDX-License-Identifier: Apache-2.0
"""Program that Spark starts as the Python of its workers: PySpark is imported from where it is installed.

Spark puts `pyspark.zip` first on the path of its workers. The archive has no bytecode, so each worker compiles PySpark:
that takes 2.1 s of CPU time, where an installed PySpark takes 0.65 s.
"""

import importlib.machinery
import os
import sys
from pathlib import Path
from typing import Final

PROGRAM: Final = "mqtt-nats-worker-python"
"""Name of the program that pip installs beside Python."""

_ARCHIVES: Final = "python/lib"
"""Directory of the archives in an installed PySpark."""


def worker_python() -> str:
    """Return the path of the program, or of this Python where pip has not installed the program beside it."""
    program = Path(sys.executable).with_name(PROGRAM)
    return str(program) if program.is_file() else sys.executable


def without_archives(path: str, search: list[str]) -> str:
    """Return a search path without the archives of the PySpark that is found without them.

    Args:
        path: directories and archives, as in PYTHONPATH.
        search: the same, with the directories of installed packages.
    """
    entries = path.split(os.pathsep)
    archives = {one for one in entries if one.endswith(".zip") and Path(one).parent.match(f"*/{_ARCHIVES}")}
    found = importlib.machinery.PathFinder.find_spec("pyspark", [one for one in search if one not in archives])
    if found is None or found.origin is None:
        return path
    own = Path(found.origin).parent / _ARCHIVES
    return os.pathsep.join(one for one in entries if one not in archives or Path(one).parent != own)


def main() -> None:
    """Run Python in this process, with the arguments of this program."""
    os.environ["PYTHONPATH"] = without_archives(os.environ.get("PYTHONPATH", ""), sys.path)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
