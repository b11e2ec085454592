# SPDX-License-Identifier: Apache-2.0
"""Job ``archive``: stored messages to files by date and first topic level, each message exactly once.

Spark's checkpoint has the sequence up to which messages are in the archive. The log of Spark's file sink names the
files that belong to the archive. So an incomplete batch of a killed run is written again, and the files of the first
attempt do not count. A table of Delta or Iceberg has the number of the last batch in the commit of its files.
"""

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from mqtt_streams.subjects import root_of, subject_to_topic
from pyspark_mqtt_nats.decoders.option import columns
from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.jobs.monitor import Monitor
from pyspark_mqtt_nats.jobs.progress import Progress, count, duration, plural, rate
from pyspark_mqtt_nats.jobs.queries import Tally, rounds, run_round
from pyspark_mqtt_nats.jobs.storage import Checkpoint, Place
from pyspark_mqtt_nats.lakehouse import PACKAGES
from pyspark_mqtt_nats.lakehouse.batches import Batches, arrow_schema, compare_files, prepare
from pyspark_mqtt_nats.lakehouse.tables import COPIES, PARTITIONS, Target, exists, open_table
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import stream_info
from pyspark_mqtt_nats.options import STARTS, Options
from pyspark_mqtt_nats.reading.selection import visible

OTHER: Final = "_other"
"""Directory of the first levels beyond the most that get one of their own."""

BATCH: Final = 1_000_000
"""Most messages of a micro-batch when no limit is given; a killed run has to write them again."""

FEW_ROOTS: Final = 4
"""Most directories of roots for which each task writes what it has read. With more, rows are first brought together by
directory, so that a batch does not write many small files."""

_NAME_MOST: Final = 48  # characters: file systems allow names of 255 bytes, UTF-8 has up to 4 a character
_PAGES: Final = 20  # of the list of subjects, which has 100,000 on a page


@dataclass(frozen=True)
class Archive:
    """Settings of an archive. `source`: options of the source; `every`: seconds between two rounds, None for one round.

    `roots`: most directories a day; `files`: files a directory and batch, None for the choice of the job. `catalog` and
    `table`: Iceberg's.
    """

    output: str
    source: Mapping[str, str]
    checkpoint: str | None = None
    every: float | None = None
    format: str = "parquet"
    roots: int = 64
    files: int | None = None
    catalog: str | None = None
    table: str = "mqtt.messages"


@dataclass(frozen=True)
class Archived:
    """Counts of a run; `first` and `last` sequence, 0 without a message."""

    job: Archive
    messages: int
    batches: int
    seconds: float
    first: int
    last: int

    def text(self) -> str:
        """Return the summary."""
        job = self.job
        if not self.messages:
            return f"nothing new to archive in {job.output} ({duration(self.seconds)})"
        lines = [
            f"{plural(self.messages, 'message')} archived in {duration(self.seconds)}, "
            f"{rate(self.messages, self.seconds)}, in {plural(self.batches, 'batch')}",
            f"  sequences {count(self.first)} to {count(self.last)}",
            f"  in {job.output}: {job.format}, by date and root",
        ]
        missing = self.last - self.first + 1 - self.messages
        if missing > 0:
            lines.insert(2, f"  {plural(missing, 'sequence')} between them: other topics, expired or deleted")
        return "\n".join(lines)


def run(spark: SparkSession, job: Archive, progress: Progress) -> Archived:
    """Archive the stored messages, or go on until the user stops the job.

    Raises JobError, and the errors of Spark and the source.
    """
    options = Options.parse(job.source)
    added = columns(options.decoders)
    _require_free(added, job.format)
    with Monitor(options, progress.say):
        return _run(spark, job, progress, added)


def _require_free(added: StructType, format: str) -> None:
    """Raise JobError for a column of decoders whose name the archive needs; Spark makes no difference of capitals."""
    own = (*PARTITIONS, *(COPIES if format == "iceberg" else ()))
    for name in added.names:
        if name.lower() in own:
            raise JobError(f"decoders: {name!r} is a column that the archive adds by itself: choose another name")


