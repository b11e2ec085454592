# SPDX-License-Identifier: Apache-2.0
"""Reader for configuration files of nats-server: values with the lines on which they begin."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mqtt_nats.base.errors import StartupError

DEPTH_MOST: Final = 50
"""Most levels of maps and lists, and of included files."""

_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r]+) | (?P<comment>\#[^\n]*|//[^\n]*) | (?P<newline>\n)
    | (?P<sign>[{}\[\](),:=;]) | "(?P<double>(?:[^"\\]|\\.)*)" | '(?P<single>[^']*)'
    | (?P<bare>[^\s{}\[\](),:=;"'][^\s{}\[\](),=;"']*)""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Value:
    """A value: a text, a list of values, or a map of values by key, as it is written."""

    value: Any
    file: Path
    line: int

    def get(self, *keys: str) -> Value | None:
        """Return the value under the first of these keys that the map has, in lower or upper case; None without one."""
        if not isinstance(self.value, dict):
            return None
        found = {key.lower(): value for key, value in self.value.items()}
        return next((found[key] for key in keys if key in found), None)


def read_nats(path: Path, depth: int = 0) -> Value:
    """Return the map of a configuration file, and of the files that it includes.

    Raises:
        StartupError: a file cannot be read, or is no configuration of nats-server.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartupError(f"{path} is not UTF-8 text") from None
    if depth > DEPTH_MOST:
        raise StartupError(f"{path}: files are included without end")
    return _Parser(path, text, depth).parse()


class _Parser:
    def __init__(self, path: Path, text: str, depth: int) -> None:
        self._path = path
        self._depth = depth
        self._tokens = list(_tokens(path, text))
        self._at = 0

    def parse(self) -> Value:
        return Value(self._map("", {}, 0), self._path, 1)

    def _peek(self) -> tuple[str, str, int]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "", 0)

    def _next(self) -> tuple[str, str, int]:
        found = self._peek()
        self._at += 1
        return found

    def _skip(self, signs: str) -> None:
        while self._peek()[0] == "sign" and self._peek()[1] in signs:
            self._at += 1

    def _map(self, end: str, variables: dict[str, Value], depth: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        scope = dict(variables)
        while True:
            self._skip(",;")
            kind, text, line = self._next()
            if (kind, text) == ("sign", end) or (kind == "end" and not end):
                return found
            if kind not in ("bare", "text"):
                raise self._wrong(line, "expected a key")
            if text == "include" and self._peek()[0] == "text":
                included = read_nats(self._path.parent / self._next()[1], self._depth + 1)
                found |= included.value
                scope |= included.value
                continue
            # `key: value`: the colon ends a bare key without a space, too.
            key, colon, rest = text.partition(":") if kind == "bare" else (text, "", "")
            if colon and rest:
                value = Value(_scalar(rest, scope), self._path, line)
            else:
                self._skip(":=")
                value = self._value(scope, depth + 1)
            scope[key] = value
            found[key] = value

    def _value(self, scope: dict[str, Value], depth: int) -> Value:
        kind, text, line = self._next()
        if depth > DEPTH_MOST:
            raise self._wrong(line, "too many levels")
        match kind, text:
            case "sign", "{":
                return Value(self._map("}", scope, depth), self._path, line)
            case "sign", "[":
                return Value(self._list(scope, depth), self._path, line)
            case "text", _:
                return Value(text, self._path, line)
            case "bare", _:
                return Value(_scalar(text, scope), self._path, line)
        raise self._wrong(line, "expected a value")

    def _list(self, scope: dict[str, Value], depth: int) -> list[Value]:
        found: list[Value] = []
        while True:
            self._skip(",;")
            if self._peek()[:2] == ("sign", "]"):
                self._at += 1
                return found
            found.append(self._value(scope, depth + 1))

    def _wrong(self, line: int, text: str) -> StartupError:
        return StartupError(f"{self._path}, {f'line {line}' if line else 'the end'}: {text}")


def _scalar(text: str, scope: dict[str, Value]) -> Any:
    """Return a bare word; a variable is replaced by its value, unless it comes from the environment."""
    name = text[1:]
    return scope[name].value if text.startswith("$") and name in scope else text


def _tokens(path: Path, text: str) -> Iterator[tuple[str, str, int]]:
    at, line = 0, 1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise StartupError(f"{path}, line {line}: {text[at : at + 1]!r} is not expected")
        kind = found.lastgroup
        if kind in ("double", "single"):
            yield "text", found[kind], line
        elif kind in ("sign", "bare"):
            yield kind, found[kind], line
        line += found[0].count("\n")
        at = found.end()
