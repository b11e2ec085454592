# SPDX-License-Identifier: Apache-2.0
"""The job ``shell``: a prompt for SQL statements, or for Python, over the views of `sql`."""

import code
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from pyspark.sql import DataFrame, SparkSession

from pyspark_mqtt_nats.jobs.failures import explain
from pyspark_mqtt_nats.jobs.progress import Progress
from pyspark_mqtt_nats.jobs.queries import watch
from pyspark_mqtt_nats.jobs.sql import ROWS, shown
from pyspark_mqtt_nats.queries.views import Views, make_views

_BANNER = (
    "Statements end with a semicolon; SHOW VIEWS lists the views, DESCRIBE messages its columns. "
    "exit or Ctrl-D ends the shell."
)
_ENDS = ("exit", "quit")
"""Statements that end the shell, as in the shells of Spark and of databases."""

_PYTHON = "spark is the session; sql(statement) returns a DataFrame over the views. Ctrl-D ends."


@dataclass(frozen=True)
class Shell:
    """Settings of a shell: options of the source, and streams by name with the prefixes of their subjects."""

    source: Mapping[str, str]
    streams: Mapping[str, str] = field(default_factory=dict)
    rows: int = ROWS
    python: bool = False


class Ended:
    """The end of a shell, which prints nothing more."""

    def text(self) -> str:
        """Return nothing."""
        return ""


def run(
    spark: SparkSession,
    job: Shell,
    progress: Progress,
    read: Callable[[str], str] = input,
    say: Callable[[str], None] = print,
) -> Ended:
    """Read statements until the end of the input; an error is printed, and the shell goes on.

    SIGINT ends what is typed or what runs: Spark's own handler ends its jobs and raises KeyboardInterrupt. SIGTERM ends
    the shell.
    """
    before = signal.signal(signal.SIGTERM, _end)
    try:
        _run(spark, job, progress, read, say)
    finally:
        signal.signal(signal.SIGTERM, before)
    return Ended()


def _run(
    spark: SparkSession, job: Shell, progress: Progress, read: Callable[[str], str], say: Callable[[str], None]
) -> None:
    views = Views(spark, make_views(job.source, job.streams).values(), whole=job.python)
    progress.clear()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() a history
    if job.python:
        _python(spark, views, read)
        return
    terminal = sys.stdin.isatty()
    if terminal:
        say(_BANNER)
    for statement in statements(read, terminal=terminal):
        try:
            lines = watch(spark, progress, "reading", partial(_answer, views, statement, job.rows))
        except KeyboardInterrupt:
            if not terminal:
                raise
            lines = ["stopped"]
        except Exception as error:
            lines = [f"error: {explain(error)}"]
        progress.clear()
        if lines:
            say("\n".join(lines))


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End the shell, which waits for a line: a handler of SIGTERM."""
    sys.exit(130)


def _answer(views: Views, statement: str, rows: int) -> list[str]:
    frame = views.query(statement)
    return shown(frame, rows)[0] if frame.columns else []


def statements(read: Callable[[str], str], *, terminal: bool = True) -> Iterator[str]:
    """Yield statements, each up to a semicolon at the end of a line, until the user or the input ends the shell.

    Args:
        terminal: a person types them, and Ctrl-C drops what was typed. From a file they are read without prompts, which
            would be among the results.
    """
    lines: list[str] = []
    while True:
        try:
            line = read(("...> " if lines else "sql> ") if terminal else "")
        except KeyboardInterrupt:
            if not terminal:
                raise
            print()
            lines.clear()
            continue
        except EOFError:
            line, ended = "", True
        else:
            ended = False
        lines.append(line)
        text = "\n".join(lines).strip()
        if text.rstrip("; ").lower() in _ENDS:
            return
        if ended or not text or text.endswith(";"):
            lines.clear()
            if text.rstrip(";").strip():
                yield text.rstrip(";").strip()
        if ended:
            return


def _python(spark: SparkSession, views: Views, read: Callable[[str], str]) -> None:
    def sql(statement: str) -> DataFrame:
        """Return the result of a statement over the views."""
        return views.query(statement)

    names: dict[str, Any] = {"spark": spark, "sql": sql}
    code.interact(_PYTHON, readfunc=read, local=names, exitmsg="")
