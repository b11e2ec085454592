# SPDX-License-Identifier: Apache-2.0
"""Whether the shared reader may be used: only while every server of sessions understands stored positions.

nats-server's own MQTT listener does not refuse a session that may have a position, and would send again the messages
that the session took from the shared reader of a gateway that has died. A few gateways look for its clients at a time.
See docs/internals/shared_reader.md#shared-reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final, Protocol

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.backbone.retry import ask_once_for_all
from mqtt_nats.base.tasks import rooted
from mqtt_nats.delivery.position_writer import write_changed_positions
from mqtt_nats.sessions.takeover import check_owners
from mqtt_nats.shared_reader.session_checks import keep_up
from mqtt_nats.shared_reader.sessions import SharedReaderSessions
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.retained import listener_has_clients

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings
    from mqtt_nats.delivery.receiver import DeliveryServices
    from mqtt_nats.sessions.takeover import Claims

log = logging.getLogger("mqtt_nats.broker")

CHECK_IDLE_S: Final = 5.0
"""Maximum seconds between two checks while the shared reader is not used, or all claims are heard."""

CHECK_SELDOM_S: Final = 30.0
"""Maximum seconds between two other checks; an advisory causes one at once."""

LISTENER: Final = 192.0
"""Number of gateways that look for clients of nats-server's listener between two checks, on average. Every gateway
also looks at an advisory of a new consumer: the checks between find the consumers whose advisory was lost."""

QUIET_BEFORE_USE_S: Final = 30.0
"""Seconds without a reason against the shared reader before the shared reader is used again."""

CREATED: Final = f"$JS.EVENT.ADVISORY.CONSUMER.CREATED.{RETAINED}.*".encode()
"""Advisory that nats-server's listener serves a client: gateways create no consumer of retained messages."""


class Registration(Protocol):
    """The registration of the gateway: its lease."""

    def watches(self, gateways: float) -> bool:
        """Whether this gateway looks at others now, as so many of all ``gateways`` do on average."""


class PositionSupport:
    """The check whether sessions may be served by the shared reader."""

    def __init__(self, live: SharedReaderSessions, lease: Registration, claims: Claims) -> None:
        self._live = live
        self._lease = lease
        self._claims = claims
        self._doubted = asyncio.get_running_loop().time()
        """Loop time in seconds at which claims may have come whose subjects do not name the bucket."""
        self._wanted = live.services.settings.shared_reader
        self._why = ""
        self._since = 0.0
        self._heard = asyncio.Event()
        live.services.nats.reconnect.register(Phase.REQUESTS, self._doubt)

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
            self._live.services.tasks.spawn(self._check_owners(), "claims that may have been missed")

    async def _check_owners(self) -> None:
        """Read the records of all sessions once all nats-servers send all claims here."""
        services = self._live.services
        link = services.nats.link
        wire = link.wire
        while wire is not None and wire is link.wire:  # after a reconnect the records are read anyway
            with contextlib.suppress(TimeoutError):
                await services.nodes.fence(link)
                check_owners(services)
                return
            log.debug("nats-server has not taken the subscription of all claims yet")

    async def begin(self) -> None:
        """Check for the first time.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        if self._wanted == "auto":
            self._live.services.nats.reconnect.subscribe(CREATED, self._created)
        await ask_once_for_all(self._look)
        self._live.allow(not self._why)

    async def check_regularly(self) -> None:
        """Check every `CHECK_IDLE_S` for as long as the gateway runs."""
        while self._wanted == "auto":
            settled = self._live.allowed and not self._claims.hears_all
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
                if self._why:
                    self._live.allow(False)
                elif not self._live.allowed and now - self._since > QUIET_BEFORE_USE_S:
                    self._live.allow(True)
                if self._claims.hears_all and not self._why and now - self._doubted > QUIET_BEFORE_USE_S:
                    self._claims.hear_concerned()
            except (ApiError, NoResponders, RequestTimeout) as error:
                self._since = now
                log.debug("clients of nats-server's listener cannot be looked for: %s", error)

    async def _look(self) -> None:
        """Look for a reason against the shared reader: sessions have to stay with their own consumers."""
        inbox = self._live.services.nats.inbox
        listener = self._wanted != "always" and await listener_has_clients(inbox)
        why = "nats-server's own MQTT listener has clients" if listener else ""
        if why != self._why:
            self._since = asyncio.get_running_loop().time()
            log.info("the shared reader is %s", f"not used: {why}" if why else f"used in {QUIET_BEFORE_USE_S:.0f} s")
        self._why = why
        if why:
            self._hear_all()


def is_wanted(settings: Settings) -> bool:
    """Return whether the shared reader may be used."""
    return settings.shared_reader != "never"


def start_tasks(
    delivery: DeliveryServices,
    live: SharedReaderSessions | None,
    company: PositionSupport | None,
    tasks: asyncio.TaskGroup,
) -> list[asyncio.Task[None]]:
    """Start the tasks that write positions and, where the shared reader is used, the tasks of the shared reader."""
    background = [tasks.create_task(rooted(write_changed_positions(delivery.writers)), name="positions")]
    if live is not None and company is not None:
        background.append(tasks.create_task(rooted(live.reader.run()), name="shared reader"))
        background.append(tasks.create_task(keep_up(live, delivery.waiting), name="live sessions"))
        background.append(tasks.create_task(company.check_regularly(), name="who else serves sessions"))
    return background
