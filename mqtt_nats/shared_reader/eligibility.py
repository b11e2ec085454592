# SPDX-License-Identifier: Apache-2.0
"""Whether the shared reader may be used: only while every server of sessions understands stored positions.

An older gateway refuses a session that may have a position. A question of a gateway that has connected says whether it
can read positions: after one that does not say so every gateway looks at all registrations. Otherwise a few gateways
look at a time. nats-server's own MQTT listener does not refuse such a session, and would send again the messages that
the session took from the shared reader of a gateway that has died. See docs/internals/shared_reader.md#shared-reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.backbone.retry import ask_once_for_all
from mqtt_nats.base.tasks import rooted
from mqtt_nats.delivery.position_writer import keep
from mqtt_nats.sessions.takeover import check_owners
from mqtt_nats.shared_reader.session_checks import keep_up
from mqtt_nats.shared_reader.sessions import SharedReaderSessions
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import consumer_info, consumer_names
from mqtt_streams.gateway_subjects import HERE, NAMES_BUCKETS, READS_POSITIONS
from mqtt_streams.gateways import CLAIM_BUCKETS, POSITIONS, GatewayStore
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.sessions import V5_CONSUMERLESS, V5_POSITION

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings
    from mqtt_nats.delivery.receiver import DeliveryServices
    from mqtt_nats.sessions.takeover import Claims

log = logging.getLogger("mqtt_nats.broker")

EVERY: Final = 5.0
"""Maximum seconds between two checks while the shared reader is not used, or all claims are heard."""

SELDOM: Final = 30.0
"""Maximum seconds between two other checks; an advisory, or a gateway that connects, causes one at once."""

READING: Final = 1.0
"""Number of gateways that read the registrations of all others between two checks, on average."""

LISTENER: Final = 192.0
"""Number of gateways that look for clients of nats-server's listener between two checks, on average. Every gateway
also looks at an advisory of a new consumer: the checks between find the consumers whose advisory was lost."""

QUIET: Final = 30.0
"""Seconds without a reason against the shared reader before the shared reader is used again."""

CREATED: Final = f"$JS.EVENT.ADVISORY.CONSUMER.CREATED.{RETAINED}.*".encode()
"""Advisory that nats-server's listener serves a client: gateways create no consumer of retained messages."""


