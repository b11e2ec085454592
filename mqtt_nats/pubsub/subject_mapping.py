# SPDX-License-Identifier: Apache-2.0
"""Subject mappings of a NATS account, as nats-server applies them to published messages.

nats-server itself maps the subject on which a client publishes. nats-server does not map the copies that a gateway
stores under that subject, nor the messages that a gateway delivers to its own clients: for these copies and messages
the gateway applies the mappings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_PART: Final = re.compile(r"\$(\d{1,3})|\{\{ *wildcard\( *(\d{1,3}) *\) *\}\}")


class Transform:
    """Mapping of one subject pattern to another subject.

    Raises:
        ValueError: ``source`` or ``target`` is not supported.
    """

    __slots__ = ("_open", "_parts", "_source")

    def __init__(self, source: str, target: str) -> None:
        tokens = source.split(".")
        if any(not one or " " in one for one in tokens) or ">" in tokens[:-1]:
            raise ValueError(f"{source!r} is not a subject")
        self._open = tokens[-1] == ">"
        if self._open:
            tokens.pop()
        stars = [place for place, one in enumerate(tokens) if one == "*"]
        self._source = tuple(None if one == "*" else one for one in tokens)
        parts: list[str | int] = []
        given = target.split(".")
        if (given[-1] == ">") != self._open:
            raise ValueError(f"{source!r}: both sides of a mapping end with > or none does")
        if self._open:
            given.pop()
        for one in given:
            found = _PART.fullmatch(one)
            if found is not None:
                number = int(found[1] or found[2])
                if not 1 <= number <= len(stars):
                    raise ValueError(f"{source!r} has no wildcard {number}")
                parts.append(stars[number - 1])
            elif not one or "*" in one or ">" in one or "{{" in one or " " in one or one.startswith("$"):
                raise ValueError(f"{target!r}: expected tokens, $1 and {{{{wildcard(1)}}}}, with > at the end of both")
            else:
                parts.append(one)
        self._parts = tuple(parts)

    def apply(self, tokens: list[str]) -> str | None:
        """Return the subject to which a subject, given as tokens, is mapped; None: the mapping does not match."""
        size = len(self._source)
        if len(tokens) <= size if self._open else len(tokens) != size:
            return None
        for wanted, one in zip(self._source, tokens, strict=False):
            if wanted is not None and wanted != one:
                return None
        made = [one if isinstance(one, str) else tokens[one] for one in self._parts]
        return ".".join(made + tokens[size:])


def parse_mappings(given: Mapping[str, str]) -> tuple[Transform, ...]:
    """Return the mappings of the settings.

    Raises:
        ValueError: a mapping is not supported.
    """
    return tuple(Transform(source, target) for source, target in given.items())


def mapped(transforms: tuple[Transform, ...], subject: str) -> str:
    """Return the subject under which a message published on ``subject`` is found."""
    tokens = subject.split(".")
    for one in transforms:
        found = one.apply(tokens)
        if found is not None:
            return found
    return subject
