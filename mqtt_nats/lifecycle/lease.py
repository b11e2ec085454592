# SPDX-License-Identifier: Apache-2.0
"""Leases of this gateway and of the other gateways.

A gateway has a lease in a KV bucket and renews it. When the gateway dies, its lease lapses, and another gateway
deals with its clients: see :mod:`mqtt_nats.lifecycle.failover` and docs/internals/lifecycle.md#leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats import __version__
from mqtt_nats.backbone.pending_stores import TRANSIENT, lacks_room
from mqtt_nats.backbone.retry import ask_once_for_all
from mqtt_nats.base.server_clock import converted, elapsed
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.config.worker_identity import default_name
from mqtt_nats.lifecycle.failover import fail_over, publish_wills
from mqtt_nats.lifecycle.predecessor import NAME, PROCESS, free_name, is_gone, own_process
from mqtt_nats.lifecycle.readiness import explain
from mqtt_nats.sessions.removals import MissingRecords
from mqtt_nats.sessions.takeover import still_owner
from mqtt_nats.transport.connection import Hold
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.gateways import Entry, GatewayStore, LeaseTaken
from mqtt_streams.hashing import name_hash
from mqtt_streams.sessions import V5_VERSION

if TYPE_CHECKING:
    from mqtt_nats.delivery.position_handover import PositionHandover
    from mqtt_nats.lifecycle.will import Wills
    from mqtt_nats.observability.presence import Presence
    from mqtt_nats.sessions.session import Session
    from mqtt_nats.sessions.takeover import Claims

log = logging.getLogger("mqtt_nats.broker")

RENEWALS_PER_LEASE: Final = 4
"""Number of renewals in the time that a lease lasts."""

LEASE_WATCHERS: Final = 4
"""Number of gateways that look for lapsed leases between two renewals, on average: not every gateway does, as the cost
would grow with their number."""

STREAM_CHECKERS: Final = 32
"""Number of gateways that check the stream of messages between two renewals, on average. Each also checks the stream
when JetStream tells of a change, so these checks are for advisories that were lost."""

KNOWN_S: Final = 0.5
"""Seconds, for each registered gateway, in which :meth:`Lease.registered` reads all of them once.

If every gateway calls it all the time, the cost still grows with their number and not with its square.
"""

CONFIRMED: Final = 5.0
"""Seconds for which CONNECT waits for the renewal of the lease."""

RENEWAL_RETRY_S: Final = 0.5
"""Seconds until the lease is renewed after a renewal that JetStream has not answered: clients may wait for it."""

LET_GO_WAIT_MOST_S: Final = 30.0
"""Maximum seconds for which a client that is let go waits until it is known whether its session has moved."""


def called(entry: Entry) -> str:
    """Return a gateway's id, and its name where it has one, for log messages."""
    name = entry.info.get(NAME)
    return f"{entry.identity} ({name})" if isinstance(name, str) and name else entry.identity


