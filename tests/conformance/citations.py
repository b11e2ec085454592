# SPDX-License-Identifier: Apache-2.0
"""Find citations of normative statements in source files, and the tests that they stand for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
CODE = ("mqtt_nats", "streams")
TESTS = ("tests",)

DEFAULT = "3.1.1"
"""The standard of an id without a mark."""

_ID = re.compile(r"\[MQTT-(3-8\.3-4|\d+\.\d+\.\d+-\d+)\]")
_MARK = re.compile(r"[\s,]*\((3\.1\.1|5\.0|3\.1\.1, 5\.0)\)")
_BETWEEN = re.compile(r"[\s,]*(?:and )?")
_ANY = re.compile(r"MQTT-\d[\d.-]*")


@dataclass(frozen=True)
class Citation:
    """One id on one line."""

    standard: str
    id: str
    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass
class Found:
    """Everything cited: (standard, id) -> places in the code, and tests that prove it."""

    code: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    tests: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    all: list[Citation] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    """``path:line: text`` of what looks like a citation and is none."""


def citations(path: str, text: str) -> tuple[list[Citation], list[str]]:
    """The citations of a file, and what looks like one."""
    found: list[Citation] = []
    malformed: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if "MQTT-" not in line:
            continue
        group: list[str] = []
        end = 0
        spans = list(_ID.finditer(line))
        for index, match in enumerate(spans):
            if group and not _BETWEEN.fullmatch(line, end, match.start()):
                group = []
            group.append(match[1])
            end = match.end()
            mark = _MARK.match(line, end)
            following = spans[index + 1].start() if index + 1 < len(spans) else len(line)
            if mark is not None:
                standards = mark[1].split(", ")
                end = mark.end()
            elif _BETWEEN.fullmatch(line, end, following) and following < len(line):
                continue  # its mark, if any, comes behind the next id
            else:
                standards = [DEFAULT]
            found += [Citation(standard, one, path, number) for one in group for standard in standards]
            group = []
        good = [(match.start(), match.end()) for match in spans]
        malformed += [
            f"{path}:{number}: {match[0]}"
            for match in _ANY.finditer(line)
            if not any(start < match.start() and match.end() < stop for start, stop in good)
        ]
    return found, malformed


class Module:
    """A test module: its tests and tables, and what they are made of."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.name = path.removesuffix(".py").replace("/", ".")
        self.uses: dict[str, set[tuple[str, str]]] = {}
        """Test or table -> (module, name) of everything in its decorators or its definition."""
        self.tests: set[str] = set()
        self._blocks: list[tuple[int, int, str, bool]] = []
        imported: dict[str, tuple[str, str]] = {}
        tree = ast.parse(text)
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    imported[alias.asname or alias.name] = (node.module, alias.name)
        self._walk(tree.body, imported, "")

    def _walk(self, body: list[ast.stmt], imported: dict[str, tuple[str, str]], prefix: str) -> None:
        def names(*nodes: ast.AST) -> set[tuple[str, str]]:
            parts = [part for node in nodes for part in ast.walk(node)]
            return {imported.get(part.id, (self.name, part.id)) for part in parts if isinstance(part, ast.Name)}

        for index, node in enumerate(body):
            end = node.end_lineno or node.lineno
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    start = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                    name = prefix + node.name
                    self._blocks.append((start, end, name, False))
                    if node.name.startswith("test_"):
                        self.tests.add(name)
                        self.uses[name] = names(*node.decorator_list)  # its rows
                case ast.ClassDef() if node.name.startswith("Test"):
                    self._walk(node.body, imported, f"{node.name}::")
                case ast.Assign() | ast.AnnAssign():
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    after = body[index + 1] if index + 1 < len(body) else None
                    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                        end = after.end_lineno or end  # the table's docstring
                    for target in targets:
                        if isinstance(target, ast.Name):
                            self.uses[prefix + target.id] = names(node)
                            self._blocks.append((node.lineno, end, prefix + target.id, True))
                case _:
                    pass

    def at(self, line: int) -> tuple[str, bool] | None:
        """The test or table that a line belongs to, and whether it is a table."""
        for start, end, name, table in self._blocks:
            if start <= line <= end:
                return (name, table) if table or name in self.tests else None
        return None


def _sources(root: Path, folders: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            if path.parent != FOLDER:
                yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def scan(root: Path = ROOT) -> Found:
    """Every citation below ``root``; this package's own examples are none."""
    found = Found()
    for path, text in _sources(root, CODE):
        cited, malformed = citations(path, text)
        found.all += cited
        found.malformed += malformed
        for one in cited:
            found.code.setdefault((one.standard, one.id), []).append(str(one))
    modules: list[tuple[Module, list[Citation]]] = []
    for path, text in _sources(root, TESTS):
        cited, malformed = citations(path, text)
        found.all += cited
        found.malformed += malformed
        modules.append((Module(path, text), cited))
    users = _users([module for module, _ in modules])
    rows: dict[tuple[str, str], dict[tuple[str, str], list[int]]] = {}
    for module, cited in modules:
        for one in cited:
            place = module.at(one.line)
            if place is None:
                continue
            name, table = place
            key = (one.standard, one.id)
            if table:
                for node in users.get((module.name, name), []):
                    rows.setdefault(key, {}).setdefault((node, name), []).append(one.line)
            else:
                rows.setdefault(key, {}).setdefault((f"{module.path}::{name}", ""), [])
    for key, tests in rows.items():
        found.tests[key] = [_row(node, name, lines) for (node, name), lines in tests.items()]
    return found


def _row(node: str, name: str, lines: list[int]) -> str:
    if not lines:
        return node
    return f"{node} ({name}, line{'s'[: len(lines) > 1]} {', '.join(map(str, lines))})"


def _users(modules: list[Module]) -> dict[tuple[str, str], list[str]]:
    """(module, table) -> the tests whose rows come from it, directly or through other tables."""
    known = {(module.name, name): uses for module in modules for name, uses in module.uses.items()}
    users: dict[tuple[str, str], list[str]] = {}
    for module in modules:
        for test in sorted(module.tests):
            reached: set[tuple[str, str]] = set()
            todo = [(module.name, test)]
            while todo:
                one = todo.pop()
                if one not in reached and one in known:
                    reached.add(one)
                    todo += known[one]
            for one in reached:
                users.setdefault(one, []).append(f"{module.path}::{test}")
    return users
