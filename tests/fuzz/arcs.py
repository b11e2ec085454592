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
    """Collects the steps taken within the source files of one directory."""

    def __init__(self, directory: Path) -> None:
        self.seen: set[Arc] = set()
        self._directory = str(directory)
        self._followed: dict[CodeType, bool] = {}

    def follow(self, function: Callable[[], Any]) -> bool:
        """Call ``function``; whether it took a step that was never taken before."""
        before = len(self.seen)
        sys.settrace(self._enter)
        try:
            function()
        finally:
            sys.settrace(None)
        return len(self.seen) > before

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Callable[[FrameType, str, Any], Any] | None:
        code = frame.f_code
        followed = self._followed.get(code)
        if followed is None:
            followed = self._followed[code] = code.co_filename.startswith(self._directory)
        if not followed:
            return None
        file, name, last = code.co_filename, code.co_qualname, 0
        seen = self.seen

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            line = frame.f_lineno
            seen.add((file, name, last, line))
            last = line
            return step

        return step
