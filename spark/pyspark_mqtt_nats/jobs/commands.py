# SPDX-License-Identifier: Apache-2.0
"""Command lines of the jobs. A job checks all flags before it imports and starts Spark."""

import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from pyspark_mqtt_nats import values
from pyspark_mqtt_nats.jobs import JobError, flags
from pyspark_mqtt_nats.jobs.failures import OURS
from pyspark_mqtt_nats.jobs.prepare import prepare
from pyspark_mqtt_nats.jobs.progress import Progress
from pyspark_mqtt_nats.jobs.runs import run_job
from pyspark_mqtt_nats.options import STARTS
from pyspark_mqtt_nats.rules.definitions import load

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FORMAT = "Format of Spark, such as parquet or orc; what is not Spark's own needs its package."
_CHECKPOINT = "Directory in which a run finds where the last one has ended"
_EVERY = "Go on until Ctrl-C, with a round every so many seconds."


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def jobs() -> None:
    """Spark over the messages that MQTT clients have published.

    Jobs print their progress on stderr and a summary on stdout. Exit status: 0 when all is done, or after SIGINT or
    SIGTERM where a job goes on until then; 1 for an error, one line on stderr; 2 for wrong usage; 130 when it was
    stopped before.
    """


jobs.add_command(prepare)


def main(
    arguments: list[str] | None = None,
    program: str = "python -m pyspark_mqtt_nats.jobs",
    find_nkey: flags.FindNkey | None = None,
) -> None:
    """Run a job by its command line, and exit.

    Args:
        find_nkey: knows how to log in where no way is given.
    """
    try:
        jobs.main(arguments, prog_name=program, obj=find_nkey)
    except OURS as error:
        click.echo(f"{program}: {error}", err=True)
        sys.exit(1)


@jobs.command(cls=flags.Job)
@click.option("--output", required=True, metavar="DIR", callback=flags.filled, help="Where the archive is, or will be.")
@click.option(
    "--checkpoint", metavar="DIR", callback=flags.filled, help=f"{_CHECKPOINT}. [default: _checkpoint in --output]"
)
@click.option("--every", type=float, metavar="SECONDS", callback=flags.positive, help=_EVERY)
@flags.archive_format
@click.option(
    "--roots",
    type=click.IntRange(0, 1000),
    default=64,
    show_default=True,
    help="First topic levels that get a directory of their own, by the number of messages; the others are in _other.",
)
@click.option(
    "--files",
    type=click.IntRange(1, 1000),
    help="Files in each directory that a batch writes, and tasks that write them. [default: one; with at most four "
    "roots one for each task that reads]",
)
@flags.table_flags
@flags.source_flags("Messages", *flags.READING, *flags.LIMITS, maxMessagesPerTrigger="1000000")
@flags.source_flags("Connection", *flags.CONNECTION)
@flags.spark_flags
@click.pass_context
def archive(
    context: click.Context,
    /,
    output: str,
    checkpoint: str | None,
    every: float | None,
    format: str,
    roots: int,
    files: int | None,
    catalog: str | None,
    table: str,
    **_: Any,
) -> None:
    """Write messages to files, or a table of Delta or Iceberg, by date and first topic level.

    Each run goes on where the last one has ended, and every message is in the archive exactly once, also when a run was
    killed. Read files with Spark, which knows what of them counts.
    """
    source = flags.source_options(context, "stream")
    flags.check_format(context)

    def run(spark: "SparkSession", progress: Progress) -> Any:
        from pyspark_mqtt_nats.jobs import archive as job

        settings = job.Archive(output, source, checkpoint, every, format, roots, files, catalog, table)
        return job.run(spark, settings, progress)

    run_job("archive", context, run)


