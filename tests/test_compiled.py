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
