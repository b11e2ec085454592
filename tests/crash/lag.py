# SPDX-License-Identifier: Apache-2.0
"""How long the machine has held up this process: what a test may take longer than it would on an idle machine."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final, Self

BEAT: Final = 0.05
"""Seconds between two beats."""


class Lag:
    """A thread that sleeps for a moment, again and again, and adds up what it slept too long."""

    def __init__(self) -> None:
        self._heard = (0.0, time.monotonic())
        """Seconds that it has slept too long, until when."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while not self._ended.wait(BEAT):
            self._heard = (self.seconds, time.monotonic())

    @property
    def seconds(self) -> float:
        """Seconds that it has slept too long since it began, this sleep included."""
        late, beat = self._heard
        return late + max(0.0, time.monotonic() - beat - BEAT)

    def __enter__(self) -> Self:
        self._heard = (0.0, time.monotonic())
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
