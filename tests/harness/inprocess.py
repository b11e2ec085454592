# SPDX-License-Identifier: Apache-2.0
"""A gateway in a thread of the test's own process, so that a test can reach into it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import anyio

from mqtt_nats.base.errors import first_error
from mqtt_nats.client.account import Account
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.broker import Broker
from mqtt_nats.gateway.gateway import Gateway
from mqtt_nats.transport.listener_settings import Bound

T = TypeVar("T")

_START = 30.0  # seconds


class InProcess:
    """A running gateway. What touches it has to run in its own thread: see :meth:`call` and :meth:`run`."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.ports: list[int] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.error: BaseException | None = None
        self.stop: Callable[[], None] = lambda: None
        """Ends it in good order, and waits for that."""

    @property
    def port(self) -> int:
        """Where its first listener is."""
        return self.ports[0]

    @property
    def account(self) -> Account:
        """The services that clients of the gateway share."""
        return self.broker.account

    @property
    def broker(self) -> Broker:
        """The gateway's own account, with plugins, desired state and answers."""
        assert self.gateway.own.broker is not None
        return self.gateway.own.broker

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the gateway's thread; its result, or exception."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(_START)

    def call(self, work: Callable[[], T]) -> T:
        """Call a function in the gateway's thread; its result, or exception."""

        async def run() -> T:
            return work()

        return self.run(run())


@contextlib.contextmanager
def running(settings: Settings) -> Iterator[InProcess]:
    """A gateway with these settings, until the block ends. What keeps it from starting is raised.

    Refusals that pass have a CONNACK, whose reason tests compare, unless the settings say otherwise.
    """
    if "temporary_refusals" not in settings.model_fields_set:
        settings = settings.model_copy(update={"temporary_refusals": "connack"})
    found = InProcess(Gateway(settings))
    started = threading.Event()
    ending: list[Callable[[], Any]] = []

    async def main() -> None:
        stop = anyio.Event()
        loop = found.loop = asyncio.get_running_loop()
        ending.append(lambda: loop.call_soon_threadsafe(stop.set))

        def on_ready(addresses: list[Bound]) -> None:
            found.ports = [one.port for one in addresses]
            started.set()

        try:
            await found.gateway.connect(anyio.Event())
            try:
                await found.gateway.run(on_ready, stop)
            finally:
                await found.gateway.disconnect()
        except BaseException as error:
            found.error = first_error(error)
        finally:
            started.set()

    thread = threading.Thread(target=lambda: anyio.run(main, backend_options={"use_uvloop": True}), daemon=True)

    def end() -> None:
        if found.error is None and thread.is_alive():
            ending[0]()
        thread.join(_START)
        assert not thread.is_alive()

    found.stop = end
    thread.start()
    assert started.wait(_START)
    try:
        if found.error is not None:
            raise found.error
        yield found
    finally:
        end()
    if found.error is not None:
        raise found.error
