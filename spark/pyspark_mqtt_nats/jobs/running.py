# SPDX-License-Identifier: Apache-2.0
"""Following what Spark does: streaming queries round by round, and actions that take a while."""

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
from pyspark_mqtt_nats.jobs.progress import Progress, count, rate

T = TypeVar("T")

_POLL: Final = 0.2  # seconds

ATTEMPTS: Final = 5
"""Times that a query is started whose workers do not come up."""

_NO_WORKER: Final = "Python worker failed to connect back"


def tasks(spark: SparkSession) -> str:
    """What the tasks of Spark are at: "3 of 8 tasks", "" between two stages."""
    tracker = spark.sparkContext.statusTracker()
    done = total = 0
    for stage in tracker.getActiveStageIds():
        if (info := tracker.getStageInfo(stage)) is not None:
            done += info.numCompletedTasks
            total += info.numTasks
    return f"{count(done)} of {count(total)} tasks" if total else ""


def watch(spark: SparkSession, progress: Progress, what: str, action: Callable[[], T]) -> T:
    """Run a blocking action of Spark, showing how far it is; raises JobError when the user stops it."""
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
    """What the batches of a streaming query have done, added up over the rounds of a job."""

    begun: float = field(default_factory=time.monotonic)
    messages: int = 0
    batches: int = 0
    late: int = 0
    """Groups of rows that came after their window had been written."""
    removed: int = 0
    """Groups that have left the state."""
    open: int = 0
    """Groups that the state has."""
    observed: list[dict[str, Any]] = field(default_factory=list)
    begin: dict[str, Any] = field(default_factory=dict)
    """Offset before the first message."""
    end: dict[str, Any] = field(default_factory=dict)
    """Offset after the last one."""
    _seen: int = -1

    def add(self, update: dict[str, Any]) -> None:
        """Take in the progress of one batch, as Spark writes it; each batch once."""
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
        """First and last sequence that was read, (0, 0) when there was no message."""
        return (self.begin["next"], self.end["next"] - 1) if self.begin else (0, 0)

    @property
    def seconds(self) -> float:
        """Since the job has begun."""
        return time.monotonic() - self.begun

    def line(self) -> str:
        """For the progress line."""
        return f"{count(self.messages)} messages, {rate(self.messages, self.seconds)}, batch {self.batches + 1}"


def _offset(value: Any) -> dict[str, Any]:
    found = orjson.loads(value) if isinstance(value, str) else value
    return found if isinstance(found, dict) else {}


def rounds(progress: Progress, every: float | None) -> Iterator[None]:
    """Once; or again and again, beginning every so many seconds, until the user stops it."""
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
    """Everything that is there now, in as many batches as the options of the source make of it.

    A worker process that does not come up within the ten seconds that Spark gives it, on a machine that has too much
    to do, has done nothing yet: the query goes on from its checkpoint, as after any other end. Not for ever.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _run_query(spark, writer, progress, tally)
            break
        except StreamingQueryException as error:
            if _NO_WORKER not in str(error) or attempt == ATTEMPTS or progress.stopping:
                raise
            progress.say("a Python worker of Spark has not come up in time; once more")


def _run_query(spark: SparkSession, writer: DataStreamWriter, progress: Progress, tally: Tally) -> None:
    query = writer.trigger(availableNow=True).start()
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
    """Progress as Spark's JSON, in whatever form this version of pyspark has it."""
    found: dict[str, Any] = orjson.loads(update.json)
    return found
