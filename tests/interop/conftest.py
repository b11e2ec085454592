# SPDX-License-Identifier: Apache-2.0
"""One nats-server with its MQTT listener, one gateway beside it, and clients for both."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import nats as nats_py
import orjson
import pytest
from nats.aio.client import Client as NatsClient

from mqtt_streams.gateway_subjects import LEFT
from mqtt_streams.hashing import name_hash
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer, make_server
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually
from tests.integration.conftest import position, settled
from tests.interop.support import Message, Paho, Pahos, Raws, Sides


@pytest.fixture(scope="module")
def nats(nats_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A nats-server with ``mqtt {}``, for all tests of a module."""
    server = make_server(nats_backend, tmp_path_factory.mktemp("nats"), mqtt=True)
    server.start()
    yield server
    server.discard()


@pytest.fixture(scope="module")
def sides(nats: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    """The MQTT ports of the gateway and of nats-server."""
    directory: Path = tmp_path_factory.mktemp("gateway")
    asyncio.run(_first(nats.mqtt_port))
    gateway = Gateway(directory / "gateway.log", nats.url)
    gateway.start()
    yield {"gateway": gateway.port, "nats-server": nats.mqtt_port}
    gateway.process.discard()
    assert "Traceback" not in gateway.log, gateway.log


async def _first(port: int) -> None:
    """Have nats-server's listener serve somebody: gateways know from then on that there are two sides."""
    async with await RawClient.connect(port, "first"):
        pass


@pytest.fixture
def paho(sides: Sides) -> Iterator[Pahos]:
    """Connect paho-mqtt clients: ``paho(side, client_id, **options)``."""
    clients: list[Paho] = []

    def connect(
        side: str, client_id: str, *, clean: bool = True, will: Message | None = None, connects: int = 1
    ) -> Paho:
        client = Paho(sides[side], client_id, clean=clean, will=will, connects=connects)
        clients.append(client)
        client.connect()
        return client

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
async def raw(sides: Sides) -> AsyncIterator[Raws]:
    """Connect clients that do nothing by themselves: ``await raw(side, client_id, **options)``."""
    clients: list[RawClient] = []

    async def connect(side: str, client_id: str, *, clean: bool = True) -> RawClient:
        client = await RawClient.connect(sides[side], client_id, clean=clean)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.drop()


@pytest.fixture
async def nats_client(nats: NatsServer) -> AsyncIterator[NatsClient]:
    """A NATS client on the same account."""
    client = await nats_py.connect(nats.url)
    yield client
    await client.close()


@pytest.fixture
def settle(nats: NatsServer) -> Callable[[str], None]:
    """Wait until what a client has acknowledged is acknowledged in JetStream; to be called before it closes."""

    async def settled_in(client_id: str) -> None:
        client = await nats_py.connect(nats.url)
        try:
            await settled(client.jetstream(), client_id)
        finally:
            await client.close()

    return lambda client_id: asyncio.run(settled_in(client_id))


@pytest.fixture
def let_go(nats: NatsServer) -> Callable[[str], None]:
    """Wait until nobody receives for a session any more, and a gateway has set its consumers to its position.

    What is delivered to a connection that is just ending comes again: at once from the gateway, but only after
    half a minute from nats-server's listener.
    """
    return lambda client_id: asyncio.run(_let_go(nats.url, client_id))


@pytest.fixture
def show(nats: NatsServer) -> Callable[[str], None]:
    """Wait until the consumers of a session show that nothing is left for its client."""

    async def rest(client_id: str) -> None:
        client = await nats_py.connect(nats.url)

        async def nothing() -> bool:
            infos = await client.jetstream().consumers_info("$MQTT_msgs")
            return not any(one.num_pending for one in infos if one.name.startswith(f"{name_hash(client_id)}_"))

        try:
            await aeventually(nothing)
        finally:
            await client.close()

    return lambda client_id: asyncio.run(rest(client_id))


async def _let_go(url: str, client_id: str) -> None:
    client = await nats_py.connect(url)
    try:
        await handed_over(client, client_id)
    finally:
        await client.close()


async def handed_over(client: NatsClient, client_id: str) -> None:
    """As the fixture `let_go`."""
    js, key = client.jetstream(), name_hash(client_id)

    async def free() -> bool:
        infos = await js.consumers_info("$MQTT_msgs")
        if any(info.push_bound for info in infos if info.name.startswith(f"{key}_")):
            return False
        record = orjson.loads((await js.get_last_msg("$MQTT_sess", f"$MQTT.sess.{key}")).data or b"{}")
        at = await position(js, client_id)
        if at.id and at.id == record.get("v5", {}).get("pos"):  # else nats-server's listener has served it last
            if not at.clean:
                return False
            await client.request(LEFT + at.gateway, client_id.encode(), timeout=30)
        return True

    await aeventually(free)
