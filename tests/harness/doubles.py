# SPDX-License-Identifier: Apache-2.0
"""What several tests of the broker's parts need."""

import ast
import asyncio
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import pytest

T = TypeVar("T")

STANDS_FOR: dict[type, type] = {}
"""The classes that doubles stand for, by double."""


def stands_for(real: type) -> Callable[[type[T]], type[T]]:
    """Note the class that a double stands for; `tests/architecture/test_doubles.py` compares their names.

    Names that begin with ``fake_`` are for the test alone.
    """

    def note(fake: type[T]) -> type[T]:
        STANDS_FOR[fake] = real
        return fake

    return note


@stands_for(asyncio.AbstractEventLoop)
class FakeLoop:
    """A clock in place of the event loop's, and the callbacks that are due, in the order of their registration."""

    def __init__(self) -> None:
        self.fake_now = 0.0
        self.fake_due: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        return self.fake_now

    def call_later(self, delay: float, callback: Callable[[], object]) -> None:
        self.fake_due.append((self.fake_now + delay, callback))

    def call_at(self, when: float, callback: Callable[[], object]) -> None:
        self.fake_due.append((when, callback))


class Timers:
    """A clock in place of the event loop's, and what is to be called when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = FakeLoop()
        self.due = self._loop.fake_due
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self._loop)

    @property
    def now(self) -> float:
        """Seconds of the clock."""
        return self._loop.fake_now

    def pass_to(self, now: float) -> None:
        """Let time pass."""
        while self.due and self.due[0][0] <= now:
            self._loop.fake_now, act = self.due.pop(0)
            act()
        self._loop.fake_now = now


@cache
def members(real: type) -> frozenset[str]:
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
    return frozenset(found)


def foreign_names(fake: type, real: type) -> set[str]:
    """What a fake has that the class it stands for has not; names with ``fake_`` are for the test itself."""
    own = {name for name in {*vars(fake), *members(fake)} if not name.startswith(("_", "fake_"))}
    return own - members(real) - set(dir(object))
