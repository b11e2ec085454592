# SPDX-License-Identifier: Apache-2.0
"""SIGHUP: the signal's action, and whether the signal means that the terminal is gone."""

from __future__ import annotations

import sys
from collections.abc import Callable


class ReloadSignal:
    """SIGHUP action: connects the receiver of the signal with the function that reads files again."""

    def __init__(self) -> None:
        self.act: Callable[[], object] = lambda: None
        self._terminal = _has_terminal()

    def call(self, act: Callable[[], object]) -> None:
        """Set the function that the signal calls."""
        self.act = act

    @property
    def serious(self) -> bool:
        """Whether the terminal from which the process was started is gone, so that the signal ends the process."""
        return self._terminal and not _has_terminal()


def _has_terminal() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
