# SPDX-License-Identifier: Apache-2.0
"""Pages of which parts are written by a command and the rest by hand."""

from __future__ import annotations

import re
from pathlib import Path


def _marks(part: str) -> tuple[str, str]:
    return f"<!-- {part}: written by a command -->", f"<!-- {part}: end -->"


def replaced(text: str, part: str, content: str) -> str:
    """``text`` with ``content`` between the marks of ``part``, which are added at the end where there are none."""
    begin, end = _marks(part)
    block = f"{begin}\n\n{content.strip()}\n\n{end}"
    pattern = re.escape(begin) + r".*?" + re.escape(end)
    if re.search(pattern, text, re.DOTALL):
        return re.sub(pattern, lambda _: block, text, count=1, flags=re.DOTALL)
    return (text.rstrip() + "\n\n" if text.strip() else "") + block + "\n"


def put(path: Path, title: str, part: str, content: str) -> None:
    """Write a part of a page; a page that is not there yet gets the title."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else f"# {title}\n"
    path.write_text(replaced(text, part, content))
