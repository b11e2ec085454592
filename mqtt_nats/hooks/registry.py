# SPDX-License-Identifier: Apache-2.0
"""All chains of one gateway."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast, overload

from mqtt_nats.hooks.chain import (
    TIMEOUT,
    Account,
    Chain,
    Decider,
    Decision,
    DecisionChain,
    Entry,
    Notice,
    NoticeChain,
    Observer,
    Point,
    is_async,
)

E = TypeVar("E")
V = TypeVar("V")


class Hooks:
    """Who is asked, and told, at which point.

    Points without callbacks have no chain at all: whoever would ask finds nothing, and what is on the message path is
    not even there (:mod:`mqtt_nats.client.message_hooks`).

    Args:
        spawn: runs a coroutine in the gateway's task group.
    """

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        self._spawn = spawn
        self._chains: dict[Point, Chain] = {}
        self.changed: Callable[[Point], None] = lambda point: None
        """Called when a point has got a callback, or has lost one."""

    @overload
    def add(
        self,
        point: Decision[E, V],
        callback: Decider[E, V],
        *,
        priority: int = 0,
        timeout: float = TIMEOUT,
        owner: str = "",
    ) -> Entry: ...
    @overload
    def add(
        self, point: Notice[E], callback: Observer[E], *, priority: int = 0, timeout: float = TIMEOUT, owner: str = ""
    ) -> Entry: ...
    def add(
        self,
        point: Point,
        callback: Callable[..., Any],
        *,
        priority: int = 0,
        timeout: float = TIMEOUT,
        owner: str = "",
    ) -> Entry:
        """Have a callback asked, or told, at a point.

        Args:
            priority: callbacks with a higher one come first.
            timeout: seconds after which an async callback has failed.
            owner: whose it is, for logs and :meth:`remove_all`.

        Raises:
            ValueError: ``timeout`` is not positive.
            TypeError: it cannot be called, or is async where nothing can wait.
        """
        if not callable(callback):
            raise TypeError(f"a hook at {point.name} cannot be called")
        if not timeout > 0:
            raise ValueError("timeout is not positive")
        if isinstance(point, Decision) and not point.waits and is_async(callback):
            raise TypeError(f"a hook at {point.name} cannot be async: whoever asks cannot wait")
        entry = Entry(point, callback, priority, timeout, owner)
        chain = self._chains.get(point)
        if chain is None:
            chain = NoticeChain(point, self._spawn) if isinstance(point, Notice) else DecisionChain(point)
            self._chains[point] = chain
        chain.add(entry)
        self.changed(point)
        return entry

    def remove(self, entry: Entry) -> bool:
        """Take a callback out; False when it was not there."""
        chain = self._chains.get(entry.point)
        if chain is None or entry not in chain.entries:
            return False
        chain.remove(entry)
        if not chain.entries:
            del self._chains[entry.point]
        self.changed(entry.point)
        return True

    def remove_all(self, owner: str) -> int:
        """Take out all callbacks of ``owner``; returns how many there were."""
        entries = [entry for chain in self._chains.values() for entry in chain.entries if entry.owner == owner]
        return sum(self.remove(entry) for entry in entries)

    def deciding(self, point: Decision[E, V]) -> DecisionChain[E, V] | None:
        """The chain of a decision; None where there are no callbacks."""
        return cast("DecisionChain[E, V] | None", self._chains.get(point))

    def noticing(self, point: Notice[E]) -> NoticeChain[E] | None:
        """The chain of a notice; None where there are no callbacks."""
        return cast("NoticeChain[E] | None", self._chains.get(point))

    def accounts(self) -> list[Account]:
        """What every callback has done, in the order in which they are asked."""
        return [
            Account(chain.point.name, one.name, one.owner, one.priority, one.calls, one.failures)
            for chain in self._chains.values()
            for one in chain.entries
        ]
