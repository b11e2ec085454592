# SPDX-License-Identifier: Apache-2.0
"""What mypyc asks of the modules that it compiles, read from the sources: nothing is compiled here."""

import ast
from pathlib import Path

from hatch_build import listed
from tests.harness.nats import ROOT

PLACES = {"mqtt_nats": ROOT, "mqtt_streams": ROOT / "streams"}


def _path(module: str) -> Path | None:
    place = PLACES.get(module.partition(".")[0])
    if place is None:
        return None
    path = place.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _class(path: Path, name: str) -> tuple[Path, ast.ClassDef] | None:
    """Where a class that ``path`` knows by a name is defined."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return path, node
    for one in ast.walk(tree):
        if isinstance(one, ast.ImportFrom) and one.module:
            for alias in one.names:
                if (alias.asname or alias.name) == name and (source := _path(one.module)) is not None:
                    return _class(source, alias.name)
    return None


def test_what_is_derived_from_elsewhere_allows_it() -> None:
    """A class of a module that is not compiled cannot be made of one that is, unless that one says so."""
    compiled = {ROOT / name for name in listed(ROOT)}
    seen = 0
    for top, place in PLACES.items():
        for path in (place / top).rglob("*.py"):
            if path in compiled:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                for base in node.bases if isinstance(node, ast.ClassDef) else ():
                    found = _class(path, base.id) if isinstance(base, ast.Name) else None
                    if found is None or found[0] not in compiled:
                        continue
                    seen += 1
                    marks = [ast.unparse(one) for one in found[1].decorator_list]
                    assert "mypyc_attr(allow_interpreted_subclasses=True)" in marks, f"{path}: {ast.unparse(base)}"
    assert seen > 5


def _awaits(nodes: list[ast.stmt]) -> bool:
    """Whether a coroutine may be suspended in these statements, other than in a function that they define."""
    left: list[ast.AST] = list(nodes)
    while left:
        node = left.pop()
        if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            left += ast.iter_child_nodes(node)
    return False


def _raises_again(nodes: list[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Raise) and node.exc is None for top in nodes for node in ast.walk(top))


def test_what_is_suspended_is_handling_nothing_that_it_needs_again() -> None:
    """The end of a ``finally``, and a bare ``raise``, take what is being handled where the coroutine goes on."""
    seen = 0
    for name in listed(ROOT):
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Try):
                seen += 1
                assert not _awaits(node.finalbody), f"{name}:{node.lineno}: await in finally"
                for handler in node.handlers:
                    again = _awaits(handler.body) and _raises_again(handler.body)
                    assert not again, f"{name}:{handler.lineno}: raise behind await"
    assert seen > 20


def _defined(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}


def test_tasks_begin_in_what_is_not_compiled() -> None:
    """A suspended coroutine that is compiled leaves what it handles to the next task, if there is nothing below it."""
    compiled = {ROOT / name for name in listed(ROOT)}
    sources = [path for top, place in PLACES.items() for path in (place / top).rglob("*.py")]
    elsewhere = set().union(*(_defined(path) for path in sources if path not in compiled))
    # Of a name that others have too nobody can tell here which one is meant.
    unique = set().union(*(_defined(path) for path in compiled)) - elsewhere
    seen = 0
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
                continue
            function = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if function not in ("create_task", "ensure_future", "gather"):
                continue
            seen += 1
            for given in node.args:
                work = given.value.elt if isinstance(given, ast.Starred) and hasattr(given.value, "elt") else given
                called = ast.unparse(work.func).rpartition(".")[2] if isinstance(work, ast.Call) else ""
                assert called not in unique, f"{path}:{node.lineno}: {called}"
    assert seen > 20
