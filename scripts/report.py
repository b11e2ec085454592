# SPDX-License-Identifier: Apache-2.0
"""`make report`: figures of the source and of its walks, beside those of an earlier commit. No test compares them.

python -m scripts.report [--since REVISION] [--no-walks]
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Final

from scripts.packages import ROOT
from scripts.walks import traced

LIBRARIES: Final = ("mqtt_nats", "streams", "spark")
FUNCTION_LINES: Final = 50
FILE_LINES: Final = 700
BULLET_WORDS: Final = 40
PARAGRAPH_WORDS: Final = 90
"""Sizes above which the report counts a function, a file, a bullet or a paragraph."""

_BULLET: Final = re.compile(r" *(?:[-*]|\d+\.) +")
_LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_NO_PROSE: Final = ("#", "|", "<", "```")


def pieces(text: str) -> Iterator[tuple[bool, int]]:
    """Yield whether a piece of a page is a bullet, and its number of words, for each bullet and paragraph.

    Headings, tables and examples are left out.
    """
    bullet, words, example = False, 0, False
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        begins = _BULLET.match(line)
        fence = stripped.startswith("```")
        if fence or example or not stripped or begins or stripped.startswith(_NO_PROSE):
            if words:
                yield bullet, words
            bullet, words = begins is not None, 0
        example ^= fence
        if not fence and not example and not stripped.startswith(_NO_PROSE):
            prose = _LINK.sub(r"\1", line[begins.end() :] if begins else stripped)
            words += sum(any(letter.isalnum() for letter in word) for word in prose.split())


def function_lines(path: Path) -> Iterator[int]:
    """Yield the number of lines of each function of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            yield node.end_lineno - node.lineno + 1


def lines_of(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def source_figures(root: Path) -> dict[str, str]:
    """Return the figures of a source tree by their names."""
    files = {name: sorted((root / name).rglob("*.py")) for name in (*LIBRARIES, "tests")}
    source = [path for name in LIBRARIES for path in files[name]]
    packages = Counter(path.parent for path in files["mqtt_nats"] if path.parent != root / "mqtt_nats")
    largest = max(packages, key=lambda folder: packages[folder])
    sizes = {path: lines_of(path) for path in source}
    longest = max(sizes, key=lambda path: sizes[path])
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    prose = [piece for page in pages for piece in pieces(page.read_text(encoding="utf-8"))]
    internals = "".join(path.read_text(encoding="utf-8") for path in sorted((root / "docs/internals").glob("*.md")))
    readme = (root / "README.md").read_text(encoding="utf-8")
    long = sum(words > (BULLET_WORDS if bullet else PARAGRAPH_WORDS) for bullet, words in prose)
    return {
        **{f"lines of {name}": f"{sum(map(lines_of, found)):,}" for name, found in files.items()},
        "folders with modules": str(len(packages)),
        "modules of the largest folder": f"{packages[largest]} ({largest.relative_to(root)})",
        "lines of the longest module": f"{sizes[longest]} ({longest.relative_to(root)})",
        f"modules of more than {FILE_LINES} lines": str(sum(size > FILE_LINES for size in sizes.values())),
        f"functions of more than {FUNCTION_LINES} lines": str(
            sum(lines > FUNCTION_LINES for path in source for lines in function_lines(path))
        ),
        "rules in docs/internals": str(len(re.findall(r"^Code: ", internals, re.MULTILINE))),
        "words of README.md": str(sum(words for _, words in pieces(readme))),
        "words of all pages": f"{sum(words for _, words in prose):,}",
        f"bullets of more than {BULLET_WORDS} words, paragraphs of more than {PARAGRAPH_WORDS}": str(long),
    }


def unpack(revision: str, folder: Path) -> None:
    """Write the files of a revision into a folder."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def figures(root: Path, walks: bool) -> dict[str, str]:
    """Return the figures of a source tree, with those of its walks where they are wanted."""
    found = source_figures(root)
    if walks:
        with tempfile.TemporaryDirectory() as folder:
            counts = traced(root, Path(folder))
        found |= {f"modules entered: {walk}": str(count) for walk, count in counts.items()}
    return found


def main() -> None:
    """Print a table: figure, its value today, its value at the other commit."""
    parser = argparse.ArgumentParser(description="Figures of the source and of its walks, beside those of a commit.")
    parser.add_argument("--since", help="the other commit; default: the newest one that is older than a day")
    parser.add_argument("--no-walks", action="store_true", help="start no gateway: leave the walks out")
    asked = parser.parse_args()
    before = ["git", "rev-list", "-1", "--before=1 day ago", "HEAD"]
    since = asked.since or subprocess.run(before, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    if not since:
        sys.exit("report: no commit is older than a day; name one with --since")
    today = figures(ROOT, not asked.no_walks)
    with tempfile.TemporaryDirectory() as folder:
        unpack(since, Path(folder))
        other = figures(Path(folder), not asked.no_walks)
    print(f"| | now | {since[:10]} |\n|---|---|---|")
    for name, value in today.items():
        print(f"| {name} | {value} | {other.get(name, '')} |")


if __name__ == "__main__":
    main()
