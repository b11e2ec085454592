# SPDX-License-Identifier: Apache-2.0
"""The job ``aggregate``: count, minimum, maximum and mean of numbers in payloads, by topic and time window.

Without a checkpoint it is a batch over what is stored now, and exact. With one it goes on where the last run ended, and
writes a window once, when no more of it is expected: when something later by `watermark` has been seen.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from pyspark_mqtt_nats.decoders.columns import NUMBER
from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.jobs.figures import printable
from pyspark_mqtt_nats.jobs.monitor import Monitor
from pyspark_mqtt_nats.jobs.progress import Progress, count, duration, plural, rate
from pyspark_mqtt_nats.jobs.queries import Tally, rounds, run_round, watch
from pyspark_mqtt_nats.jobs.storage import Checkpoint, Place, parent
from pyspark_mqtt_nats.options import STARTS, Options

_COLUMNS: Final = "sequence BIGINT, timestamp TIMESTAMP, topic STRING, payload BINARY"
_SHOWN: Final = 60  # characters of a payload in a message
_SECONDS_BELOW: Final = 1e11  # a larger number is a time in milliseconds
_MILLISECONDS_BELOW: Final = 1e14


@dataclass(frozen=True)
class Aggregate:
    """Requested aggregation. `window`, `slide` and `watermark` in seconds; `levels` from 1, () for whole topics.

    `field`: the number in JSON payloads, None where they are numbers; `time_field`: the time in JSON payloads, None for
    when NATS has stored them. `output` None: the figures are printed, the first `rows` of them.
    """

    source: Mapping[str, str]
    window: int
    slide: int | None = None
    levels: tuple[int, ...] = ()
    field: str | None = None
    time_field: str | None = None
    watermark: int = 600
    output: str | None = None
    format: str = "parquet"
    overwrite: bool = False
    checkpoint: str | None = None
    every: float | None = None
    rows: int = 50

    @property
    def keys(self) -> list[str]:
        """The columns by which figures are told apart, beside the window."""
        return [f"level_{level}" for level in self.levels] or ["topic"]


@dataclass(frozen=True)
class Aggregated:
    """Result of an aggregation. `windows`: number of figures made; `open`: those of windows that are not over.

    `late`: windows and keys for which values came too late. `table`: what is to be printed, heading first.
    """

    job: Aggregate
    messages: int
    values: int
    windows: int
    seconds: float
    example: str = ""
    open: int = 0
    late: int = 0
    table: tuple[tuple[str, ...], ...] = ()

    def text(self) -> str:
        """The figures, unless they are in files, and the summary."""
        lines = aligned(self.table)
        if self.table and self.windows > len(self.table) - 1:
            lines.append(f"... and {count(self.windows - len(self.table) + 1)} more; --rows N shows more, --output all")
        where = f" in {self.job.output}" if self.job.output else ""
        speed = f"{duration(self.seconds)}, {rate(self.messages, self.seconds)}"
        lines.append(f"{plural(self.windows, 'figure')}{where} from {plural(self.values, 'value')} ({speed})")
        if self.values < self.messages:
            unused = plural(self.messages - self.values, "message")
            lines.append(f"  {unused} with {_lack(self.job)}, such as {self.example}")
        if self.job.checkpoint:
            lines.append(f"  {plural(self.open, 'figure')} of windows that are not over yet")
        if self.late:
            lines.append(f"  {count(self.late)} or more values came after their window; --watermark waits longer")
        return "\n".join(lines)


def run(spark: SparkSession, job: Aggregate, progress: Progress) -> Aggregated:
    """Compute the figures; raises JobError when no payload has a number, and what Spark and the source raise."""
    found = _stream(spark, job, progress) if job.checkpoint else _batch(spark, job, progress)
    if found.messages and not found.values:
        advice = "change --field" if job.field else "name the number in JSON payloads by --field"
        if job.time_field:
            advice += " or --time-field"
        raise JobError(f"all {count(found.messages)} messages have {_lack(job)}, such as {found.example}; {advice}")
    return found


def _lack(job: Aggregate) -> str:
    number = f"no number in {job.field}" if job.field else "no number as payload"
    return f"{number}, or no time in {job.time_field}" if job.time_field else number


def _batch(spark: SparkSession, job: Aggregate, progress: Progress) -> Aggregated:
    if job.output is not None:
        place = Place(spark, parent(job.output), "--output")
        if not place.of_objects:
            place.require_writable()
    messages = spark.read.format("mqtt_nats").options(**job.source).schema(_COLUMNS).load()
    values = measured(messages, job)
    seen = Observation()
    result = windows(values.observe(seen, *checks()), job)
    tally = Tally()
    table: tuple[tuple[str, ...], ...] = ()
    if job.output is None:
        ordered = result.orderBy("start", *job.keys)
        made = watch(spark, progress, "reading", lambda: ordered.collect())
        number = len(made)
        table = (tuple(result.columns), *(tuple(map(shown, row)) for row in made[: job.rows]))
    else:
        mode = "overwrite" if job.overwrite else "errorifexists"
        written = Observation()
        ordered = result.orderBy("start", *job.keys).observe(written, F.count(F.lit(1)).alias("windows"))
        output = job.output
        watch(spark, progress, "reading", lambda: ordered.write.format(job.format).mode(mode).save(output))
        number = _observed(written).get("windows", 0)
    checked = _observed(seen) or watch(spark, progress, "reading", values.agg(*checks()).collect)[0].asDict()
    return Aggregated(
        job, checked["messages"], checked["numbers"], number, tally.seconds, _example(checked["example"]), table=table
    )


def _stream(spark: SparkSession, job: Aggregate, progress: Progress) -> Aggregated:
    assert job.checkpoint is not None
    assert job.output is not None
    begun_with = {
        "job": "aggregate",
        "--format": job.format,
        "--window": f"'{job.window} seconds'",
        "--slide": f"'{job.slide or job.window} seconds'",
        "--level": " ".join(map(str, job.levels)) or "none",
        "--field": job.field or "none",
        "--time-field": job.time_field or "none",
    }
    checkpoint = Checkpoint(spark, job.checkpoint, job.output, begun_with)
    checkpoint.save()
    source = dict(job.source)
    if not STARTS & {name.lower() for name in source}:
        source["startingOffsets"] = "earliest"
    tally = Tally()
    with Monitor(Options.parse(source), progress.say):
        for _ in rounds(progress, job.every):
            messages = spark.readStream.format("mqtt_nats").options(**source).schema(_COLUMNS).load()
            result = windows(measured(messages, job).observe("checks", *checks()), job)
            writer = result.writeStream.format(job.format).outputMode("append")
            writer = writer.option("checkpointLocation", job.checkpoint).option("path", job.output)
            run_round(spark, writer, progress, tally)
            if job.every is not None:
                progress.show(f"{count(tally.messages)} messages, {count(tally.open)} open windows, waiting for more")
    examples = [text for found in tally.observed if (text := _example(found.get("example")))]
    return Aggregated(
        job,
        sum(found.get("messages") or 0 for found in tally.observed),
        sum(found.get("numbers") or 0 for found in tally.observed),
        tally.removed,
        tally.seconds,
        examples[0] if examples else "",
        tally.open,
        tally.late,
    )


def measured(messages: DataFrame, job: Aggregate) -> DataFrame:
    """`time` and `value` of each message, null where there is none, its keys, `sequence`, `topic` and `payload`."""
    text = F.try_validate_utf8(F.col("payload").cast("string"))
    value = _number(text if job.field is None else F.get_json_object(text, json_path(job.field)))
    time = F.col("timestamp") if job.time_field is None else _time(F.get_json_object(text, json_path(job.time_field)))
    levels = F.split("topic", "/")
    keys = [F.get(levels, level - 1).alias(f"level_{level}") for level in job.levels]
    return messages.select("sequence", "topic", "payload", *keys, time.alias("time"), value.alias("value"))


def windows(values: DataFrame, job: Aggregate) -> DataFrame:
    """`measured` values as figures: the keys, `start`, `end`, `count`, `min`, `max` and `mean`."""
    usable = values.where(F.col("value").isNotNull() & F.col("time").isNotNull())
    usable = usable.withWatermark("time", f"{job.watermark} seconds")
    window = F.window("time", f"{job.window} seconds", f"{job.slide or job.window} seconds")
    figures = usable.groupBy(window.alias("window"), *job.keys).agg(
        F.count("value").alias("count"),
        F.min("value").alias("min"),
        F.max("value").alias("max"),
        F.avg("value").alias("mean"),
    )
    edges = (F.col("window.start").alias("start"), F.col("window.end").alias("end"))
    return figures.select(*job.keys, *edges, "count", "min", "max", "mean")


def checks() -> tuple[Column, ...]:
    """Columns to observe of `measured` messages: their number, the number that counts, and the first that does not."""
    good = F.col("value").isNotNull() & F.col("time").isNotNull()
    shown = F.substring(F.try_validate_utf8(F.col("payload").cast("string")), 1, _SHOWN)
    example = F.struct("sequence", "topic", shown.alias("payload"))
    return (
        F.count(F.lit(1)).alias("messages"),
        F.count_if(good).alias("numbers"),
        F.min(F.when(~good, example)).alias("example"),
    )


def _observed(observation: Observation) -> dict[str, Any]:
    """Return the observed figures; none where Spark has found that there are no rows and has left the plan out."""
    try:
        return observation.get
    except Py4JJavaError:
        return {}


def _example(row: Any) -> str:
    if row is None:
        return ""
    payload = "bytes that are no text" if row["payload"] is None else repr(row["payload"])
    return f"sequence {row['sequence']}, topic {row['topic']!r}: {payload}"


def _number(text: Column) -> Column:
    """Text as DOUBLE; null for what is no decimal number, and for one that DOUBLE cannot hold."""
    value = F.when(text.rlike(NUMBER), F.trim(text).try_cast("double"))
    return F.when(F.abs(value) < float("inf"), value)


def _time(text: Column) -> Column:
    """Text as TIMESTAMP: ISO 8601, in UTC where it does not say otherwise, or (milli)seconds since 1970."""
    number = _number(text)
    seconds = F.when(F.abs(number) < _SECONDS_BELOW, number).when(F.abs(number) < _MILLISECONDS_BELOW, number / 1000)
    return F.when(number.isNotNull(), F.timestamp_micros((seconds * 1e6).cast("bigint"))).otherwise(
        F.try_to_timestamp(text)
    )


def json_path(field: str) -> str:
    """`a.b[0]` as Spark's JSON path; raises JobError for what is none."""
    if field.startswith("$"):
        return field
    parts = field.split(".")
    if not all(re.fullmatch(r"[^\[\]'\"*]+(\[\d+\])*", part) for part in parts):
        raise JobError(f"--field or --time-field {field!r}: expected names with dots between them, such as sensor.temp")
    return "$" + "".join(
        f"['{name}']{index}"
        for name, index in (re.match(r"([^\[]+)(.*)", part).groups() for part in parts)  # type: ignore[union-attr]
    )


def shown(value: Any) -> str:
    """A value of the figures as text; topics come from strangers."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:%Y-%m-%d %H:%M:%S}" if hasattr(value, "strftime") else printable(str(value))


def aligned(table: tuple[tuple[str, ...], ...]) -> list[str]:
    """A table as lines, its columns as wide as they must be; numbers to the right."""
    if not table:
        return []
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [name in ("count", "min", "max", "mean") for name in table[0]]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in table
    ]
