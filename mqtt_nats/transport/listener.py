# SPDX-License-Identifier: Apache-2.0
"""Listener: accepts connections, decides which may come in, and secures them if configured.

MQTT runs over TCP, TLS and WebSocket [MQTT-7.1.1-1] (3.1.1), [MQTT-4.2.0-1] (5.0).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

from mqtt_nats.base.admission import ADMITTED, Admission, ConnectionLimit, ListenerAdmission, Verdict
from mqtt_nats.base.logs import log_failure, once
from mqtt_nats.base.loopback import unpace
from mqtt_nats.base.networks import parse_host, parse_network
from mqtt_nats.codec import Limits
from mqtt_nats.transport.connection import CLOSE_LINGER_S
from mqtt_nats.transport.every_address import EVERY, listen_everywhere
from mqtt_nats.transport.listener_settings import Bound, ConnectionSettings, ListenerSettings, parse_address
from mqtt_nats.transport.proxy import BadHeader, HeaderReader, NoHeader
from mqtt_nats.transport.tls import certificate_end, client_trust, make_context

if TYPE_CHECKING:
    from mqtt_nats.transport.websocket import WebSocket

log = logging.getLogger("mqtt_nats.listeners")

ACCEPTS: Final = 64
"""Maximum number of connections accepted in a row."""

DESCRIPTORS: Final = 16
"""Number of descriptors of one listening socket: libuv accepts one connection of each in a turn of the event loop.

With one descriptor, a busy gateway accepts few connections per second. It answers connections that arrive together
one by one, and their NATS messages are not batched.
"""

ACCEPT_RETRY_S: Final = 1.0
"""Seconds without accepting when the process has too many files open."""


class Counted(Protocol):
    """Connection, as a listener uses it."""

    def count(self, on_end: Callable[[], None] | None, admission: Admission) -> None:
        """Note the decision about a counted connection, and call ``on_end`` once when the connection has ended.

        The decision has the monotonic time in seconds at which CONNECT is handled.
        """

    def uncount(self) -> None:
        """Call ``on_end`` now: the connection ends."""

    def name_source(self, source: tuple[str, int]) -> None:
        """Note the client's address and port, as a proxy has named them."""


