# SPDX-License-Identifier: Apache-2.0
"""One listener: accepts connections, counts them, and secures them where it is to.

MQTT runs over TCP, TLS and WebSocket [MQTT-7.1.1-1] (3.1.1), [MQTT-4.2.0-1] (5.0).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from functools import partial
from time import monotonic
from typing import Any, Final, Protocol

from mqtt_nats.connection.connection import LINGER
from mqtt_nats.listeners.secure import make_context
from mqtt_nats.listeners.settings import Bound, ListenerSettings, parse_address
from mqtt_nats.listeners.websocket import WebSocket

log = logging.getLogger("mqtt_nats.listeners")

ACCEPTS: Final = 64
"""Connections accepted in a row."""

AGAIN: Final = 1.0
"""Seconds without accepting, when the process has too many files open."""

REMIND: Final = 60.0
"""Seconds between two lines that a listener is full."""


class Counted(Protocol):
    """A connection, as a listener sees it."""

    left: Callable[[], None] | None
    """To be called once, when it is gone: it has been counted."""


class Listener:
    """Accepts connections on the address of ``settings``.

    Args:
        timeout: seconds in which handshakes must be complete.

    Raises:
        StartupError: a certificate or key cannot be used.
    """

    def __init__(self, settings: ListenerSettings, timeout: float) -> None:
        self.settings = settings
        self.connections = 0
        """Sockets that are open, also those whose TLS handshake is not complete."""
        self._context = make_context(settings) if settings.secure else None
        self._timeout = timeout
        self._server: asyncio.Server | None = None
        self._sockets: list[socket.socket] = []
        self._reminded = -REMIND

    async def open(
        self,
        make: Callable[[Listener], Any],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        *,
        backlog: int,
        shared: bool,
    ) -> list[Bound]:
        """Begin to accept; returns the addresses.

        Args:
            make: makes a connection, which is a :class:`Counted`.
            spawn: runs a coroutine in a task.
            backlog: connections that the kernel queues.
            shared: other processes listen on the same port.

        Raises:
            OSError: the address is not to be had.
        """
        loop = asyncio.get_running_loop()
        host, port = parse_address(self.settings.listen)
        new: Callable[[], Any] = partial(self._web, make) if self.settings.web else partial(make, self)
        if self._context is None:
            self._server = await loop.create_server(new, host, port, backlog=backlog, reuse_port=shared or None)
            return [self._bound(one.getsockname()) for one in self._server.sockets]
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                one = socket.create_server(address[:2], family=family, backlog=backlog, reuse_port=shared)
                one.setblocking(False)
                self._sockets.append(one)
        except OSError:
            self.close()
            raise
        for one in self._sockets:
            # Not create_server: it would count a connection only after its handshake, and could not change context.
            loop.add_reader(one, self._accept, one, new, spawn)
        return [self._bound(one.getsockname()) for one in self._sockets]

    def _bound(self, address: Any) -> Bound:
        return Bound(address[0], address[1], self.settings.type)

    def close(self) -> None:
        """Accept nobody any more."""
        if self._server is not None:
            self._server.close()
        for one in self._sockets:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        self._sockets.clear()

    def reload(self) -> None:
        """Read certificates again, for the connections that come from now on.

        Raises:
            StartupError: they cannot be used; the former stay.
        """
        if self.settings.secure:
            self._context = make_context(self.settings)

    def enter(self, connection: Counted) -> bool:
        """Count a connection, unless there are too many."""
        limit = self.settings.max_connections
        if limit is not None and self.connections >= limit:
            now = monotonic()
            if now - self._reminded >= REMIND:
                self._reminded = now
                log.warning("listener %s has %d connections: more are closed at once", self.settings.listen, limit)
            return False
        self.connections += 1
        connection.left = self._leave
        return True

    def _web(self, make: Callable[[Listener], Any]) -> WebSocket:
        return WebSocket(make(self), self.enter, self._timeout)

    def _leave(self) -> None:
        self.connections -= 1

    def _accept(
        self,
        listening: socket.socket,
        new: Callable[[], Any],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        for _ in range(ACCEPTS):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("listener %s accepts nobody for a while: %s", self.settings.listen, error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(AGAIN, self._again, listening, new, spawn)
                return
            accepted.setblocking(False)
            protocol = new()
            if self.enter(protocol):
                spawn(self._secure(accepted, address, protocol), "TLS handshake")
            else:
                accepted.close()

    def _again(self, listening: socket.socket, *more: Any) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening, *more)

    async def _secure(self, accepted: socket.socket, address: Any, protocol: Any) -> None:
        """The handshake; the protocol is told of the connection when it is complete, and of its end then only."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._timeout,
                ssl_shutdown_timeout=LINGER,
            )
        except (OSError, asyncio.CancelledError) as error:
            if protocol.left is not None:
                protocol.left()
                protocol.left = None
            if isinstance(error, asyncio.CancelledError):
                raise
            log.debug("listener %s: TLS with %s:%d failed: %s", self.settings.listen, *address[:2], _why(error))


def _why(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    return str(error) or "the client has left"
