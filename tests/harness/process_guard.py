# SPDX-License-Identifier: Apache-2.0
"""Guard of unit tests: a test that starts a process fails, whichever way it does so.

Audit events come before `subprocess`, `os.fork`, `os.posix_spawn` and the like, and stop them. uvloop and
`multiprocessing` have no event, so their starts are noticed by the hook of a fork or by the function that they call.
"""

from __future__ import annotations

import _posixsubprocess
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

EVENTS: Final = frozenset(
    ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.spawn", "os.system", "pty.spawn")
)

REMEDY: Final = "a unit test starts no process: mark it `pytest.mark.processes`"


class ProcessGuard:
    """Stops starts of processes, and counts those that it can only notice, while it watches."""

    def __init__(self) -> None:
        self._watching = False
        self._noticed = 0
        sys.addaudithook(self._heard)
        os.register_at_fork(before=self._notice)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._watching and event in EVENTS:
            pytest.fail(f"{event} {arguments[:2]}: {REMEDY}")

    def _notice(self) -> None:
        self._noticed += self._watching

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Let no process start in this block.

        Raises:
            pytest.fail.Exception: one was started, or is about to be.
        """
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_posixsubprocess, "fork_exec", self._refuse)
            self._watching, self._noticed = True, 0
            try:
                yield
            finally:
                self._watching = False
        if self._noticed:
            pytest.fail(f"a fork: {REMEDY}")

    def _refuse(self, *_: Any) -> int:
        pytest.fail(REMEDY)
