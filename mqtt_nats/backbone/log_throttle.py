# SPDX-License-Identifier: Apache-2.0
"""What nats-server refuses is logged, but not each time: it is repeated for each publish, and for each attempt."""

from __future__ import annotations

from time import time
from typing import Final

AGAIN: Final = 60.0
"""Seconds after which the same is logged again."""

MOST: Final = 1000
"""Different ones that are known."""


class Complaints:
    """What was logged lately."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def new(self, text: str) -> bool:
        """Whether something has to be logged; it has been, then."""
        now = time()
        if now - self._told.get(text, 0.0) <= AGAIN:
            return False
        if len(self._told) >= MOST:
            self._told.clear()
        self._told[text] = now
        return True
