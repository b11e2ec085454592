# SPDX-License-Identifier: Apache-2.0
"""Connections to the admin listener that speak TLS, until they do: nobody else would count them, or end them soon."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from functools import partial

from mqtt_nats.admin import connections
from mqtt_nats.transport.listener import ACCEPT_RETRY_S, ACCEPTS

log = logging.getLogger("mqtt_nats.admin")


class Handshakes:
    """Accepts connections, and hands them on when they are secure.

    Args:
        make: makes the protocol of one.
    """

    def __init__(self, listening: socket.socket, context: ssl.SSLContext, make: Callable[[], asyncio.Protocol]) -> None:
        self._listening = listening
        self.context = context
        """Of connections to come."""
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[asyncio.Task[None], str] = {}
        """The address of each, the oldest first."""
        self._open = True
        self._accept_more()

    def renew(self, context: ssl.SSLContext) -> None:
        """Use another context for connections to come."""
        self.context = context

    def close(self) -> None:
        """Accept nobody any more."""
        self._open = False
        self._loop.remove_reader(self._listening)
        for task in self._under_way:
            task.cancel()

    def _accept_more(self) -> None:
        if self._open:
            self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("admin listener: accepting is paused: %s", error.strerror)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(ACCEPT_RETRY_S, self._accept_more)
                return
            accepted.setblocking(False)
            self._make_room()
            task = self._loop.create_task(self._secure(accepted), name="admin handshake")
            self._under_way[task] = address[0]
            task.add_done_callback(partial(self._ended, accepted))

    def _ended(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._under_way.pop(task, None)
        if task.cancelled():  # perhaps before it had begun
            accepted.close()

    def _make_room(self) -> None:
        """Where there are too many, end the oldest of the address that has most of them."""
        if len(self._under_way) < connections.MOST_CONNECTIONS:
            return
        of = Counter(self._under_way.values())
        crowded = max(self._under_way, key=lambda task: of[self._under_way[task]])
        del self._under_way[crowded]
        crowded.cancel()

    async def _secure(self, accepted: socket.socket) -> None:
        context = self.context
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                self._make, accepted, ssl=context, ssl_handshake_timeout=connections.HEAD_SECONDS
            )
            if self.context is not context:  # the files were read again meanwhile
                transport.abort()
        except OSError:
            pass  # whatever it was, it does not speak TLS, or has left
