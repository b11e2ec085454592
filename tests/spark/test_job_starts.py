# SPDX-License-Identifier: Apache-2.0
"""Jobs that are stopped while Spark starts: the real command line, and a signal at each stage."""

import inspect
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from pyspark import SparkContext

from mqtt_nats.__main__ import main
from pyspark_mqtt_nats.jobs.session import end_start
from tests.harness.process import LoggedProcess
from tests.harness.waiting import eventually
from tests.spark.conftest import SOURCE_ROOTS

WAIT = 120.0  # seconds; a busy machine


def jvms(directory: Path) -> list[psutil.Process]:
    """The JVM of the job in a directory, and the one before it that makes its command line."""
    running = psutil.process_iter(["name", "cwd"])
    return [one for one in running if one.info["name"] == "java" and one.info["cwd"] == str(directory.resolve())]


def listens(directory: Path) -> bool:
    """Whether the JVM answers, so that the session is being made."""
    for one in jvms(directory):
        with suppress(psutil.NoSuchProcess):  # the one before ends meanwhile
            if one.net_connections("tcp"):
                return True
    return False


@pytest.mark.processes
@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("words", "reached", "number"),
    [
        ("archive --output a --every 60", jvms, signal.SIGTERM),
        ("archive --output a", jvms, signal.SIGINT),
        ("archive --output a", listens, signal.SIGTERM),
        ("archive --output a --every 60", listens, signal.SIGINT),
        ("prepare", listens, signal.SIGINT),
    ],
)
def test_a_signal_ends_a_start_and_its_jvm(
    words: str, reached: Callable[[Path], object], number: signal.Signals, tmp_path: Path
) -> None:
    job = LoggedProcess("job", tmp_path / "job.log")
    environ = {"PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS)), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    try:
        job.start([sys.executable, "-m", "mqtt_nats", "spark", *words.split()], environ, tmp_path)
        eventually(lambda: reached(tmp_path) or not job.alive, WAIT)
        assert job.alive, job.text
        if number == signal.SIGINT:
            job.interrupt()
        else:
            job.send(number)
        assert job.wait(WAIT) == 130
        eventually(lambda: not jvms(tmp_path), WAIT)
        assert job.text == ""
    finally:
        job.discard()


def test_before_there_is_a_jvm_a_signal_ends_the_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", None)
    with pytest.raises(KeyboardInterrupt):
        end_start(inspect.currentframe())


def interrupted(*_: object) -> None:
    """What is imported, while Ctrl-C is pressed."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("module", ["mqtt_nats.cli", "pyspark_mqtt_nats.jobs.commands"])
def test_ctrl_c_while_modules_are_loaded(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loading = ModuleType(module)
    loading.__dict__["main"] = interrupted
    monkeypatch.setitem(sys.modules, module, loading)
    monkeypatch.setattr(sys, "argv", ["mqtt-nats", "spark", "report"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 130
