# SPDX-License-Identifier: Apache-2.0
"""A child process whose output goes to a file that failing tests show."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.harness.forked import Forked, fork
from tests.harness.waiting import eventually

RUNNING: "list[LoggedProcess]" = []
"""Processes started and not yet discarded, for the report of a failing test."""


class LoggedProcess:
    """Start, end and start again one command, with all output appended to ``log``."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self.prefix: tuple[str, ...] = ()
        """What runs the command."""
        self._popen: subprocess.Popen[bytes] | Forked | None = None
        self._mark = 0

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        """Run ``command``; ``env`` is added to our environment."""
        with self._output() as output:
            self._popen = subprocess.Popen(
                [*self.prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                start_new_session=True,  # so that `interrupt` reaches this process and its children only
            )
        self._started()

    def start_module(self, module: str, arguments: Sequence[str], env: Mapping[str, str] | None, cwd: Path) -> None:
        """``python -m module arguments``, forked from a process that has loaded the gateway's modules if it can be."""
        if not self.prefix:
            with self._output() as output:
                self._popen = fork(module, arguments, {**os.environ, **(env or {})}, cwd, output.fileno())
        if self.prefix or self._popen is None:
            self.start([sys.executable, "-m", module, *arguments], env, cwd)
        self._started()

    def _output(self) -> IO[bytes]:
        """Where the output of one more start goes."""
        assert not self.alive, f"{self.name} runs already"
        self._mark = self.log.stat().st_size if self.log.exists() else 0
        return self.log.open("ab")

    def _started(self) -> None:
        if self not in RUNNING:
            RUNNING.append(self)

    @property
    def pid(self) -> int:
        """Process id of the last start."""
        assert self._popen is not None, f"{self.name} was never started"
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def text(self) -> str:
        """What it has written since its last start."""
        with self.log.open("rb") as file:
            file.seek(self._mark)
            return file.read().decode(errors="replace")

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._popen is not None and self._popen.poll() is None:
            self._popen.send_signal(number)

    def interrupt(self) -> None:
        """What Ctrl-C in a terminal does: SIGINT to the whole foreground process group."""
        os.killpg(self.pid, signal.SIGINT)

    def wait(self, timeout: float = 20.0) -> int:
        """Wait for the end and return the exit status; killed after ``timeout`` seconds, as a failure."""
        assert self._popen is not None, f"{self.name} was never started"
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self._popen.wait()
            raise AssertionError(f"{self.name} did not end within {timeout} s\n{self.text}") from None

    def discard(self) -> None:
        """End it whatever state it is in."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGKILL)
        if self._popen is not None:
            self._popen.wait()
        if self in RUNNING:
            RUNNING.remove(self)


def wait_ready(process: LoggedProcess, pattern: str, timeout: float) -> str:
    """The first group of ``pattern`` (multiline) in the output; AssertionError when it ends or takes too long."""
    compiled = re.compile(pattern, re.MULTILINE)

    def seen() -> re.Match[str] | None:
        match = compiled.search(process.text)
        if match is None and not process.alive:
            raise RuntimeError(f"{process.name} ended with status {process.wait()}:\n{process.text}")
        return match

    return eventually(seen, timeout, what=f"{process.name} ready").group(1)
