# SPDX-License-Identifier: Apache-2.0
"""A cluster each of whose servers has a network of its own (Linux, as root), so that cables can be pulled.

The servers and what is put beside them are reached under their ports on 127.0.0.1, as from any other process: a
doorway listens there and connects inside the namespace.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

from tests.harness.cluster import Cluster
from tests.harness.gateway import Gateway
from tests.harness.nats import ProcessNatsServer
from tests.harness.proxy import Proxy
from tests.harness.waiting import free_port

_NETWORK = 0x40000000  # CLONE_NEWNET
_ROUTE_PORT = 6222


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


def namespace_obstacle() -> str:
    """Why there can be no namespaces here; empty when there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None:
        return "the command ip is not installed"
    name = f"mqtry{secrets.token_hex(3)}"
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "br0", "type", "bridge")
            _ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two")
        finally:
            _ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {str(error.stderr).strip()}"
    return ""


class Doorway(Proxy):
    """Forwards a port of 127.0.0.1 to the same one inside a namespace."""

    def __init__(self, port: int, namespace: str) -> None:
        self._namespace = namespace
        super().__init__(port, port=port)

    def _accept(self) -> None:
        with Path(f"/run/netns/{self._namespace}").open("rb") as file:  # for this thread only
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
        super()._accept()


class NamespaceCluster(Cluster):
    """``servers`` are named n0, n1, n2; cables lead from each to a switch.

    Args:
        directory: for configurations, stores and logs.
        size: how many servers.
    """

    def __init__(self, directory: Path, *, size: int = 3) -> None:
        tag = f"mq{secrets.token_hex(3)}"
        self._switch = f"{tag}s"
        self._names = [f"{tag}{number}" for number in range(size)]
        self._doors: list[Doorway] = []
        self.servers = []
        self.routes = [_ROUTE_PORT] * size
        try:
            self._build(directory)
        except BaseException:
            self.discard()
            raise

    def _build(self, directory: Path) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        addresses = [f"10.77.0.{number + 1}" for number in range(len(self._names))]
        routes = ", ".join(f'"nats://{address}:{_ROUTE_PORT}"' for address in addresses)
        for number, name in enumerate(self._names):
            _ip("netns", "add", name)
            _ip("-n", self._switch, "link", "add", f"p{number}", "type", "veth", "peer", "name", "up0", "netns", name)
            _ip("-n", self._switch, "link", "set", f"p{number}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{addresses[number]}/24", "dev", "up0")
            for device in ("up0", "lo"):
                _ip("-n", name, "link", "set", device, "up")
            server = ProcessNatsServer(
                directory / f"n{number}",
                config=f'server_name: "n{number}"\ncluster {{ name: "c", '
                f'listen: "{addresses[number]}:{_ROUTE_PORT}", no_advertise: true, routes: [{routes}] }}',
            )
            server.port = free_port()
            server.process.prefix = self._inside(number)
            self._doors.append(Doorway(server.port, name))
            self.servers.append(server)

    def _inside(self, number: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._names[number])

    def put(self, gateway: Gateway, number: int) -> None:
        """Have a gateway that is not started yet run beside a server."""
        gateway.port = free_port()
        gateway.process.prefix = self._inside(number)
        self._doors.append(Doorway(gateway.port, self._names[number]))

    def isolate(self, number: int) -> None:
        """Pull the cable of a server."""
        _ip("-n", self._switch, "link", "set", f"p{number}", "down")

    def heal(self) -> None:
        """Plug all cables in."""
        for number in range(len(self._names)):
            _ip("-n", self._switch, "link", "set", f"p{number}", "up")

    def discard(self) -> None:
        """End all for good."""
        super().discard()
        for door in self._doors:
            door.close()
        for name in (*self._names, self._switch):
            if Path(f"/run/netns/{name}").exists():
                _ip("netns", "delete", name)
