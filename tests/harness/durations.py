# SPDX-License-Identifier: Apache-2.0
"""Which tests `make test` leaves to `make test-long`: `tests/conftest.py` gives them the mark ``long`` by this table.

Files and folders stand here that need much time for what they prove; of these, tests that start processes are long.
Some of each kind stay in `make test`: those of `SHORT`, and the files that do not stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import PurePosixPath
from typing import Final

LONG: Final[Mapping[str, int]] = {
    "tests/chaos/test_experiments.py": 550,
}
"""Seconds of a file, or of the longest file of a folder, in one of four processes. What takes longest is run first."""

SHORT: Final[frozenset[str]] = frozenset(("tests/chaos/test_experiments.py::test_experiment[R1]",))
"""Tests of these files that `make test` runs all the same; a name without parameters is that of all its cases."""


@cache
def seconds(path: str) -> int:
    """What `LONG` says of a file, by itself or by its innermost folder; 0: it is not long. Paths begin with tests/."""
    parents = PurePosixPath(path).parents
    return next((LONG[str(one)] for one in (path, *parents) if str(one) in LONG), 0)


def is_long(test: str) -> bool:
    """Whether a test is long, by its node id."""
    return seconds(test.partition("::")[0]) > 0 and not {test, test.partition("[")[0]} & SHORT
