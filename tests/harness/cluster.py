# SPDX-License-Identifier: Apache-2.0
"""Three nats-servers that form one cluster, on loopback, each with a store of its own."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import nats.errors
import orjson
from nats.aio.client import Client
from nats.js.errors import Error as JetStreamError

from tests.harness.nats import NatsServer, make_server
from tests.harness.waiting import aeventually, free_port

_LEADER_WAIT = 40.0  # seconds
_LEAD_WAIT = 90.0  # seconds


class Cluster:
    """``servers`` are named n0, n1, n2; each keeps its ports and its store when it is started again.

    Args:
        directory: for configurations, stores and logs.
        backend: ``process`` or ``container``.
        size: how many servers.
        config: appended to each server's configuration.
        mqtt: also run nats-server's own MQTT listener on each.
    """

    def __init__(
        self, directory: Path, *, backend: str = "process", size: int = 3, config: str = "", mqtt: bool = False
    ) -> None:
        self.routes = [free_port() for _ in range(size)]
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self.routes)
        self.servers: list[NatsServer] = [
            make_server(
                backend,
                directory / f"n{number}",
                config=f'server_name: "n{number}"\n'
                f'cluster {{ name: "c", listen: "127.0.0.1:{port}", routes: [{routes}] }}\n{config}',
                mqtt=mqtt,
            )
            for number, port in enumerate(self.routes)
        ]

    @property
    def url(self) -> str:
        """URLs of all servers, separated by commas."""
        return ",".join(server.url for server in self.servers)

    def start(self) -> None:
        """Start all and wait until JetStream has a leader."""
        for server in self.servers:
            server.start()
        asyncio.run(self._ready())

    async def _ready(self) -> None:
        async def answers() -> bool:
            return await self.info("") is not None

        await aeventually(answers, _LEADER_WAIT, what="JetStream of the cluster")

    async def info(self, stream: str) -> dict[str, Any] | None:
        """STREAM.INFO, or the account's information when ``stream`` is empty; None while nobody can tell."""
        subject = f"$JS.API.STREAM.INFO.{stream}" if stream else "$JS.API.INFO"
        with contextlib.suppress(OSError, nats.errors.Error, JetStreamError, TimeoutError):
            # One server that is up is enough, and one that is paused must not hold us up.
            client = await nats.connect(
                [server.url for server in self.servers], connect_timeout=1, allow_reconnect=False, error_cb=_quiet
            )
            try:
                reply: dict[str, Any] = orjson.loads((await client.request(subject, b"", timeout=2)).data)
                return None if "error" in reply else reply
            finally:
                await client.close()
        return None

    async def leader(self, stream: str) -> NatsServer:
        """The server that leads ``stream``; waits for an election to end."""

        async def elected() -> str | None:
            info = await self.info(stream)
            name: str | None = (info or {}).get("cluster", {}).get("leader")
            return name

        name = await aeventually(elected, _LEADER_WAIT, what=f"a leader of {stream}")
        return self.servers[int(name.removeprefix("n"))]

    async def answers(self, server: NatsServer) -> bool:
        """Whether JetStream answers those who are connected to ``server``."""
        with contextlib.suppress(OSError, nats.errors.Error, TimeoutError):
            client = await nats.connect(server.url, connect_timeout=5, allow_reconnect=False, error_cb=_quiet)
            try:
                return "error" not in orjson.loads((await client.request("$JS.API.INFO", b"", timeout=5)).data)
            finally:
                await client.close()
        return False

    async def leader_at(self, server: NatsServer, stream: str) -> str:
        """The name of the leader of ``stream`` for those who are connected to ``server``; empty: nobody can tell."""
        with contextlib.suppress(OSError, nats.errors.Error, TimeoutError):
            client = await nats.connect(server.url, connect_timeout=1, allow_reconnect=False, error_cb=_quiet)
            try:
                reply = orjson.loads((await client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=2)).data)
                return str(reply.get("cluster", {}).get("leader", ""))
            finally:
                await client.close()
        return ""

    async def settled(self, stream: str) -> None:
        """Wait until every replica of ``stream`` is there and up to date."""

        async def current() -> bool:
            info = await self.info(stream)
            replicas = (info or {}).get("cluster", {}).get("replicas") or []
            return len(replicas) == len(self.servers) - 1 and all(
                replica.get("current") and not replica.get("offline") for replica in replicas
            )

        await aeventually(current, _LEADER_WAIT, what=f"all replicas of {stream}")

    def discard(self) -> None:
        """End all for good."""
        for server in self.servers:
            server.discard()


async def lead(client: Client, what: str, name: str, wait: float = _LEAD_WAIT) -> None:
    """Have ``STREAM.<stream>`` or ``CONSUMER.<stream>.<consumer>`` led by the server ``name`` in ``wait`` seconds."""
    kind, _, path = what.partition(".")

    async def led() -> bool:
        try:
            info = orjson.loads((await client.request(f"$JS.API.{kind}.INFO.{path}", timeout=2)).data)
            if info.get("cluster", {}).get("leader") == name:
                return True
            body = orjson.dumps({"placement": {"preferred": name}})
            await client.request(f"$JS.API.{kind}.LEADER.STEPDOWN.{path}", body, timeout=2)
        except (nats.errors.Error, TimeoutError):
            pass
        await asyncio.sleep(0.3)
        return False

    await aeventually(led, wait, what=f"{what} led by {name}")


async def _quiet(error: Exception) -> None:
    """nats-py prints errors where nobody listens for them."""


@contextlib.contextmanager
def running_cluster(directory: Path, **options: Any) -> Iterator[Cluster]:
    """A cluster that runs, and is ended afterwards; the arguments are those of :class:`Cluster`."""
    cluster = Cluster(directory, **options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.discard()
