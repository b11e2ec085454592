# SPDX-License-Identifier: Apache-2.0
"""Pieces of SVG pictures that can be read on a light and on a dark page: no background, colours by a style sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape as escape
from typing import Final

FONT: Final = "font-family:system-ui,sans-serif"


def rules(selectors: Mapping[str, tuple[str, str]]) -> list[str]:
    """CSS: selector → what it has on light pages, and on dark ones."""
    light = [f"{selector}{{{style}}}" for selector, (style, _) in selectors.items()]
    dark = [f"{selector}{{{style}}}" for selector, (_, style) in selectors.items()]
    return [*light, "@media (prefers-color-scheme:dark){", *dark, "}"]


def picture(width: int, height: int, title: str, style: Sequence[str], body: Sequence[str]) -> str:
    """A whole file; ``title`` is what is read out in place of the picture."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img">',
            f"<title>{escape(title)}</title>",
            "<style>",
            *style,
            "</style>",
            *body,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words at a point."""
    attributes = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(words)}</text>'
