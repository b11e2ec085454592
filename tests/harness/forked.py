# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from one which has their modules, as `subprocess.Popen` would start them."""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.harness import nursery

_NO_MATTER = ("MQTT_NATS_", "PYTEST_", "SPARK_", "JDK_")
"""Variables that begin so are looked at when the gateway runs, or by others, some of which tests set for good."""


class Forked:
    """A process that another forked for us; as much of `subprocess.Popen` as `LoggedProcess` needs."""

    def __init__(self, replies: socket.socket) -> None:
        self._replies = replies.detach()
        weakref.finalize(self, os.close, self._replies)
        self.returncode: int | None = None
        self.pid = self._reply()
        self._lock = threading.Lock()  # threads of a test look at the same gateway

    def poll(self) -> int | None:
        """The exit status, if it has ended; a signal's number is negative."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its parent has not said so yet
                os.kill(self.pid, number)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._replies, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1000):
                return None
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._reply()
        return self.returncode

    def _reply(self) -> int:
        data = os.read(self._replies, 64)
        assert data, "who was to fork a gateway, or to wait for its end, has ended"
        return int(data)


class Nursery:
    """The process they are forked from."""

    def __init__(self, env: Mapping[str, str], cwd: Path) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", nursery.__name__, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, env=env, cwd=cwd, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()

    def fork(self, module: str, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, output: int) -> Forked:
        """``python -m module arguments``, with that environment and standard output."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"module": module, "arguments": list(arguments), "env": dict(env), "cwd": str(cwd)}
        with theirs:
            socket.send_fds(self._control, [json.dumps(request).encode()], [output, theirs.fileno()])
        return Forked(ours)

    def close(self) -> None:
        """No more of them; those that run go on."""
        self._control.close()
        self._process.wait()


def _that_matter(env: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in env.items() if not key.startswith(_NO_MATTER)}


_ENV = _that_matter(os.environ)


@cache
def _nursery(cwd: Path) -> Nursery:
    found = Nursery(_ENV, cwd)
    atexit.register(found.close)
    return found


def fork(module: str, arguments: Sequence[str], env: Mapping[str, str], cwd: Path, output: int) -> Forked | None:
    """`Nursery.fork`; None where a variable of the environment may change what happens before ``module`` runs.

    None also where there are no such sockets (macOS).
    """
    if sys.platform != "linux":
        return None
    return _nursery(cwd).fork(module, arguments, env, cwd, output) if _that_matter(env) == _ENV else None
