# SPDX-License-Identifier: Apache-2.0
"""Whether a PromQL query finds something in what ``/metrics`` answers: metrics, matchers, and labels to group by."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser
from prometheus_client.parser import text_string_to_metric_families

TARGET = {"job": "mqtt-nats", "instance": "gateway:9883"}
"""What Prometheus adds to every sample."""


class Samples:
    """What was answered, by name."""

    def __init__(self, text: str) -> None:
        self._labels: dict[str, list[dict[str, str]]] = {}
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                self._labels.setdefault(one.name, []).append({**one.labels, **TARGET})

    def problems(self, query: str) -> list[str]:
        """Why the query finds nothing; empty when it does."""
        return list(self._look(promql_parser.parse(query), frozenset()))

    def _look(self, node: Any, wanted: frozenset[str]) -> Iterator[str]:
        match type(node).__name__:
            case "VectorSelector":
                yield from self._select(node, wanted)
            case "MatrixSelector":
                yield from self._select(node.vector_selector, wanted)
            case "AggregateExpr":
                modifier = node.modifier
                yield from self._look(node.expr, wanted | frozenset(modifier.labels if modifier is not None else ()))
            case "Call":
                for one in node.args:
                    yield from self._look(one, wanted)
            case "BinaryExpr":
                yield from self._look(node.lhs, wanted)
                yield from self._look(node.rhs, wanted)
            case "ParenExpr" | "UnaryExpr":
                yield from self._look(node.expr, wanted)

    def _select(self, selector: Any, wanted: frozenset[str]) -> Iterator[str]:
        name = selector.name
        if name not in self._labels:
            yield f"there is no metric {name}"
            return
        found = [labels for labels in self._labels[name] if _fits(selector.matchers.matchers, labels)]
        if not found:
            yield f"no sample of {name} has labels like {selector.matchers}"
        elif missing := wanted - set(found[0]):
            yield f"{name} has no label {', '.join(sorted(missing))}"


def _fits(matchers: list[Any], labels: dict[str, str]) -> bool:
    for one in matchers:
        value = labels.get(one.name, "")
        kind = str(one.op).rpartition(".")[2]
        fits = re.fullmatch(one.value, value) is not None if kind in ("Re", "NotRe") else value == one.value
        if fits is not (kind in ("Re", "Equal")):
            return False
    return True
