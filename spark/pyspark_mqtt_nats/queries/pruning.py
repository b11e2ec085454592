# SPDX-License-Identifier: Apache-2.0
"""Columns that a query needs of each view, from Spark's optimised plan.

Spark 4.3 prunes no columns of a Python source. Its optimiser still leaves only what a query needs in the nodes above
the views: `Project` and `Aggregate` say which columns go on. A plan that this module does not know needs all columns.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from py4j.java_gateway import is_instance_of
from pyspark.sql import SparkSession

VIEW: Final = "mqtt_nats.view"
"""Key of a column's metadata: the name of its view."""

_COMMAND: Final = "org.apache.spark.sql.catalyst.plans.logical.Command"

_NARROWING: Final = frozenset(("Project", "Aggregate"))
"""Nodes whose expressions alone say what they need of their child."""

_PASSING: Final = frozenset(
    (
        *("Filter", "Sort", "Join", "Window", "Generate", "GlobalLimit", "LocalLimit", "Offset", "Tail", "Sample"),
        *("Repartition", "RepartitionByExpression", "EventTimeWatermark", "Deduplicate", "DeduplicateWithinWatermark"),
    )
)
"""Nodes that pass columns of their children on, and need some themselves."""


@dataclass
class Need:
    """What a query needs of a view: columns, and how many times the view occurs."""

    columns: set[str] = field(default_factory=set)
    times: int = 0


def planned(spark: SparkSession, text: str) -> Any:
    """Return Spark's QueryExecution of a statement, which is planned and not run."""
    state = spark._jsparkSession.sessionState()
    mode = spark._jvm.org.apache.spark.sql.execution.CommandExecutionMode.SKIP()  # type: ignore[union-attr]
    return state.executePlan(state.sqlParser().parsePlan(text), mode)


def is_command(spark: SparkSession, plan: Any) -> bool:
    """Whether a statement is no query: Spark runs it at once."""
    return bool(is_instance_of(spark.sparkContext._gateway, plan.analyzed(), _COMMAND))


def needs(plan: Any) -> dict[str, Need]:
    """Return what a query needs, by the names of the views that it uses."""
    found: dict[str, Need] = {}
    _walk(plan.optimizedPlan(), None, found)
    return found


def _walk(node: Any, wanted: frozenset[int] | None, found: dict[str, Need]) -> None:
    """Add what a node and those below it need; `wanted`: ids of attributes that nodes above need, None for all."""
    for query in _items(node.subqueries()):
        _walk(query, None, found)
    children = list(_items(node.children()))
    if not children:
        _leaf(node, wanted, found)
        return
    name = node.nodeName()
    below: frozenset[int] | None = None
    if name in _NARROWING:
        below = _references(node)
    elif name in _PASSING and wanted is not None:
        below = wanted | _references(node)
    for child in children:
        _walk(child, below, found)


def _leaf(node: Any, wanted: frozenset[int] | None, found: dict[str, Need]) -> None:
    seen: set[str] = set()
    for attribute in _items(node.output()):
        view = json.loads(attribute.metadata().json()).get(VIEW)
        if view is None:
            continue
        need = found.setdefault(view, Need())
        seen.add(view)
        if wanted is None or attribute.exprId().id() in wanted:
            need.columns.add(attribute.name())
    for view in seen:
        found[view].times += 1


def _references(node: Any) -> frozenset[int]:
    return frozenset(attribute.exprId().id() for attribute in _items(node.references().toSeq()))


def _items(sequence: Any) -> Iterator[Any]:
    """Yield the items of a Scala sequence."""
    for place in range(sequence.size()):
        yield sequence.apply(place)
