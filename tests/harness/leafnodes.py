# SPDX-License-Identifier: Apache-2.0
"""A nats-server whose JetStream has a domain, and another one that is its leafnode."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mqtt_nats.gateway.embedded import find_binary
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.proxy import Proxy
from tests.harness.waiting import eventually, free_port

DOMAIN = "hub"
PATIENCE = 30.0

Leaf = Literal["no JetStream", "a domain of its own"]


class Hub:
    """Two nats-servers, the hub with the domain `DOMAIN`; their connection goes through `between`.

    Args:
        directory: for configurations, stores and logs.
        leaf: what the leafnode has.
        more: more lines for the configuration of both.
    """

    def __init__(self, directory: Path, leaf: Leaf, *, more: str = "") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.between = Proxy(port)
        remote = f'leafnodes {{ reconnect: "100ms", remotes: [ {{ url: "nats://127.0.0.1:{self.between.port}" }} ] }}'
        own = 'jetstream { domain: "leaf" }' if leaf == "a domain of its own" else ""
        texts = {
            # Without no_advertise the leafnode would learn the port behind the proxy.
            "hub": f'jetstream {{ domain: "{DOMAIN}" }}\n'
            f'leafnodes {{ listen: "127.0.0.1:{port}", no_advertise: true }}',
            "leaf": f"{own}\n{remote}",
        }
        self.processes: dict[str, LoggedProcess] = {}
        self.urls: dict[str, str] = {}
        self._commands: dict[str, list[str]] = {}
        for name, text in texts.items():
            file = directory / f"{name}.conf"
            file.write_text(f'server_name: "{name}"\n{text}\n{more}\n', encoding="utf-8")
            client = free_port()
            self.urls[name] = f"nats://127.0.0.1:{client}"
            self.processes[name] = LoggedProcess(name, directory / f"{name}.log")
            place = ["-a", "127.0.0.1", "-p", str(client), "-sd", str(directory / name)]
            self._commands[name] = [str(find_binary()), "-c", str(file), *place]

    def start(self) -> None:
        """Start both, and wait until they are connected."""
        for name, process in self.processes.items():
            process.start(self._commands[name])
            wait_ready(process, "(Server is ready)", PATIENCE)
        self.wait()

    def wait(self) -> None:
        """Wait until the leafnode is connected."""
        log = self.processes["leaf"]
        eventually(lambda: "Leafnode connection created" in log.text.rpartition("connection closed")[2], PATIENCE)

    def discard(self) -> None:
        """End both."""
        for process in self.processes.values():
            process.discard()
        self.between.close()
