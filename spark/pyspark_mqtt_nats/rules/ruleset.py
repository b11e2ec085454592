# SPDX-License-Identifier: Apache-2.0
"""All rules of a file while they run, and the file as it changes."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.rules.definitions import Definitions, load
from pyspark_mqtt_nats.rules.query import Figures, RunningRule
from pyspark_mqtt_nats.rules.query_plan import Reads, plan, sink_options

RETRY_S: Final = 30.0
"""Seconds after which a file whose rules could not be planned is tried again, for what has failed only in passing."""


class Ruleset:
    """Owner of the rules that run.

    Args:
        say: tells the user something, one line.
    """

    def __init__(self, spark: SparkSession, file: Path, reads: Reads, say: Callable[[str], None]) -> None:
        self._spark = spark
        self._file = file
        self._reads = reads
        self._say = say
        self._running: dict[str, RunningRule] = {}
        self._refused = ""
        self._retry_at = math.inf
        self._seen = self._force = load(file)
        self._swap(self._force, self._planned(self._force, list(self._force.rules)))

    @property
    def figures(self) -> Mapping[str, Figures]:
        """Counts of each rule, by its name."""
        return {name: rule.figures for name, rule in self._running.items()}

    @property
    def running(self) -> int:
        """Rules whose query is past its start."""
        return sum(rule.told for rule in self._running.values())

    def check(self) -> None:
        """Look at each query; they are started one after another: their workers have ten seconds to come up."""
        for name, rule in self._running.items():
            may_start = not any(one.starting for one in self._running.values())
            if text := rule.check(may_start):
                self._say(f"rule {name}: {text}")

    def reload(self) -> None:
        """Put the file in force where it has changed; a file with an error changes nothing."""
        try:
            found = load(self._file)
            if found == self._seen and time.monotonic() < self._retry_at:
                if found == self._force:
                    self._accept()
                return
            self._seen = found
            changed = [name for name in found.rules if not found.same(self._force, name)]
            planned = self._planned(found, changed)
        except JobError as error:
            self._retry_at = time.monotonic() + RETRY_S
            if str(error) != self._refused:
                self._refused = str(error)
                self._say(f"{error}; the rules in force stay")
            return
        self._retry_at = math.inf
        gone = [name for name in self._running if name not in found.rules]
        if not changed and not gone:
            self._accept()
        self._refused = ""
        for name in (*gone, *changed):
            if (rule := self._running.get(name)) is not None:
                rule.stop()
        for name in gone:
            del self._running[name]
        self._swap(found, planned)
        if changed or gone:
            self._say(f"{self._file}: started {_names(changed)}, stopped {_names(gone)}")

    def _accept(self) -> None:
        """Say that the file has the rules in force, where an error of the file was told before."""
        if self._refused:
            self._refused = ""
            self._say(f"{self._file}: it has the rules in force")

    def stop(self) -> None:
        """Stop all queries."""
        for rule in self._running.values():
            rule.stop()

    def _planned(self, found: Definitions, names: list[str]) -> dict[str, DataFrame]:
        return {name: self._plan(found, name) for name in names}

    def _plan(self, found: Definitions, name: str) -> DataFrame:
        try:
            return plan(self._spark, found, found.rules[name], self._reads)
        except JobError as error:
            raise JobError(f"{self._file}: {error}") from None

    def _swap(self, found: Definitions, planned: Mapping[str, DataFrame]) -> None:
        for name, messages in planned.items():
            rule = found.rules[name]
            sink = sink_options(found, rule, self._reads.source)
            before = self._running.get(name)
            figures = None if before is None else before.figures
            self._running[name] = RunningRule(rule, messages, sink, found.checkpoint(rule), figures)
        self._force = found


def _names(names: list[str]) -> str:
    return ", ".join(names) or "none"
