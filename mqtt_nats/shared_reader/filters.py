# SPDX-License-Identifier: Apache-2.0
"""Which filters a reader of stored messages names: JetStream takes no two that meet, and many are costly to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, takewhile
from typing import Any, Final

from mqtt_streams.messages import PREFIX as STORED_PREFIX

FILTERS_MOST: Final = 1024
"""Most filters that a reader names. nats-server compares each with each when they are changed: 30 ms for so many."""

FILTERS_SIZE_MOST: Final = 128 * 1024
"""Most characters of these filters: JetStream stores them for each consumer, on each server."""

COMPARED_MOST: Final = 6 * FILTERS_MOST**2
"""Most tokens of these filters, times their number: so many tokens are compared when they are changed."""

WANTED_MOST: Final = 8 * FILTERS_MOST
"""Most filters for which prefixes are looked for."""

LEVELS_MOST: Final = 8
"""Most topic levels of a prefix that stands for filters where there are too many of them."""

EVERYTHING: Final = (STORED_PREFIX + ">",)

_END: Final = ""
"""Key of a filter in the node of its last token: no token is empty."""


class FilterSet:
    """Filters as a tree of their tokens."""

    def __init__(self, filters: Iterable[str] = ()) -> None:
        self._root: dict[str, Any] = {}
        for one in filters:
            self.add(one)

    def add(self, text: str) -> None:
        """Add a filter."""
        node = self._root
        for token in text.split("."):
            node = node.setdefault(token, {})
        node[_END] = text

    def covers(self, text: str) -> bool:
        """Whether one of the filters matches every subject that ``text`` matches."""
        tokens = text.split(".")
        left: list[tuple[dict[str, Any], int]] = [(self._root, 0)]
        while left:
            node, at = left.pop()
            if at == len(tokens):
                if _END in node:
                    return True
                continue
            if ">" in node:
                return True
            wide = {tokens[at], "*"} if tokens[at] != ">" else set()
            left += [(node[token], at + 1) for token in wide if token in node]
        return False

    def meeting(self, text: str) -> Iterator[str]:
        """Yield the filters that match a subject that ``text`` matches, too."""
        tokens = text.split(".")
        left: list[tuple[dict[str, Any], int]] = [(self._root, 0)]
        while left:
            node, at = left.pop()
            if at == len(tokens):
                if _END in node:
                    yield node[_END]
                continue
            if ">" in node:
                yield node[">"][_END]
            token = tokens[at]
            if token == ">":
                yield from _below(node)
            elif token == "*":
                left += [(child, at + 1) for key, child in node.items() if key not in (">", _END)]
            else:
                left += [(node[key], at + 1) for key in (token, "*") if key in node]


def _below(node: dict[str, Any]) -> Iterator[str]:
    """Yield the filters with more tokens than ``node``, without its own ``>``."""
    left = [child for key, child in node.items() if key not in (">", _END)]
    while left:
        found = left.pop()
        for key, child in found.items():
            if key == _END:
                yield child
            else:
                left.append(child)


def chosen(filters: Iterable[str]) -> tuple[str, ...]:
    """Return the filters to read for ``filters``: no two of them meet, and they are not too many.

    Where there are too many, prefixes with as many topic levels as possible stand for them; at last `EVERYTHING`.
    """
    wanted = set(filters)
    if len(wanted) > WANTED_MOST:
        return EVERYTHING
    for some in chain((wanted,), _prefixes(wanted)):
        kept = _apart(some)
        if kept is None:
            break
        tokens = len(kept) + sum(one.count(".") for one in kept)
        few = len(kept) <= FILTERS_MOST and tokens * len(kept) <= COMPARED_MOST
        if few and sum(map(len, kept)) <= FILTERS_SIZE_MOST:
            return tuple(kept)
    return EVERYTHING


def _apart(filters: set[str]) -> list[str] | None:
    """Return the filters without those that others cover, as far as `FILTERS_MOST`; None: two of the others meet."""
    kept: list[str] = []
    tree = FilterSet()
    for one in sorted(filters, key=lambda text: (">" not in text, "*" not in text, text)):
        if tree.covers(one):
            continue
        if next(tree.meeting(one), None) is not None:
            return None
        kept.append(one)
        if len(kept) > FILTERS_MOST:  # too many; where two of the rest meet, their prefixes meet or are the same
            break
        tree.add(one)
    return kept


def common(filters: Iterable[str]) -> str:
    """Return one filter that matches what each of ``filters`` matches: it has the tokens with which all begin."""
    wanted = {tuple(one.split(".")) for one in filters}
    if len(wanted) == 1:
        return ".".join(*wanted)
    # At least one token has to be left for `>`.
    begins = zip(*(tokens[:-1] for tokens in wanted), strict=False)
    return ".".join([*(some[0] for some in takewhile(lambda some: len(set(some)) == 1, begins)), ">"])


def _prefixes(filters: set[str]) -> Iterator[set[str]]:
    """Yield the prefixes that stand for filters, with one topic level less each time."""
    topics = [one.removeprefix(STORED_PREFIX).split(".") for one in filters]
    longest = max(map(len, topics), default=1) - 1
    for levels in range(min(LEVELS_MOST, longest), 0, -1):
        yield {_prefix(tokens, levels) for tokens in topics}


def _prefix(tokens: list[str], levels: int) -> str:
    """Return a filter by the first levels of a filter's topic; it matches what that filter matches."""
    if len(tokens) <= levels:
        return STORED_PREFIX + ".".join(tokens)
    return f"{STORED_PREFIX}{'.'.join(tokens[:levels])}.>"
