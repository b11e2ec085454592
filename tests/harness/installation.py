# SPDX-License-Identifier: Apache-2.0
"""What deploy/ installs, on this machine: its secrets, and nats-server with its configuration and users."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mqtt_nats.gateway.embedded import find_binary
from tests.harness.nats import ROOT
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.waiting import free_port

DEPLOY = ROOT / "deploy"
CLUSTER = ("nats-1", "nats-2", "nats-3")
"""Names of the servers that cluster.conf has."""
INSIDE = "/run/secrets"
"""Where containers find secrets."""


class Secrets:
    """What ``deploy/secrets.sh`` makes.

    Args:
        directory: for it; it may exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.make()

    def make(self) -> None:
        """Run the script."""
        script = DEPLOY / "secrets.sh"
        subprocess.run(["sh", str(script), str(self.directory)], check=True, capture_output=True, timeout=60)

    def env(self, name: str) -> dict[str, str]:
        """The variables of a file for the environment."""
        lines = (self.directory / name).read_text(encoding="ascii").splitlines()
        return dict(line.split("=", 1) for line in lines)

    def text(self, name: str) -> str:
        """A password or token."""
        return (self.directory / name).read_text(encoding="ascii")

    @property
    def authority(self) -> Path:
        """The certificate of the authority."""
        return self.directory / "ca.pem"


def users_of_the_chart() -> str:
    """The users of nats-values.yaml, as the chart writes them into the configuration of nats-server."""
    values = yaml.safe_load((DEPLOY / "kubernetes" / "nats-values.yaml").read_text(encoding="utf-8"))
    users = {"authorization": values["config"]["merge"]["authorization"]}
    return re.sub(r'"<< (\S+) >>"', r"\1", json.dumps(users, indent=1)).strip()[1:-1]


class SecuredNats:
    """nats-server as deploy/nats has it, with other paths and ports.

    Args:
        directory: for configuration, store and log.
        users: in place of users.conf; None: that file.
        ports: port of this machine by what the configuration says.
        arguments: of the command line beside configuration and store.
    """

    def __init__(
        self,
        directory: Path,
        secrets: Secrets,
        *,
        users: str | None = None,
        main: str = "nats-server.conf",
        replaced: Mapping[str, str] | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.process = LoggedProcess("nats-server", directory / "nats-server.log")
        self._directory, self._secrets, self._main, self._arguments = directory, secrets, main, arguments
        changes = {
            INSIDE: str(secrets.directory),
            "0.0.0.0:4222": f"127.0.0.1:{self.port}",
            "127.0.0.1:8222": f"127.0.0.1:{free_port()}",
            **(replaced or {}),
        }
        for file in (DEPLOY / "nats").iterdir():
            text = file.read_text(encoding="utf-8")
            for old, new in changes.items():
                text = text.replace(old, new)
            (directory / file.name).write_text(text, encoding="utf-8")
        if users is not None:
            (directory / "users.conf").write_text(users, encoding="utf-8")

    @property
    def url(self) -> str:
        """For NATS clients; TLS is required."""
        return f"tls://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Its log."""
        return self.process.text

    def launch(self) -> None:
        """Start it without waiting."""
        files = [f"-c={self._directory / self._main}", f"-sd={self._directory / 'store'}"]
        self.process.start([str(find_binary()), *files, *self._arguments], self._secrets.env("nats.env"))

    def start(self) -> None:
        """Start it and wait until clients can connect."""
        self.launch()
        self.wait()

    def wait(self) -> None:
        """Wait until clients can connect."""
        wait_ready(self.process, "(Server is ready)", 30.0)

    def discard(self) -> None:
        """End it."""
        self.process.discard()

    def login(self, user: str) -> dict[str, Any]:
        """The environment with which gateway and ``ctl`` are this user."""
        return {
            "MQTT_NATS_NATS": self.url,
            "MQTT_NATS_NATS_USER": user,
            "MQTT_NATS_NATS_PASSWORD": self._secrets.text(f"{user}-password"),
            "MQTT_NATS_NATS_TLS_CA": str(self._secrets.authority),
        }


class SecuredCluster:
    """Three nats-servers as deploy/nats/cluster.conf has them.

    Args:
        directory: for configurations, stores and logs.
    """

    def __init__(self, directory: Path, secrets: Secrets) -> None:
        self.routes = {name: free_port() for name in CLUSTER}
        self.servers = [self._made(directory / name, secrets, name) for name in CLUSTER]

    def _made(self, directory: Path, secrets: Secrets, name: str) -> SecuredNats:
        places = {"0.0.0.0:6222": f"127.0.0.1:{self.routes[name]}"}
        places |= {f"{other}:6222": f"127.0.0.1:{port}" for other, port in self.routes.items()}
        arguments = (f"--server_name={name}",)
        return SecuredNats(directory, secrets, main="cluster.conf", replaced=places, arguments=arguments)

    @property
    def url(self) -> str:
        """Of all servers."""
        return ",".join(server.url for server in self.servers)

    def start(self) -> None:
        """Start the servers and wait until clients can connect."""
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.wait()

    def discard(self) -> None:
        """End the servers."""
        for server in self.servers:
            server.process.discard()

    def login(self, user: str) -> dict[str, Any]:
        """The environment with which gateway and ``ctl`` are this user."""
        return {**self.servers[0].login(user), "MQTT_NATS_NATS": self.url}
