# SPDX-License-Identifier: Apache-2.0
"""The order of packages and the size of functions. Exceptions are listed by name, with a reason; lists may only shrink.

The tests compare both ways: an exception that the source no longer has must leave its list.
"""

import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scripts.packages import PACKAGES, ROOT, cycle, modules, package, parsed, upward
from tests.architecture.ownership import foreign_assignments, private_names

EXCEPTIONS: dict[str, Any] = json.loads(Path(__file__).with_name("exceptions.json").read_text(encoding="utf-8"))

TESTS = ROOT / "tests"
LIBRARIES = ("streams", "spark")
FUNCTION_LINES_MAX = 50
SHRINK = "remove from tests/architecture/exceptions.json what has gone; what is new needs another design"


def short(module: str) -> str:
    return module.removeprefix("mqtt_nats.")


def test_no_import_at_run_time_points_upward() -> None:
    found = sorted(f"{short(one.source)} -> {short(one.target)}" for one in upward() if not one.types)
    assert found == []


def test_no_import_for_types_points_upward() -> None:
    found = sorted(f"{short(one.source)} -> {short(one.target)}" for one in upward() if one.types)
    assert found == []


def test_no_modules_import_each_other_at_run_time() -> None:
    assert cycle() == []


def test_every_package_has_a_place_in_the_order() -> None:
    assert {one for one in map(package, modules()) if one} - PACKAGES.keys() == set()


def long_functions(path: Path) -> dict[str, int]:
    """The functions of a file that are too long, and their lines."""
    return {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    }


def test_functions_are_short() -> None:
    found = {
        f"{short(module)}.{name}": lines
        for module, path in modules().items()
        for name, lines in long_functions(path).items()
    }
    listed: dict[str, int] = EXCEPTIONS["long_functions"]
    assert found.keys() == listed.keys(), SHRINK
    assert {name: lines for name, lines in found.items() if lines > listed[name]} == {}


def test_nobody_assigns_attributes_of_others() -> None:
    found = {short(name): dict(Counter(sorted(foreign_assignments(parsed(path))))) for name, path in modules().items()}
    assert {name: some for name, some in sorted(found.items()) if some} == EXCEPTIONS["foreign_assignments"], SHRINK


def test_nobody_uses_private_names_of_others() -> None:
    found = {short(name): dict(Counter(sorted(private_names(parsed(path))))) for name, path in modules().items()}
    assert {name: some for name, some in sorted(found.items()) if some} == EXCEPTIONS["private_names"], SHRINK


@pytest.mark.parametrize("folder", LIBRARIES)
def test_libraries_have_short_functions_and_use_no_private_names_of_others(folder: str) -> None:
    """The packages beside the gateway, without exceptions."""
    files = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / folder).rglob("*.py"))}
    assert files
    assert {name: some for name, path in files.items() if (some := long_functions(path))} == {}
    assert {name: names for name, path in files.items() if (names := list(private_names(parsed(path))))} == {}


def test_each_exception_has_a_reason() -> None:
    names = set(EXCEPTIONS["long_functions"])
    for kind in ("foreign_assignments", "private_names"):
        names |= {f"{module} {name}" for module, found in EXCEPTIONS[kind].items() for name in found}
    assert EXCEPTIONS["reasons"].keys() == names
    assert all(EXCEPTIONS["reasons"].values())


@pytest.mark.parametrize(
    ("text", "foreign", "private"),
    [
        ("self.a = 1", [], []),
        ("client.a = 1", ["client.a"], []),
        ("self.client.a += 1", ["client.a"], []),
        ("del side.a", ["side.a"], []),
        ("find().a = 1", ["().a"], []),
        ("(a.x, b.y) = 1, 2", ["a.x", "b.y"], []),
        ("print(client.a)", [], []),
        ("print(client._a)", [], ["client._a"]),
        ("self._a = 1\nprint(other._a)", [], []),
        ("from mqtt_nats.base import _x", [], ["mqtt_nats.base._x"]),
        ("from collections import _x", [], []),
        ("from mqtt_nats import __version__", [], []),
        ("will._replace(seq=1)\nos._exit(1)", [], []),
        ("a.__slots__", [], []),
        ("Row._fields\nspark._jvm", [], []),
        ("from pyspark_mqtt_nats.options import _x", [], ["pyspark_mqtt_nats.options._x"]),
    ],
)
def test_the_checks_themselves(text: str, foreign: list[str], private: list[str]) -> None:
    assert sorted(foreign_assignments(ast.parse(text))) == foreign
    assert sorted(private_names(ast.parse(text))) == private


def faces() -> dict[str, str]:
    """For each name that the face of a package exports, which module has it: `codec` and `hooks` are imported so."""
    return {
        f"{name}.{one.asname or one.name}": node.module
        for name, path in modules().items()
        if path.stem == "__init__"
        for node in parsed(path).body
        if isinstance(node, ast.ImportFrom) and node.module
        for one in node.names
    }


def imported_by(folder: Path) -> set[str]:
    """Modules of the gateway, and names from them, that the tests of a folder import."""
    nodes = (node for path in folder.rglob("test_*.py") for node in ast.walk(parsed(path)))
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    known = faces()
    return found | {known[one] for one in found & known.keys()}


def test_each_module_has_tests_of_its_own() -> None:
    """In the folder of its package, not only by whole gateways, which take long and do not come to every corner."""
    imported = {name: imported_by(TESTS / name) for name in PACKAGES}
    found = {
        short(name)
        for name, path in modules().items()
        if package(name) and path.stem != "__init__" and any(map(_decides, parsed(path).body))
        if name not in imported[package(name)]
    }
    listed: dict[str, str] = EXCEPTIONS["without_tests"]
    assert found == set(listed), SHRINK
    assert all(listed.values())


def _decides(node: ast.stmt) -> bool:
    """Whether a statement of a module is a function, or a class with one; a protocol decides nothing."""
    if isinstance(node, ast.ClassDef):
        protocol = any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
        return not protocol and any(map(_decides, node.body))
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
