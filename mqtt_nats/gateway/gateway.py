# SPDX-License-Identifier: Apache-2.0
"""The gateway: connects to NATS, listens, and ends in good order."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio

from mqtt_nats.access.acl import Rules
from mqtt_nats.admin import administered
from mqtt_nats.base.admission import ConnectionLimit
from mqtt_nats.base.errors import StartupError, describe
from mqtt_nats.base.logs import GATEWAY
from mqtt_nats.client.authorization import change_rules, revoke
from mqtt_nats.client.client import Client
from mqtt_nats.client.connect import refuse
from mqtt_nats.client.message_hooks import entered
from mqtt_nats.codec import MqttError, ReasonCode, UseAnotherServer
from mqtt_nats.config.access_control import AccessControl
from mqtt_nats.config.nats_connect import nats_access
from mqtt_nats.config.process_limits import within_process
from mqtt_nats.config.settings import Settings, cannot_listen
from mqtt_nats.control.audit import AuditTrail
from mqtt_nats.control.report import progress
from mqtt_nats.control.server import Powers
from mqtt_nats.gateway.account import Tenant
from mqtt_nats.gateway.sighup import ReloadSignal
from mqtt_nats.observability.history import History
from mqtt_nats.transport.connection import Connection, Handler
from mqtt_nats.transport.listener import Listener
from mqtt_nats.transport.listener_settings import Bound
from mqtt_nats.transport.rate_limited import PacedConnection, paced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mqtt_nats.client.account import Account

log = logging.getLogger("mqtt_nats.gateway")

GIVING_UP: Final = 3.0
"""Maximum seconds for a gateway whose start has failed to give up its lease and close its connections."""

DRAIN_STEP: Final = 0.01
"""Minimum seconds between clients that are disconnected one after the other; shorter waits are left out."""


async def serve(
    settings: Settings,
    *,
    on_ready: Callable[[list[Bound]], None],
    stop: anyio.Event,
    hangup: ReloadSignal | None = None,
) -> None:
    """Run a gateway until ``stop`` is set.

    Args:
        on_ready: called once with the addresses on which the gateway accepts.
        hangup: its action becomes :meth:`Gateway.reload`.

    Raises:
        StartupError: a file cannot be read, NATS cannot be used, or an address is not available.
    """
    gateway = Gateway(settings)
    if hangup is not None:
        hangup.call(gateway.reload)
    async with administered(gateway, on_ready) as ready:
        await gateway.connect()
        try:
            await gateway.run(ready, stop)
        finally:
            await gateway.disconnect()


class Gateway:
    """Gateway process with all its accounts and listeners."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings = within_process(settings)
        self.access = AccessControl(settings, nats_access)
        self.connection_limit = ConnectionLimit(settings)
        self.listeners = [Listener(one, settings, self.connection_limit) for one in settings.all_listeners]
        self.doors = {one: self.access.door(one.settings) for one in self.listeners}
        self.reloads: list[Callable[[], None]] = [
            *(listener.reload for listener in self.listeners),
            self.access.reload,
        ]
        """Functions that :meth:`reload` calls. Each raises StartupError when it has to keep its former state."""
        self.audit_trail, self.history = AuditTrail(), History()
        self.own = Tenant("", settings)
        """The gateway's own account, which serves clients without a tenant."""
        self.tenants = [self.own, *(Tenant(name, settings.of(name)) for name in settings.tenants)]

    @property
    def account(self) -> Account | None:
        """The gateway's own account; None before it serves."""
        return None if self.own.broker is None else self.own.broker.account

    @property
    def identity(self) -> str:
        """Id with which the gateway has started in its own account."""
        return self.own.identity

    def name(self) -> str:
        """Return the gateway's present id in its own account, for logs."""
        return self.own.speaker()

    def reload(self) -> list[str]:
        """Read the files again that may change while the gateway runs; log and return the problems."""
        problems = []
        for part in self.reloads:
            try:
                part()
            except StartupError as error:
                problems.append(str(error))
                log.error("the former files stay in use: %s", error)
            except Exception as error:  # the former state stays in force
                problems.append(describe(error))
                log.exception("the former files stay in use")
        log.info("the other files are read again" if problems else "files are read again")
        return problems

    async def connect(self) -> None:
        """Connect to NATS and prepare the streams, for every account.

        Raises:
            StartupError: one line with the problem.
        """
        try:
            for tenant in self.tenants:
                await tenant.connect()
        except StartupError:
            await self.disconnect()
            raise
        GATEWAY.set(self.name)

    async def disconnect(self) -> None:
        """Close the connections to NATS, and the authenticators' connections."""
        await self.access.close()
        for tenant in self.tenants:
            await tenant.disconnect()

    # -- clients --------------------------------------------------------------------------------

    async def run(self, on_ready: Callable[[list[Bound]], None], stop: anyio.Event) -> None:
        """Serve clients until ``stop`` is set."""
        async with asyncio.TaskGroup() as tasks:
            powers = Powers(self.doors, stop.set, self.audit_trail, self.history)
            accounts: dict[str, Account] = {}
            brokers = []
            for tenant in self.tenants:
                broker = tenant.open(tasks, self.reload, powers, accounts, self.access.rules)
                accounts[tenant.name] = broker.account
                brokers.append(broker)
            served = tuple(accounts.values())
            self.access.tell(partial(_change_rules, served), partial(_revoke, served))
            for listener in self.listeners:
                listener.heed(accounts[listener.settings.tenant or ""].banning.address)
            background: list[asyncio.Task[None]] = []
            try:
                for tenant in self.tenants:
                    await tenant.begin()
                if len(self.tenants) > 1:
                    for tenant in self.tenants:
                        await tenant.look_for(self.tenants)
                background += [task for tenant in reversed(self.tenants) for task in tenant.keep(tasks)]
                background.append(tasks.create_task(self.access.keep(), name="authenticators"))
                background.append(tasks.create_task(self.history.keep(partial(progress, served[0])), name="history"))
                addresses = await self._listen(accounts)
                # Objects that live as long as the gateway are not collected again. Nearly all other objects are freed
                # by reference counts. So old objects are collected very rarely: all clients wait meanwhile, as they do
                # for young objects, which therefore are few.
                gc.collect()
                gc.freeze()
                gc.set_threshold(10_000, 5, 1_000)
                on_ready(addresses)
            except BaseException:
                await self._give_up(served, background)
                raise
            await stop.wait()
            self._close_listeners()
            await self._shut(served)
            for broker in brokers:
                await broker.plugins.end()
            for task in background:
                task.cancel()

    async def _listen(self, accounts: dict[str, Account]) -> list[Bound]:
        """Begin to accept on every listener; return the addresses."""
        settings = self.settings
        found: list[Bound] = []
        for listener in self.listeners:
            of = listener.settings.tenant
            account = accounts[of or ""]
            make = partial(self._connection, account, partial(self._accept, listener, account))
            try:
                bound = await listener.open(
                    make, account.services.tasks.spawn, backlog=settings.backlog, shared=settings.workers > 1
                )
            except OSError as error:
                self._close_listeners()
                raise StartupError(cannot_listen(listener.settings.listen, error)) from None
            found += bound
            for tenant in self.tenants:
                if of in (None, tenant.name):
                    accounts[tenant.name].lease.info.setdefault("listen", []).extend(map(str, bound))
        return found

    def _close_listeners(self) -> None:
        for listener in self.listeners:
            listener.close()

    def _accept(self, listener: Listener, account: Account, connection: Connection) -> Handler | None:
        if account.registry.closing or (connection.on_end is None and not listener.enter(connection, connection.host)):
            return None
        client = Client(account, connection, self.doors[listener])
        account.registry.enter(client)
        return entered(client)

    def _connection(
        self, account: Account, accept: Callable[[Connection], Handler | None], listener: Listener
    ) -> Connection:
        kind = PacedConnection if paced(listener.general) else Connection
        return kind(listener.limits, account.services.path.round, listener.general, account.services.clock, accept)

    async def _give_up(self, accounts: Sequence[Account], background: list[asyncio.Task[None]]) -> None:
        """Clean up after a failed start: a lease left behind would look like a gateway that has died."""
        with anyio.move_on_after(GIVING_UP, shield=True):
            self._close_listeners()
            await self._shut(accounts)
        for task in background:
            task.cancel()

    async def _shut(self, accounts: Sequence[Account]) -> None:
        """Close every connection, then wait until all stores and jobs are complete."""
        for account in accounts:
            account.registry.begin_closing()
        await self._let_go(accounts)
        await asyncio.gather(*(tenant.finish() for tenant in self.tenants))

    async def _let_go(self, accounts: Sequence[Account]) -> None:
        """End every connection, one after the other: other gateways get the clients so, and serve them sooner."""
        text = "the gateway is shutting down"
        error = MqttError(text, ReasonCode.SERVER_SHUTTING_DOWN)
        if self.settings.server_reference is not None:
            error = UseAnotherServer(text, self.settings.server_reference)
        clients = [client for account in accounts for client in account.registry.connections]
        for client in [one for one in clients if one.unanswered]:
            refuse(client, error)
        begun, seconds = asyncio.get_running_loop().time(), self.settings.drain_seconds(len(clients))
        for number, client in enumerate(clients):
            due = begun + seconds * number / len(clients)
            if (wait := due - asyncio.get_running_loop().time()) > DRAIN_STEP:
                await asyncio.sleep(wait)
            client.end(error)


def _change_rules(accounts: Iterable[Account], rules: Rules) -> None:
    for account in accounts:
        change_rules(account, rules)


def _revoke(accounts: Iterable[Account]) -> None:
    for account in accounts:
        revoke(account)
