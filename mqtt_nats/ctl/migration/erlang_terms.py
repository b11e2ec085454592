# SPDX-License-Identifier: Apache-2.0
"""Reader for files of Erlang terms, such as the `acl.conf` of EMQX: atoms, texts, numbers, lists and tuples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

DEPTH_MOST: Final = 30
"""Most levels of a term."""

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|%[^\n]*) | <<"(?P<binary>(?:[^"\\]|\\.)*)"(?:/utf8)?>> | "(?P<text>(?:[^"\\]|\\.)*)"
    | (?P<number>\d+) | (?P<atom>[a-z]\w*) | '(?P<quoted>[^'\n]*)' | (?P<sign>[{}\[\],.])""",
    re.VERBOSE | re.ASCII,
)


class Atom(str):
    """An atom of Erlang."""

    __slots__ = ()


def read_terms(text: str) -> Iterator[tuple[int, Any]]:
    """Yield each term of a file with the line on which it begins; a tuple of Erlang is a tuple.

    Raises:
        ValueError: the text has no such terms; the error names the line.
    """
    tokens = list(_tokens(text))
    at = 0
    while at < len(tokens):
        line = tokens[at][2]
        term, at = _term(tokens, at, 0)
        if at >= len(tokens) or tokens[at][:2] != ("sign", "."):
            raise ValueError(f"line {line}: the term has no full stop at its end")
        at += 1
        yield line, term


def _term(tokens: list[tuple[str, str, int]], at: int, depth: int) -> tuple[Any, int]:
    if at >= len(tokens):
        raise ValueError("the end: a term is not complete")
    kind, text, line = tokens[at]
    if depth > DEPTH_MOST:
        raise ValueError(f"line {line}: too many levels")
    if kind == "atom":
        return Atom(text), at + 1
    if kind == "number":
        return int(text), at + 1
    if kind == "text":
        return text, at + 1
    if text not in ("{", "["):
        raise ValueError(f"line {line}: {text!r} is not expected")
    end = "}" if text == "{" else "]"
    found: list[Any] = []
    at += 1
    while at < len(tokens) and tokens[at][:2] != ("sign", end):
        one, at = _term(tokens, at, depth + 1)
        found.append(one)
        if at < len(tokens) and tokens[at][:2] == ("sign", ","):
            at += 1
    if at >= len(tokens):
        raise ValueError(f"line {line}: {text} has no {end}")
    return (tuple(found) if text == "{" else found), at + 1


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    at, line = 0, 1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"line {line}: {text[at]!r} is not expected")
        kind = found.lastgroup
        if kind in ("text", "binary"):
            yield "text", re.sub(r"\\(.)", r"\1", found[kind]), line
        elif kind in ("atom", "quoted"):
            yield "atom", found[kind], line
        elif kind in ("number", "sign"):
            yield kind, found[kind], line
        line += found[0].count("\n")
        at = found.end()
