# SPDX-License-Identifier: Apache-2.0
"""The topic filters of this gateway's clients, found by topic."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class _Node(Generic[T]):
    __slots__ = ("children", "exact", "rest")

    def __init__(self) -> None:
        self.children: dict[str, _Node[T]] = {}
        self.exact: T | None = None  # a filter that ends here
        self.rest: T | None = None  # a filter that ends here with "#"


class FilterTrie(Generic[T]):
    """Maps topic filters to values; :meth:`match` is linear in topic levels times matching branches."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()

    def add(self, topic_filter: str, value: T) -> None:
        """Put ``value`` under a legal topic filter."""
        levels = topic_filter.split("/")
        rest = levels[-1] == "#"
        if rest:
            levels.pop()
        node = self._root
        for level in levels:
            child = node.children.get(level)
            if child is None:
                child = node.children[level] = _Node()
            node = child
        if rest:
            node.rest = value
        else:
            node.exact = value

    def remove(self, topic_filter: str) -> None:
        """Remove a filter and the branches that only it needed."""
        levels = topic_filter.split("/")
        rest = levels[-1] == "#"
        if rest:
            levels.pop()
        path = [self._root]
        for level in levels:
            child = path[-1].children.get(level)
            if child is None:
                return
            path.append(child)
        if rest:
            path[-1].rest = None
        else:
            path[-1].exact = None
        for depth in range(len(levels), 0, -1):
            node = path[depth]
            if node.children or node.exact is not None or node.rest is not None:
                break
            del path[depth - 1].children[levels[depth - 1]]

    def match(self, topic: str) -> list[T]:
        """The values of all filters that match a topic name, which is taken as it is.

        [MQTT-3.3.2-3] [MQTT-4.7.3-4] (3.1.1, 5.0)

        Wildcards in the first level do not match a topic that starts with ``$`` [MQTT-4.7.2-1].
        """
        found: list[T] = []
        levels = topic.split("/")
        nodes = [self._root]
        first = topic[:1] == "$"
        for level in levels:
            following: list[_Node[T]] = []
            for node in nodes:
                if node.rest is not None and not first:
                    found.append(node.rest)
                child = node.children.get(level)
                if child is not None:
                    following.append(child)
                child = None if first else node.children.get("+")
                if child is not None:
                    following.append(child)
            nodes = following
            first = False
        for node in nodes:
            if node.exact is not None:
                found.append(node.exact)
            if node.rest is not None:  # "a/#" matches "a" [MQTT-4.7.1-2]
                found.append(node.rest)
        return found