def _run(spark: SparkSession, job: Archive, progress: Progress, added: StructType) -> Archived:
    where = job.checkpoint or f"{job.output.rstrip('/')}/_checkpoint"
    checkpoint = Checkpoint(spark, where, job.output, {"job": "archive", "--format": job.format})
    if added.names and checkpoint.memory.get("columns") != added.json():  # else these columns were compared before
        compare_files(spark, Place(spark, job.output, "--output"), job.format, added)
        checkpoint.memory["columns"] = added.json()
    roots: dict[str, str] = checkpoint.memory.setdefault("roots", {})
    lake = _Lake(spark, job, checkpoint) if job.format in PACKAGES else None
    tally = Tally()
    for _ in rounds(progress, job.every):
        before = len(roots)
        if before < job.roots:
            add_roots(roots, first_levels(Options.parse(job.source)), job.roots)
        if len(roots) != before or not before:
            checkpoint.save()
        messages = spark.readStream.format("mqtt_nats").options(**_with_defaults(job.source)).load()
        if lake is not None:
            writer = messages.writeStream.foreachBatch(lake.batches(messages, roots))
        else:
            writer = arranged(messages, roots, job.files).writeStream.format(job.format).partitionBy("date", "root")
            writer = writer.option("path", job.output)
        writer = writer.outputMode("append").option("checkpointLocation", where)
        run_round(spark, writer, progress, tally)
        if job.every is not None:
            progress.show(f"{count(tally.messages)} messages, waiting for more")
    first, last = tally.sequences()
    return Archived(job, tally.messages, tally.batches, tally.seconds, first, last)


class _Lake:
    """The table of an archive, and its writer's name, which the checkpoint remembers."""

    def __init__(self, spark: SparkSession, job: Archive, checkpoint: Checkpoint) -> None:
        prepare(spark)
        self._job = job
        self._checkpoint = checkpoint
        self._place = Place(spark, job.output, "--output")
        self._place.require_writable()
        self._target = Target(job.format, job.output, job.catalog, job.table)
        memory = checkpoint.memory
        if "writer" not in memory:
            if exists(self._target):
                checkpoint.refuse(job.output)
            memory["writer"] = f"mqtt-nats-{secrets.token_hex(8)}"
            checkpoint.save()
        self._writer = str(memory["writer"])

    def batches(self, messages: DataFrame, roots: Mapping[str, str]) -> Callable[[DataFrame, int], None]:
        """Return the function that writes a batch of messages; raises JobError."""
        arrange = partial(arranged, roots=roots, files=self._job.files)
        table = open_table(self._target, self._writer, arrow_schema(arrange(messages)))
        self._checkpoint.compare(table.last_batch(), self._job.output)
        return Batches(table, self._place, self._writer, arrange, keep=self._job.format == "iceberg").write


def _with_defaults(source: Mapping[str, str]) -> dict[str, str]:
    """Return the source's options, with defaults: from the beginning, a bounded number of messages at a time."""
    given = {name.lower() for name in source}
    found = dict(source)
    if not given & STARTS:
        found["startingOffsets"] = "earliest"
    if not given & {"maxmessagespertrigger", "maxbytespertrigger"}:
        found["maxMessagesPerTrigger"] = str(BATCH)
    return found


def arranged(messages: DataFrame, roots: Mapping[str, str], files: int | None) -> DataFrame:
    """Return messages with the columns `date` and `root`, those of one directory in `files` partitions.

    `files` None: in the partitions in which they are read where there are few directories, else in one.
    """
    found = messages.withColumn("date", F.to_date("timestamp")).withColumn("root", _root(roots))
    if files is None and len(roots) <= FEW_ROOTS:
        return found
    keys = [F.col("date"), F.col("root")]
    return found.repartition(*keys, *([F.col("sequence") % files] if files is not None and files > 1 else []))


def _root(roots: Mapping[str, str]) -> Column:
    if not roots:
        return F.lit(OTHER)
    table = F.create_map(*(F.lit(text) for pair in roots.items() for text in pair))
    return F.coalesce(F.try_element_at(table, F.substring_index("topic", "/", 1)), F.lit(OTHER))


def directory(level: str) -> str:
    """Return a first level of a topic as part of a directory's name, for any file system and any query engine."""
    return re.sub(r"[^\w.-]", "_", level)[:_NAME_MOST] or "_empty"


def add_roots(roots: dict[str, str], levels: Mapping[str, int], most: int) -> None:
    """Give the first levels with the most messages a directory, until there are `most`; none loses its own."""
    for level in sorted(levels, key=lambda level: (-levels[level], level)):
        if len(roots) >= most:
            break
        roots.setdefault(level, directory(level))


def first_levels(options: Options) -> dict[str, int]:
    """Return the first levels of stored topics with their numbers of messages; raises SourceError."""
    found: dict[str, int] = {}
    shown = visible(options.subjects, options.subject_prefix, evaluated=bool(options.asked))
    with Connection(options.access) as connection:
        for subject in options.asked or (f"{options.subject_prefix}>",):
            offset = 0
            for _ in range(_PAGES):
                info = stream_info(connection, options.stream, subjects_filter=subject, offset=offset)
                page: dict[str, int] = info["state"].get("subjects") or {}
                for name, number in page.items():
                    if shown is not None and not shown(name.removeprefix(options.subject_prefix)):
                        continue
                    level = subject_to_topic(root_of(name.removeprefix(options.subject_prefix))).partition("/")[0]
                    found[level] = found.get(level, 0) + number
                offset += len(page)
                if not page or offset >= info.get("total", 0):
                    break
    return found
