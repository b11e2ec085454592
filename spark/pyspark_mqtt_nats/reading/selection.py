# SPDX-License-Identifier: Apache-2.0
"""Subjects of a stream that a read wants: the filters that NATS evaluates, and the part that the reader evaluates."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from mqtt_streams.subjects import starts_with_wildcard, visible_to_wildcard

FILTERS_MOST: Final = 1000
"""Most filters that NATS evaluates; with more of them NATS sends every message and the reader selects."""

_END: Final = ""
"""Key of a node where a filter ends; no token of a subject is empty."""


class Filters:
    """Subject filters as a tree of their tokens: a look-up costs about the same for one filter and for 10,000."""

    def __init__(self, filters: Iterable[str]) -> None:
        self._root: dict[str, Any] = {}
        for item in filters:
            node = self._root
            for token in item.split("."):
                node = node.setdefault(token, {})
            node[_END] = item

    def covers(self, subject: str, but: str = "") -> bool:
        """Whether a filter, another one than `but`, matches everything that `subject` (a filter too) matches."""
        tokens = subject.split(".")
        nodes = [(self._root, 0)]
        while nodes:
            node, place = nodes.pop()
            if place == len(tokens):
                if node.get(_END, but) != but:
                    return True
                continue
            token = tokens[place]
            if ">" in node and node[">"][_END] != but:
                return True
            if token == ">":
                continue
            nodes += [(node[one], place + 1) for one in dict.fromkeys(("*", token)) if one in node]
        return False


def without_covered(subjects: Sequence[str]) -> list[str]:
    """Return the filters that are needed: JetStream refuses a filter that another one covers."""
    needed = list(dict.fromkeys(subjects))
    filters = Filters(needed)
    return [subject for subject in needed if not filters.covers(subject, but=subject)]


def asked(subjects: tuple[str, ...]) -> tuple[str, ...]:
    """Return the filters that NATS is to evaluate; () for every message of the stream."""
    return subjects if len(subjects) <= FILTERS_MOST else ()


def visible(subjects: Sequence[str], prefix: str, evaluated: bool) -> Callable[[str], bool] | None:
    """Return a function that tells whether a subject (without prefix) from NATS is wanted; None when all are.

    `evaluated`: NATS has evaluated the filters. It does not know that a filter which starts with `+` matches no topic
    that starts with `$` [MQTT-4.7.2-1].
    """
    bare = [subject.removeprefix(prefix) for subject in subjects]
    if not bare or (evaluated and not any(map(starts_with_wildcard, bare))):
        return None
    named = Filters(subject for subject in bare if not starts_with_wildcard(subject))
    wild = Filters(subject for subject in bare if starts_with_wildcard(subject))

    def check(subject: str) -> bool:
        if visible_to_wildcard(subject) and (evaluated or wild.covers(subject)):
            return True
        return named.covers(subject)

    return check
