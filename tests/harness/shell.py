# SPDX-License-Identifier: Apache-2.0
"""The commands of the documentation, run as written, with the real clients."""

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

from mqtt_nats.__main__ import CLIENTS
from tests.harness.nats import ROOT
from tests.harness.process import LoggedProcess

BUILD_WAIT = 480  # seconds

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mqtt-nats-tests"


def need(*programs: str) -> None:
    """Skip the test where a program is missing."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"`{program}` is not installed")


def find_nats_cli() -> str:
    """The nats CLI: from PATH, else built with Go and kept in the user's cache; without Go the test is skipped."""
    return _find_or_make("nats", "build-nats-cli", "the nats CLI", "go")


def find_helm() -> str:
    """Helm, in the same way."""
    return _find_or_make("helm", "build-helm", "helm", "go")


def find_promtool() -> str:
    """Promtool: from PATH, else from Debian's package and kept in the user's cache; without apt the test is skipped."""
    return _find_or_make("promtool", "fetch-promtool", "promtool (it comes with Prometheus)", "apt-get")


def find_program(name: str) -> str | None:
    """Path of a program in PATH, or in the user's cache, where earlier tests have put it; None: it is in neither."""
    return shutil.which(name) or shutil.which(name, path=_CACHE)


def _find_or_make(name: str, script: str, what: str, maker: str) -> str:
    """Path of a program; one that is missing is put into the user's cache by a script, which needs the ``maker``."""
    if found := find_program(name):
        return found
    if shutil.which(maker) is None:
        pytest.skip(f"neither `{name}` nor `{maker}` is installed")
    _CACHE.mkdir(parents=True, exist_ok=True)
    command = [str(ROOT / "scripts" / script), str(_CACHE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_WAIT)
    except subprocess.TimeoutExpired:
        pytest.skip(f"scripts/{script} did not make {what} within {BUILD_WAIT} s")
    if done.returncode:
        pytest.skip(f"scripts/{script} did not make {what}: {done.stderr.strip()[-300:]}")
    return str(_CACHE / name)


def find_pyspark(version: str) -> str:
    """Interpreter of an environment with a minor version of PySpark alone, which pip makes in the user's cache.

    An environment whose installation was interrupted is made anew. Where pip cannot, the test is skipped.
    """
    place = _CACHE / f"pyspark-{version}"
    interpreter = place / "bin" / "python"
    # pip writes RECORD when all files of the package are there.
    if not any(place.glob("lib/python*/site-packages/pyspark-*.dist-info/RECORD")):
        shutil.rmtree(place, ignore_errors=True)
        venv.create(place, with_pip=True)
        command = [str(interpreter), "-m", "pip", "install", "--quiet", f"pyspark=={version}.*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_WAIT)
        if done.returncode:
            shutil.rmtree(place)
            pytest.skip(f"pip did not install pyspark {version}: {done.stderr.strip()[-300:]}")
    return str(interpreter)


DEFAULT_PORT = "1883"
"""Port of commands that name none."""

SOURCES = (ROOT, ROOT / "streams", ROOT / "spark")


class Shell:
    """Runs commands that name the documented ports against servers that have others, in a directory.

    `mqtt-nats` is this checkout's.

    Args:
        ports: documented MQTT port → the one to use.
        nats_url: for the nats CLI, and in the place of nats://127.0.0.1:4222.
        directory: working directory, also for logs.
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
        if words[0] == "mqtt-nats":
            if words[1] in CLIENTS and "-p" not in words:
                words += ["-p", DEFAULT_PORT]
            if "--listen" in words:
                host, _, port = words[words.index("--listen") + 1].rpartition(":")
                words[words.index("--listen") + 1] = f"{host}:{self._ports[port]}"
            words[:1] = [sys.executable, "-m", "mqtt_nats"]
        if "-p" in words:
            at = words.index("-p") + 1
            words[at] = self._ports[words[at]]
        return words

    @property
    def env(self) -> dict[str, str]:
        """Environment of the commands."""
        found = {name: value for name, value in os.environ.items() if not name.startswith("MQTT_NATS_")}
        found |= {"PYTHONPATH": os.pathsep.join(map(str, SOURCES)), "MQTT_NATS_NATS": self.nats_url}
        found |= {"NATS_URL": self.nats_url, "XDG_CONFIG_HOME": str(self._directory), "TERM": "dumb"}
        return found | self._variables

    def run(self, line: str, given: str = "") -> str:
        """What a command prints that is given ``given`` and has to succeed."""
        done = subprocess.run(
            self.arguments(line),
            cwd=self._directory,
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
                cwd=self._directory,
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
            process = subprocess.Popen(
                self.arguments(line), cwd=self._directory, env=self.env, stdin=theirs, stdout=theirs, stderr=theirs
            )
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
        process.start(self.arguments(line), self.env, self._directory)
        return process

    def close(self) -> None:
        """End what still runs."""
        for process in self._background:
            process.discard()