async def _let_go(client: Session) -> None:
    """End a connection whose session another gateway may have dealt with."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LET_GO_WAIT_MOST_S):
            await still_owner(client)
    if client.alive:  # claimed later, or unknown: no other gateway deals with the session
        client.end_connection(
            MqttError("another gateway has considered this gateway dead", ReasonCode.SERVER_UNAVAILABLE)
        )


class Lease:
    """Lease and registration of this gateway; detects dead gateways by their lapsed leases."""

    def __init__(self, wills: Wills, presence: Presence, claims: Claims, handover: PositionHandover) -> None:
        self._services = services = wills.services
        self._wills, self._presence, self._claims, self._handover = wills, presence, claims, handover
        self.store = GatewayStore(services.nats.inbox)
        self._records = MissingRecords(services.nats.inbox, services.registry)
        self.ttl = services.settings.gateway_lease
        self.info: dict[str, Any] = {
            "version": __version__,
            "records": V5_VERSION,
            "started": time.time(),
        }
        """Registration of this gateway. ``records``: the version of the session records that it writes."""
        self._sequence = 0
        self._registration = 0
        self._until = (0.0, 0.0)
        """Ends of the lease by the monotonic clock and by `elapsed` (seconds): other gateways wait until then."""
        self._held = asyncio.Event()
        self._renewing = False
        self._healthy_since: float | None = None
        self._renewed = 0.0
        self._gateways = 1.0
        """Estimate of how many gateways renew their leases, this one included."""
        self.proven = -math.inf
        """Loop time in seconds of the last renewal after which the stream of messages had a leader."""
        self._refusal = ""
        self.full = False
        """Whether the lease is not renewed since JetStream has no room."""
        """Reason why the last renewal failed; empty = it succeeded."""
        self._known: list[Entry] = []
        """All gateways, as :meth:`registered` has read them."""
        self._known_at = 0.0
        """Time of that, monotonic in seconds."""
        self._reaping: set[str] = set()
        self._left: set[str] = set()
        """Dead gateways whose clients are left to a newer gateway."""
        self.wake = asyncio.Event()
        """Set to renew the lease at once, as when NATS is connected again."""

    async def begin(self) -> None:
        """Take the lease for the first time; no client is served before.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        await ask_once_for_all(self._services.stream.check)  # this also reads nats-server's time
        former = await ask_once_for_all(self._take_name)
        await ask_once_for_all(self._renew)
        for entry in former:
            await ask_once_for_all(partial(self._succeed, entry))

    async def _take_name(self) -> list[Entry]:
        """Choose the name of this gateway; returns the dead gateways that had it before."""
        settings, own = self._services.settings, own_process()
        entries = [one for one in await self.store.entries() if isinstance(one.info.get(NAME), str)]
        gone = {one.identity: is_gone(one.info.get(PROCESS), own) for one in entries}
        wanted = settings.name or default_name()
        if any(one.lapsed and gone[one.identity] is None and one.info[NAME] == wanted for one in entries):
            # After an outage of NATS a living gateway has a lapsed lease, too: wait until it can have renewed it.
            await asyncio.sleep(self.ttl / RENEWALS_PER_LEASE * 1.5)
            entries = [one for one in await self.store.entries() if one.identity in gone]
        dead = {one.identity for one in entries if gone[one.identity] or (one.lapsed and gone[one.identity] is None)}
        taken = {one.info[NAME] for one in entries if one.identity not in dead}
        name = settings.name or free_name(wanted, taken)
        if name in taken:
            log.warning("another gateway has the name %s: give each gateway a name of its own", name)
        self.info |= {NAME: name, PROCESS: own}
        log.info("this gateway has the id %s and the name %s", self._services.identity.id, name)
        return [one for one in entries if one.identity in dead and one.info[NAME] == name]

    async def _succeed(self, entry: Entry) -> None:
        """Publish the wills of the dead gateway that had this one's name; deal with its sessions in the background.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        if not self._can_read(entry) or entry.reaper:
            return
        try:
            sequence = await self.store.hold(
                entry.identity, self._services.identity.id, entry.sequence, self.ttl * RENEWALS_PER_LEASE
            )
        except LeaseTaken:
            sequence, holder = await self.store.lease(entry.identity)
            if holder != self._services.identity.id:  # else an earlier attempt of this gateway was stored
                return  # another gateway was faster
        log.warning(
            "gateway %s had the name of this gateway and is dead: its wills and sessions are taken over", called(entry)
        )
        published = await publish_wills(self._wills, entry)
        self._reaping.add(entry.identity)
        work = self._fail_over(entry, sequence, published)
        self._services.tasks.spawn(work, f"clients of gateway {entry.identity}")

    async def keep_lease(self) -> None:
        """Renew the lease, and handle lapsed leases of other gateways, for as long as the gateway runs.

        A look at the other leases may last longer than a lease where JetStream is slow: renewals do not wait for it.
        """
        looking: asyncio.Task[None] | None = None
        while True:
            pause = self.ttl / RENEWALS_PER_LEASE
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(pause, RENEWAL_RETRY_S) if self._refusal else pause):
                        await self.wake.wait()
                self.wake.clear()
                await self._services.nats.online.wait()
                if await self._renew_connected() and (looking is None or looking.done()):
                    looking = self._services.tasks.spawn(self._look(), "leases of others")
            except (ApiError, NoResponders, RequestTimeout) as error:
                log.debug("lease: %s", error)
            except Exception:
                log.exception("the lease could not be kept")

    async def _look(self) -> None:
        """Check the stream of messages, and the oldest leases of other gateways."""
        try:
            stream, begun = self._services.stream, asyncio.get_running_loop().time()
            if not stream.has_leader or self.watches(STREAM_CHECKERS):
                await stream.check()
                await self._records.check_records()
            if stream.has_leader:
                self.proven = begun
            if self.watches(LEASE_WATCHERS):
                await self._judge()
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("leases of other gateways: %s", error)

    def watches(self, gateways: float) -> bool:
        """Whether this gateway looks at others now, as so many of all ``gateways`` do on average."""
        return random.random() * self._gateways < gateways

    async def registered(self) -> list[Entry]:
        """Return all registered gateways, as read at most `KNOWN_S` ago for each of them.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        now = time.monotonic()
        if now - self._known_at >= len(self._known) * KNOWN_S:
            self._known, self._known_at = await self.store.entries(), now
        return self._known

    @property
    def obstacle(self) -> str:
        """Reason why new clients are not let in; empty while the lease is renewed in time."""
        return self._complaint() if self._refusal and not self.lasts() else ""

    def _complaint(self) -> str:
        return "the lease of the gateway is not renewed" + (f": {self._refusal}" if self._refusal else "")

    def lasts(self) -> bool:
        """Whether the lease lasts for at least the time between two renewals, by both clocks."""
        left = self.ttl / RENEWALS_PER_LEASE
        return time.monotonic() + left <= self._until[0] and elapsed() + left <= self._until[1]

    async def confirmed(self, client: Session) -> None:
        """Wait until the lease lasts a while: only then do other gateways deal with a new client's session and will.

        Raises:
            RequestTimeout: the lease is not renewed, or the client has gone meanwhile.
        """
        while not self.lasts():
            self._held.clear()
            if not self._renewing:
                self.wake.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONFIRMED):
                    await self._held.wait()
            if not self._held.is_set() or not client.alive:
                raise RequestTimeout(self._complaint())

    async def _renew_connected(self) -> bool:
        """Renew the lease; False: NATS was connected anew meanwhile, and the answer may be lost with the connection."""
        self._renewing = True
        renewing = asyncio.create_task(self.renew())
        waking = asyncio.create_task(self.wake.wait())
        try:
            await asyncio.wait((renewing, waking), return_when=asyncio.FIRST_COMPLETED)
            if renewing.done():
                renewing.result()
                return True
            return False
        finally:
            self._renewing = False
            renewing.cancel()
            waking.cancel()

    async def renew(self) -> None:
        """Renew the lease; after another gateway has dealt with this one's clients, end them and take a new id.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not answer.
        """
        try:
            await self._renew()
        except (ApiError, NoResponders, RequestTimeout) as error:
            self._healthy_since = None
            known, self._refusal = self._refusal, explain(error)
            self.full = isinstance(error, ApiError) and lacks_room(error)
            if isinstance(error, ApiError) and error.err_code not in TRANSIENT and not known:
                log.warning("%s; new clients are refused when the lease ends", self._complaint())
            raise

    async def _renew(self) -> None:
        services = self._services
        identity = services.identity.id
        while True:
            begun = time.monotonic(), elapsed()
            try:
                former, self._sequence = (
                    self._sequence,
                    await self.store.hold(identity, identity, self._sequence, self.ttl),
                )
                # Between two renewals every gateway writes its lease and its registration.
                self._gateways = max(1.0, (self._sequence - former) / 2) if former else 1.0
                services.stream.share(self._gateways)
                alive = converted(begun[1])
                self._registration = await self.store.register(identity, alive, self.info, self._registration)
                break
            except LeaseTaken:
                sequence, holder = await self.store.lease(identity)
                registration = await self.store.registered(identity)
                if holder in ("", identity) and (registration or not self._registration):
                    # This gateway's own write came late, or the lease has lapsed and no other gateway has taken it.
                    self._sequence, self._registration = sequence, registration
                    continue
                log.error("this gateway was considered dead: another gateway has taken over its wills and sessions")
                identity = self._begin_anew()
        self._until = begun[0] + self.ttl, begun[1] + self.ttl
        self._held.set()
        self._refusal, self.full = "", False
        now = time.monotonic()
        if self._healthy_since is None or now - self._renewed > self.ttl / 2:
            self._healthy_since = now
        self._renewed = now

    def _begin_anew(self) -> str:
        """End all clients, whose sessions may have moved, and go on under another id; returns the id."""
        services = self._services
        self._presence.renamed()
        services.identity.rename(name_hash(secrets.token_hex(16)))
        self._claims.named(services.identity.id)
        self._handover.named()
        self._sequence = self._registration = 0
        for client in list(services.registry.connections):
            if client.epoch:
                client.connection.hold(Hold.LEASE)
                client.do(_let_go(client))
            elif client.record is not None:  # its session is being claimed under the former id
                client.end_connection(
                    MqttError("another gateway has considered this gateway dead", ReasonCode.SERVER_UNAVAILABLE)
                )
        return services.identity.id

    async def _judge(self) -> None:
        """Deal with the clients of gateways whose lease has lapsed.

        This starts only after this gateway has been connected, with a JetStream that answers, for the time of a whole
        lease: after an outage the other gateways need that time to renew their leases.
        """
        since = self._healthy_since
        if since is None or time.monotonic() - since < self.ttl:
            return
        for entry in await self.store.oldest():
            if entry.lapsed and entry.identity != self._services.identity.id and entry.identity not in self._reaping:
                if not self._can_read(entry):
                    continue
                try:
                    sequence = await self.store.hold(
                        entry.identity, self._services.identity.id, entry.sequence, self.ttl * RENEWALS_PER_LEASE
                    )
                except LeaseTaken:
                    continue  # the gateway is alive, or another gateway was faster
                log.warning(
                    "gateway %s has not renewed its lease: its wills and sessions are taken over", called(entry)
                )
                self._reaping.add(entry.identity)
                self._services.tasks.spawn(self._fail_over(entry, sequence), f"clients of gateway {entry.identity}")

    def _can_read(self, entry: Entry) -> bool:
        """Whether this gateway can read all records of a dead one; else a newer gateway deals with its clients."""
        records = entry.info.get("records", 1)
        if not isinstance(records, int) or records <= V5_VERSION:
            return True
        if entry.identity not in self._left:
            self._left.add(entry.identity)
            log.warning(
                "gateway %s has not renewed its lease; its session records have version %d, this gateway knows %d: "
                "its clients are left to a newer gateway",
                entry.identity,
                records,
                V5_VERSION,
            )
        return False

    async def _fail_over(self, entry: Entry, sequence: int, published: int = 0) -> None:
        """Deal with the clients of a dead gateway; after an interruption any gateway does it again."""
        work = asyncio.create_task(fail_over(self._wills, self._presence, entry, published))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=self.ttl)
                if not work.done():  # the work takes long: renew the claim of the dead gateway's lease
                    sequence = await self.store.hold(
                        entry.identity, self._services.identity.id, sequence, self.ttl * RENEWALS_PER_LEASE
                    )
            work.result()
            await self.store.remove(entry.identity)
        except (ApiError, NoResponders, RequestTimeout, LeaseTaken) as error:
            log.warning("not all wills and sessions of gateway %s are taken over: %s", entry.identity, error)
        finally:
            work.cancel()
            self._reaping.discard(entry.identity)

    async def release(self) -> None:
        """Remove the lease: the gateway ends and has left its sessions in order."""
        try:
            await self.store.remove(self._services.identity.id)
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("lease: %s", error)
