# SPDX-License-Identifier: Apache-2.0
"""A cluster whose servers can be cut off from each other: their routes go through proxies."""

from __future__ import annotations

from pathlib import Path

from tests.harness.cluster import Cluster
from tests.harness.nats import NatsServer, make_server
from tests.harness.proxy import Proxy
from tests.harness.waiting import free_port

NOBODY = "127.0.0.1:1"
"""Where servers say that they are, lest they make routes of their own that no proxy sees."""


class SplitCluster(Cluster):
    """``servers`` are named n0, n1, n2; clients reach each of them directly, whatever happens to the routes.

    Args:
        directory: for configurations, stores and logs.
        size: how many servers.
    """

    def __init__(self, directory: Path, *, size: int = 3) -> None:
        self.routes = [free_port() for _ in range(size)]
        self._ways = {
            (one, other): Proxy(self.routes[other]) for one in range(size) for other in range(size) if one != other
        }
        self.servers: list[NatsServer] = []
        for number, port in enumerate(self.routes):
            routes = ", ".join(f'"{proxy.url}"' for (one, _), proxy in self._ways.items() if one == number)
            config = (
                f'server_name: "n{number}"\ncluster {{ name: "c", listen: "127.0.0.1:{port}", '
                f'advertise: "{NOBODY}", no_advertise: true, routes: [{routes}] }}'
            )
            self.servers.append(make_server("process", directory / f"n{number}", config=config))

    def isolate(self, *numbers: int, silently: bool = False) -> None:
        """Cut these servers off from the others, but not from each other.

        Args:
            silently: their connections stay, and nothing comes through.
        """
        for (one, other), proxy in self._ways.items():
            if (one in numbers) != (other in numbers):
                proxy.stall() if silently else proxy.cut()

    def heal(self) -> None:
        """Let everything through again."""
        for proxy in self._ways.values():
            proxy.restore()

    def discard(self) -> None:
        """End all for good."""
        super().discard()
        for proxy in self._ways.values():
            proxy.close()
