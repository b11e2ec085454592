# SPDX-License-Identifier: Apache-2.0
"""The list of modules that are compiled, and which build runs. `make test-compiled` runs the tests on compiled ones."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from hatch_build import ROOTS, listed
from mqtt_nats.building import build
from tests.harness.nats import ROOT

COMPILED = find_spec("mqtt_nats__mypyc") is not None
"""True in the tree of ``make test-compiled``."""


def dotted(path: str) -> str:
    """The name by which a module is imported."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] in ROOTS else parts)


@pytest.mark.parametrize("path", listed(ROOT))
def test_each_module_of_the_list_is_what_runs(path: str) -> None:
    source = ROOT / path
    assert source.is_file()
    module = import_module(dotted(path))
    assert module.__file__ is not None
    # Of a compiled module mypyc makes the directory up.
    assert Path(module.__file__).suffix != ".py" if COMPILED else Path(module.__file__) == source


def test_the_build_has_a_name() -> None:
    assert build() == ("compiled" if COMPILED else "pure Python")


def test_mutants_run_from_the_sources() -> None:
    code = "import tests.chaos.mutants, mqtt_nats.building; print(mqtt_nats.building.build())"
    path = [str(ROOT / each) for each in (*ROOTS, "spark")]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "pure Python\n"
