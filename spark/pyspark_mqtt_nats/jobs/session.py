# SPDX-License-Identifier: Apache-2.0
"""Spark session of a job: without log on the terminal, in UTC, and on loopback when Spark runs on this machine."""

import contextlib
import logging
import os
import re
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

from pyspark import SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from pyspark_mqtt_nats import java, prepare
from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.jobs.failures import MORE, explain

_LOOPBACK: Final = "127.0.0.1"
_WARNING: Final = re.compile(r"messages are missing \(|messages were removed by the retention")
"""Warnings of the source about messages that are gone."""

_WRITERS: Final = "10"
"""Files that a task has open at a time: for five directories of two days rows need not be sorted before."""

FILES_LEAST: Final = 1024
"""Open files with which Spark's JVM comes up; it opens more than 300 jars."""

_REDACTED: Final = r"(?i)secret|password|token|access[.]?key|nkey|creds|tlskey"
"""Option names whose values Spark hides in plans and logs: its own pattern, and options that may be secrets."""


@dataclass(frozen=True)
class Setup:
    """Settings of a session. `master` None: local[*], or the choice of spark-submit. `log` None: no log is kept."""

    job: str
    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None


def submitted() -> bool:
    """Whether spark-submit has started this process, with a JVM."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def settings(setup: Setup) -> dict[str, str]:
    """Return the Spark configuration; the user's settings win."""
    found = {
        "spark.app.name": f"mqtt-nats {setup.job}",
        "spark.redaction.regex": _REDACTED,
        "spark.sql.maxConcurrentOutputFileWriters": _WRITERS,
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
    }
    master = setup.conf.get("spark.master") or setup.master
    if master is None and not submitted():
        master = "local[*]"
    if master is not None:
        found["spark.master"] = master
        if re.fullmatch(r"local(\[.*\])?", master):
            found |= {
                "spark.driver.bindAddress": _LOOPBACK,
                "spark.driver.host": _LOOPBACK,
                "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
                "spark.ui.enabled": "false",
            }
    return found | dict(setup.conf)


@contextlib.contextmanager
def session(setup: Setup) -> Iterator[tuple[SparkSession, "Log"]]:
    """Start a session, which ends with the block, and yield it with its log; raises JobError, java.JavaError."""
    conf = settings(setup)
    if not submitted():
        if conf["spark.master"].startswith("local"):
            prepare()
            if conf.get("spark.driver.bindAddress") == _LOOPBACK:
                os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
        else:  # the workers are elsewhere, and so is their interpreter
            java.ensure()
    # They repeat with stack traces what the exceptions say.
    for name in ("py4j", "DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    logging.getLogger().addFilter(told)
    builder = SparkSession.builder
    for name, value in conf.items():
        builder = builder.config(name, value)
    with _log(setup.log) as log:
        try:
            with _stderr(log.file):
                spark = builder.getOrCreate()
        except Exception as error:
            exited = "JAVA_GATEWAY_EXITED" in str(error)
            why = (log.why() if exited else "") or explain(error).removesuffix(MORE).rstrip(".")
            if "stopped SparkContext" in why:
                why = f"the master {conf.get('spark.master', '')} does not answer"
            raise JobError(f"Spark did not start: {why}; {_remedy(exited)}") from None
        try:
            if setup.log is None:
                spark.sparkContext.setLogLevel("ERROR")
            yield spark, log
        finally:
            with contextlib.suppress(Exception):  # the JVM may be gone
                spark.stop()


def end_start(frame: FrameType | None) -> None:
    """End the JVM of a session, so that the start fails; raises KeyboardInterrupt where there is none yet.

    An exception in `launch_gateway` would have the JVM stay for ever: it would not find the directory into which it
    writes its port, and its input would not be looked at.

    Args:
        frame: what a signal has interrupted. `launch_gateway` has the process in a variable until the JVM answers.
    """
    gateway: Any = SparkContext._gateway
    jvm = None if gateway is None else gateway.proc
    while frame is not None and jvm is None:
        if frame.f_code is launch_gateway.__code__:
            jvm = frame.f_locals.get("proc")
            if jvm is None:  # it is just being started: the caller sees later that the user has stopped the job
                return
        frame = frame.f_back
    if jvm is None:
        raise KeyboardInterrupt
    jvm.terminate()


def _remedy(exited: bool) -> str:
    """Return what to change where Spark has not started; `exited`: its JVM has ended."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the JVM raises its own limit to this one
    if exited and 0 <= files < FILES_LEAST:
        return f"it may open {files} files: allow {FILES_LEAST:,} by ulimit -n {FILES_LEAST}"
    return "change --master or --conf"


def told(record: logging.LogRecord) -> bool:
    """Whether the user is to see what was logged without a name: py4j does so where the JVM has ended."""
    return "py4j" not in Path(record.pathname).parts


class Log:
    """Log of the JVM and of the Python workers on this machine."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self._begin = file.seek(0, os.SEEK_END)

    def _lines(self) -> Iterator[str]:
        self.file.seek(self._begin)
        for line in self.file:
            yield line.decode(errors="replace").strip()

    def why(self) -> str:
        """Return the line that says why the JVM has ended, "" without such a line."""
        for line in self._lines():
            if re.search(r"Exception\b|Error\b|^Unrecognized|^Invalid", line):
                return re.sub(r"^(?:Exception in thread .*?: |Error: |Error occurred .*: )", "", line)[:400]
        return ""

    def warnings(self) -> list[str]:
        """Return the source's warnings about messages that are gone, each line once."""
        return list(dict.fromkeys(line[:400] for line in self._lines() if _WARNING.search(line)))


@contextlib.contextmanager
def _log(path: Path | None) -> Iterator[Log]:
    """Yield the log in the file of --log, else in a temporary file."""
    if path is None:
        with tempfile.TemporaryFile() as file:
            yield Log(file)
        return
    try:
        path.open("ab").close()
    except OSError as error:
        raise JobError(f"--log {path}: {error.strerror}") from None
    with path.open("ab+") as file:
        yield Log(file)


@contextlib.contextmanager
def _stderr(log: IO[bytes]) -> Iterator[None]:
    """Give `log` as stderr to processes that the block starts."""
    sys.stderr.flush()
    saved = os.dup(2)
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