class Registration(Protocol):
    """The registration of the gateway, which says what it writes: its lease."""

    def may_write(self, version: int) -> None:
        """Say that the gateway may write session records of a version."""

    async def writes(self, version: int) -> None:
        """Tell other gateways, before the first one, of session records of a version; raises TimeoutError."""

    async def told(self) -> None:
        """Wait until all gateways can know what this gateway writes."""

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
        self._bucketless: list[str] = []
        """Gateways whose claims do not name the bucket, as last seen."""
        self._gateways = GatewayStore(live.services.nats.inbox)
        self._wanted = live.services.settings.shared_reader
        self._why = ""
        self._since = 0.0
        self._older: list[str] = []
        """Gateways that cannot resume sessions with a position, as last seen."""
        self._heard = asyncio.Event()
        live.announce_by(partial(lease.writes, V5_CONSUMERLESS))
        live.services.nats.reconnect.register(Phase.REQUESTS, self._doubt)

    def _connected(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if reply and (READS_POSITIONS not in headers or NAMES_BUCKETS not in headers):
            self._doubt()

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
        """Check for the first time; this gateway's registration then says whether the gateway may store positions.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        if self._wanted == "auto":
            self._live.services.nats.reconnect.subscribe(CREATED, self._created)
            self._live.services.nats.reconnect.subscribe(HERE, self._connected)
        await ask_once_for_all(partial(self._look, everybody=True))
        if not self._why:
            self._lease.may_write(V5_POSITION)
            self._live.allow(True)

    async def keep(self) -> None:
        """Check every `EVERY` seconds for as long as the gateway runs."""
        while self._wanted == "auto":
            settled = self._live.allowed and not self._claims.hears_all
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SELDOM if settled else EVERY):
                    await self._heard.wait()
            heard = self._heard.is_set()
            self._heard.clear()
            try:
                everybody = heard or self._lease.watches(READING) or await self._have_gone()
                if settled and not everybody and not self._lease.watches(LISTENER):
                    continue
                await self._look(everybody=everybody)
                if self._why:
                    self._live.allow(False)
                elif not self._live.allowed and asyncio.get_running_loop().time() - self._since > QUIET:
                    self._lease.may_write(V5_POSITION)
                    await self._lease.told()
                    await self._look(everybody=True)
                    self._live.allow(not self._why)
                if self._hears_without_need():
                    await self._look(everybody=True)
                    if self._hears_without_need():
                        self._claims.hear_concerned()
            except (ApiError, NoResponders, RequestTimeout) as error:
                self._since = asyncio.get_running_loop().time()
                log.debug("other gateways cannot be listed: %s", error)

    def _hears_without_need(self) -> bool:
        """Whether all claims are heard although there was no reason for a while."""
        quiet = asyncio.get_running_loop().time() - self._doubted
        return self._claims.hears_all and not self._bucketless and quiet > QUIET

    async def _look(self, *, everybody: bool) -> None:
        """Look for a reason against the shared reader; without ``everybody`` the gateways are those seen before."""
        if everybody and self._wanted != "always":
            await self._look_at_gateways()
        why = "" if self._wanted == "always" else await self._against()
        if why != self._why:
            self._since = asyncio.get_running_loop().time()
            log.info("the shared reader is %s", f"not used: {why}" if why else f"used in {QUIET:.0f} s")
        self._why = why
        if why or self._bucketless:
            self._hear_all()

    async def _against(self) -> str:
        """Return why sessions have to stay with their own consumers; empty when there is no reason."""
        services = self._live.services
        if self._older:
            return f"gateway {self._older[0]} is too old for it"
        for name in await consumer_names(services.nats.inbox, RETAINED, RETAINED + "_"):
            info = await consumer_info(services.nats.inbox, RETAINED, name)
            if info is not None and info.push_bound:
                return "nats-server's own MQTT listener has clients"
        return ""

    async def _look_at_gateways(self) -> None:
        """Look for gateways that cannot resume sessions with a position, or whose claims do not name the bucket."""
        own = self._live.services.identity.id
        found = await self._gateways.registrations()
        older = [
            one for one, info in found.items() if one != own and not (info.get(POSITIONS) and info.get(CLAIM_BUCKETS))
        ]
        living = [one for one in older if (await self._gateways.lease(one))[1]]
        self._older = [one for one in living if not self._can_resume(found[one])]
        self._bucketless = [one for one in living if not found[one].get(CLAIM_BUCKETS)]

    def _can_resume(self, registration: dict[str, Any]) -> bool:
        """Whether a gateway can resume the sessions that this one leaves, by its registration."""
        # Gateways whose claims name the bucket know records of version `V5_CONSUMERLESS`, too.
        knows = registration.get(CLAIM_BUCKETS) or not self._live.choice.may_want_records
        return bool(registration.get(POSITIONS) and knows)

    async def _have_gone(self) -> bool:
        """Whether all older gateways, or all whose claims do not name the bucket, have gone since they were seen."""
        for names in (self._older, self._bucketless):
            present = bool(names)
            while names and not (await self._gateways.lease(names[0]))[1]:
                del names[0]
            if present and not names:
                return True
        return False


def is_wanted(settings: Settings, config: dict[str, Any]) -> bool:
    """Return whether the shared reader may be used; ``config``: configuration of the stream of messages."""
    return settings.shared_reader != "never" and config.get("retention") == "limits"


def start_tasks(
    delivery: DeliveryServices,
    live: SharedReaderSessions | None,
    company: PositionSupport | None,
    tasks: asyncio.TaskGroup,
) -> list[asyncio.Task[None]]:
    """Start the tasks that write positions and, where the shared reader is used, the tasks of the shared reader."""
    background = [tasks.create_task(rooted(keep(delivery.writers)), name="positions")]
    if live is not None and company is not None:
        background.append(tasks.create_task(rooted(live.reader.run()), name="shared reader"))
        background.append(tasks.create_task(keep_up(live, delivery.waiting), name="live sessions"))
        background.append(tasks.create_task(company.keep(), name="who else serves sessions"))
    return background
