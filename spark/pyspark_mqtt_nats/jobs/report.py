# SPDX-License-Identifier: Apache-2.0
"""The job ``report``: what is in the store, or in an archive, as a page and in a few lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.jobs.figures import Bar, Figures, Gap, Ranked, width_of_bars
from pyspark_mqtt_nats.jobs.page import render
from pyspark_mqtt_nats.jobs.progress import Progress
from pyspark_mqtt_nats.jobs.queries import watch
from pyspark_mqtt_nats.jobs.storage import Place
from pyspark_mqtt_nats.lakehouse.batches import read_files
from pyspark_mqtt_nats.options import Options

_COLUMNS: Final = (
    "sequence BIGINT, timestamp TIMESTAMP, topic STRING, payload BINARY, qos INT, retain BOOLEAN, publisher STRING"
)
_NEEDED: Final = [column.split()[0] for column in _COLUMNS.split(", ")]
_BLOCK: Final = 1 << 16
"""Sequences among which gaps are looked for by one task."""
_PIECES: Final = 200  # of the strip that shows which sequences have a message


@dataclass(frozen=True)
class Report:
    """Input of a report: an archive, or the store. `most`: length of the lists; `output`: the page, None for none."""

    source: Mapping[str, str]
    input: str | None = None
    format: str = "parquet"
    output: Path | None = None
    most: int = 20


@dataclass(frozen=True)
class Reported:
    """Result of a report."""

    job: Report
    figures: Figures
    seconds: float

    def text(self) -> str:
        """The summary."""
        text = self.figures.text()
        return f"{text}\n{self.job.output} has the charts" if self.job.output else text


def run(spark: SparkSession, job: Report, progress: Progress) -> Reported:
    """Read everything once and write the page; raises JobError and what Spark and the source raise."""
    begun = datetime.now(UTC)
    if job.output is not None:
        Place(spark, f"file:{job.output.absolute().parent}", "--output").require_writable()
    if job.input is None:
        options = Options.parse(job.source)
        name, whole = f"stream {options.stream}", not options.subjects
        messages = spark.read.format("mqtt_nats").options(**job.source).schema(_COLUMNS).load()
    else:
        name, whole = job.input, True
        messages = read_files(spark, job.input, job.format)
        missing = [column for column in _NEEDED if column not in messages.columns]
        if missing:
            raise JobError(f"--input {job.input} is no archive of messages: it has no column {missing[0]!r}")
    found = figures(spark, messages, progress, name=name, whole=whole, most=job.most)
    if job.output is not None:
        try:
            job.output.write_text(render(found), encoding="utf-8")
        except OSError as error:
            raise JobError(f"--output {job.output}: {error.strerror}") from None
    return Reported(job, found, (datetime.now(UTC) - begun).total_seconds())


def figures(
    spark: SparkSession, messages: DataFrame, progress: Progress, *, name: str, whole: bool, most: int
) -> Figures:
    """The figures of messages. They are read once: Spark keeps a few columns of them, on disk where it has to."""
    slim = messages.select(
        "sequence", "timestamp", "topic", "qos", "retain", "publisher", F.length("payload").alias("size")
    )
    slim = slim.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        return _figures(spark, slim, progress, Figures(source=name, made=datetime.now(UTC), whole=whole), most)
    finally:
        slim.unpersist()


def _figures(spark: SparkSession, slim: DataFrame, progress: Progress, empty: Figures, most: int) -> Figures:
    total = watch(spark, progress, "reading", lambda: slim.agg(*_totals()).collect())[0]
    if not total["messages"]:
        return empty

    def rank(column: str) -> list[Ranked]:
        ordered = slim.groupBy(column).agg(F.count(F.lit(1)).alias("messages"), F.sum("size").alias("bytes"))
        ordered = ordered.orderBy(F.desc("messages"), column).limit(most)
        rows = watch(spark, progress, f"counting by {column}", ordered.collect)
        return [Ranked(None if row[0] is None else str(row[0]), row["messages"], row["bytes"] or 0) for row in rows]

    first, last = _moment(total["first_time"]), _moment(total["last_time"])
    width = width_of_bars((last - first).total_seconds())
    slots = slim.groupBy(F.expr(f"unix_micros(timestamp) div {width * 1_000_000}").alias("slot"))
    bars = watch(spark, progress, "counting by time", slots.count().orderBy("slot").collect)
    gaps, gap_count, missing = ([], 0, 0) if not empty.whole else _gaps(spark, slim, progress, most)
    pieces: Sequence[float] = ()
    if gaps:
        pieces = _coverage(spark, slim, progress, total["first_sequence"], total["last_sequence"])
    return Figures(
        source=empty.source,
        made=empty.made,
        messages=total["messages"],
        bytes=total["bytes"] or 0,
        topics=total["topics"],
        publishers=total["publishers"],
        retained=total["retained"],
        first_sequence=total["first_sequence"],
        last_sequence=total["last_sequence"],
        first_time=first,
        last_time=last,
        smallest=total["smallest"] or 0,
        median=total["median"] or 0,
        largest=total["largest"] or 0,
        width=width,
        bars=[Bar(_moment(row["slot"] * width * 1_000_000), row["count"]) for row in bars],
        busiest=rank("topic"),
        senders=rank("publisher"),
        qos=sorted(rank("qos"), key=lambda one: one.name or "-"),
        whole=empty.whole,
        gaps=gaps,
        gap_count=gap_count,
        missing=missing,
        coverage=pieces,
    )


def _moment(microseconds: int) -> datetime:
    return datetime.fromtimestamp(microseconds // 1_000_000, UTC)


def _totals() -> list[Column]:
    return [
        F.count(F.lit(1)).alias("messages"),
        F.sum("size").alias("bytes"),
        F.count_distinct("topic").alias("topics"),
        F.count_distinct("publisher").alias("publishers"),
        F.count_if(F.coalesce("retain", F.lit(False))).alias("retained"),
        F.min("sequence").alias("first_sequence"),
        F.max("sequence").alias("last_sequence"),
        F.unix_micros(F.min("timestamp")).alias("first_time"),
        F.unix_micros(F.max("timestamp")).alias("last_time"),
        F.min("size").alias("smallest"),
        F.percentile_approx("size", 0.5).alias("median"),
        F.max("size").alias("largest"),
    ]


def _gaps(spark: SparkSession, slim: DataFrame, progress: Progress, most: int) -> tuple[list[Gap], int, int]:
    """The largest gaps in order of the sequences, how many there are, and how many sequences they have.

    Blocks of sequences are looked at by themselves, those that are not full; the driver has what is between them.
    """
    block = F.expr(f"sequence div {_BLOCK}").alias("block")
    edges = slim.groupBy(block).agg(
        F.min("sequence").alias("first"),
        F.max("sequence").alias("last"),
        F.count_distinct("sequence").alias("messages"),
    )
    blocks = watch(spark, progress, "looking for gaps", edges.orderBy("block").collect)
    found = [
        Gap(before["last"] + 1, after["first"] - before["last"] - 1)
        for before, after in pairwise(blocks)
        if after["first"] - before["last"] > 1
    ]
    number, missing = len(found), sum(gap.missing for gap in found)
    if any(row["messages"] <= row["last"] - row["first"] for row in blocks):
        holes = edges.where("messages <= last - first").select("block")
        inside = slim.select("sequence", block).join(F.broadcast(holes), "block").select("sequence", "block")
        before = F.expr("lag(sequence) OVER (PARTITION BY block ORDER BY sequence)")
        lost = inside.select("sequence", (F.col("sequence") - before - 1).alias("missing")).where("missing > 0")
        lost = lost.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            counted = watch(spark, progress, "looking for gaps", lost.agg(F.count(F.lit(1)), F.sum("missing")).collect)[
                0
            ]
            number, missing = number + counted[0], missing + (counted[1] or 0)
            largest = lost.orderBy(F.desc("missing"), "sequence").limit(most)
            rows: list[Any] = watch(spark, progress, "looking for gaps", largest.collect)
            found += [Gap(row["sequence"] - row["missing"], row["missing"]) for row in rows]
        finally:
            lost.unpersist()
    found = sorted(found, key=lambda gap: (-gap.missing, gap.first))[:most]
    return sorted(found, key=lambda gap: gap.first), number, missing


def _coverage(spark: SparkSession, slim: DataFrame, progress: Progress, first: int, last: int) -> list[float]:
    """Share of the sequences that have a message, in up to _PIECES pieces."""
    length = last - first + 1
    pieces = min(_PIECES, length)
    # piece i has the sequences from first + length * i div pieces on
    piece = F.expr(f"((sequence - {first}) * {pieces} + {pieces - 1}) div {length}")
    rows = watch(spark, progress, "looking for gaps", slim.groupBy(piece.alias("piece")).count().collect)
    counts = {row["piece"]: row["count"] for row in rows}
    bounds = [length * index // pieces for index in range(pieces + 1)]
    return [counts.get(index, 0) / (after - before) for index, (before, after) in enumerate(pairwise(bounds))]
