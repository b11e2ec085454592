# SPDX-License-Identifier: Apache-2.0
"""What several tests of the broker's parts need."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest


class Timers:
    """A clock in place of the event loop's, and what is to be called when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.due: list[Any] = []
        self.now = 0.0
        loop: Any = SimpleNamespace(
            time=lambda: self.now,
            call_later=lambda delay, act: self.due.append((self.now + delay, act)),
            call_at=lambda due, act: self.due.append((due, act)),
        )
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)

    def pass_to(self, now: float) -> None:
        """Let time pass."""
        while self.due and self.due[0][0] <= now:
            self.now, act = self.due.pop(0)
            act()
        self.now = now
