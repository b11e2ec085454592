# SPDX-License-Identifier: Apache-2.0
"""Which steps from line to line some code takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Arc = tuple[str, str, int, int]
"""File, function, line before (0 = the function begins), line."""


class Arcs:
    """Collects the steps taken within some source files.

    Args:
        sources: the files, or directories with them.
    """

    def __init__(self, *sources: Path) -> None:
        self.seen: set[Arc] = set()
        self._often: set[tuple[Arc, int]] = set()
        """Steps, and how many bits the number has of how often one call took them."""
        self._counts: dict[Arc, int] = {}
        self._sources = tuple(map(str, sources))
        self._followed: dict[CodeType, bool] = {}

    def follow(self, function: Callable[[], Any]) -> bool:
        """Call ``function``; whether it took a step that was never taken before, or never nearly as often."""
        self._counts.clear()
        sys.settrace(self._enter)
        try:
            function()
        finally:
            sys.settrace(None)
        before = len(self._often)
        self.seen.update(self._counts)
        self._often.update((arc, count.bit_length()) for arc, count in self._counts.items())
        return len(self._often) > before

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Callable[[FrameType, str, Any], Any] | None:
        code = frame.f_code
        followed = self._followed.get(code)
        if followed is None:
            followed = self._followed[code] = code.co_filename.startswith(self._sources)
        if not followed:
            return None
        file, name, last = code.co_filename, code.co_qualname, 0
        counts = self._counts

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            line = frame.f_lineno
            arc = (file, name, last, line)
            counts[arc] = counts.get(arc, 0) + 1
            last = line
            return step

        return step
