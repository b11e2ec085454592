# SPDX-License-Identifier: Apache-2.0
"""A client that has left is freed by reference counts: all clients wait while the collector runs."""

import asyncio
import gc
from collections.abc import AsyncIterator

import anyio
import pytest

from mqtt_nats.client.client import Client
from mqtt_nats.codec import Disconnect, Publish, Will
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway import account as module
from mqtt_nats.gateway.gateway import serve
from mqtt_nats.transport.listener_settings import Bound
from mqtt_streams.api import ApiError
from tests.harness.nats import NatsServer
from tests.harness.rawclient import PUBREC, RawClient
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio

CLIENTS = 50


@pytest.fixture
async def port(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """The port of a gateway in this process."""
    monkeypatch.setattr(module, "ROUTES_RELEASE_S", 1.0)
    stop = anyio.Event()
    ready: asyncio.Future[list[Bound]] = asyncio.get_running_loop().create_future()
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,))
    thresholds = gc.get_threshold()
    running = asyncio.create_task(serve(settings, on_ready=ready.set_result, stop=stop))
    done, _ = await asyncio.wait((running, ready), return_when=asyncio.FIRST_COMPLETED)
    assert ready in done, running.exception()
    try:
        yield (await ready)[0][1]
    finally:
        stop.set()
        await running
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def kept(kind: type) -> int:
    """Number of objects of a class that are in memory."""
    return sum(isinstance(found, kind) for found in gc.get_objects())


def is_live() -> bool:
    """Whether the shared reader serves the client that is connected."""
    sides = [one.durable_side for one in gc.get_objects() if isinstance(one, Client) and one.alive]
    return any(one is not None and one.live for one in sides)


async def visit(port: int, name: str, clean: bool, orderly: bool) -> None:
    """Do a little of everything, and leave in the middle of it."""
    will = Will(f"{name}/will", b"x", 1, True)
    async with await RawClient.connect(port, name, clean=clean, will=will) as client:
        await client.subscribe(f"{name}/+", f"+/{name}", qos=2)
        await client.unsubscribe(f"+/{name}")
        packet_id = client.publish(f"{name}/a", b"x", 2)
        await client.expect_ack(PUBREC, packet_id)
        client.publish(f"{name}/b", b"x", 1)
        while not isinstance(await client.packet(), Publish):
            pass
        if orderly:
            client.send(Disconnect())


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("orderly", [True, False])
async def test_nothing_waits_for_the_collector(port: int, clean: bool, orderly: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        before, errors = kept(Client), kept(ApiError)
        for number in range(CLIENTS):
            await visit(port, f"visitor {clean} {orderly} {number}", clean, orderly)
        # The last that a loop variable or a callback still holds.
        assert await aeventually(lambda: kept(Client) <= before + 2)
        assert kept(ApiError) <= errors + 2, (
            "JetStream's answer where nothing is stored, of which each session has several"
        )
    finally:
        gc.enable()


async def test_nor_do_sessions_of_the_shared_reader(port: int) -> None:
    gc.collect()
    gc.disable()
    try:
        before = kept(Client)
        for number in range(5):
            async with await RawClient.connect(port, f"reader {number}", clean=False) as raw:
                await raw.subscribe("read/#", qos=1)
                assert await aeventually(is_live)
        assert await aeventually(lambda: kept(Client) <= before + 2)
    finally:
        gc.enable()


async def test_the_session_moves_before_a_job_has_begun(port: int) -> None:
    """A SUBSCRIBE and the signal of a takeover come in the same turn: nothing of the client is left behind."""
    async with await RawClient.connect(port, "hasty", clean=False) as raw:
        await raw.subscribe("hasty/a", qos=1)
        (client,) = (one for one in gc.get_objects() if isinstance(one, Client) and one.client_id == "hasty")
        account = client.account

        async def job() -> None:
            raise AssertionError("the session is somebody else's")

        client.do(job())
        client.taken_over()
        await raw.expect_closed()
        assert await aeventually(lambda: client not in account.registry.connections)
        assert "hasty/a" not in account.services.path.table.filters
        assert not [name for name, owner in account.registry.attached.items() if owner is client]