class Listener:
    """Listener on the address of ``settings``.

    Args:
        general: settings of the gateway; the attribute ``general`` has the settings in force at the listener.
        process: limits that all listeners of the process share.

    Raises:
        StartupError: a certificate or key cannot be used.
    """

    def __init__(self, settings: ListenerSettings, general: ConnectionSettings, process: ConnectionLimit) -> None:
        self.settings = settings
        self.general = general = general.at(settings)
        self.limits = decoder_limits(general)
        self._admission = ListenerAdmission(process, general, settings.addresses, settings.max_connections)
        # One object for all: a newly bound method takes memory for each connection.
        self._left = self._admission.release_connection
        self._proxies = tuple(map(parse_network, settings.proxy_protocol))
        self._context = make_context(settings) if settings.secure else None
        self._trust = None if self._context is None else client_trust(settings, self._context)
        self.certificate_end = certificate_end(settings)
        """Unix time at which the certificate in force ends; infinite without TLS."""
        self._timeout = general.connect_timeout
        self.bound: list[Bound] = []
        """Addresses on which the listener accepts; empty before :meth:`open`."""
        self._servers: list[asyncio.Server] = []
        self._sockets: list[socket.socket] = []

    async def open(
        self,
        make: Callable[[Listener], Any],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        *,
        backlog: int,
        shared: bool,
    ) -> list[Bound]:
        """Begin to accept; return the addresses.

        Args:
            make: makes a connection, which is a :class:`Counted`.
            spawn: runs a coroutine in a task.
            backlog: connections that the kernel queues.
            shared: other processes listen on the same port.

        Raises:
            OSError: the address is not available.
        """
        loop = asyncio.get_running_loop()
        host, port = parse_address(self.settings.listen)
        new: Callable[[], Any] = self._web(make) if self.settings.web else partial(make, self)
        try:
            if self._context is None and not self._proxies:
                await self._open_plain(host, port, new, backlog, shared)
                return self.bound
            if host == EVERY:
                self._sockets += listen_everywhere(port, backlog, shared)
            else:
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
                for family, _, _, _, address in dict.fromkeys(found):
                    one = socket.create_server(address[:2], family=family, backlog=backlog, reuse_port=shared)
                    one.setblocking(False)
                    self._sockets.append(one)
        except OSError:
            self.close()
            raise
        for one in self._sockets:
            # create_server would count a connection only after its handshake, and could not change the TLS context.
            loop.add_reader(one, self._accept, one, new, spawn)
        self.bound = [self._bound(one) for one in self._sockets]
        return self.bound

    async def _open_plain(self, host: str, port: int, new: Callable[[], Any], backlog: int, shared: bool) -> None:
        """Begin to accept connections that need no handshake; raises OSError."""
        loop = asyncio.get_running_loop()
        if host == EVERY:
            sockets = listen_everywhere(port, backlog, shared)
            self._servers += [await loop.create_server(new, sock=one, backlog=backlog) for one in sockets]
        else:
            self._servers.append(await loop.create_server(new, host, port, backlog=backlog, reuse_port=shared or None))
        listening = [one for server in self._servers for one in server.sockets]
        self.bound = [self._bound(one) for one in listening]
        for one in listening:
            for _ in range(DESCRIPTORS - 1):
                again = socket.socket(fileno=os.dup(one.fileno()))
                self._servers.append(await loop.create_server(new, sock=again, backlog=backlog))

    @property
    def connections(self) -> int:
        """Number of open sockets."""
        return self._admission.connections

    def _bound(self, listening: socket.socket) -> Bound:
        address = listening.getsockname()
        unpace(listening, address[0])
        return Bound(address[0], address[1], self.settings.type)

    def heed(self, banned: Callable[[str], bool]) -> None:
        """Refuse banned addresses from now on."""
        self._admission.refuse_banned(banned)

    def close(self) -> None:
        """Stop accepting."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for one in self._sockets:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        self._sockets.clear()

    def reload(self) -> Callable[[bytes], bool] | None:
        """Read the certificates again, for new connections.

        Returns:
            A function that tells whether a client's certificate (DER), which the former files have let in, is accepted.
            None: all of them are.

        Raises:
            StartupError: a file cannot be used; the former context stays in force.
        """
        if not self.settings.secure:
            return None
        context, end = make_context(self.settings), certificate_end(self.settings)
        trust, former = client_trust(self.settings, context), self._trust
        self._context, self.certificate_end, self._trust = context, end, trust
        if trust is None or former is None or not trust.withdraws(former):
            return None
        return partial(trust.accepts, former=former)

    def enter(self, connection: Counted, host: str) -> bool:
        """Count a connection of the address ``host``; False: the connection is refused."""
        if not host:  # the socket was reset: its data could be read, but has no known source
            return False
        if self._proxies and not self._trusts(host):
            return self._refused(Verdict.PROXY, host)
        if not self._admission.admit_connection():
            return self._refused(Verdict.FULL, host)
        if self._proxies:
            connection.count(self._left, ADMITTED)
            return True
        if self._admit(connection, host):
            return True
        self._admission.release_connection()
        return False

    def _trusts(self, host: str) -> bool:
        """Return whether an address belongs to a configured proxy."""
        address = parse_host(host)
        return address is not None and any(
            network.version == address.version and address in network for network in self._proxies
        )

    def _named(self, connection: Counted, source: tuple[str, int]) -> bool:
        """Check and note the client's address that a proxy has named; False: the client is refused."""
        if not self._admit(connection, source[0]):
            return False
        connection.name_source(source)
        return True

    def _admit(self, connection: Counted, host: str) -> bool:
        """Decide about a counted connection by its client's address; False: the client is refused."""
        admission = self._admission.admit_address(host, monotonic())
        if admission.verdict.closes:
            return self._refused(admission.verdict, host)
        connection.count(self._leaving(host), admission)
        return True

    def _leaving(self, host: str) -> Callable[[], None]:
        return partial(self._leave, host) if self._admission.counts_addresses else self._left

    def _leave(self, host: str) -> None:
        self._admission.release_connection()
        self._admission.release_address(host)

    def _refused(self, verdict: Verdict, host: str) -> bool:
        """Count and log a refused connection; log once in a while for each listener and reason."""
        where, kind = self.settings.listen, f"listener_{verdict.name.lower()}"
        extra = once(f"{where} {kind}")
        if verdict is Verdict.FULL:
            text = "listener %s has %d connections: further connections are closed"
            log_failure(log, logging.WARNING, kind, text, where, self._admission.connections, extra=extra)
        else:
            text = "listener %s: a connection from %s is refused: %s"
            log_failure(log, logging.WARNING, kind, text, where, host, verdict.value, extra=extra)
        return False

    def _web(self, make: Callable[[Listener], Any]) -> Callable[[], WebSocket]:
        from mqtt_nats.transport.websocket import WebSocket  # not loaded unless a listener needs it

        return lambda: WebSocket(make(self), self._enter_web, self._timeout, self.settings.origins, self.settings.paths)

    def _enter_web(self, connection: WebSocket) -> bool:
        name = connection.get_extra_info("peername")
        return self.enter(connection, str(name[0]) if isinstance(name, tuple) else "")

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
                log.error("listener %s: accepting is paused: %s", self.settings.listen, error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(ACCEPT_RETRY_S, self._again, listening, new, spawn)
                return
            accepted.setblocking(False)
            protocol = new()
            if self.enter(protocol, address[0]):
                spawn(self._secure(accepted, address, protocol), "handshake")
            else:
                accepted.close()

    def _again(self, listening: socket.socket, *more: Any) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening, *more)

    async def _secure(self, accepted: socket.socket, address: Any, protocol: Any) -> None:
        """Read the PROXY header and do the TLS handshake; the protocol learns of the connection afterwards."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        handed = False
        try:
            if self._proxies:
                async with asyncio.timeout(self._timeout):
                    found = await _read_header(accepted)
                if not self._named(protocol, found or address[:2]):
                    raise NoHeader("the connection is refused")
            secure: dict[str, Any] = {}
            context = self._context
            if context is not None:
                left = max(0.1, self._timeout - (loop.time() - begun))
                secure = {"ssl_handshake_timeout": left, "ssl_shutdown_timeout": CLOSE_LINGER_S}
            handed = True
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=context, **secure)
            if self._trust is not None and self._context is not context:  # the files were read again meanwhile
                transport.abort()
        except (OSError, BadHeader, NoHeader, asyncio.CancelledError) as error:
            protocol.uncount()
            if not handed:
                accepted.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            if isinstance(error, BadHeader):
                self._no_header(address[0], error)
                return
            what = "TLS" if handed else "PROXY protocol"
            text = "listener %s: %s with %s:%d failed: %s"
            log_failure(log, logging.DEBUG, "handshake", text, self.settings.listen, what, *address[:2], _why(error))

    def _no_header(self, host: str, error: BadHeader) -> None:
        """Count and log a trusted proxy's bytes that are no header; log once in a while: all its clients are closed."""
        where = self.settings.listen
        text = "listener %s: the proxy %s does not send a header of the PROXY protocol (setting `proxy_protocol`): %s"
        extra = once(f"{where} proxy_header")
        log_failure(log, logging.WARNING, "proxy_header", text, where, host, error, extra=extra)


def decoder_limits(settings: ConnectionSettings) -> Limits:
    """Return the limits of a connection's decoder."""
    return Limits(
        max_packet_size=settings.max_packet_size,
        connect_packet_size=settings.connect_packet_size,
        max_topic_levels=settings.max_topic_levels,
        max_filters=settings.max_filters,
        max_user_properties=settings.max_user_properties,
        max_user_property_bytes=settings.max_user_property_bytes,
        max_qos=settings.max_qos,
        max_client_id_length=settings.max_client_id_length,
    )


async def _read_header(accepted: socket.socket) -> tuple[str, int] | None:
    """Read a PROXY protocol header, and no byte behind it.

    Raises:
        BadHeader: the bytes are no header.
        NoHeader: the connection ends within the header.
        OSError: the connection is broken.
    """
    loop = asyncio.get_running_loop()
    reader = HeaderReader()
    while reader.need:
        data = await loop.sock_recv(accepted, reader.need)
        if not data:
            raise NoHeader("the connection ends in the header")
        reader.feed(data)
    return reader.source


def _why(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    return str(error) or "the client has left"
