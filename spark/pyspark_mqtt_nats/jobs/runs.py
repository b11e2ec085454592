# SPDX-License-Identifier: Apache-2.0
"""Run of a job from a command line: its session, the request to stop it, its summary and its exit status."""

import contextlib
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from pyspark_mqtt_nats.jobs import JobError, require_spark
from pyspark_mqtt_nats.jobs.failures import explain
from pyspark_mqtt_nats.jobs.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STOPPED: Final = 130
"""Exit status of a job that was stopped before it has done all."""


def run_job(name: str, context: click.Context, run: Callable[["SparkSession", Progress], Any]) -> None:
    """Run a job in a new session and print its summary; raises JobError."""
    require_spark()
    given = context.params
    progress = Progress(name)
    progress.show("starting Spark")
    # A shell is not ended by Ctrl-C, but what it does.
    running = contextlib.nullcontext() if name == "shell" else progress.signals()
    try:
        from pyspark_mqtt_nats.jobs.session import Setup, end_start, session

        setup = Setup(name, given["master"], given["conf"], given["log"])
        with progress.signals(end_start), session(setup) as (started, log), running:
            _continue(progress)
            outcome = run(started, progress)
            for line in log.warnings():
                progress.say(f"warning: {line}")
            progress.clear()
            if text := outcome.text():
                click.echo(text)
        if progress.stopping and given.get("every") is None and not given.get("follow") and name != "rule":
            sys.exit(STOPPED)
    except KeyboardInterrupt:
        progress.clear()
        sys.exit(STOPPED)
    except Exception as error:
        progress.clear()
        if progress.stopping:
            sys.exit(STOPPED)
        if given["log"] is not None:
            with given["log"].open("a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
        raise JobError(explain(error)) from None


def _continue(progress: Progress) -> None:
    """Raise KeyboardInterrupt where the user has stopped the job, and Spark has started nevertheless."""
    if progress.stopping:
        raise KeyboardInterrupt
