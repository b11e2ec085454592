# SPDX-License-Identifier: Apache-2.0
"""Connections to NATS: the first one, and what is renewed on each further one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import IntEnum
from functools import partial
from math import inf
from typing import Any, Final

from nats.errors import NoServersError

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.backbone.link import CONNECT_TIMEOUT, Handler, NatsConnection
from mqtt_nats.backbone.servers import Servers
from mqtt_nats.base.server_clock import converted, elapsed
from mqtt_streams.stored import is_answer

log = logging.getLogger("mqtt_nats.nats")

LINK_SILENCE_MOST_S: Final = 12.0
"""Maximum seconds between two signs of life of a connection to NATS: nats-py pings every ten seconds."""


class Phase(IntEnum):
    """Phases of a reconnect, in their order."""

    CLAIMS = 1
    """Signals that a session has moved: they must not be missed while the rest is renewed."""
    REQUESTS = 2
    """Requests of other gateways, advisories, and what was missed of them."""
    ROUTES = 3
    """Subscriptions of clients."""
    SESSIONS = 4
    """Sessions and events, once nats-server knows all subscriptions."""


class Reconnect:
    """Callbacks that renew state on each further connection of a link: by phases, then in order of registration."""

    def __init__(self, link: NatsConnection) -> None:
        self._link = link
        self._callbacks: dict[Phase, list[Callable[[], object]]] = {phase: [] for phase in Phase}

    def register(self, phase: Phase, renew: Callable[[], object]) -> None:
        """Call ``renew`` in a phase of each reconnect."""
        self._callbacks[phase].append(renew)

    def subscribe(self, subject: bytes, handler: Handler, phase: Phase = Phase.REQUESTS) -> None:
        """Subscribe a subject now and on each further connection, until the gateway ends.

        Answers of nats-server that a reply subject has led there are left out: they are of nobody who may publish
        there. Subjects on which the gateway awaits answers are for `subscribe_answers`.
        """

        def handled(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
            if not is_answer(headers, payload):
                handler(subject, reply, headers, payload)

        self.subscribe_answers(subject, handled, phase)

    def subscribe_answers(self, subject: bytes, handler: Handler, phase: Phase = Phase.REQUESTS) -> None:
        """Do the same as :meth:`subscribe`, for every message."""
        sid = self._link.subscribe_raw(subject, handler)
        self.register(phase, partial(self._link.renew, sid, subject))

    def renew(self, *phases: Phase) -> None:
        """Call what is registered for the phases, in their order."""
        for phase in sorted(phases):
            for renew in self._callbacks[phase]:
                renew()


class NatsLinks:
    """The connections of one account to NATS, and what has happened to them.

    Args:
        link: the connection for publishes, requests and ordinary subscriptions.
        wild: the connection for filters that start with a wildcard.
        shared: the connection for queue groups, which also get what this gateway publishes.
    """

    def __init__(
        self,
        link: NatsConnection,
        wild: NatsConnection,
        shared: NatsConnection,
        inbox: RequestInbox,
        store: AckedPublisher,
    ) -> None:
        self.link, self.wild, self.shared = link, wild, shared
        self.inbox, self.store = inbox, store
        self.reconnect = Reconnect(link)
        self.online = asyncio.Event()
        """Set while NATS is connected."""
        self.online.set()
        self.linked = elapsed()
        """Time of the last reconnect, or new leader of a group's consumer, by :func:`elapsed` in seconds."""
        self.relinked = -inf
        """Loop time in seconds of the last reconnect, or new leader of a group's consumer; -inf = none yet."""
        self.standing = False
        """Whether the gateway stood still, and does not know yet which sessions have moved."""
        self.gaps: dict[NatsConnection, float] = {}
        """Unix time of nats-server in seconds since which a connection may have missed messages, by connection."""
        self.lost_count = 0
        """Number of gaps until now."""
        self.crowded_until = 0.0
        """Loop time in seconds until which every deliver subject is assumed to have its own listener."""
        self._repairing = 0
        """Number of gaps that are being repaired."""

    def publish(self, subject: bytes, payload: bytes, reply: bytes = b"") -> None:
        """Publish a message without headers at the end of the turn; ``reply``: subject for answers, empty = none."""
        target = b"%b %b" % (subject, reply) if reply else subject
        self.link.out.append(b"PUB %b %d\r\n%b\r\n" % (target, len(payload), payload))
        self.link.kick()

    def crowd(self, until: float) -> None:
        """Assume that every deliver subject has its own listener, until a loop time in seconds."""
        self.crowded_until = until

    def relink(self) -> None:
        """Note a reconnect, or a new leader of a group's consumer."""
        self.linked = elapsed()
        self.relinked = asyncio.get_running_loop().time()

    def lost(self, link: NatsConnection) -> None:
        """Note a gap: messages that the server sent after the last read are lost with the connection."""
        self.gaps.setdefault(link, converted(link.heard))
        self.lost_count += 1

    def begin_repair(self) -> None:
        """Count a gap that is being repaired."""
        self._repairing += 1

    def end_repair(self) -> None:
        """Count a gap that is repaired."""
        self._repairing -= 1

    @property
    def steady(self) -> bool:
        """Whether no gap has to be repaired, and no connection to NATS has fallen silent."""
        silent = elapsed() - min(self.link.heard, self.wild.heard) > LINK_SILENCE_MOST_S
        return not (self.gaps or self._repairing or silent)

    def tick(self) -> None:
        """Note that the event loop runs."""
        for link in (self.link, self.wild, self.shared):
            link.tick()

    def call_on_standstill(self, noticed: Callable[[], None]) -> None:
        """Call ``noticed`` after a standstill, before anything of any connection is handled or sent."""
        for link in (self.link, self.wild, self.shared):
            link.call_on_standstill(noticed)

    def begin_standstill(self) -> bool:
        """Send nothing, as the gateway stood still; return False when nothing is sent already."""
        if self.standing:
            return False
        self.standing = True
        self.link.hold_frames()
        self.shared.hold_frames()
        return True

    def end_standstill(self) -> None:
        """Go on: the gateway knows which sessions have moved."""
        self.standing = False
        self.link.go_on()
        self.shared.go_on()


