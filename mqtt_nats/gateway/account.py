# SPDX-License-Identifier: Apache-2.0
"""Account: connections, streams, broker and background tasks of a gateway for one NATS account.

A gateway serves its own account, and one more account for each of its tenants. The accounts share the process, the
listeners and the authenticators, and nothing that is in NATS. See docs/internals/gateway.md#tenants.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.backbone.connect import NatsLinks
from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.base import logs
from mqtt_nats.base.errors import StartupError
from mqtt_nats.base.logs import GATEWAY
from mqtt_nats.base.tasks import rooted
from mqtt_nats.client.disconnect import end_silent
from mqtt_nats.config.nats_connect import check_version, connect_link, open_inbox
from mqtt_nats.config.settings import Settings
from mqtt_nats.control.server import Powers
from mqtt_nats.delivery import slow_clients as stalling
from mqtt_nats.delivery.position_writer import write_changed_positions
from mqtt_nats.gateway.broker import Broker, Place
from mqtt_nats.gateway.fleet_pause import FleetPause
from mqtt_nats.gateway.reconnect import recover, recover_wild, register
from mqtt_nats.ingress.retained.deferral import withhold
from mqtt_nats.lifecycle.pause_detection import tick, watch
from mqtt_nats.lifecycle.timers import take_timers
from mqtt_nats.observability.message_log import follow
from mqtt_nats.pubsub.fanout import SEEN_FOR
from mqtt_nats.sessions import paused_consumers
from mqtt_nats.sessions.groups.subscribe import look_after, recover_queues
from mqtt_nats.sessions.listener_clients import CREATED, ListenerClients
from mqtt_nats.shared_reader.session_checks import keep_up
from mqtt_nats.transport.connection import CLOCK_STEP
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.definitions import (
    BY_SIZE,
    EnsureReport,
    NotAnswering,
    StillThere,
    StreamSetupError,
    check_own_streams,
    ensure_streams,
    kept_single,
    shown,
    with_ids,
)
from mqtt_streams.hashing import name_hash
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.retained import STREAM as RETAINED
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.stores import Streams

if TYPE_CHECKING:
    from mqtt_nats.client.account import Account
    from mqtt_nats.sessions.services import Services

log = logging.getLogger("mqtt_nats.gateway")

STORES_END_MOST_S: Final = 10.0
"""Maximum seconds in which a stopping gateway completes its stores and jobs."""

STREAMS_CHECK_S: Final = 1.0
"""Seconds between two checks of streams that do not answer."""

META_ELECTION_MOST_S: Final = 30.0
"""Maximum seconds until the JetStream of a cluster has a leader when the gateway starts."""

FILES_REMOVED_MOST_S: Final = 2.5
"""Maximum seconds until nats-server has removed the files of streams that were deleted just before."""

GROWN: Final = 30.0
"""Seconds between two checks whether the cluster has become large enough for more replicas."""

WRITERS: Final = 1.0
"""Number of gateways that look between two such checks for programs that do not roll records up, on average."""

ROUTES_RELEASE_S: Final = 20.0
"""Seconds after which the gateway again frees the memory of routes that are no longer used."""


class SameAccount(StartupError):
    """Two tenants have the same NATS account."""


def _not_here() -> list[str]:
    return ["files are read again when the gateway's own account asks for it"]


class Tenant:
    """Tenant: one NATS account that the gateway serves.

    Args:
        name: name of the tenant; empty for the gateway's own account.
        settings: settings of the gateway, with the connection settings of this account.
        begin_pause: called when all gateways of the account are to pause.
    """

    def __init__(self, name: str, settings: Settings, begin_pause: Callable[[], None]) -> None:
        self.name = name
        self.settings = settings
        self._pause = FleetPause(begin_pause)
        self.identity = name_hash(secrets.token_hex(16))
        self.link = NatsConnection()
        self.wild = NatsConnection()
        self.shared = NatsConnection()
        self.inbox: RequestInbox | None = None
        self.store: AckedPublisher | None = None
        self.broker: Broker | None = None
        self.domain = ""
        self._of = f"tenant {name}: " if name else ""
        """Prefix of log messages about the account."""
        self._configs: dict[str, dict[str, Any]] = {}
        """Configurations of the streams, by stream name."""
        self._listener: ListenerClients | None = None
        """Check whether nats-server's listener has clients; None before the first one."""
        self._single: dict[str, str] = {}
        """Streams that keep one message per subject, and why: see `kept_single`."""
        self._ending = False
        self._looking = False
        """Whether streams are being checked and restored."""

    def speaker(self) -> str:
        """Return the gateway's present id, for logs."""
        return self.identity if self.broker is None else self.broker.account.services.identity.id

    # -- NATS -----------------------------------------------------------------------------------

    async def connect(self, stop: anyio.Event) -> bool:
        """Connect to NATS and prepare the streams; return False when ``stop`` was set during a pause.

        Raises:
            StartupError: one line with the problem.
        """
        GATEWAY.set(self.speaker)
        try:
            return await self._connect(stop)
        except StartupError as error:
            raise StartupError(f"{self._of}{error}") from None

    async def _connect(self, stop: anyio.Event) -> bool:
        urls = self.settings.nats_display
        name = f"mqtt-nats {self.identity}"
        self.link = await connect_link(
            self.settings,
            name=name,
            on_online=self._online,
            on_offline=self._offline,
            no_echo=self.settings.local_dispatch,
        )
        self.wild = await connect_link(
            self.settings,
            name=f"{name} wildcards",
            on_online=self._wild_online,
            on_offline=self._wild_offline,
            no_echo=False,
        )
        self.shared = await connect_link(
            self.settings,
            name=f"{name} shared subscriptions",
            on_online=self._shared_online,
            on_offline=self._shared_offline,
            no_echo=False,
        )
        check_version(self.link, urls)
        self.inbox = await open_inbox(self.settings, self.link)
        try:
            report = await self._first_look(self.inbox, stop)
            if report is not None and self.settings.jetstream_domain:
                await check_own_streams(self.inbox, report.domain)
        except StreamSetupError as error:
            raise StartupError(" ".join(str(error).split())) from None
        except (NoResponders, RequestTimeout, ApiError) as error:
            raise StartupError(
                f"nats-server at {urls} does not serve JetStream ({' '.join(str(error).split())}): "
                "enable it (jetstream {} in its configuration, or nats-server -js)"
            ) from None
        if report is None:
            return False
        for line in report.kept:
            log.warning("%s%s", self._of, line)
        self._tell_limits(report)
        self._tell_lost(report.lost)
        self._tell(report)
        self.domain = report.domain
        return True

    async def _first_look(self, inbox: RequestInbox, stop: anyio.Event) -> EnsureReport | None:
        """Prepare the streams when no pause is in force; None = ``stop`` was set meanwhile.

        A cluster that is just being started has time to elect its leaders.
        """
        begun = asyncio.get_running_loop().time()
        while True:
            if not await self._pause.wait(inbox, stop, self._of):
                return None
            try:
                report = await self._ensure_streams(inbox)
                inbox.forget_unheard()  # streams were missing because nobody had created them
                return report
            except NotAnswering as error:
                patience = META_ELECTION_MOST_S if self.link.server.get("cluster") else 0.0
                if isinstance(error, StillThere):
                    patience = FILES_REMOVED_MOST_S
                if asyncio.get_running_loop().time() > begun + patience:
                    raise
                log.info("%s%s", self._of, " ".join(str(error).split()))
            await asyncio.sleep(STREAMS_CHECK_S)

    def _tell_limits(self, report: EnsureReport) -> None:
        """Log the limits of the account that concern sessions."""
        limits = report.limits
        if limits.consumers:
            log.warning(
                "%sthe account allows %d consumers of a stream: messages of durable sessions wait when no consumer is "
                "left for the readers of a gateway",
                self._of,
                limits.consumers,
            )
        if limits.ack_pending:
            log.info("%sthe account allows max_ack_pending of %d", self._of, limits.ack_pending)

    def _tell_lost(self, streams: list[str]) -> None:
        """Log what is lost with streams that have existed, and are created again."""
        for stream in streams:
            what = "every session" if stream == SESSIONS else "all that it held"
            log.error("%sstream %s was deleted, and is created again: %s is lost", self._of, stream, what)

    def _tell(self, report: EnsureReport) -> None:
        """Log the changes of the streams."""
        if report.single != self._single:
            self._single = report.single
            for why in dict.fromkeys(report.single.values()):
                log.info(
                    "%s%s: what is removed from %s may come back after a kill of nats-server",
                    self._of,
                    why,
                    ", ".join(stream for stream, one in report.single.items() if one == why),
                )
        if report.created:
            replicas = report.configs[report.created[0]].get("num_replicas", 1)
            log.info("%screated %d streams, replicas: %d", self._of, len(report.created), replicas)
        for stream, messages in report.remains.items():
            log.error(
                "%snats-server has lost the definition of stream %s, as after a power cut soon after it was created. "
                "The stream was created anew with %d of its messages; its consumers are gone, and sessions may be",
                self._of,
                stream,
                messages,
            )
        for stream, names in report.upgraded.items():
            changes = ", ".join(f"{name} = {shown(name, report.configs[stream][name])}" for name in names)
            log.warning("%schanged stream %s: %s", self._of, stream, changes)

    async def _ensure_streams(self, inbox: RequestInbox) -> EnsureReport:
        settings = self.settings
        report = await ensure_streams(
            inbox,
            replicas=settings.stream_replicas,
            message_retention=settings.message_retention,
            message_ids=settings.message_ids,
            positions=True,
            max_retained=settings.max_retained,
        )
        if report.created:  # nats-server flushes definitions to the disk only with `sync_interval: always`
            await asyncio.to_thread(os.sync)
        self._configs = report.configs
        inbox.limit(report.limits.ack_pending)
        if self.broker is not None:
            self._recognise(self.broker.account.services)
        return report

    def _recognise(self, services: Services) -> None:
        """Set how messages are stored so that their stream recognises repetitions."""
        config = self._configs[MESSAGES]
        services.path.use_ids(with_ids(self.settings.message_ids, config.get("num_replicas", 1)))
        # Half of the window: it takes a while from the store of a message until the message is sent again.
        services.nats.store.trust(config.get("duplicate_window", 0) / 2e9, config.get("num_replicas", 1))
        services.streams.retained.read_replicas(self._configs[RETAINED].get("num_replicas", 1) > 1)

    async def disconnect(self) -> None:
        """Close the connections to NATS."""
        self._ending = True
        for link in (self.shared, self.wild, self.link):
            if link.is_connected:
                await link.close()
            elif not link.is_closed and link.options:
                link.options["allow_reconnect"] = False
                await link.close()

    async def _offline(self) -> None:
        if self._ending:
            return
        known = self.store is not None and self.store.warned
        log.log(logging.INFO if known else logging.WARNING, "%sthe connection to NATS is lost", self._of)
        if self.broker is not None and self.store is not None:
            nats, registry = self.broker.account.services.nats, self.broker.account.registry
            nats.lost(self.link)
            nats.online.clear()
            registry.unchecked.update(client for client in registry.clients.values() if client.alive)
            self.store.offline()

    async def _online(self) -> None:
        broker, store, inbox = self.broker, self.store, self.inbox
        if broker is None or store is None or inbox is None:
            self.link.go_online()
            return
        log.warning("%sconnected to NATS again", self._of)
        (account := broker.account).services.counters.reconnect()
        account.services.nats.relink()  # before anybody sees that NATS is there: records must not be removed now
        # The inbox is subscribed before any request is sent again, so that replies arrive.
        inbox.renew()
        self.link.go_online()
        withhold(account.ingress.retained)
        store.online()
        account.lease.wake.set()
        account.services.tasks.spawn(recover(account, self.link), "recovery")

    async def _wild_offline(self) -> None:
        log.debug("%sthe connection for wildcards is lost", self._of)
        if self.broker is not None:
            self.broker.account.services.nats.lost(self.wild)

    async def _shared_offline(self) -> None:
        log.debug("%sthe connection for shared subscriptions is lost", self._of)

    async def _shared_online(self) -> None:
        self.shared.go_online()
        if self.broker is not None:
            recover_queues(self.broker.account.services)

    async def _wild_online(self) -> None:
        self.wild.go_online()
        if self.broker is not None:
            self.broker.account.services.tasks.spawn(
                recover_wild(self.broker.account, self.wild), "recovery of wildcards"
            )

    # -- clients --------------------------------------------------------------------------------

    def open(
        self,
        tasks: asyncio.TaskGroup,
        reload: Callable[[], list[str]],
        powers: Powers,
        place: Place,
    ) -> Broker:
        """Make the broker; clients are not served yet.

        Args:
            reload: reads files again, for requests in the gateway's own account.
            powers: actions that may be requested there; a gateway cannot be stopped from a tenant's account.
            place: the account among those of the gateway.
        """
        assert self.inbox is not None
        self.store = AckedPublisher(self.link, self._pressure)
        if self.name:
            own = {one: door for one, door in powers.doors.items() if one.settings.tenant == self.name}
            powers = Powers(own, None)
        broker = self.broker = Broker(
            self.settings,
            NatsLinks(self.link, self.wild, self.shared, self.inbox, self.store),
            Streams(self.inbox, self.domain),
            tasks,
            place,
            reload=_not_here if self.name else reload,
            pause=self._pause,
            powers=powers,
        )
        follow(broker.account.services.hooks)
        self._recognise(broker.account.services)
        register(broker.account, broker.live)
        watch(broker.account.services)
        broker.account.services.nats.reconnect.subscribe(CREATED, self._listener_begun)
        paused_consumers.watch(broker.account.services)
        stalling.watch(broker.account.delivery)
        self.link.report(partial(self._denied, self.link), self._writable)
        self.wild.report(partial(self._denied, self.wild))
        return broker

    async def begin(self) -> None:
        """Look for clients of nats-server's listener, register the gateway, and load bans and plugins.

        Raises:
            StartupError: one line that says why the account cannot be served.
        """
        broker = self.broker
        assert broker is not None
        account = broker.account
        self._listener = ListenerClients(account.services, account.lease, account.claims, broker.live.follow_positions)
        try:
            await self._listener.begin()
            await broker.account.lease.begin()
        except (NoResponders, RequestTimeout, ApiError) as error:
            text = " ".join(str(error).split())
            raise StartupError(f"{self._of}the gateway cannot be registered in NATS: {text}") from None
        await broker.account.banning.begin()
        broker.account.services.tasks.spawn(broker.account.gaps.store_barrier.introduce(), "other gateways")
        await broker.fleet.begin()

    async def look_for(self, others: Iterable[Tenant]) -> None:
        """Check that no other tenant has the same NATS account: the two tenants would meet in it.

        Raises:
            SameAccount: another tenant has it.
            StartupError: the check failed.
        """
        assert self.broker is not None
        try:
            there = {entry.identity for entry in await self.broker.account.lease.store.entries()}
        except (NoResponders, RequestTimeout, ApiError) as error:
            raise StartupError(f"{self._of}gateways cannot be read: {' '.join(str(error).split())}") from None
        for other in others:
            if other is not self and other.identity in there:
                order = ["", *self.settings.tenants]  # whichever was served first, the text is the same
                both = sorted((other.name, self.name), key=order.index)
                names = [f"tenant {name!r}" if name else "the gateway" for name in both]
                raise SameAccount(
                    f"{' and '.join(names)} have the same NATS account: give each tenant credentials of its own account"
                )

    def start_serving(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start the tasks that run while clients are served; return them."""
        GATEWAY.set(self.speaker)
        broker, listener = self.broker, self._listener
        assert broker is not None
        assert listener is not None
        return [
            tasks.create_task(self._tick(broker.account), name="clock"),
            tasks.create_task(take_timers(broker.account.wills, broker.account.lease.watches), name="timers"),
            tasks.create_task(broker.account.lease.keep_lease(), name="lease"),
            tasks.create_task(broker.account.readiness.watch_jetstream(), name="readiness"),
            tasks.create_task(broker.account.banning.follow_bans(), name="bans"),
            tasks.create_task(broker.account.ingress.system.publish_topics(), name="$SYS"),
            tasks.create_task(broker.fleet.follow_wishes(), name="fleet"),
            tasks.create_task(
                broker.account.kept.watch_clients(broker.account.registry.connections), name="kept messages"
            ),
            tasks.create_task(look_after(broker.account.services), name="shared subscriptions"),
            tasks.create_task(rooted(write_changed_positions(broker.account.delivery.writers)), name="positions"),
            tasks.create_task(rooted(broker.live.reader.run()), name="shared reader"),
            tasks.create_task(keep_up(broker.live, broker.account.delivery.waiting), name="live sessions"),
            tasks.create_task(listener.check_regularly(), name="clients of nats-server's listener"),
        ]

    def _pressure(self, pressed: bool) -> None:
        if self.broker is not None:
            self.broker.account.services.path.press(pressed)

    def _writable(self, writable: bool) -> None:
        if self.broker is not None:
            self.broker.account.services.path.press(not writable)

    def _denied(self, link: NatsConnection, publish: bool, subject: bytes) -> None:
        """Handle a permission error of NATS: waiting stores and subscriptions must learn of it."""
        broker = self.broker
        if broker is None:
            return
        if not publish:
            broker.account.services.path.table.deny(link, subject)
        elif link is self.link:
            broker.account.services.nats.store.denied(subject)

    async def finish(self) -> None:
        """Wait until the stores and jobs of the disconnected clients are complete, then give the lease up."""
        broker = self.broker
        assert broker is not None
        with anyio.move_on_after(STORES_END_MOST_S) as limit:
            while broker.account.registry.connections:
                broker.account.registry.client_removed.clear()
                await broker.account.registry.client_removed.wait()
            await broker.account.services.tasks.last_jobs()
            broker.account.ingress.retained.tombstones.delete_all()
            await broker.account.services.nats.store.drained()
        for client in list(broker.account.registry.connections):
            client.connection.abort()
            client.lost()
        broker.account.services.tasks.cancel()
        if self.link.online:
            try:
                await self.link.fence(2.0)
                if not limit.cancelled_caught:
                    await broker.account.lease.release()  # else another gateway completes the rest
            except TimeoutError:
                log.warning("%sNATS did not confirm the last messages", self._of)

    async def _tick(self, account: Account) -> None:
        loop, services = asyncio.get_running_loop(), account.services
        now = rotated = released = looked = loop.time()
        while True:
            await asyncio.sleep(CLOCK_STEP)
            due, now = now + CLOCK_STEP, loop.time()
            services.counters.lag.observe(now - due)
            services.clock.set(now)
            logs.tick()
            tick(services)
            services.nats.store.tick(now)
            account.live_copies.tick(now)
            services.nodes.tick(now)
            stalling.look_after(account.delivery)
            if now - rotated > SEEN_FOR / 2 and services.nats.steady:
                rotated = now
                services.path.fanout.rotate()
                account.beginnings.rotate()
            unheard = services.nats.inbox.unheard or services.nats.store.unheard
            if unheard and not self._looking and services.nats.online.is_set():
                self._looking = True
                services.tasks.spawn(self._restore(services), "missing streams")
            if now - released > ROUTES_RELEASE_S:
                released = now
                services.path.table.release()
            if now - looked > GROWN:
                looked = now
                if self._may_have_grown():
                    services.tasks.spawn(self._restore(services), "replicas")
                elif account.lease.watches(WRITERS) and services.nats.online.is_set():
                    services.tasks.spawn(self._look_at_writers(services), "writers of records")
            end_silent(account.registry, now)

    def _may_have_grown(self) -> bool:
        """Return whether the streams have fewer replicas than the announced servers allow."""
        known = self.link.known
        few = self.settings.stream_replicas is None and self._configs[MESSAGES].get("num_replicas", 1) < BY_SIZE
        # The servers of another domain are not announced.
        enough = self.settings.jetstream_domain or (known is not None and known.size >= BY_SIZE)
        return few and bool(enough) and not self._looking

    def _listener_begun(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        """Look at once: nats-server's own MQTT listener serves clients from now on."""
        if self.broker is not None and not self._ending:
            services = self.broker.account.services
            services.tasks.spawn(self._look_at_writers(services), "writers of records")

    async def _look_at_writers(self, services: Services) -> None:
        """Change the streams when programs that do not roll records up have come or gone."""
        try:
            if await kept_single(services.nats.inbox, self.settings.max_retained) == self._single:
                return
        except (StreamSetupError, NoResponders, RequestTimeout, ApiError) as error:
            log.debug("%swriters of records: %s", self._of, error)
            return
        await self._restore(services)

    async def _restore(self, services: Services) -> None:
        """Create streams that were deleted, and raise replicas where the cluster allows it."""
        self._looking = True
        services.nats.inbox.forget_unheard()
        services.nats.store.forget_unheard()
        try:
            if await self._pause.forbids(services.nats.inbox):
                raise NotAnswering("the gateways are paused while the streams are replaced")
            report = await self._ensure_streams(services.nats.inbox)
            self._tell_lost(report.created)
            self._tell(report)
        except (StreamSetupError, NoResponders, RequestTimeout, ApiError) as error:
            log.debug("%sstreams: %s", self._of, error)
            services.nats.inbox.note_unheard()
        finally:
            await asyncio.sleep(STREAMS_CHECK_S)
            self._looking = False
