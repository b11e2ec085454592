# SPDX-License-Identifier: Apache-2.0
"""Doubles of a test are small classes; each has the names of the class that it stands for."""

import ast
from importlib import import_module

import pytest

from scripts.packages import parsed
from tests.architecture.test_packages import TESTS
from tests.harness.doubles import STANDS_FOR, foreign_names, members

UNTYPED = frozenset(("SimpleNamespace", "MagicMock", "Mock", "AsyncMock", "create_autospec"))
"""Classes and functions whose objects have whatever name a test gives or asks for."""

FILES = sorted(TESTS.rglob("*.py"))


def doubles() -> list[tuple[str, str]]:
    """The module and the name of each class that stands for another."""
    return [
        (".".join(path.relative_to(TESTS.parent).with_suffix("").parts), node.name)
        for path in FILES
        if "@stands_for(" in path.read_text(encoding="utf-8")
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef) and any("stands_for(" in ast.unparse(one) for one in node.decorator_list)
    ]


@pytest.mark.parametrize(("module", "name"), doubles(), ids=str)
def test_a_double_has_the_names_of_what_it_stands_for(module: str, name: str) -> None:
    """A renamed attribute fails here, and not in silence. Names of a base that stands for nothing are of the test."""
    double = getattr(import_module(module), name)
    plain = [members(base) for base in double.__mro__[1:] if base not in STANDS_FOR]
    assert foreign_names(double, STANDS_FOR[double]) - set().union(*plain) == set()


def untyped(tree: ast.Module) -> set[str]:
    """Those of `UNTYPED` that a module imports, by name or with the module that has them."""
    names = {one.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names}
    return (names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}) & UNTYPED


def test_doubles_are_typed() -> None:
    found = {path.relative_to(TESTS).as_posix(): untyped(parsed(path)) for path in FILES}
    assert {name: some for name, some in found.items() if some} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from types import SimpleNamespace", {"SimpleNamespace"}),
        ("from unittest import mock\nmock.Mock()", {"Mock"}),
        ("from unittest.mock import MagicMock as Any", {"MagicMock"}),
        ("from unittest.mock import patch\nclass Mocking: pass", set()),
    ],
)
def test_the_check_itself(text: str, found: set[str]) -> None:
    assert untyped(ast.parse(text)) == found