def _value(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return a callback that parses a value as the source does."""

    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from None

    return callback


def _day(value: str) -> date:
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise ValueError(f"expected a day such as 2026-11-20, not {value[:40]!r}") from None


@jobs.command(cls=flags.Job)
@flags.archive
@click.option("--format", type=click.Choice(["parquet", "delta", "iceberg"]), default="parquet", show_default=True)
@click.option(
    "--target-size",
    "size",
    default="128m",
    show_default=True,
    metavar="BYTES",
    callback=_value(values.size),
    help="Of files.",
)
@click.option("--before", metavar="DAY", callback=_value(_day), help="Only days before this one. [default: today, UTC]")
@flags.table_flags
@flags.spark_flags
@click.pass_context
def compact(context: click.Context, /, master: str | None, conf: Any, log: Path | None, **settings: Any) -> None:
    """Make fewer and larger files of an archive's finished days.

    Readers see the old files or the new ones, and never both.
    """
    if context.meta.get(flags.SOURCE):
        raise click.UsageError("--option has no effect: nothing is read from NATS", context)
    flags.check_format(context)

    def run(spark: "SparkSession", progress: Progress) -> Any:
        from pyspark_mqtt_nats.jobs import compact as job

        return job.run(spark, job.Compact(**settings), progress)

    run_job("compact", context, run)


@jobs.command(cls=flags.Job)
@click.option("--window", required=True, metavar="SPAN", callback=flags.interval, help="Length of a window: '1 hour'.")
@click.option(
    "--slide", metavar="SPAN", callback=flags.interval, help="From one window to the next. [default: its length]"
)
@click.option(
    "--field", metavar="PATH", help="The number in JSON payloads, such as sensor.temp; else they are numbers."
)
@click.option("--time-field", metavar="PATH", help="The time in JSON payloads; else it is when NATS has stored them.")
@click.option(
    "--level",
    "levels",
    multiple=True,
    type=click.IntRange(1, 128),
    help="By this level of the topic, the first is 1, and not by the whole topic; may be repeated.",
)
@click.option("--output", metavar="DIR", callback=flags.filled, help="Write the figures there. [default: print them]")
@click.option("--format", default="parquet", show_default=True, metavar="NAME", help=_FORMAT)
@click.option("--overwrite", is_flag=True, help="Replace what is in --output; without --checkpoint only.")
@click.option(
    "--checkpoint",
    metavar="DIR",
    callback=flags.filled,
    help=f"{_CHECKPOINT}: windows are added to --output when they are over.",
)
@click.option(
    "--watermark",
    default="10 minutes",
    show_default=True,
    metavar="SPAN",
    callback=flags.interval,
    help="With --checkpoint: how late values may come.",
)
@click.option("--every", type=float, metavar="SECONDS", callback=flags.positive, help=_EVERY)
@click.option(
    "--rows", type=click.IntRange(0), default=50, show_default=True, help="Figures that are printed, at most."
)
@flags.source_flags("Messages", *flags.READING, *flags.ENDING, *flags.LIMITS)
@flags.source_flags("Connection", *flags.CONNECTION)
@flags.spark_flags
@click.pass_context
def aggregate(context: click.Context, /, master: str | None, conf: Any, log: Path | None, **settings: Any) -> None:
    """Count, minimum, maximum and mean of numbers, by topic and time window.

    Over what is stored now; or, with --checkpoint, over what has come since the last run, adding to --output the
    windows that are over.
    """
    for name, other in (
        ("every", "checkpoint"),
        ("watermark", "checkpoint"),
        ("checkpoint", "output"),
        ("overwrite", "output"),
    ):
        flags.require(context, name, other)
    flags.exclude(context, "overwrite", "checkpoint")
    if settings["slide"] is not None and settings["slide"] > settings["window"]:
        raise click.UsageError("--slide is longer than --window", context)
    source = flags.source_options(context, "batch" if settings["checkpoint"] is None else "stream")
    settings["levels"] = tuple(dict.fromkeys(settings["levels"]))

    def run(spark: "SparkSession", progress: Progress) -> Any:
        from pyspark_mqtt_nats.jobs import aggregate as job

        return job.run(spark, job.Aggregate(source=source, **settings), progress)

    run_job("aggregate", context, run)


def _view_flags(command: flags.F) -> flags.F:
    """Add the flags of jobs that make views to a command."""
    decorators: tuple[Callable[[flags.F], flags.F], ...] = (
        flags.spark_flags,
        flags.source_flags("Connection", *flags.OF_VIEWS),
        flags.source_flags("Messages", *flags.READING, *flags.ENDING, *flags.LIMITS, *flags.QUERYING),
        flags.stream_flag,
        click.option(
            "--rows", type=click.IntRange(1), default=50, show_default=True, help="Rows that are printed, at most."
        ),
    )
    for decorate in decorators:
        command = decorate(command)
    return command


def _view_options(context: click.Context, use: Literal["batch", "stream"]) -> dict[str, str]:
    """Return the options of the source for all views; raises UsageError for an option that each view has itself."""
    source = flags.source_options(context, use)
    for name in source:
        if name.lower() in ("mode", "pushdown", *map(str.lower, flags.OF_A_STREAM)):
            raise click.UsageError(f"--option {name}: each view has its own; --stream makes another one", context)
    return source


@jobs.command(cls=flags.Job)
@click.argument("query")
@click.option("--follow", is_flag=True, help="Go on until Ctrl-C, and print what comes from now on.")
@click.option("--output", metavar="FILE", help="Write the whole result: name.parquet, name.csv or name.json.")
@click.option("--overwrite", is_flag=True, help="Replace --output.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE",
    help="Write a page with a chart of the result: name.html.",
)
@_view_flags
@click.pass_context
def sql(context: click.Context, /, master: str | None, conf: Any, log: Path | None, **settings: Any) -> None:
    """The result of a query over the views messages, retained and sessions.

    QUERY is SQL, or - for standard input: "SELECT topic, count(*) FROM messages GROUP BY topic".
    """
    follow, output, page = settings["follow"], settings["output"], settings["plot"]
    if follow and (output is not None or page is not None):
        raise click.UsageError("--follow prints rows; --output and --plot need a query that ends", context)
    if output is not None and Path(output).suffix not in (".parquet", ".csv", ".json"):
        raise click.UsageError(f"--output {output}: expected a name that ends in .parquet, .csv or .json", context)
    flags.require(context, "overwrite", "output")
    if page is not None and page.suffix != ".html":
        raise click.UsageError(f"--plot {page}: expected a name that ends in .html", context)
    if page is not None and not page.absolute().parent.is_dir():
        raise JobError(f"--plot {page}: there is no directory {page.absolute().parent}")
    if settings["query"] == "-":
        settings["query"] = sys.stdin.read()
    settings["query"] = settings["query"].strip().rstrip(";")
    if not settings["query"]:
        raise click.UsageError("QUERY is empty", context)
    source = _view_options(context, "stream" if follow else "batch")
    if follow and not STARTS & {name.lower() for name in source}:
        # Spark takes some seconds to start; what comes meanwhile is shown too.
        source["startingTimestamp"] = str(int(time.time() * 1000))

    def run(spark: "SparkSession", progress: Progress) -> Any:
        from pyspark_mqtt_nats.jobs import sql as job

        return job.run(spark, job.Sql(source=source, **settings), progress)

    run_job("sql", context, run)


@jobs.command(cls=flags.Job)
@click.option("--python", is_flag=True, help="A prompt of Python, with `spark` and `sql(statement)`.")
@_view_flags
@click.pass_context
def shell(context: click.Context, /, python: bool, streams: dict[str, str], rows: int, **_: Any) -> None:
    """A prompt for SQL statements over the views messages, retained and sessions; or for Python.

    A statement ends with a semicolon. `exit` or Ctrl-D ends the shell.
    """
    source = _view_options(context, "batch")

    def run(spark: "SparkSession", progress: Progress) -> Any:
        from pyspark_mqtt_nats.jobs import shell as job

        return job.run(spark, job.Shell(source, streams, rows, python), progress)

    run_job("shell", context, run)


@jobs.command(cls=flags.Job)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--metrics-port", type=click.IntRange(0, 65_535), metavar="PORT", help="Metrics for Prometheus on 127.0.0.1:PORT."
)
@flags.stream_flag
@flags.source_flags(
    "Messages", "startingSequence", "startingTimestamp", "failOnDataLoss", "numPartitions", numPartitions="1"
)
@flags.source_flags("Messages", *flags.LIMITS, "includeHeaders", "readMode", maxMessagesPerTrigger="100000")
@flags.source_flags("Connection", *flags.OF_VIEWS)
@flags.spark_flags
@click.pass_context
def rule(context: click.Context, /, file: Path, metrics_port: int | None, streams: dict[str, str], **_: Any) -> None:
    """Publish the results of queries over what comes, until Ctrl-C.

    FILE has the rules, as docs/spark-rules.md says. A change of FILE is put in force at once.
    """
    source = _view_options(context, "stream")
    for name in source:
        if name.lower() in ("topics", "decoders"):
            raise click.UsageError(f"--option {name}: FILE has it", context)
    load(file)

    def run(spark: "SparkSession", progress: Progress) -> Any:
        from pyspark_mqtt_nats.jobs import rule as job
        from pyspark_mqtt_nats.rules.query_plan import Reads

        return job.run(spark, job.RuleJob(file, Reads(source, streams), metrics_port), progress)

    run_job("rule", context, run)


def _speed(value: str) -> float:
    if value == "max":
        return 0.0
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ValueError("expected a number such as 1 or 10, or max")
    return found


def _prefix(value: str) -> str:
    if any(char in value for char in "+#\0"):
        raise ValueError("expected the beginning of a topic, without + and #")
    return value


@jobs.command(cls=flags.Job)
@flags.archive
@flags.archive_format
@click.option(
    "--speed",
    default="1",
    show_default=True,
    metavar="N|max",
    callback=_value(_speed),
    help="Times the recorded speed.",
)
@click.option("--rate", type=float, metavar="N", callback=flags.positive, help="Messages a second, instead of --speed.")
@click.option("--prefix", default="", metavar="TEXT", callback=_value(_prefix), help="Begins the topics: 'replay/'.")
@click.option("--retain/--no-retain", default=True, show_default=True, help="Retain what was retained.")
@click.option(
    "--topics", "filters", default="#", metavar="FILTERS", callback=_value(values.filters), help="Only these topics."
)
@click.option(
    "--starting-sequence", "start", metavar="N", callback=_value(values.whole(1)), help="Begin with this sequence."
)
@click.option("--ending-sequence", "end", metavar="N", callback=_value(values.whole(1)), help="End with this sequence.")
@click.option(
    "--starting-timestamp",
    "since",
    metavar="TIME",
    callback=_value(values.timestamp),
    help="Only what was stored then or later.",
)
@click.option(
    "--ending-timestamp",
    "until",
    metavar="TIME",
    callback=_value(values.timestamp),
    help="Only what was stored before.",
)
@flags.source_flags("Connection", *flags.CONNECTION)
@flags.spark_flags
@click.pass_context
def replay(context: click.Context, /, master: str | None, conf: Any, log: Path | None, **settings: Any) -> None:
    """Publish an archive again, in its order.

    At the recorded speed, a multiple of it, or at a given rate. Subscribers get the messages as if clients published
    them now; --prefix keeps them apart from what clients do publish now.
    """
    sink = flags.source_options(context, "write")
    flags.exclude(context, "speed", "rate")
    for first, last, name in (("start", "end", "sequence"), ("since", "until", "timestamp")):
        if None not in (settings[first], settings[last]) and settings[last] < settings[first]:
            raise click.UsageError(f"--ending-{name} is before --starting-{name}", context)

    def run(spark: "SparkSession", progress: Progress) -> Any:
        from pyspark_mqtt_nats.jobs import replay as job

        return job.run(spark, job.Replay(sink=sink, **settings), progress)

    run_job("replay", context, run)


@jobs.command(cls=flags.Job)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    metavar="FILE",
    help="Write a page with charts: report.html. [default: only print the summary]",
)
@click.option(
    "--input", metavar="DIR", callback=flags.filled, help="Report on an archive. [default: on what is stored]"
)
@flags.archive_format
@click.option("--most", type=click.IntRange(1, 1000), default=20, show_default=True, help="Length of the lists.")
@flags.source_flags("Messages", *flags.READING, *flags.ENDING)
@flags.source_flags("Connection", *flags.CONNECTION)
@flags.spark_flags
@click.pass_context
def report(context: click.Context, /, output: Path | None, input: str | None, format: str, most: int, **_: Any) -> None:
    """Busiest topics and publishers, messages over time, gaps: in a few lines, and as a page with charts."""
    flags.require(context, "format", "input")
    if input is not None and context.meta.get(flags.SOURCE):
        raise click.UsageError(f"{', '.join(context.meta[flags.SOURCE])}: no effect with --input", context)
    source = flags.source_options(context, "batch")
    if output is not None and not output.absolute().parent.is_dir():
        raise JobError(f"--output {output}: there is no directory {output.absolute().parent}")

    def run(spark: "SparkSession", progress: Progress) -> Any:
        from pyspark_mqtt_nats.jobs import report as job

        return job.run(spark, job.Report(source, input, format, output, most), progress)

    run_job("report", context, run)
