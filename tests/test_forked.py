# SPDX-License-Identifier: Apache-2.0
"""Processes of tests that are forked from one with the gateway's modules are what ``python -m`` would start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import forked
from tests.harness.forked import Forked
from tests.harness.nats import ROOT, NatsServer
from tests.harness.process import LoggedProcess, wait_ready


@pytest.fixture
def process(tmp_path: Path) -> LoggedProcess:
    return LoggedProcess("forked", tmp_path / "log")


def run(process: LoggedProcess, *arguments: str, env: dict[str, str] | None = None) -> None:
    process.start_module("mqtt_nats", arguments, env, ROOT)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--version"], 0, "mqtt-nats"),
        (["serve", "--no-such-flag"], 2, "No such option"),
        (["serve", "--nats", "nats://127.0.0.1:1", "--connect-timeout", "-1"], 1, "connect"),
    ],
)
def test_status_and_output(process: LoggedProcess, arguments: list[str], status: int, text: str) -> None:
    """As of the same command in a process of its own."""
    run(process, *arguments)
    assert process.wait() == status
    assert text in process.text
    assert not process.alive


@pytest.mark.processes
def test_variables(process: LoggedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the gateway's is seen by what is forked; with another, it is a process that starts with it."""
    monkeypatch.setattr(forked, "_ENV", forked._that_matter(os.environ))  # whatever other tests have set
    run(process, "serve", env={"MQTT_NATS_LISTEN": "nonsense"})
    assert process.wait() != 0
    assert "nonsense" in process.text
    assert isinstance(process._popen, Forked) == (sys.platform == "linux")
    run(process, "--version", env={"TZ": "Europe/Berlin"})
    assert process.wait() == 0
    assert isinstance(process._popen, subprocess.Popen)


def test_signals(process: LoggedProcess, nats_server: NatsServer) -> None:
    """What ends it is its status; Ctrl-C reaches it and not the tests."""
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0), (signal.SIGINT, 0)):
        run(process, "serve", "--nats", nats_server.url, "--listen", "127.0.0.1:0")
        wait_ready(process, r"serving: (MQTT) ", 30)
        assert process.alive
        if number == signal.SIGINT:
            process.interrupt()
        else:
            process.send(number)
        assert process.wait() == status
