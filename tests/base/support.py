# SPDX-License-Identifier: Apache-2.0
"""Gateways in a thread of the test, so that tests can look into them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import anyio
import psutil

from mqtt_nats.client.client import Client
from mqtt_nats.codec import ReasonCode
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.gateway import Gateway
from mqtt_nats.transport.listener_settings import Bound, ListenerSettings
from tests.harness import raw5
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually

T = TypeVar("T")

PATIENCE = 30.0
LOCAL = "127.0.0.1:0"


class Inside:
    """A running gateway."""

    def __init__(self, gateway: Gateway, loop: asyncio.AbstractEventLoop, ports: list[int]) -> None:
        self.gateway = gateway
        self.loop = loop
        self.ports = ports
        """Of the listeners, in their order."""

    def call(self, work: Callable[[], T]) -> T:
        """Run a function in the gateway's event loop."""

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE)

    def client(self, client_id: str) -> Client:
        """The gateway's side of a connected client."""
        account = self.gateway.account
        assert account is not None
        return self.call(lambda: account.registry.clients[client_id])

    @property
    def connections(self) -> int:
        """Open connections that are counted."""
        return self.call(lambda: self.gateway.connection_limit.connections)


@contextlib.contextmanager
def no_places(inside: Inside, places: asyncio.Semaphore, count: int) -> Iterator[None]:
    """Others have all of so many places until the block ends."""

    async def take_all() -> None:
        for _ in range(count):
            await places.acquire()

    asyncio.run_coroutine_threadsafe(take_all(), inside.loop).result(PATIENCE)
    try:
        yield
    finally:
        for _ in range(count):
            inside.call(places.release)


@contextlib.contextmanager
def running(nats: str, *listeners: dict[str, Any], **settings: Any) -> Iterator[Inside]:
    """A gateway with these listeners, each on a port of its own."""
    made = tuple(
        ListenerSettings.model_validate({"listen": LOCAL, "allow_anonymous": True, **one}) for one in listeners or ({},)
    )
    given = Settings(nats=(nats,), listeners=made, **({"temporary_refusals": "connack"} | settings))
    started = threading.Event()
    found: list[Inside] = []
    stop: list[anyio.Event] = []

    async def main() -> None:
        gateway = Gateway(given)
        stop.append(anyio.Event())

        def on_ready(addresses: list[Bound]) -> None:
            found.append(Inside(gateway, asyncio.get_running_loop(), [one.port for one in addresses]))
            started.set()

        await gateway.connect(anyio.Event())
        try:
            await gateway.run(on_ready, stop[0])
        finally:
            await gateway.disconnect()

    thread = threading.Thread(
        target=lambda: anyio.run(main, backend="asyncio", backend_options={"use_uvloop": True}), daemon=True
    )
    thread.start()
    try:
        assert started.wait(PATIENCE), "the gateway does not start"
        yield found[0]
    finally:
        if found:
            found[0].loop.call_soon_threadsafe(stop[0].set)
        thread.join(PATIENCE)
        assert not thread.is_alive()


def memory(pid: int | None = None) -> int:
    """Resident bytes of a process, this one where none is named."""
    found: int = psutil.Process(pid).memory_info().rss
    return found


def reason(port: int, client_id: str = "") -> int | None:
    """What a 5.0 client is answered; None where the connection ends without an answer."""
    with Raw5(port, patience=PATIENCE) as client:
        client.send(raw5.connect(client_id))
        found = client.receive()
        return None if found is None else raw5.answer(found).reason


def let_in(port: int, client_id: str = "") -> bool:
    """Whether a client is let in."""
    return reason(port, client_id) == 0


def banned(port: int, client_id: str) -> bool:
    """Whether a client is told that it is banned."""
    return reason(port, client_id) == ReasonCode.BANNED


def everywhere(gateways: Iterable[Inside], check: Callable[[int], bool]) -> None:
    """Wait until something is so at the first listener of each gateway."""
    for inside in gateways:
        eventually(partial(check, inside.ports[0]), PATIENCE)
