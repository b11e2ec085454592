# SPDX-License-Identifier: Apache-2.0
"""SIGHUP: what is done about it."""

from __future__ import annotations

import sys
from collections.abc import Callable


class ReloadSignal:
    """Brings SIGHUP from who receives it to who can do something about it."""

    def __init__(self) -> None:
        self.act: Callable[[], object] = lambda: None
        self._terminal = _has_terminal()

    @property
    def serious(self) -> bool:
        """True when the terminal that the process was started from is gone: that is what the signal was for."""
        return self._terminal and not _has_terminal()


def _has_terminal() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
