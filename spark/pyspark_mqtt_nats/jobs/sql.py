# SPDX-License-Identifier: Apache-2.0
"""The job ``sql``: the result of a query over stored messages as a table, a file or a chart, or as it grows."""

import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType

from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.jobs.monitor import Monitor
from pyspark_mqtt_nats.jobs.progress import Progress, duration, plural, terminal_width
from pyspark_mqtt_nats.jobs.queries import Tally, run_query, watch
from pyspark_mqtt_nats.jobs.storage import Place, parent
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.queries import plot
from pyspark_mqtt_nats.queries.tables import table
from pyspark_mqtt_nats.queries.views import Views, make_views

FORMATS: Final = {".parquet": "parquet", ".csv": "csv", ".json": "json"}
"""Extension of an output -> format of Spark."""

ROWS: Final = 50
"""Rows that are printed, at most, unless the user says otherwise."""

_INTERVAL: Final = "1 second"
"""From one micro-batch to the next, at least, of a query that is followed."""

_CHECKPOINTS: Final = "spark.sql.streaming.checkpointLocation"
"""Setting of the directory for the checkpoint of a query that is followed; a temporary one unless it is set."""

_OUTPUT_MODE: Final = "STREAMING_OUTPUT_MODE"


@dataclass(frozen=True)
class Sql:
    """Requested query. `streams`: name -> prefix of its subjects, views of their own.

    `rows`: of the printed table. `output`: a file for the whole result. `plot`: a page with a chart.
    """

    query: str
    source: Mapping[str, str]
    streams: Mapping[str, str] = field(default_factory=dict)
    rows: int = ROWS
    output: str | None = None
    overwrite: bool = False
    plot: Path | None = None
    follow: bool = False


@dataclass(frozen=True)
class Result:
    """Result of a query: lines to print."""

    lines: tuple[str, ...]

    def text(self) -> str:
        """Return the lines as one text."""
        return "\n".join(self.lines)


def run(spark: SparkSession, job: Sql, progress: Progress, say: Callable[[str], None] = print) -> Result:
    """Run the query; `say` prints what comes while it is followed.

    Raises JobError, and what Spark and the source raise.
    """
    views = Views(spark, make_views(job.source, job.streams, job.follow).values())
    progress.show("planning")
    frame = views.query(job.query)
    if job.follow:
        return _follow(spark, frame, job, progress, say)
    if frame.isStreaming:
        raise JobError("the query reads a stream: give --follow")
    tally = Tally()
    lines: list[str] = []
    if job.output is not None:
        number = _write(spark, frame, job, progress)
        lines.append(f"{plural(number, 'row')} in {job.output} ({duration(tally.seconds)})")
    if job.plot is not None:
        lines.append(_plot(spark, frame, job, progress))
    return Result(tuple(lines or _printed(spark, frame, job, progress, tally)))


def shown(frame: DataFrame, most: int, heading: bool = True) -> tuple[list[str], int]:
    """Return the first rows of a result as lines, with a last line where there are more; and the number of rows."""
    rows = frame.limit(most + 1).collect()
    lines = table(frame.schema, rows[:most], heading, terminal_width(sys.stdout))
    if len(rows) > most:
        lines.append(f"... and more; --rows N shows more than {most:,}, --output all")
    return lines, len(rows)


def _printed(spark: SparkSession, frame: DataFrame, job: Sql, progress: Progress, tally: Tally) -> list[str]:
    lines, number = watch(spark, progress, "reading", lambda: shown(frame, job.rows))
    if number <= job.rows and frame.columns:
        lines.append(f"{plural(number, 'row')} ({duration(tally.seconds)})")
    return lines


def _write(spark: SparkSession, frame: DataFrame, job: Sql, progress: Progress) -> int:
    """Write the result as one file and return the number of its rows."""
    assert job.output is not None
    path = PurePosixPath(job.output)
    place = Place(spark, parent(job.output), "--output")
    if place.has(path.name) and not job.overwrite:
        raise JobError(f"--output {job.output} is there already; give another one, or --overwrite")
    place.require_writable()
    observed = Observation()
    if path.suffix == ".csv":
        frame = _without_bytes(frame)
    counted = frame.observe(observed, F.count(F.lit(1)).alias("rows")).coalesce(1)
    parts = f".{path.name}.{secrets.token_hex(4)}"
    try:
        writer = counted.write.format(FORMATS[path.suffix]).option("header", "true")
        watch(spark, progress, "reading", lambda: writer.save(place.child(parts)))
        place.move(parts, "part-", path.name)
    finally:
        place.remove(parts)
    return int(observed.get["rows"])


def _without_bytes(frame: DataFrame) -> DataFrame:
    """Return a result with bytes in base64, as JSON has them; Spark would write them as [31 32]."""
    names = [field.name for field in frame.schema.fields if isinstance(field.dataType, BinaryType)]
    return frame.withColumns({name: F.base64(F.col(f"`{name.replace('`', '``')}`")) for name in names})


def _plot(spark: SparkSession, frame: DataFrame, job: Sql, progress: Progress) -> str:
    assert job.plot is not None
    plot.check(frame.schema)
    Place(spark, f"file:{job.plot.absolute().parent}", "--plot").require_writable()
    rows = watch(spark, progress, "reading", lambda: frame.limit(plot.ROWS_MOST + 1).collect())
    page = plot.render(job.query, frame.schema, rows[: plot.ROWS_MOST], len(rows) > plot.ROWS_MOST)
    try:
        job.plot.write_text(page, encoding="utf-8")
    except OSError as error:
        raise JobError(f"--plot {job.plot}: {error.strerror}") from None
    return f"{plural(min(len(rows), plot.ROWS_MOST), 'row')} drawn in {job.plot}"


def _follow(spark: SparkSession, frame: DataFrame, job: Sql, progress: Progress, say: Callable[[str], None]) -> Result:
    """Print rows as they come, or the whole result anew with each batch where it is an aggregate."""
    if not frame.isStreaming:
        raise JobError("--follow needs a query over messages, or over a stream of --stream")
    if (checkpoint := spark.conf.get(_CHECKPOINTS, None)) is not None:
        Place(spark, checkpoint, f"--conf {_CHECKPOINTS}").require_writable()
    tally = Tally()
    with Monitor(Options.parse(job.source), progress.say):
        try:
            _run(spark, frame, "append", job, progress, tally, say)
        except AnalysisException as error:
            if _OUTPUT_MODE not in str(error):
                raise
            _run(spark, frame, "complete", job, progress, tally, say)
    return Result((f"{plural(tally.messages, 'message')} in {plural(tally.batches, 'batch')}",))


def _run(
    spark: SparkSession,
    frame: DataFrame,
    mode: str,
    job: Sql,
    progress: Progress,
    tally: Tally,
    say: Callable[[str], None],
) -> None:
    begun = False

    def show(batch: DataFrame, number: int) -> None:
        nonlocal begun
        lines, found = shown(batch, job.rows, heading=mode == "complete" or not begun)
        if not lines or (begun and mode == "append" and not found):
            return
        begun = True
        if mode == "complete":
            lines.insert(0, f"-- {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC")
        progress.clear()
        say("\n".join(lines))

    writer = frame.writeStream.outputMode(mode).foreachBatch(show).trigger(processingTime=_INTERVAL)
    run_query(spark, writer, progress, tally)
