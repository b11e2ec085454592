# SPDX-License-Identifier: Apache-2.0
"""What several tests of the broker's parts need."""

import ast
import asyncio
import inspect
import textwrap
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


def members(real: type) -> set[str]:
    """Names of the attributes and methods of a class and its bases: those of the class, and those of ``self``."""
    found = set(dir(real))
    for one in real.__mro__[:-1]:
        found.update(vars(one).get("__annotations__", ()))  # fields of models
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except (OSError, TypeError):
            continue  # compiled, or of C: its slots are in `dir`
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
    return found


def foreign_names(fake: type, real: type) -> set[str]:
    """What a fake has that the class it stands for has not; names with ``fake_`` are for the test itself."""
    own = {name for name in {*vars(fake), *members(fake)} if not name.startswith(("_", "fake_"))}
    return own - members(real) - set(dir(object))
