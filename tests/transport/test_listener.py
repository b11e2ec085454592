# SPDX-License-Identifier: Apache-2.0
"""Connections that come together are accepted together, also while a turn of the event loop takes long."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, closing

import pytest

from mqtt_nats.base.admission import ConnectionLimit
from mqtt_nats.config.settings import Settings
from mqtt_nats.transport.listener import Listener
from tests.harness.waiting import aeventually

COUNT = 32


class Opened:
    """A listener, and the protocols that it has made."""

    def __init__(self) -> None:
        settings = Settings(listen="127.0.0.1:0")
        self.listener = Listener(settings.all_listeners[0], settings, ConnectionLimit(settings))
        self.made: list[asyncio.Protocol] = []

    async def open(self) -> tuple[str, int]:
        (bound,) = await self.listener.open(self._make, self._spawn, backlog=100, shared=False)
        return bound.host, bound.port

    def _make(self, _: Listener) -> asyncio.Protocol:
        self.made.append(asyncio.Protocol())
        return self.made[-1]

    def _spawn(self, *_: object) -> None:
        raise AssertionError("a plain connection needs no handshake")


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    async with AsyncExitStack() as stack:
        one = Opened()
        stack.callback(one.listener.close)
        yield one


async def test_many_are_accepted_in_one_turn(opened: Opened) -> None:
    address = await opened.open()
    with ExitStack() as stack:
        for _ in range(COUNT):  # they wait: the event loop has no turn meanwhile
            stack.enter_context(socket.create_connection(address))
        turns = 0
        while len(opened.made) < COUNT:
            await asyncio.sleep(0)
            turns += 1
            assert turns < COUNT // 2, f"{len(opened.made)} of {COUNT} accepted in {turns} turns"


async def test_nobody_is_accepted_when_it_is_closed(opened: Opened) -> None:
    address = await opened.open()
    opened.listener.close()

    def refused() -> bool:
        with closing(socket.socket()) as one:
            return one.connect_ex(address) == errno.ECONNREFUSED

    await aeventually(refused, what="the port is closed")
    assert not opened.made


async def test_nothing_is_left_where_it_cannot_listen(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has too many files open."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        address: tuple[str, int] = one.getsockname()
    opened.listener.settings = opened.listener.settings.model_copy(update={"listen": f"{address[0]}:{address[1]}"})

    def full(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "dup", full)
    with pytest.raises(OSError, match="Too many open files"):
        await opened.open()

    def free() -> bool:
        try:
            socket.create_server(address).close()
        except OSError:
            return False
        return True

    await aeventually(free, what="the port is free again")
