# SPDX-License-Identifier: Apache-2.0
"""Starts of Spark: seconds from a new process to the first rows of a read, and to the first commit of an archive.

    mqtt-nats spark prepare
    python -m benchmarks.spark_starts --rounds 5

`first read` is the script of docs/spark.md over a few messages. `archive` is the job that is started again with few
messages to read. Both start in turn: without the archive of classes that the command has made, with it, and with it and
without Java's optimising compiler. Each start is a process of its own; the table has medians, wall time and CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import proc
from pyspark_mqtt_nats.class_archive import use_archive

_ROOT: Final = Path(__file__).parents[1]
_WAIT_S: Final = 600.0
_MESSAGES: Final = 1000

_OPTIONS: Final = "SPARK_SUBMIT_OPTS"
"""Variable that names the archive of classes, unless the variable is set."""

_C1: Final = "-XX:TieredStopAtLevel=1"
"""Option of Java: code is compiled once and not optimised again, which takes much of the CPU time of a start."""

STAGES: Final = ("imports", "Java", "session", "load", "rows")
"""Parts of a first read: imports of PySpark; `prepare`; JVM and session; `load`; the first action."""


class Spent(NamedTuple):
    """Seconds since a start: wall time, and CPU time of all its processes."""

    wall: float
    cpu: float


def read(url: str, begun: float) -> None:
    """Read for the first time, and print what each stage has taken since `begun`."""
    spent: dict[str, Spent] = {}

    def note(stage: str) -> None:
        spent[stage] = Spent(time.time() - begun, _cpu_seconds(os.getpid()))

    from pyspark.sql import SparkSession

    from pyspark_mqtt_nats import prepare

    note("imports")
    prepare()
    note("Java")
    session = SparkSession.builder.master("local[*]").config("spark.sql.session.timeZone", "UTC").getOrCreate()
    note("session")
    frame = session.read.format("mqtt_nats").option("servers", url).load()
    note("load")
    found = frame.collect()
    note("rows")
    if len(found) < _MESSAGES:
        raise SystemExit(f"{len(found)} rows")
    print(json.dumps(spent))


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of all below it, those that have ended included."""
    return proc.cpu_seconds_alone(pid) + proc.cpu_seconds_below(pid)


def first_read(url: str, environ: Mapping[str, str]) -> dict[str, Spent]:
    """Run `read` in a new process."""
    program = f"from benchmarks.spark_starts import read; read({url!r}, {time.time()!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]  # a JVM may have said something
    return {stage: Spent(*values) for stage, values in json.loads(line).items()}


class Archive:
    """The job `archive` into a directory."""

    def __init__(self, url: str, directory: Path) -> None:
        self._commits = directory / "archive" / "_checkpoint" / "commits"
        self._command = [sys.executable, "-m", "pyspark_mqtt_nats.jobs", "archive", "--servers", url]
        self._command += ["--output", str(directory / "archive")]

    def run(self) -> None:
        """Archive what there is."""
        subprocess.run(
            self._command, env=_environment(used=False), check=True, stdout=subprocess.DEVNULL, timeout=_WAIT_S
        )

    def restart(self, environ: Mapping[str, str]) -> dict[str, Spent]:
        """Start it again; what it has taken until the next commit."""
        before = set(self._commits.iterdir())
        begun = time.perf_counter()
        command = [*self._command, "--every", "60"]
        with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
            try:
                while set(self._commits.iterdir()) <= before:
                    if job.poll() is not None or time.perf_counter() - begun > _WAIT_S:
                        raise SystemExit(f"the archive made no commit: {' '.join(command)}")
                    time.sleep(0.02)
                return {"commit": Spent(time.perf_counter() - begun, _cpu_seconds(job.pid))}
            finally:
                job.send_signal(signal.SIGTERM)


def _environment(*, used: bool) -> dict[str, str]:
    """Return the environment of a start that uses the archive of classes, or does not; there has to be one."""
    roots = [str(_ROOT / name) for name in ("", "streams", "spark")]
    path = os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "SPARK_LOCAL_IP": "127.0.0.1"}
    environ.pop(_OPTIONS, None)
    if not used:
        return environ | {_OPTIONS: ""}
    use_archive(environ)
    if _OPTIONS not in environ:
        raise SystemExit("there is no archive of classes: run mqtt-nats spark prepare")
    return environ


def table(found: Mapping[str, list[dict[str, Spent]]]) -> str:
    """Return the medians of all starts: seconds of each stage, not since the start."""
    lines = ["| start | stage | wall s | CPU s |", "|---|---|---|---|"]
    for name, starts in found.items():
        before = Spent(0.0, 0.0)
        for stage in starts[0]:
            wall, cpu = (statistics.median(getattr(one[stage], what) for one in starts) for what in Spent._fields)
            lines.append(f"| {name} | {stage} | {wall - before.wall:.2f} | {cpu - before.cpu:.2f} |")
            before = Spent(wall, cpu)
        if len(starts[0]) > 1:
            lines.append(f"| {name} | all | {before.wall:.2f} | {before.cpu:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    from benchmarks import peers
    from benchmarks.spark import fill

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spark_starts", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=5, help="the table has medians (%(default)s)")
    parser.add_argument("--only", choices=("first read", "archive"), help="one kind of start")
    options = parser.parse_args()
    prepared = _environment(used=True)
    ways = {"": _environment(used=False), ", prepared": prepared}
    ways[", prepared, C1"] = prepared | {_OPTIONS: f"{prepared[_OPTIONS]} {_C1}"}
    with tempfile.TemporaryDirectory(prefix="bench-spark-") as directory, peers.monitored_nats_server() as (url, _, _):
        fill(url, _MESSAGES, 128)
        archive = Archive(url, Path(directory))
        if options.only != "first read":
            archive.run()

        def archived(environ: Mapping[str, str]) -> dict[str, Spent]:
            fill(url, _MESSAGES, 128)
            return archive.restart(environ)

        starts: dict[str, Callable[[Mapping[str, str]], dict[str, Spent]]] = {
            "first read": lambda environ: first_read(url, environ),
            "archive": archived,
        }
        found: dict[str, list[dict[str, Spent]]] = {}
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
            for name, start in starts.items():
                for way, environ in ways.items():
                    if options.only in (None, name):
                        found.setdefault(name + way, []).append(start(environ))
        print(table(found))


if __name__ == "__main__":
    main()
