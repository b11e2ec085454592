# SPDX-License-Identifier: Apache-2.0
"""Registry of the hook chains of one gateway."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, overload

from mqtt_nats.hooks.chain import (
    TIMEOUT,
    Account,
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
    """The chains of callbacks of one gateway, by point.

    A point without callbacks has no chain, and the code of hooks on the message path is installed only while there are
    callbacks (:mod:`mqtt_nats.client.message_hooks`).

    Args:
        spawn: runs a coroutine in the gateway's task group.
    """

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        self._spawn = spawn
        self._changed: Callable[[Point], None] = lambda point: None
        self._chains: dict[Point, Any] = {}
        """The chain of each point: a `NoticeChain` or a `DecisionChain`."""
        self.in_use = False
        """True while any point has callbacks. Whoever asks often asks this first: it is no call."""

    def call_on_change(self, changed: Callable[[Point], None]) -> None:
        """Call ``changed`` when a callback was added to or removed from a point."""
        self._changed = changed

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
        """Add a callback to a point.

        Args:
            priority: callbacks with a higher priority run first.
            timeout: seconds after which an async callback has failed.
            owner: name of the callback's owner, for logs and :meth:`remove_all`.

        Raises:
            ValueError: ``timeout`` is not positive.
            TypeError: the callback is not callable, or is async at a point that cannot wait.
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
        self.in_use = True
        self._changed(point)
        return entry

    def remove(self, entry: Entry) -> bool:
        """Remove a callback; False when it was not registered."""
        chain = self._chains.get(entry.point)
        if chain is None or entry not in chain.entries:
            return False
        chain.remove(entry)
        if not chain.entries:
            del self._chains[entry.point]
            self.in_use = bool(self._chains)
        self._changed(entry.point)
        return True

    def remove_all(self, owner: str) -> int:
        """Remove all callbacks of ``owner`` and return their number."""
        entries = [entry for chain in self._chains.values() for entry in chain.entries if entry.owner == owner]
        return sum(self.remove(entry) for entry in entries)

    def deciding(self, point: Decision[E, V]) -> DecisionChain[E, V] | None:
        """Return the chain of a decision; None without callbacks."""
        chain: DecisionChain[E, V] | None = self._chains.get(point)
        return chain

    def noticing(self, point: Notice[E]) -> NoticeChain[E] | None:
        """Return the chain of a notice; None without callbacks."""
        chain: NoticeChain[E] | None = self._chains.get(point)
        return chain

    def accounts(self) -> list[Account]:
        """Return calls and failures of every callback; the callbacks of a point are in their order."""
        return [
            Account(chain.point.name, one.name, one.owner, one.priority, one.calls, one.failures)
            for chain in self._chains.values()
            for one in chain.entries
        ]
