# SPDX-License-Identifier: Apache-2.0
"""The admin listener of one gateway process: uvicorn, on the gateway's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import anyio
import uvicorn

from mqtt_nats.admin.access.administrators import Administrators
from mqtt_nats.admin.access.guard import is_dismissed
from mqtt_nats.admin.app import make_app
from mqtt_nats.admin.connections import MOST_CONNECTIONS, AdminProtocol, AdminSocket, notice_the_end
from mqtt_nats.admin.handshakes import Handshakes
from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.nats_connect import connect_link, open_inbox
from mqtt_nats.config.worker_identity import own_place
from mqtt_nats.transport.client_trust import ClientTrust, certificate_of, end_of
from mqtt_nats.transport.listener_settings import Bound, ListenerSettings, join_address, parse_address
from mqtt_nats.transport.tls import certificate_end, client_trust, make_context

if TYPE_CHECKING:
    from mqtt_nats.admin import ServedGateway
    from mqtt_nats.backbone.link import NatsConnection
    from mqtt_nats.config.settings import Settings

log = logging.getLogger("mqtt_nats.admin")

HEAD_MOST: Final = 16 * 1024
"""Bytes of a request before its body."""

MESSAGE_MOST: Final = 1024 * 1024
"""Bytes of one WebSocket message."""

PING_INTERVAL: Final = 20.0
PING_TIMEOUT: Final = 20.0
"""Seconds between two pings of a WebSocket, and in which its browser has to answer."""

TICKS: Final = 10
"""Ticks of uvicorn, of which it has ten in a second, between two looks for certificates that have ended."""

ENDING: Final = 2
"""Seconds that requests have to end when the gateway does."""


class Server(uvicorn.Server):
    """Signals are not its business, nor are handshakes of TLS.

    Args:
        tls: is spoken; None: nothing but HTTP.
    """

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._tls = tls
        self._handshakes: list[Handshakes] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        tls = self._tls
        await super().startup(sockets if tls is None else [])
        if tls is not None:
            self._handshakes = [Handshakes(one, tls, self._made) for one in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end, then go."""
        for one in self._handshakes:
            one.close()
        await super().shutdown(sockets)

    def stop(self) -> None:
        """Begin to end: requests that have come are answered."""
        self.should_exit = True

    def renew(self, tls: ssl.SSLContext | None) -> None:
        """Speak TLS otherwise, with connections to come."""
        if tls is not None:
            for one in self._handshakes:
                one.renew(tls)

    def dismiss(self, administrators: Administrators) -> None:
        """End the pages and traces of those who are none of these administrators."""
        for one in list(self.server_state.connections):
            scope = getattr(one, "scope", None)  # a WebSocket whose handshake has failed has none
            lasting = isinstance(one, AdminProtocol | AdminSocket) and one.lasting
            if lasting and scope is not None and is_dismissed(scope, administrators):
                one.transport.abort()

    def distrust(self, trust: ClientTrust, former: ClientTrust) -> None:
        """End the connections whose certificates are not accepted any more."""
        for one in list(self.server_state.connections):
            certificate = certificate_of(one.transport)
            if certificate is not None and not trust.accepts(certificate, former):
                one.transport.abort()

    async def on_tick(self, counter: int) -> bool:
        """End connections whose certificates have ended, about once a second."""
        if self._tls is not None and counter % TICKS == 0:
            now = time.time()
            for one in list(self.server_state.connections):
                end = end_of(one.transport)
                if end is not None and end <= now:
                    one.transport.abort()
        return await super().on_tick(counter)

    def _made(self) -> asyncio.Protocol:
        return AdminProtocol(self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the gateway."""
        yield


class Tls(NamedTuple):
    """TLS of the admin listener, made from its files.

    Attributes:
        context: None: it does without TLS.
        end: Unix time at which its certificate ends.
        trust: which certificates of clients it accepts; None: it needs none.
    """

    context: ssl.SSLContext | None = None
    end: float = math.inf
    trust: ClientTrust | None = None


def tls_of(settings: Settings) -> Tls:
    """Read the files for TLS that the settings name for the admin listener.

    Raises:
        StartupError: a file cannot be used.
    """
    if settings.admin_listen is None or settings.admin_tls_cert is None:
        return Tls()
    own = ListenerSettings(
        listen=settings.admin_listen,
        type="tls",
        tls_cert=settings.admin_tls_cert,
        tls_key=settings.admin_tls_key,
        tls_client_ca=settings.admin_tls_client_ca,
        tls_crl_file=settings.admin_tls_crl_file,
    )
    context = make_context(own)
    return Tls(context, certificate_end(own), client_trust(own, context))


def check_files(settings: Settings) -> None:
    """Read the files that the settings name for the admin listener.

    Raises:
        StartupError: a file cannot be used.
    """
    tls_of(settings)
    Administrators.load(settings)


class AdminListener:
    """Listens from before the gateway is connected to NATS until it has ended, so that it can say how far that is."""

    def __init__(self, gateway: ServedGateway) -> None:
        self.gateway = gateway
        self.settings = gateway.settings
        self.place = own_place()
        self.ready = False
        """The streams exist, and MQTT clients are listened for."""
        assert self.settings.admin_listen is not None
        self.listen = self.settings.admin_listen
        self.bound = Bound(*parse_address(self.listen), "admin")
        self.administrators = Administrators({})
        self._tls = Tls()
        self._link: NatsConnection | None = None
        self._inbox: RequestInbox | None = None
        self._connecting = asyncio.Lock()
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to listen.

        Raises:
            StartupError: a file cannot be used, or the address is not to be had.
        """
        settings = self.settings
        self._tls = tls_of(settings)
        self.administrators = Administrators.load(settings)
        listening = self._bind()
        host, port = listening.getsockname()[:2]
        self.bound = Bound(host, port, "admin")
        if self._tls.context is None and settings.admin_has_tokens and not settings.admin_is_near:
            log.warning("admin listener %s: the token is sent without encryption: set admin_tls_cert", self.listen)
        config = uvicorn.Config(
            make_app(self),
            http=AdminProtocol,
            ws=AdminSocket,
            ws_max_size=MESSAGE_MOST,
            ws_ping_interval=PING_INTERVAL,
            ws_ping_timeout=PING_TIMEOUT,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=HEAD_MOST,
            timeout_graceful_shutdown=ENDING,
        )
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        self.gateway.reloads.append(self.reload)
        self._server = Server(config, self._tls.context)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]), name="admin listener")
        log.info("admin listener is open on %s", join_address(host, port))
        return self

    def reload(self) -> None:
        """Read certificates, authorities and tokens again. What they do not let in any more ends.

        Raises:
            StartupError: they cannot be used.
        """
        if self._server is not None:
            administrators = Administrators.load(self.settings)
            tls, former = tls_of(self.settings), self._tls
            self._tls, self.administrators = tls, administrators
            self._server.renew(tls.context)
            self._server.dismiss(administrators)
            if tls.trust is not None and former.trust is not None and tls.trust.withdraws(former.trust):
                self._server.distrust(tls.trust, former.trust)

    def _bind(self) -> socket.socket:
        """A socket that listens; workers share its address, and the kernel deals connections out."""
        host, port = parse_address(self.listen)
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            found = socket.socket(family, kind)
            try:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if self.place.workers > 1:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                notice_the_end(found)
                found.bind(address)
                found.listen(MOST_CONNECTIONS)
                found.setblocking(False)
            except OSError:
                found.close()
                raise
        except OSError as error:
            raise StartupError(
                f"cannot listen on {self.listen}: {error.strerror or error}; stop what listens there or choose another "
                "address with --admin-listen"
            ) from None
        return found

    async def __aexit__(self, *_: object) -> None:
        """Let requests end, then go."""
        with anyio.CancelScope(shield=True):
            if self._server is not None and self._serving is not None:
                self._server.stop()
                try:
                    await self._serving
                except Exception:
                    log.exception("the admin listener has failed")
            if self._link is not None:
                await self._link.close()

    def get_ready(self) -> None:
        """Note that the streams exist, and that MQTT clients are listened for."""
        self.ready = True

    async def inbox(self) -> RequestInbox:
        """For questions to all gateways: over a connection to NATS of its own, on which this one hears them too.

        Raises:
            StartupError: NATS cannot be reached.
        """
        async with self._connecting:
            if self._inbox is None:
                name = f"mqtt-nats {self.gateway.identity} admin"
                link = await connect_link(
                    self.settings, name=name, no_echo=False, on_online=self._online, on_offline=_nothing
                )
                try:
                    self._inbox = await open_inbox(self.settings, link)
                except StartupError:
                    await link.close()
                    raise
                self._link = link
        return self._inbox

    async def _online(self) -> None:
        if self._inbox is not None and self._link is not None:
            self._inbox.renew()
            self._link.go_online()

    @property
    def certificates(self) -> dict[str, float]:
        """Unix time at which the certificate in force ends, by the configured address of each listener with TLS."""
        ends = [(one.settings.listen, one.certificate_end) for one in self.gateway.listeners]
        return {where: end for where, end in (*ends, (self.listen, self._tls.end)) if end != math.inf}

    @property
    def obstacle(self) -> str:
        """Reason for which the gateway serves nobody at present; empty when it serves."""
        account = self.gateway.account
        if account is None or not self.ready:
            return "the gateway is starting: NATS is not connected, or its streams are not there"
        if account.registry.closing:
            return "the gateway is draining"
        if not account.services.nats.online.is_set():
            return "not connected to NATS"
        return account.readiness.reason


async def _nothing() -> None:
    return
