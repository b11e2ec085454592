# SPDX-License-Identifier: Apache-2.0
"""The statements of each standard, what proves them, and what is wrong."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from tests.conformance.citations import Found

FOLDER = Path(__file__).parent
BINDS = ("server", "client", "both")


@dataclass(frozen=True)
class Statement:
    """One normative statement."""

    id: str
    binds: str
    text: str
    void: str = ""

    @property
    def needs_test(self) -> bool:
        """True for what binds a server, unless its condition does not hold for this one."""
        return self.binds != "client" and not self.void


@dataclass(frozen=True)
class Standard:
    """A version of MQTT."""

    name: str
    statements: tuple[Statement, ...]

    @property
    def ids(self) -> frozenset[str]:
        """Every id that may be cited."""
        return frozenset(one.id for one in self.statements)


def standards(folder: Path = FOLDER) -> list[Standard]:
    """Read ``mqtt-*.toml``, oldest version first."""
    found = []
    for path in sorted(folder.glob("mqtt-*.toml")):
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        statements = tuple(Statement(id, **fields) for id, fields in data["statements"].items())
        for one in statements:
            assert one.binds in BINDS, one
            assert one.text, one
        found.append(Standard(data["standard"], statements))
    return found


def problems(found: Found, all_standards: list[Standard]) -> list[str]:
    """Everything that makes the table wrong or incomplete, one line each."""
    ids = {standard.name: standard.ids for standard in all_standards}
    wrong = [f"{text}: not the id of a statement" for text in found.malformed]
    wrong += [
        f"{one}: MQTT {one.standard} has no statement {one.id}" for one in found.all if one.id not in ids[one.standard]
    ]
    for standard in all_standards:
        for one in standard.statements:
            tests = found.tests.get((standard.name, one.id))
            if one.needs_test and not tests:
                wrong.append(f"MQTT {standard.name}: no test proves {one.id}: {one.text}")
            if one.void and tests:
                wrong.append(f"MQTT {standard.name}: {one.id} is void ({one.void}), but {tests[0]} cites it")
    return wrong


def table(found: Found, standard: Standard) -> Iterator[str]:
    """Lines: statement, whom it binds, places in the code, tests."""
    rows: list[tuple[str, str, str, str]] = [("statement", "binds", "code", "test")]
    for one in standard.statements:
        key = (standard.name, one.id)
        tests = found.tests.get(key) or ([f"void: {one.void}"] if one.void else ["-"])
        cells = zip_longest(found.code.get(key, ["-"]), tests, fillvalue="")
        for number, (code, test) in enumerate(cells):
            rows.append(("" if number else one.id, "" if number else one.binds, code, test))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()


def summary(found: Found, standard: Standard) -> str:
    """One line of numbers."""
    needed = [one for one in standard.statements if one.needs_test]
    covered = sum((standard.name, one.id) in found.tests for one in needed)
    clients = sum(one.binds == "client" for one in standard.statements)
    void = sum(bool(one.void) for one in standard.statements)
    return (
        f"MQTT {standard.name}: {len(standard.statements)} statements, {clients} bind only clients, {void} void; "
        f"{covered} of the other {len(needed)} have a test"
    )
