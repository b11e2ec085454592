# SPDX-License-Identifier: Apache-2.0
"""Templates: text with the names of columns in braces, such as ``alerts/{topic}``; ``{{`` and ``}}`` are braces."""

import re
from collections.abc import Iterator

_PART = re.compile(r"(\{\{|\}\})|\{([^{}]+)\}|([^{}]+)|([{}])")


def parse(text: str) -> list[tuple[str, str]]:
    """Return (text, "") and ("", column) in their order; raises ValueError for a brace that stands alone."""
    return list(_parts(text))


def _parts(text: str) -> Iterator[tuple[str, str]]:
    for brace, column, plain, single in _PART.findall(text):
        if single:
            raise ValueError(f"{text[:80]!r} has a single {single}: columns are in braces, {{{{ and }}}} are braces")
        yield (brace[:1] + plain, column)


def check(text: str) -> str:
    """Return a template as it is; raises ValueError."""
    parse(text)
    return text
