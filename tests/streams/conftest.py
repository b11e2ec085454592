# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the store tests."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.streams.support import NatsPyJetStream, StreamsServer, connect


@pytest.fixture(scope="session")
def streams_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamsServer]:
    server = StreamsServer(tmp_path_factory.mktemp("streams-nats"))
    yield server
    server.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[[str], StreamsServer]]:
    """Starts servers with a configuration of their own."""
    servers: list[StreamsServer] = []

    def start(config: str = "") -> StreamsServer:
        servers.append(StreamsServer(tmp_path / f"nats-{len(servers)}", config))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def js(streams_server: StreamsServer) -> AsyncIterator[NatsPyJetStream]:
    """A connection to the shared server, where no stream is left of earlier tests."""
    transport = await connect(streams_server)
    context = transport.client.jetstream()
    for info in await context.streams_info():
        await context.delete_stream(str(info.config.name))
    yield transport
    await transport.client.close()


@pytest.fixture
async def link() -> AsyncIterator[Callable[..., Awaitable[NatsPyJetStream]]]:
    """Opens further connections, with nats-py's options, and closes them."""
    opened: list[NatsPyJetStream] = []

    async def open_one(server: StreamsServer, **options: object) -> NatsPyJetStream:
        opened.append(await connect(server, **options))
        return opened[-1]

    yield open_one
    for transport in opened:
        await transport.client.close()
