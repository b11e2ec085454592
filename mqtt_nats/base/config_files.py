# SPDX-License-Identifier: Apache-2.0
"""Reading of the TOML configuration file, and removal of secrets from shown settings."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel

from mqtt_nats.base.errors import StartupError

_HEADER: Final = re.compile(r"\s*\[")
_KEY: Final = re.compile(r"""\s*\[{0,2}\s*(?:"([^"]+)"|'([^']+)'|([\w-]+))""")


HIDDEN: Final = "(hidden)"
"""Text shown in place of a secret."""

_QUERY: Final = re.compile(r"[?#](?=.)")


def without_userinfo(url: str) -> str:
    """Return a URL without user name and password."""
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.rpartition("@")[2]


def without_secrets(value: Any) -> Any:
    """Return a value for display: its URLs have no user name, password, query or fragment.

    A query may contain a key, and a fragment a token.
    """
    if isinstance(value, str):
        if "://" not in value:
            return value
        url = without_userinfo(value)
        mark = _QUERY.search(url)
        return url if mark is None else f"{url[: mark.end()]}{HIDDEN}"
    if isinstance(value, dict):
        return {name: without_secrets(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(one) for one in value]
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests the most similar known name; empty without a similar one."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def read_toml(path: Path, what: str) -> tuple[dict[str, Any], str]:
    """Return the values of a TOML file and its text; ``what`` is the name of the file in errors.

    Raises:
        StartupError: the file cannot be read, or is not valid.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), text
    except OSError as error:
        raise StartupError(f"cannot read the {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartupError(f"the {what} {path} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"the {what} {path} is not valid TOML: {error}") from None


def read_file(path: Path, known: Iterable[str]) -> tuple[dict[str, Any], dict[str, list[int]], list[str]]:
    """Return the values of the configuration file, the lines of each setting and of each entry of a table, and errors.

    A setting that is not in ``known`` is an error, and has no value.

    Raises:
        StartupError: the file cannot be read.
    """
    values, text = read_toml(path, "configuration file")
    names = list(known)
    where = lines_of(text, values)
    unknown = [
        f"unknown setting {key!r} in {path}{_line(where[key])}: "
        f"{nearest(key, names) or 'docs/configuration.md lists the settings'}"
        for key in values
        if key not in names
    ]
    values = {name: value for name, value in values.items() if name in names}
    return values, where | entries_of(text, values), unknown


def _line(lines: Sequence[int]) -> str:
    return f", line {lines[0]}" if lines else ""


def lines_of(text: str, values: Iterable[str]) -> dict[str, list[int]]:
    """Return the lines (from 1) of each top-level key of a TOML text, and of each header of a table of its name."""
    found: dict[str, list[int]] = {name: [] for name in values}
    lines = text.splitlines(keepends=True)
    top = True
    for number, line in enumerate(lines, 1):
        key = _KEY.match(line)
        name = next(filter(None, key.groups()), "") if key else ""
        header = _HEADER.match(line) is not None
        if name in found and (top or header) and _begins("".join(lines[: number - 1])):
            found[name].append(number)
        if header and top:
            top = not _begins("".join(lines[: number - 1]))
    return found


def entries_of(text: str, values: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the line (from 1) of each entry of a top-level table, by the names of table and entry: `tenants.acme`."""
    found: dict[str, list[int]] = {}
    lines = text.splitlines(keepends=True)
    for table, entries in values.items():
        for entry in entries if isinstance(entries, dict) else ():
            for number, line in enumerate(lines, 1):
                if entry in line and _defines(lines, number, table, entry):
                    found[f"{table}.{entry}"] = [number]
                    break
    return found


def _defines(lines: Sequence[str], number: int, table: str, entry: str) -> bool:
    """Whether the statement that begins in a line is the first about an entry of a table."""
    if not _begins("".join(lines[: number - 1])):
        return False
    for end in range(number, len(lines) + 1):  # a list or a string may continue on further lines
        try:
            said = tomllib.loads("".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue
        return entry in said.get(table, {})
    return False


def _begins(before: str) -> bool:
    """Whether a new statement begins behind this part of a TOML text; False inside a long string or list."""
    try:
        tomllib.loads(before)
    except tomllib.TOMLDecodeError:
        return False
    return True


def is_json(text: str | None) -> bool:
    """Whether an environment variable is valid JSON, or empty or unset."""
    try:
        json.loads(text or "[]")
    except ValueError:
        return False
    return True


def unknown_key(model: type[BaseModel], where: Sequence[int | str]) -> str:
    """Return the error text for an unknown key at a place (``loc`` of pydantic) of a model."""
    kinds = [model]
    for part in where[:-1]:
        fields = [kind.model_fields[part] for kind in kinds if isinstance(part, str) and part in kind.model_fields]
        if fields:  # otherwise the part is an index, or the tag of a union
            kinds = [inner for one in fields for inner in _models(one.annotation)]
    known = nearest(str(where[-1]), [name for kind in kinds for name in kind.model_fields])
    return f"unknown setting: {known}" if known else "unknown setting"


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in the type of a field."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in get_args(kind):
        yield from _models(inner)
