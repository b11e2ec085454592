# SPDX-License-Identifier: Apache-2.0
"""The single steps of docs/compiled.md can be measured."""

import re

import pytest

from benchmarks.steps import measure, steps
from tests.harness.nats import ROOT


@pytest.mark.parametrize("name", steps())
def test_a_step_runs_and_is_in_the_table(name: str) -> None:
    assert measure(steps()[name], 3, 2) > 0
    assert f"| {name} " in (ROOT / "docs" / "compiled.md").read_text(encoding="utf-8")


def test_the_page_has_no_other_step() -> None:
    text = (ROOT / "docs" / "compiled.md").read_text(encoding="utf-8")
    table = text[text.index("| step") :].partition("\n\n")[0]
    assert len(re.findall(r"^\| ", table, re.MULTILINE)) == len(steps()) + 1