async def open_link(
    options: dict[str, Any],
    *,
    name: str,
    no_echo: bool,
    on_online: Callable[[], Awaitable[None]],
    on_offline: Callable[[], Awaitable[None]],
) -> NatsConnection:
    """Connect a :class:`NatsConnection`; it reconnects for ever.

    Args:
        options: servers, credentials and TLS context as :meth:`nats.aio.client.Client.connect` takes them.
        name: shown in the server's monitoring.
        no_echo: messages published by this connection are not delivered to its own subscriptions.
        on_online: awaited after each reconnect, before anything else is sent.
        on_offline: awaited when the connection has been lost.

    Raises:
        OSError, nats.errors.Error, TimeoutError: no server accepts the connection.
    """
    servers = Servers(options["servers"])
    link = NatsConnection(servers)

    async def online() -> None:
        await on_online()

    async def offline() -> None:
        await on_offline()

    try:
        await link.connect(
            **options,
            name=name,
            no_echo=no_echo,
            max_reconnect_attempts=1,
            ping_interval=10,
            max_outstanding_pings=2,
            connect_timeout=CONNECT_TIMEOUT,  # type: ignore[arg-type]  # a float is fine
            error_cb=_log_problem,
            disconnected_cb=offline,
            reconnected_cb=online,
        )
    except NoServersError:
        raise _best_reason(link, servers) from None
    # The first round of attempts reports its error; from now on the connection is kept up.
    link.options["max_reconnect_attempts"] = -1
    link.go_online()
    return link


async def _log_problem(error: Exception) -> None:
    log.debug("nats: %r", error)


def _best_reason(link: NatsConnection, servers: Servers) -> Exception:
    """Return why no server accepts the connection: reachable ones explain it best, a refused login best of all."""
    told = sorted(link.failures, key=lambda error: "authorization" not in str(error).lower())
    return told[0] if told else servers.unresolved or NoServersError()
