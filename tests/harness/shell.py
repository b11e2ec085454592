# SPDX-License-Identifier: Apache-2.0
"""The commands of the documentation, run as written, with the real clients."""

import os
import pty
import select
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.harness.nats import ROOT
from tests.harness.process import LoggedProcess

BUILD_WAIT = 480  # seconds


def need(*programs: str) -> None:
    """Skip the test where a program is missing."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"`{program}` is not installed")


def find_nats_cli() -> str:
    """The nats CLI: from PATH, else built with Go and kept in the user's cache; without Go the test is skipped."""
    if found := shutil.which("nats"):
        return found
    if shutil.which("go") is None:
        pytest.skip("neither `nats` nor `go` is installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mqtt-nats-tests"
    cache.mkdir(parents=True, exist_ok=True)
    built = cache / "nats"
    if not built.exists():
        script = str(ROOT / "scripts" / "build-nats-cli")
        try:
            done = subprocess.run([script, str(cache)], capture_output=True, text=True, timeout=BUILD_WAIT)
        except subprocess.TimeoutExpired:
            pytest.skip(f"the nats CLI was not built within {BUILD_WAIT} s")
        if done.returncode:
            pytest.skip(f"the nats CLI could not be built: {done.stderr.strip()[-300:]}")
    return str(built)


class Shell:
    """Runs commands that name the documented ports against servers that have others.

    Args:
        ports: documented MQTT port → the one to use.
        nats_url: for the nats CLI, and in the place of nats://127.0.0.1:4222.
        directory: for logs.
        variables: more of the environment, where the documentation has them set.
    """

    def __init__(
        self, ports: Mapping[int, int], nats_url: str, directory: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self._ports = {str(documented): str(actual) for documented, actual in ports.items()}
        self.nats_url = nats_url
        self._directory = directory
        self._variables = dict(variables or {})
        self._background: list[LoggedProcess] = []

    def arguments(self, line: str) -> list[str]:
        """The words of a command."""
        words = [word.replace("nats://127.0.0.1:4222", self.nats_url) for word in shlex.split(line)]
        if "-p" in words:
            at = words.index("-p") + 1
            words[at] = self._ports[words[at]]
        return words

    @property
    def env(self) -> dict[str, str]:
        """Environment of the commands."""
        found = {**os.environ, "NATS_URL": self.nats_url, "XDG_CONFIG_HOME": str(self._directory), "TERM": "dumb"}
        return found | self._variables

    def run(self, line: str, given: str = "") -> str:
        """What a command prints that is given ``given`` and has to succeed."""
        done = subprocess.run(
            self.arguments(line),
            env=self.env,
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        return done.stdout

    def attempt(self, line: str, timeout: float) -> str:
        """What a command prints that may fail, or be ended after ``timeout`` seconds."""
        try:
            done = subprocess.run(
                self.arguments(line),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout

    def run_on_terminal(self, line: str) -> str:
        """``run`` for a program that insists on a terminal; returns what it has shown."""
        ours, theirs = pty.openpty()
        with open(ours, "rb", buffering=0) as terminal:
            process = subprocess.Popen(self.arguments(line), env=self.env, stdin=theirs, stdout=theirs, stderr=theirs)
            os.close(theirs)
            shown = b""
            with process:
                while select.select([terminal], [], [], 30)[0]:
                    try:
                        part = terminal.read(65536)
                    except OSError:  # Linux: the other side is closed
                        break
                    if not part:
                        break
                    shown += part
                else:
                    process.kill()
            assert process.returncode == 0, f"{line}\n{shown!r}"
        return shown.decode()

    def start(self, line: str) -> LoggedProcess:
        """Start a command in the background."""
        process = LoggedProcess(line, self._directory / f"{len(self._background)}.log")
        self._background.append(process)
        process.start(self.arguments(line), self.env)
        return process

    def close(self) -> None:
        """End what still runs."""
        for process in self._background:
            process.discard()
