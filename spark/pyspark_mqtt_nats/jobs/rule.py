# SPDX-License-Identifier: Apache-2.0
"""The job ``rule``: publishes the results of queries over what comes, until it is stopped."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from pyspark_mqtt_nats.jobs.monitor import Monitor
from pyspark_mqtt_nats.jobs.progress import Progress, count, plural
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.rules.metrics import serving
from pyspark_mqtt_nats.rules.query import Figures
from pyspark_mqtt_nats.rules.query_plan import Reads
from pyspark_mqtt_nats.rules.ruleset import Ruleset

_POLL: Final = 0.5  # seconds


@dataclass(frozen=True)
class RuleJob:
    """Requested run: a file of rules. `metrics_port`: of loopback, 0 for any, None for no metrics."""

    file: Path
    reads: Reads
    metrics_port: int | None = None


@dataclass(frozen=True)
class Ran:
    """Result of a run of rules."""

    read: int
    published: int
    rules: int

    def text(self) -> str:
        """Return the summary."""
        done = f"{plural(self.published, 'message')} published from {plural(self.read, 'message')}"
        return f"{done} by {plural(self.rules, 'rule')}"


def run(spark: SparkSession, job: RuleJob, progress: Progress) -> Ran:
    """Run the rules until the user stops the job.

    Raises JobError for a file that cannot be put in force at the start.
    """
    progress.show("planning")
    rules = Ruleset(spark, job.file, job.reads, progress.say)
    with contextlib.ExitStack() as ending:
        page = None
        if job.metrics_port is not None:
            page = ending.enter_context(serving(job.metrics_port))
            progress.say(f"metrics at http://127.0.0.1:{page.port}/metrics")
        ending.callback(rules.stop)
        monitor = ending.enter_context(Monitor(Options.parse(job.reads.source), progress.say))
        while not progress.stopping:
            rules.check()
            rules.reload()
            figures = seen(rules.figures, monitor.error)
            if page is not None:
                page.set(figures)
            progress.show(_state(figures, 0 if monitor.error else rules.running))
            time.sleep(_POLL)
    figures = rules.figures
    return Ran(sum(one.read for one in figures.values()), sum(one.published for one in figures.values()), len(figures))


def seen(figures: Mapping[str, Figures], error: str) -> Mapping[str, Figures]:
    """Return figures with an error of NATS for rules that have none: their queries wait for NATS."""
    return {name: replace(one, error=one.error or error) for name, one in figures.items()}


def _state(figures: Mapping[str, Figures], running: int) -> str:
    failing = sum(bool(one.error) for one in figures.values())
    published = plural(sum(one.published for one in figures.values()), "message")
    done = f"{count(running)} of {plural(len(figures), 'rule')} running"
    return f"{done}, {count(failing)} failing, {published} published"
