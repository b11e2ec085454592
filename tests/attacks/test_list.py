# SPDX-License-Identifier: Apache-2.0
"""The list of attacks in the documentation names tests that there are."""

import ast
import re

from tests.harness.nats import ROOT

PAGE = ROOT / "docs" / "internals" / "attacks.md"


def functions(file: str) -> set[str]:
    """Names of the functions of a module."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_attack_has_a_test() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = [re.fullmatch(r"\| .+ \| `(tests/[a-z0-9_/]+\.py)::(\w+)` \|", row) for row in rows if " test |" not in row]
    assert all(named), [row for row, found in zip(rows, named, strict=False) if not found]
    missing = [found[0] for found in named if found and found[2] not in functions(found[1])]
    assert not missing, missing
    floods = functions("tests/attacks/test_floods.py")
    text = (ROOT / "tests/attacks/test_floods.py").read_text(encoding="utf-8")
    used = {found[2] for found in named if found and found[1] == "tests/attacks/test_floods.py"}
    assert used <= floods
    assert used == set(re.findall(r"^    \((\w+), \d+, \d+\),", text, re.MULTILINE))
