# SPDX-License-Identifier: Apache-2.0
"""The query of one rule: started, watched, started again after a failure."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from pyspark_mqtt_nats.jobs.failures import explain
from pyspark_mqtt_nats.queries.views import FORMAT
from pyspark_mqtt_nats.rules.definitions import Rule
from pyspark_mqtt_nats.rules.query_plan import OBSERVED

PAUSE_MOST: Final = 60.0
"""Seconds from a failure to the next start, at most; it begins with one second and doubles."""


@dataclass(frozen=True)
class Figures:
    """Counts of a rule since this process has started it.

    `lag`: messages in the stream that the rule has not read. `error`: why it does not run, "" while it does.
    """

    read: int = 0
    published: int = 0
    batches: int = 0
    failures: int = 0
    lag: int = 0
    error: str = ""

    @property
    def up(self) -> int:
        """1 while the rule runs, else 0."""
        return int(not self.error)


class RunningRule:
    """Owner of the query of a rule."""

    def __init__(
        self, rule: Rule, messages: DataFrame, sink: Mapping[str, str], checkpoint: str, figures: Figures | None = None
    ) -> None:
        self.figures = figures or Figures()
        self._rule = rule
        self._messages = messages
        self._sink = sink
        self._checkpoint = checkpoint
        self._query: StreamingQuery | None = None
        self._batch = -1
        self._due = 0.0
        self._pause = 1.0
        self.told = False
        """Whether the user knows that the query runs."""

    @property
    def starting(self) -> bool:
        """Whether the query is in its first batch, or before it: Spark starts processes of Python for it."""
        query = self._query
        if query is None or query.lastProgress is not None:
            return False
        status = query.status
        return bool(status["isTriggerActive"]) or "Initializing" in status["message"]

    def check(self, may_start: bool) -> str:
        """Start the query when that is due, and count what it has done; return what to tell the user, or ""."""
        query = self._query
        if query is None:
            return self._start() if may_start and time.monotonic() >= self._due else ""
        self._count(query)
        if query.isActive:
            return "" if self.told or self.starting else self._runs()
        error = query.exception()
        self._query = None
        return self._failed(error or RuntimeError("Spark has stopped the query"))

    def stop(self) -> None:
        """Stop the query; its batch is repeated when it is started again."""
        query, self._query = self._query, None
        if query is not None:
            query.stop()
            self._count(query)

    def _start(self) -> str:
        writer = self._messages.writeStream.format(FORMAT).options(**self._sink).outputMode(self._rule.mode)
        writer = writer.option("checkpointLocation", self._checkpoint).queryName(self._rule.name)
        try:
            self._query = writer.trigger(processingTime=f"{self._rule.every} seconds").start()
        except Exception as error:
            return self._failed(error)
        self._batch = -1
        return ""

    def _runs(self) -> str:
        """Note that the query is past its start: there may be nothing to read for long."""
        self.told = True
        self.figures = replace(self.figures, error="")
        return "it runs"

    def _failed(self, error: Exception) -> str:
        text = explain(error)
        self.told = False
        pause, self._pause = self._pause, min(2 * self._pause, PAUSE_MOST)
        self._due = time.monotonic() + pause
        before = self.figures.error
        self.figures = replace(self.figures, failures=self.figures.failures + 1, error=text)
        return "" if text == before else f"{text}; the rule is started again"

    def _count(self, query: StreamingQuery) -> None:
        last = query.lastProgress
        if last is None:
            return
        # Spark keeps the last hundred; one is enough unless batches have ended since the last look.
        for update in query.recentProgress if last.batchId > self._batch + 1 else [last]:
            self._add(orjson.loads(update.json))

    def _add(self, update: Mapping[str, Any]) -> None:
        figures = replace(self.figures, lag=sum(map(_lag, update["sources"])))
        observed = (update.get("observedMetrics") or {}).get(OBSERVED)
        if update["batchId"] > self._batch and observed is not None:
            self._batch = update["batchId"]
            self._pause = 1.0
            figures = replace(
                figures,
                read=figures.read + update["numInputRows"],
                published=figures.published + observed["rows"],
                batches=figures.batches + 1,
                error="",
            )
        self.figures = figures


def _lag(source: Mapping[str, Any]) -> int:
    """Return the messages of a source that are in the stream and not in a complete batch."""
    latest, end = (_next(source.get(name)) for name in ("latestOffset", "endOffset"))
    return max(0, latest - end) if latest and end else 0


def _next(offset: Any) -> int:
    found = orjson.loads(offset) if isinstance(offset, str) else offset
    return int(found.get("next", 0)) if isinstance(found, dict) else 0
