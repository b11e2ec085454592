# SPDX-License-Identifier: Apache-2.0
"""Streaming queries round by round, and actions that take a while, with their progress."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import orjson
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.jobs.failures import NO_WORKER
from pyspark_mqtt_nats.jobs.progress import Progress, count, rate

T = TypeVar("T")

_POLL: Final = 0.2  # seconds

ATTEMPTS: Final = 5
"""Times that a query is started whose workers do not come up."""


def tasks(spark: SparkSession) -> str:
    """Return how many tasks of Spark are complete: "3 of 8 tasks", "" between two stages."""
    tracker = spark.sparkContext.statusTracker()
    done = total = 0
    for stage in tracker.getActiveStageIds():
        if (info := tracker.getStageInfo(stage)) is not None:
            done += info.numCompletedTasks
            total += info.numTasks
    return f"{count(done)} of {count(total)} tasks" if total else ""


def watch(spark: SparkSession, progress: Progress, what: str, action: Callable[[], T]) -> T:
    """Run a blocking action of Spark and show its progress; raises JobError when the user stops it."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(action)
        while True:
            try:
                return future.result(_POLL)
            except NotYet:
                progress.show(", ".join(filter(None, (what, tasks(spark)))))
            if progress.stopping:
                spark.sparkContext.cancelAllJobs()
                future.exception()
                raise JobError("stopped")


@dataclass
class Tally:
    """Sums over the batches of a streaming query, in all rounds of a job."""

    begun: float = field(default_factory=time.monotonic)
    messages: int = 0
    batches: int = 0
    late: int = 0
    """Groups of rows that came after the job had written their window."""
    removed: int = 0
    """Groups that Spark has removed from the state."""
    open: int = 0
    """Groups that are in the state."""
    observed: list[dict[str, Any]] = field(default_factory=list)
    begin: dict[str, Any] = field(default_factory=dict)
    """Offset before the first message."""
    end: dict[str, Any] = field(default_factory=dict)
    """Offset after the last one."""
    _seen: int = -1

    def add(self, update: dict[str, Any]) -> None:
        """Add the progress of one batch, as Spark writes it; a batch counts once."""
        if update["batchId"] <= self._seen:
            return
        operators = update.get("stateOperators") or []
        source = (update.get("sources") or [{}])[0]
        end = _offset(source.get("endOffset"))
        moved = end != _offset(source.get("startOffset"))
        if not update["numInputRows"] and not moved and not operators:
            return  # nothing to do; its number comes again
        self._seen = update["batchId"]
        self.messages += update["numInputRows"]
        self.batches += 1
        self.late += sum(operator.get("numRowsDroppedByWatermark", 0) for operator in operators)
        self.removed += sum(operator.get("numRowsRemoved", 0) for operator in operators)
        if operators:
            self.open = sum(operator.get("numRowsTotal", 0) for operator in operators)
        self.observed += (update.get("observedMetrics") or {}).values()
        if update["numInputRows"] and not self.begin:
            # The offset before the first batch of a query says nothing yet.
            start = _offset(source.get("startOffset"))
            self.begin = start if start.get("next") else {"next": end.get("first", 0)}
        self.end = end or self.end

    def sequences(self) -> tuple[int, int]:
        """Return the first and the last sequence that was read, (0, 0) when there was no message."""
        return (self.begin["next"], self.end["next"] - 1) if self.begin else (0, 0)

    @property
    def seconds(self) -> float:
        """Seconds since the job has begun."""
        return time.monotonic() - self.begun

    def line(self) -> str:
        """Return the text of the progress line."""
        return f"{count(self.messages)} messages, {rate(self.messages, self.seconds)}, batch {self.batches + 1}"


def _offset(value: Any) -> dict[str, Any]:
    found = orjson.loads(value) if isinstance(value, str) else value
    return found if isinstance(found, dict) else {}


def rounds(progress: Progress, every: float | None) -> Iterator[None]:
    """Yield once; with `every`, yield every so many seconds until the user stops the job."""
    while True:
        begun = time.monotonic()
        yield
        if every is None:
            return
        while (left := begun + every - time.monotonic()) > 0 and not progress.stopping:
            time.sleep(min(left, _POLL))
        if progress.stopping:
            return


def run_round(spark: SparkSession, writer: DataStreamWriter, progress: Progress, tally: Tally) -> None:
    """Read everything that is there now, in as many batches as the options of the source make of it.

    Spark gives a worker process ten seconds to come up; on a busy machine it may take longer. Such a worker has done
    nothing yet, so the query is started again from its checkpoint, at most ATTEMPTS times.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            run_query(spark, writer.trigger(availableNow=True), progress, tally)
            break
        except StreamingQueryException as error:
            if NO_WORKER not in str(error) or attempt == ATTEMPTS or progress.stopping:
                raise
            progress.say("a Python worker of Spark has not come up in time; once more")


def run_query(spark: SparkSession, writer: DataStreamWriter, progress: Progress, tally: Tally) -> None:
    """Run a streaming query until it ends by itself or the user stops it; raises what ends it."""
    query = writer.start()
    try:
        while not query.awaitTermination(_POLL):  # type: ignore[arg-type]  # it takes fractions
            if (update := query.lastProgress) is not None:
                tally.add(_plain(update))
            progress.show(", ".join(filter(None, (tally.line(), tasks(spark)))))
            if progress.stopping:
                break
    finally:
        query.stop()
        for update in query.recentProgress:
            tally.add(_plain(update))


def _plain(update: Any) -> dict[str, Any]:
    """Return the progress of a query as Spark's JSON, for every version of pyspark."""
    found: dict[str, Any] = orjson.loads(update.json)
    return found
