# SPDX-License-Identifier: Apache-2.0
"""Columns that a query needs of its views, from plans that stand for those of Spark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from pyspark_mqtt_nats.queries.pruning import VIEW, Need, needs

COLUMNS = ("topic", "payload", "timestamp")


class Items:
    """A sequence of Scala."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def size(self) -> int:
        return len(self._items)

    def apply(self, place: int) -> Any:
        return self._items[place]

    def toSeq(self) -> Items:
        return self


class Attribute:
    """A column of the view; its id is its place, and it is its own metadata."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name

    def id(self) -> int:
        return COLUMNS.index(self._name)

    def exprId(self) -> Attribute:
        return self

    def metadata(self) -> Attribute:
        return self

    def json(self) -> str:
        return json.dumps({VIEW: "messages"})


class Node:
    """A node of a plan, which needs some columns itself."""

    def __init__(self, name: str, *children: Node, needed: Sequence[str] = ()) -> None:
        self._name, self._children = name, children
        self._needed = [Attribute(one) for one in needed]

    def optimizedPlan(self) -> Node:
        return self

    def nodeName(self) -> str:
        return self._name

    def children(self) -> Items:
        return Items(self._children)

    def subqueries(self) -> Items:
        return Items(())

    def references(self) -> Items:
        return Items(self._needed)

    def output(self) -> Items:
        return Items([Attribute(one) for one in COLUMNS])


@pytest.mark.parametrize(
    ("nodes", "columns"),
    [
        ((), set(COLUMNS)),
        ((("Project", "topic"),), {"topic"}),
        ((("Aggregate", ""), ("Filter", "topic")), {"topic"}),
        ((("Project", "payload"), ("Sort", "timestamp"), ("Filter", "topic")), set(COLUMNS)),
        ((("Project", "payload"), ("Filter", "payload")), {"payload"}),
        ((("Filter", "topic"),), set(COLUMNS)),
        ((("Project", "topic"), ("Unknown", "")), set(COLUMNS)),
        ((("Project", "topic"), ("Unknown", ""), ("Project", "payload")), {"payload"}),
    ],
)
def test_columns_that_a_plan_needs(nodes: Sequence[tuple[str, str]], columns: set[str]) -> None:
    """From the top of the plan down to the view; a node that is not known needs all."""
    plan = Node("MicroBatch")
    for name, needed in reversed(nodes):
        plan = Node(name, plan, needed=[needed] if needed else [])
    assert needs(plan) == {"messages": Need(columns, 1)}


def test_a_view_that_occurs_twice() -> None:
    sides = (Node("Project", Node("Leaf"), needed=[name]) for name in ("topic", "payload"))
    assert needs(Node("Project", Node("Join", *sides), needed=["topic"])) == {"messages": Need({"topic", "payload"}, 2)}
