# SPDX-License-Identifier: Apache-2.0
"""How long those wait who want a processor: what takes seconds on a machine at rest takes longer beside other work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from typing import Final, Self

_STEP: Final = 0.05
"""Seconds between two looks at the clock."""


class Busy:
    """Measures while :meth:`watched` is entered."""

    def __init__(self) -> None:
        self.factor = 1.0
        """Processes that wanted a processor, for each processor; 1 and more."""
        self.longest = 0.0
        """Seconds for which this process has once not run although it wanted to, at most."""

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[Self]:
        """Look at the clock until the end."""
        task = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(_STEP)
            self.longest = max(self.longest, time.monotonic() - begun - _STEP)

    def look(self) -> None:
        """Take the load average into account."""
        self.factor = max(self.factor, os.getloadavg()[0] / (os.cpu_count() or 1))

    def allowed(self, seconds: float) -> float:
        """What becomes of a limit: as much again for each process that waits, and the longest wait that was seen."""
        return seconds * self.factor + self.longest
