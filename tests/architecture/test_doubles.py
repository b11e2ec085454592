# SPDX-License-Identifier: Apache-2.0
"""Doubles of a test are small classes; each has the names of the class that it stands for."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from mqtt_nats.messages.identity import Identity
from tests.architecture.test_packages import TESTS
from tests.harness.doubles import STANDS_FOR, foreign_names, members

UNTYPED = frozenset(("SimpleNamespace", "MagicMock", "Mock", "AsyncMock", "create_autospec"))
"""Classes and functions whose objects have whatever name a test gives or asks for."""


def trees(*words: str) -> Iterator[tuple[Path, ast.Module]]:
    """The test files that have one of these words, and their syntax trees."""
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(word in text for word in words):
            yield path, ast.parse(text)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(TESTS.parent).with_suffix("").parts)


def doubles() -> list[tuple[str, str]]:
    """The module and the name of each class that stands for another."""
    return [
        (module_of(path), node.name)
        for path, tree in trees("@stands_for(")
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any("stands_for(" in ast.unparse(one) for one in node.decorator_list)
    ]


@pytest.mark.parametrize(("module", "name"), doubles(), ids=str)
def test_a_double_has_the_names_of_what_it_stands_for(module: str, name: str) -> None:
    """A renamed attribute fails here, and not in silence. Names of a base that stands for nothing are of the test."""
    double = getattr(import_module(module), name)
    plain = [members(base) for base in double.__mro__[1:] if base not in STANDS_FOR]
    assert foreign_names(double, STANDS_FOR[double]) - set().union(*plain) == set()


def test_each_double_says_what_it_stands_for() -> None:
    said = {
        (module_of(path), node.name)
        for path, tree in trees("Stands for ")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and (ast.get_docstring(node) or "").startswith("Stands for ")
    }
    assert said - set(doubles()) == set(), "@stands_for is missing, or the class is not one of its module"


def test_another_name_is_found() -> None:
    class Renamed:
        def __init__(self) -> None:
            self.tenant = ""
            self.no_such_attribute = 0

        def no_such_method(self) -> None:
            pass

    assert foreign_names(Renamed, Identity) == {"no_such_attribute", "no_such_method"}


def untyped(tree: ast.Module) -> set[str]:
    """Those of `UNTYPED` that a module imports, by name or with the module that has them."""
    names = {one.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for one in node.names}
    return (names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}) & UNTYPED


def test_doubles_are_typed() -> None:
    found = {path.relative_to(TESTS).as_posix(): untyped(tree) for path, tree in trees(*UNTYPED)}
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
