# SPDX-License-Identifier: Apache-2.0
"""Findings of a migration by file and line, and the files that a migration writes."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mqtt_nats.base.errors import StartupError

Kind = Literal["moved", "changes", "missing", "not needed"]
"""``moved``: has the same effect here. ``changes``: has another effect here. ``missing``: has no counterpart."""


class Finding(NamedTuple):
    """Result for one line of the other broker's configuration: moved, changed, missing or not needed."""

    file: str
    line: int
    """Number of the line, the first is 1; 0: the finding is about the whole file."""
    kind: Kind
    subject: str
    """The option or entry that the finding is about, without secrets."""
    text: str

    def __str__(self) -> str:
        """Return the finding as one line."""
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.kind}: {self.subject}: {self.text}"


class Ban(NamedTuple):
    """A ban to set with `mqtt-nats ctl bans add`."""

    kind: Literal["client", "user", "address"]
    who: str
    seconds: int | None
    """For how long; None: always."""
    reason: str


@dataclass(slots=True)
class Migration:
    """Result of reading a configuration: settings of the gateway, access rules, lines of users, and findings."""

    settings: dict[str, Any] = field(default_factory=dict)
    rules: list[dict[str, Any]] | None = None
    """Rules in the order of the ACL file; None: no ACL file, everybody may do everything."""
    rules_default: Literal["allow", "deny"] = "deny"
    users: dict[str, str] | None = None
    """Hashes by user; None: no password file."""
    decided: str = ""
    """Place of the rule about everybody and everything, which later rules cannot change; empty = there is none."""
    lost_denial: bool = False
    """Whether a rule that denies has no counterpart: a rule behind it that allows would allow more than before."""
    bans: list[Ban] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def has_rules(self) -> bool:
        """Whether an ACL file is needed: not where everybody may do everything."""
        return self.rules is not None and bool(self.rules or self.rules_default == "deny")

    def find(self, file: Path | str, line: int, kind: Kind, subject: str, text: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(str(file), line, kind, subject, text))

    def add_users(self, users: Mapping[str, str]) -> None:
        """Add hashes by user; with none there is a password file without users."""
        self.users = {**(self.users or {}), **users}

    def add_rules(self, rules: Iterable[dict[str, Any]], *, first: bool = False) -> None:
        """Add rules behind those that are there, or before them."""
        added, present = list(rules), self.rules or []
        self.rules = [*added, *present] if first else [*present, *added]

    def decide(self, default: Literal["allow", "deny"], place: str) -> None:
        """Set what the rule at that place decides for everybody and everything; the first such rule counts."""
        self.rules_default, self.decided = default, place

    def lose_denial(self) -> None:
        """Note that a rule that denies has no counterpart; where no rule applies, access is denied."""
        self.lost_denial = True
        self.rules_default, self.rules = "deny", self.rules or []

    def files(self) -> dict[str, str]:
        """Return the text of each file to write, by name."""
        found = {"gateway.toml": self._gateway()}
        if self.has_rules:
            found["acl.toml"] = self._rules()
        if self.users is not None:
            found["passwords"] = "".join(f"{name}:{text}\n" for name, text in self.users.items())
        if self.bans:
            found["bans.sh"] = self._bans()
        return found

    def _gateway(self) -> str:
        settings = dict(self.settings)
        if self.users is not None:
            settings["password_file"] = "passwords"
        if self.has_rules:
            settings["acl_file"] = "acl.toml"
        listeners = settings.pop("listeners", [])
        return (
            "\n".join([*_pairs(settings), *(line for one in listeners for line in ("", *_table("listeners", one)))])
            + "\n"
        )

    def _rules(self) -> str:
        head = ['default = "allow"'] if self.rules_default == "allow" else []
        return (
            "\n".join([*head, *(line for one in self.rules or () for line in ("", *_table("rules", one)))]).lstrip("\n")
            + "\n"
        )

    def _bans(self) -> str:
        lines = ["#!/bin/sh", "# Run this where `mqtt-nats ctl` reaches NATS.", "set -e"]
        for one in self.bans:
            length = "always" if one.seconds is None else f"{one.seconds}s"
            options = f"--for {length} --reason {shlex.quote(one.reason)}"
            lines.append(f"mqtt-nats ctl bans add {options} -- {one.kind} {shlex.quote(one.who)}")
        return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_pairs(value)) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return str(value)


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {toml_value(value)}" for name, value in values.items()]


def _table(name: str, values: Mapping[str, Any]) -> list[str]:
    return [f"[[{name}]]", *_pairs(values)]


def write_files(directory: Path, files: Mapping[str, str], force: bool) -> None:
    """Write the files, which only their owner may read; files that exist are replaced with ``force`` only.

    Raises:
        StartupError: a file exists or cannot be written; where one exists, nothing is written.
    """
    there = sorted(name for name in files if (directory / name).exists())
    if there and not force:
        raise StartupError(f"{directory / there[0]} exists: --force replaces it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = directory / name
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise StartupError(f"cannot write to {directory}: {error.strerror}") from None


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file.

    Raises:
        StartupError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None


def shown(findings: Iterable[Finding], everything: bool) -> list[str]:
    """Return the findings as lines; those that need nothing are left out unless ``everything``."""
    return [str(one) for one in findings if everything or one.kind in ("changes", "missing")]
