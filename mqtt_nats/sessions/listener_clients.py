# SPDX-License-Identifier: Apache-2.0
"""Whether nats-server's own MQTT listener has clients: then its claims of sessions have to be heard.

The subjects of its claims do not name the session, so every gateway hears the claims of all sessions while the listener
has clients. A few gateways look for its clients at a time. See docs/internals/sessions.md#claims.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final, Protocol

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.backbone.retry import ask_once_for_all
from mqtt_nats.sessions.takeover import check_owners
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.retained import listener_has_clients

if TYPE_CHECKING:
    from collections.abc import Callable

    from mqtt_nats.sessions.services import Services
    from mqtt_nats.sessions.takeover import Claims

log = logging.getLogger("mqtt_nats.broker")

CHECK_IDLE_S: Final = 5.0
"""Maximum seconds between two checks while all claims are heard."""

CHECK_SELDOM_S: Final = 30.0
"""Maximum seconds between two other checks; an advisory causes one at once."""

LISTENER: Final = 192.0
"""Number of gateways that look for clients of nats-server's listener between two checks, on average. Every gateway
also looks at an advisory of a new consumer: the checks between find the consumers whose advisory was lost."""

QUIET_BEFORE_USE_S: Final = 30.0
"""Seconds without clients of the listener before the gateway hears only the claims that concern it."""

CREATED: Final = f"$JS.EVENT.ADVISORY.CONSUMER.CREATED.{RETAINED}.*".encode()
"""Advisory that nats-server's listener serves a client: gateways create no consumer of retained messages."""


class Registration(Protocol):
    """The registration of the gateway: its lease."""

    def watches(self, gateways: float) -> bool:
        """Whether this gateway looks at others now, as so many of all ``gateways`` do on average."""


class ListenerClients:
    """The check whether nats-server's listener has clients.

    Args:
        tell: called with whether it has, when that has changed.
    """

    def __init__(self, services: Services, lease: Registration, claims: Claims, tell: Callable[[bool], None]) -> None:
        self._services = services
        self._lease = lease
        self._claims = claims
        self._tell = tell
        self._doubted = asyncio.get_running_loop().time()
        """Loop time in seconds at which claims may have come whose subjects do not name the bucket."""
        self.present = False
        """Whether the listener had clients at the last check."""
        self._heard = asyncio.Event()
        services.nats.reconnect.register(Phase.REQUESTS, self._doubt)

    def _created(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        self._doubt()

    def _doubt(self) -> None:
        """Have the check made at once, and hear all claims at least until then."""
        self._heard.set()
        self._hear_all()

    def _hear_all(self) -> None:
        """Hear all claims for a while: the subjects of some may not name the bucket."""
        self._doubted = asyncio.get_running_loop().time()
        if self._claims.hear_all():
            self._services.tasks.spawn(self._check_owners(), "claims that may have been missed")

    async def _check_owners(self) -> None:
        """Read the records of all sessions once all nats-servers send all claims here."""
        link = self._services.nats.link
        wire = link.wire
        while wire is not None and wire is link.wire:  # after a reconnect the records are read anyway
            with contextlib.suppress(TimeoutError):
                await self._services.nodes.fence(link)
                check_owners(self._services)
                return
            log.debug("nats-server has not taken the subscription of all claims yet")

    async def begin(self) -> None:
        """Check for the first time.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        self._services.nats.reconnect.subscribe(CREATED, self._created)
        await ask_once_for_all(self._look)

    async def check_regularly(self) -> None:
        """Check at least every `CHECK_SELDOM_S` for as long as the gateway runs, if it is this gateway's turn."""
        while True:
            settled = not self._claims.hears_all
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SELDOM_S if settled else CHECK_IDLE_S):
                    await self._heard.wait()
            heard = self._heard.is_set()
            self._heard.clear()
            if settled and not heard and not self._lease.watches(LISTENER):
                continue
            now = asyncio.get_running_loop().time()
            try:
                await self._look()
                if self._claims.hears_all and not self.present and now - self._doubted > QUIET_BEFORE_USE_S:
                    self._claims.hear_concerned()
            except (ApiError, NoResponders, RequestTimeout) as error:
                log.debug("clients of nats-server's listener cannot be looked for: %s", error)

    async def _look(self) -> None:
        """Look for clients of the listener."""
        present = await listener_has_clients(self._services.nats.inbox)
        if present is not self.present:
            log.info("nats-server's own MQTT listener has %s", "clients" if present else "no clients any more")
            self._tell(present)
        self.present = present
        if present:
            self._hear_all()
