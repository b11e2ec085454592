# SPDX-License-Identifier: Apache-2.0
"""The pages in short pieces: no bullet of a list and no cell of a table over 40 words, no paragraph over 90."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.harness.nats import ROOT

BULLET_WORDS_MAX: Final = 40
PARAGRAPH_WORDS_MAX: Final = 90

PAGES: Final = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


class Piece(NamedTuple):
    """A bullet, a cell of a table or a paragraph: where it begins, and its text without links and line ends."""

    line: int
    bullet: bool
    """Whether it is a bullet or a cell."""
    text: str

    @property
    def words(self) -> int:
        """How many words it has; a sign alone is none."""
        return sum(any(letter.isalnum() for letter in word) for word in self.text.split())

    @property
    def too_long(self) -> bool:
        return self.words > (BULLET_WORDS_MAX if self.bullet else PARAGRAPH_WORDS_MAX)


_BULLET: Final = re.compile(r" *(?:[-*]|\d+\.) +")
_CELL_END: Final = re.compile(r"(?<!\\)\|")
_LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_NO_PROSE: Final = ("#", "|", "<", "```")
_FIGURES: Final = ("<!-- figures", "<!-- end of figures")
"""Lines around a table that a measurement writes; its cells are lists of figures."""


def pieces(text: str) -> Iterator[Piece]:
    """The bullets and paragraphs of a page; not its headings, tables, examples and comments."""
    begun, bullet, lines, example = 0, False, list[str](), False

    def piece() -> Iterator[Piece]:
        if lines:
            yield Piece(begun, bullet, _LINK.sub(r"\1", " ".join(lines)))
            lines.clear()

    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("```"):
            yield from piece()
            example = not example
        elif example or not stripped or stripped.startswith(_NO_PROSE):
            yield from piece()
        elif found := _BULLET.match(line):
            yield from piece()
            begun, bullet = number, True
            lines.append(line[found.end() :])
        else:
            if not lines:
                begun, bullet = number, line.startswith("  ")
            lines.append(stripped)
    yield from piece()


def cells(text: str) -> Iterator[Piece]:
    """The cells of a page's tables; not those of figures, nor of examples."""
    example = figures = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("```"):
            example = not example
        elif line.startswith(_FIGURES):
            figures = line.startswith(_FIGURES[0])
        elif line.startswith("|") and not example and not figures:
            found = _CELL_END.split(_LINK.sub(r"\1", line.strip()))[1:-1]
            yield from (Piece(number, True, cell.strip()) for cell in found)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_bullets_cells_and_paragraphs_are_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = [one for one in (*pieces(text), *cells(text)) if one.too_long]
    shown = "\n".join(f"{name(page)}:{one.line}: {one.words} words: {one.text[:70]}" for one in found)
    assert found == [], shown


def test_the_count_itself() -> None:
    text = """\
# A heading is no paragraph

One two
three – `four five`, [six](seven.md "eight").

- one
  two
  three
- four

  of the same bullet
1. five

| a table | `one \\| word` [each](x.md) |
|---|---|

<!-- figures: of a measurement -->
| are not counted |
<!-- end of figures -->

```sh
nor an example
```
last"""
    found = [(one.line, one.bullet, one.words) for one in pieces(text)]
    assert found == [
        *((3, False, 6), (6, True, 3), (9, True, 1), (11, True, 4), (12, True, 1)),
        (24, False, 1),
    ]
    assert [(one.line, one.words) for one in cells(text) if one.words] == [(14, 2), (14, 3)]
    assert [Piece(1, True, "x " * count).too_long for count in (40, 41)] == [False, True]
    assert [Piece(1, False, "x " * count).too_long for count in (90, 91)] == [False, True]
