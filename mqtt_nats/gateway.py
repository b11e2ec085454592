# SPDX-License-Identifier: Apache-2.0
"""The gateway: connects to NATS, prepares the streams, listens, and ends in good order."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import anyio

from mqtt_nats.admin import administered
from mqtt_nats.authenticators.doors import Doors
from mqtt_nats.backbone.inbox import Inbox
from mqtt_nats.backbone.link import Link
from mqtt_nats.backbone.store import Store
from mqtt_nats.broker import stalling
from mqtt_nats.broker.client import Client
from mqtt_nats.broker.context import Broker
from mqtt_nats.broker.control import Control, Powers
from mqtt_nats.broker.fleet import Fleet
from mqtt_nats.broker.greeting import UseAnotherServer
from mqtt_nats.broker.leases import Lease
from mqtt_nats.broker.recovery import recover, recover_wild, watch_consumers
from mqtt_nats.broker.sharing import look_after, recover_queues
from mqtt_nats.broker.silence import end_silent
from mqtt_nats.broker.standstill import tick, watch
from mqtt_nats.broker.tapping import changed, entered
from mqtt_nats.broker.timing import take_timers
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_nats.config import Settings, cannot_listen
from mqtt_nats.connection.connection import CLOCK_STEP, Connection, Handler
from mqtt_nats.connection.pacing import PacedConnection, paced
from mqtt_nats.errors import StartupError
from mqtt_nats.hangup import Hangup
from mqtt_nats.limits.admission import House
from mqtt_nats.linking import check_version, connect_link
from mqtt_nats.listeners.listener import Listener
from mqtt_nats.listeners.settings import Bound
from mqtt_nats.logs import GATEWAY
from mqtt_nats.plugins.manager import Plugins
from mqtt_nats.pubsub.fanout import SEEN_FOR
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.definitions import BY_SIZE, EnsureReport, NotAnswering, StreamSetupError, ensure_streams, with_ids
from mqtt_streams.hashing import name_hash
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.retained import STREAM as RETAINED

log = logging.getLogger("mqtt_nats.gateway")

SHUTDOWN: Final = 10.0
"""Seconds in which a stopping gateway finishes what it has begun."""

DRAIN_STEP: Final = 0.01
"""Seconds between clients that are let go one after the other; those of less are let go together."""

LOOK_AGAIN: Final = 1.0
"""Seconds between two looks for streams that do not answer."""

ELECTION: Final = 30.0
"""Seconds in which the JetStream of a cluster must have a leader when the gateway starts."""

GROWN: Final = 30.0
"""Seconds between two looks whether the cluster has become large enough for more replicas."""

RELEASE: Final = 20.0
"""Seconds between two looks for what topics that are not used any more keep in memory."""


async def serve(
    settings: Settings, *, on_ready: Callable[[list[Bound]], None], stop: anyio.Event, hangup: Hangup | None = None
) -> None:
    """Run a gateway until ``stop`` is set.

    Args:
        on_ready: called once with the addresses that are listened on.
        hangup: has the gateway read again what can be read again.

    Raises:
        StartupError: a file cannot be read, NATS cannot be used, or an address cannot be listened on.
    """
    gateway = Gateway(settings)
    if hangup is not None:
        hangup.act = gateway.reload
    async with administered(gateway, on_ready) as ready:
        await gateway.connect()
        try:
            await gateway.run(ready, stop)
        finally:
            await gateway.disconnect()


class Gateway:
    """One gateway process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.access = Doors(settings)
        self.house = House(settings)
        self.listeners = [Listener(one, settings, self.house) for one in settings.all_listeners]
        self.doors = {one: self.access.door(one.settings) for one in self.listeners}
        self.reloads: list[Callable[[], None]] = [
            *(listener.reload for listener in self.listeners),
            self.access.reload,
        ]
        """What :meth:`reload` calls. Each raises StartupError when it has to keep what it has."""
        self.identity = name_hash(secrets.token_hex(16))
        self.link = Link()
        self.wild = Link()
        self.shared = Link()
        self.inbox: Inbox | None = None
        self.store: Store | None = None
        self.broker: Broker | None = None
        self.lease: Lease | None = None
        self.domain = ""
        self._configs: dict[str, dict[str, Any]] = {}
        """The configurations of the streams."""
        self._ending = False
        self._looking = False
        """Streams that do not answer are being looked for."""

    def name(self) -> str:
        """Its present id, for logs."""
        return self.identity if self.broker is None else self.broker.identity

    def reload(self) -> list[str]:
        """Read files again that may change while the gateway runs; what is wrong with them, which is logged too."""
        log.info("files are read again")
        problems = []
        for part in self.reloads:
            try:
                part()
            except StartupError as error:
                problems.append(str(error))
                log.error("not changed: %s", error)
        return problems

    # -- NATS -----------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect to NATS and prepare the streams.

        Raises:
            StartupError: one line that says what is wrong.
        """
        GATEWAY.set(self.name)
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
        self.inbox = Inbox(self.link)
        try:
            report = await self._first_look(self.inbox)
        except StreamSetupError as error:
            raise StartupError(" ".join(str(error).split())) from None
        except (NoResponders, RequestTimeout, ApiError) as error:
            raise StartupError(
                f"nats-server at {urls} does not serve JetStream ({' '.join(str(error).split())}): "
                "enable it (jetstream {} in its configuration, or nats-server -js)"
            ) from None
        for line in report.kept:
            log.warning("%s", line)
        self._tell(report)
        self.domain = report.domain

    async def _first_look(self, inbox: Inbox) -> EnsureReport:
        """Prepare the streams, as soon as a cluster that is just being started has elected its leaders."""
        deadline = asyncio.get_running_loop().time() + ELECTION
        while True:
            try:
                return await self._ensure_streams(inbox)
            except NotAnswering as error:
                if not self.link._server_info.get("cluster") or asyncio.get_running_loop().time() > deadline:
                    raise
                log.info("%s", " ".join(str(error).split()))
            await asyncio.sleep(LOOK_AGAIN)

    def _tell(self, report: EnsureReport) -> None:
        """Say what was done with the streams."""
        for stream in report.created:
            log.info("created stream %s, replicas: %d", stream, report.configs[stream].get("num_replicas", 1))
        for stream, names in report.upgraded.items():
            changed = ", ".join(f"{name} = {report.configs[stream][name]}" for name in names)
            log.warning("changed stream %s: %s", stream, changed)

    async def _ensure_streams(self, inbox: Inbox) -> EnsureReport:
        settings = self.settings
        report = await ensure_streams(
            inbox,
            replicas=settings.stream_replicas,
            message_retention=settings.message_retention,
            retention=settings.retention,
            message_ids=settings.message_ids,
            max_retained=settings.max_retained,
        )
        self._configs = report.configs
        if self.broker is not None:
            self._recognise(self.broker)
        return report

    def _recognise(self, broker: Broker) -> None:
        """Store messages as their stream recognises repetitions."""
        config = self._configs[MESSAGES]
        broker.with_ids = with_ids(self.settings.message_ids, config.get("num_replicas", 1))
        # Half of it: from when a message is stored it takes a while until it is sent again.
        broker.store.trusted = config.get("duplicate_window", 0) / 2e9
        broker.retained.replicated = self._configs[RETAINED].get("num_replicas", 1) > 1

    async def disconnect(self) -> None:
        """Close the connections to NATS, and those of authenticators."""
        self._ending = True
        await self.access.close()
        for link in (self.shared, self.wild, self.link):
            if link.is_connected:
                await link.close()
            elif not link.is_closed and link.options:
                link.options["allow_reconnect"] = False
                await link.close()

    async def _offline(self) -> None:
        if self._ending:
            return
        log.warning("the connection to NATS is lost")
        if self.broker is not None and self.store is not None:
            self.broker.lost(self.link)
            self.broker.online.clear()
            self.store.offline()

    async def _online(self) -> None:
        broker, store, inbox = self.broker, self.store, self.inbox
        if broker is None or store is None or inbox is None:
            self.link.online = True
            return
        log.info("connected to NATS again")
        broker.counters.reconnects += 1
        # Replies must find their way before anything is asked again.
        inbox.renew()
        self.link.online = True
        store.online()
        if self.lease is not None:
            self.lease.wake.set()
        broker.spawn(recover(broker, self.link), "recovery")

    async def _wild_offline(self) -> None:
        log.debug("the connection for wildcards is lost")
        if self.broker is not None:
            self.broker.lost(self.wild)

    async def _shared_offline(self) -> None:
        log.debug("the connection for shared subscriptions is lost")

    async def _shared_online(self) -> None:
        self.shared.online = True
        if self.broker is not None:
            recover_queues(self.broker)

    async def _wild_online(self) -> None:
        self.wild.online = True
        if self.broker is not None:
            self.broker.spawn(recover_wild(self.broker, self.wild), "recovery of wildcards")

    # -- clients --------------------------------------------------------------------------------

    async def run(self, on_ready: Callable[[list[Bound]], None], stop: anyio.Event) -> None:
        """Serve clients until ``stop`` is set."""
        assert self.inbox is not None
        async with asyncio.TaskGroup() as tasks:
            self.store = Store(self.link, self._pressure)
            broker = self.broker = Broker(
                self.settings,
                self.identity,
                self.domain,
                self.link,
                self.wild,
                self.shared,
                self.inbox,
                self.store,
                tasks,
            )
            broker.rules, self.access.broker = self.access.rules, broker
            self.house.banned = broker.banning.address
            broker.hooks.changed = partial(changed, broker)
            broker.plugins = Plugins(broker, self.settings.plugins)
            self._recognise(broker)
            watch_consumers(broker)
            watch(broker)
            stalling.watch(broker)
            self.link.on_writable = self._writable
            self.link.on_denied = partial(self._denied, self.link)
            self.wild.on_denied = partial(self._denied, self.wild)
            self.lease = Lease(broker)
            broker.control = Control(broker, self.lease, Powers(self.doors, stop.set))
            try:
                await self.lease.begin()
            except (NoResponders, RequestTimeout, ApiError) as error:
                text = " ".join(str(error).split())
                raise StartupError(f"the gateway cannot be registered in NATS: {text}") from None
            await broker.banning.begin()
            broker.fleet = Fleet(broker, broker.plugins, self.reload)
            await broker.fleet.begin()
            background = [
                tasks.create_task(self._tick(broker), name="clock"),
                tasks.create_task(take_timers(broker), name="timers"),
                tasks.create_task(self.lease.keep(), name="lease"),
                tasks.create_task(broker.readiness.keep(), name="readiness"),
                tasks.create_task(broker.banning.keep(), name="bans"),
                tasks.create_task(broker.system.keep(), name="$SYS"),
                tasks.create_task(broker.fleet.keep(), name="fleet"),
                tasks.create_task(look_after(broker), name="shared subscriptions"),
                tasks.create_task(self.access.keep(), name="authenticators"),
            ]
            try:
                addresses = await self._listen(broker)
            except StartupError:
                for task in background:
                    task.cancel()
                raise
            # What lives as long as the gateway is not looked at again, and the rest less often: nearly all of
            # it is freed by reference counts.
            gc.collect()
            gc.freeze()
            gc.set_threshold(50_000, 20, 50)
            self.lease.info["listen"] = [str(bound) for bound in addresses]
            on_ready(addresses)
            await stop.wait()
            self._close_listeners()
            await self._shut(broker)
            await broker.plugins.end()
            for task in background:
                task.cancel()

    async def _listen(self, broker: Broker) -> list[Bound]:
        """Begin to accept on every listener."""
        settings = self.settings
        found: list[Bound] = []
        for listener in self.listeners:
            try:
                found += await listener.open(
                    self._connection, broker.spawn, backlog=settings.backlog, shared=settings.workers > 1
                )
            except OSError as error:
                self._close_listeners()
                raise StartupError(cannot_listen(listener.settings.listen, error)) from None
        return found

    def _close_listeners(self) -> None:
        for listener in self.listeners:
            listener.close()

    def _accept(self, listener: Listener, connection: Connection) -> Handler | None:
        broker = self.broker
        if (
            broker is None
            or broker.closing
            or (connection.left is None and not listener.enter(connection, connection.host))
        ):
            return None
        client = Client(broker, connection, self.doors[listener])
        broker.connections.add(client)
        return entered(client)

    def _connection(self, listener: Listener) -> Connection:
        broker = self.broker
        assert broker is not None
        accept = partial(self._accept, listener)
        kind = PacedConnection if paced(listener.general) else Connection
        return kind(listener.limits, broker.round, listener.general, broker.clock, accept)

    def _pressure(self, pressed: bool) -> None:
        if self.broker is not None:
            self.broker.pressure(pressed)

    def _writable(self, writable: bool) -> None:
        if self.broker is not None:
            self.broker.pressure(not writable)

    def _denied(self, link: Link, publish: bool, subject: bytes) -> None:
        """The NATS user may not do something: whoever waits for it has to know."""
        broker = self.broker
        if broker is None:
            return
        if not publish:
            broker.table.deny(link, subject)
        elif link is self.link:
            broker.store.denied(subject)

    async def _shut(self, broker: Broker) -> None:
        """Close every connection, then wait until what was begun is stored."""
        broker.closing = True
        await self._let_go(broker)
        with anyio.move_on_after(SHUTDOWN) as limit:
            while broker.connections:
                broker.left.clear()
                await broker.left.wait()
            await asyncio.gather(*broker.farewells)
            await broker.store.drained()
        for client in list(broker.connections):
            client.connection.abort()
            client.lost()
        broker.cancel()
        if self.link.online:
            try:
                await self.link.fence(2.0)
                if self.lease is not None and not limit.cancelled_caught:
                    await self.lease.release()  # else another gateway deals with what is left
            except TimeoutError:
                log.warning("NATS did not confirm the last messages")

    async def _let_go(self, broker: Broker) -> None:
        """End every connection, over the time of the settings: the others get the clients one after the other."""
        text = "the gateway is shutting down"
        error = MqttError(text, ReasonCode.SERVER_SHUTTING_DOWN)
        if self.settings.server_reference is not None:
            error = UseAnotherServer(text, self.settings.server_reference)
        clients = list(broker.connections)
        begun = asyncio.get_running_loop().time()
        for number, client in enumerate(clients):
            due = begun + self.settings.drain_time * number / len(clients)
            if (wait := due - asyncio.get_running_loop().time()) > DRAIN_STEP:
                await asyncio.sleep(wait)
            client.end(error)

    async def _tick(self, broker: Broker) -> None:
        loop = asyncio.get_running_loop()
        now = rotated = released = looked = loop.time()
        while True:
            await asyncio.sleep(CLOCK_STEP)
            due, now = now + CLOCK_STEP, loop.time()
            broker.counters.lag.observe(now - due)
            broker.clock.now = now
            tick(broker)
            broker.store.tick(now)
            broker.nodes.tick(now)
            stalling.look_after(broker)
            if now - rotated > SEEN_FOR / 2 and broker.steady:
                rotated = now
                broker.fanout.rotate()
            if (broker.inbox.unheard or broker.store.unheard) and not self._looking and broker.online.is_set():
                self._looking = True
                broker.spawn(self._restore(broker), "missing streams")
            if now - released > RELEASE:
                released = now
                broker.table.release()
            if now - looked > GROWN:
                looked = now
                if self._may_have_grown():
                    broker.spawn(self._restore(broker), "replicas")
            end_silent(broker, now)

    def _may_have_grown(self) -> bool:
        """Whether the streams have fewer replicas than the servers that are announced could hold."""
        known = self.link.known
        few = self.settings.stream_replicas is None and self._configs[MESSAGES].get("num_replicas", 1) < BY_SIZE
        return few and known is not None and known.size >= BY_SIZE and not self._looking

    async def _restore(self, broker: Broker) -> None:
        """Create streams that somebody has deleted, and give them the replicas that they can have."""
        self._looking = True
        broker.inbox.unheard = broker.store.unheard = False
        try:
            report = await self._ensure_streams(broker.inbox)
            for stream in report.created:
                log.error("stream %s was gone, with all that it held: created again", stream)
            self._tell(report)
        except (StreamSetupError, NoResponders, RequestTimeout, ApiError) as error:
            log.debug("streams: %s", error)
            broker.inbox.unheard = True
        finally:
            await asyncio.sleep(LOOK_AGAIN)
            self._looking = False
