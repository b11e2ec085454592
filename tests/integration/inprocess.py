# SPDX-License-Identifier: Apache-2.0
"""A gateway in this process, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.gateway import Gateway
from mqtt_nats.transport.listener_settings import Bound

PATIENCE = 30.0


class Running:
    """The gateway, and how to have it do something."""

    def __init__(self, settings: Settings) -> None:
        self.gateway = Gateway(settings)
        self.addresses: list[Bound] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.stop: anyio.Event | None = None
        self.failure: BaseException | None = None

    @property
    def port(self) -> int:
        """Of the first listener."""
        return self.addresses[0].port

    def reload(self) -> None:
        """As SIGHUP; it is done when this returns."""
        done = threading.Event()
        assert self.loop is not None

        def reload() -> None:
            self.gateway.reload()
            done.set()

        self.loop.call_soon_threadsafe(reload)
        assert done.wait(PATIENCE)


@contextmanager
def running(**settings: Any) -> Iterator[Running]:
    """Run a gateway with these settings, on a free port unless they name listeners."""
    if "listeners" not in settings:
        settings = {"listen": "127.0.0.1:0", **settings}
    settings = {"temporary_refusals": "connack", **settings}  # tests compare reasons
    found = Running(Settings(**settings))
    ready = threading.Event()

    async def main() -> None:
        found.loop, found.stop = asyncio.get_running_loop(), anyio.Event()

        def on_ready(addresses: list[Bound]) -> None:
            found.addresses = addresses
            ready.set()

        await found.gateway.connect(anyio.Event())
        try:
            await found.gateway.run(on_ready, found.stop)
        finally:
            await found.gateway.disconnect()

    def run() -> None:
        try:
            anyio.run(main, backend_options={"use_uvloop": True})
        except BaseException as error:
            found.failure = error
        ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    if found.failure is not None:
        raise found.failure
    try:
        yield found
    finally:
        loop, stop = found.loop, found.stop
        assert loop is not None
        assert stop is not None
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert found.failure is None
