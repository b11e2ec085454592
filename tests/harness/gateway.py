# SPDX-License-Identifier: Apache-2.0
"""The gateway as its users run it: ``python -m mqtt_nats serve`` in a process of its own."""

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harness import positions
from tests.harness.nats import ROOT
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.waiting import free_port

HOST = "127.0.0.1"

_START_WAIT = 30.0  # seconds

_AFTER_LOADING = ("mqtt_nats",)
"""What does not mind that the gateway's modules are there already; others change what these find when they load."""


class Gateway:
    """One gateway process. It keeps its port when it is started again, unless told otherwise.

    Args:
        log: file for its output.
        nats: URL for ``--nats``; empty: give ``--embedded`` in ``arguments``.
        arguments: more flags.
        env: more environment variables.
        module: what ``python -m`` runs in place of ``mqtt_nats``.
    """

    def __init__(
        self,
        log: Path,
        nats: str,
        *,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        module: str = "",
    ) -> None:
        self.process = LoggedProcess("gateway", log)
        self.port = 0
        self._arguments = [*(["--nats", nats] if nats else []), *arguments]
        defaults = {"MQTT_NATS_SESSION_CONSUMERS": "1000000", "MQTT_NATS_TEMPORARY_REFUSALS": "connack"}
        self._env = defaults | positions.settings(arguments, env or {}) | dict(env or {})
        """Tests share nats-servers: consumers of others are not to decide whether a session has consumers. And tests
        compare the reasons of refusals; tests/client/test_temporary_refusals.py has the default."""
        self._module = module or "mqtt_nats"

    @property
    def host(self) -> str:
        """Where MQTT clients connect."""
        return HOST

    @property
    def pid(self) -> int:
        """Process id of the last start."""
        return self.process.pid

    @property
    def log(self) -> str:
        """Its output since the last start."""
        return self.process.text

    @property
    def ready(self) -> bool:
        """Whether the last record of its log about its readiness says "ready again", or there is none."""
        return "not ready: " not in self.log.rpartition("ready again")[2]

    @property
    def nats_url(self) -> str:
        """URL of NATS, as it prints it: behind the addresses of its listeners."""
        return wait_ready(self.process, r"\bNATS +(\w+://\S+)", _START_WAIT)

    def start(self, *, port: int | None = None) -> None:
        """Start and wait until it accepts clients. ``port`` 0: a free one; None: the port it had."""
        if port is not None:
            self.port = port
        self.port = self.port or free_port()
        self.launch()
        self.port = int(wait_ready(self.process, r"\bMQTT +127\.0\.0\.1:(\d+)", _START_WAIT))

    def launch(self) -> None:
        """Start without waiting, for starts that fail."""
        arguments = ["serve", "--listen", f"{HOST}:{self.port}", *self._arguments]
        if self._module.startswith(_AFTER_LOADING):
            self.process.start_module(self._module, arguments, self._env, ROOT)
        else:
            self.process.start([sys.executable, "-m", self._module, *arguments], self._env, ROOT)

    def wait(self, timeout: float = 20.0) -> int:
        """Wait for the end; the exit status."""
        return self.process.wait(timeout)

    def term(self) -> int:
        """End it in an orderly way; the exit status."""
        self.process.send(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """End it as a crash would (SIGKILL)."""
        self.process.send(signal.SIGKILL)
        self.wait()

    def restart(self, *, kill: bool = False, port: int | None = None) -> None:
        """End it, by SIGKILL if ``kill``, and start it again."""
        if kill:
            self.kill()
        else:
            assert self.term() == 0, self.log
        self.start(port=port)
