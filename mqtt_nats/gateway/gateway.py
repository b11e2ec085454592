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
from mqtt_nats.client.authorization import change_rules, distrust, revoke
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
from mqtt_nats.gateway.payload_limits import disagreement
from mqtt_nats.gateway.sighup import ReloadSignal
from mqtt_nats.gateway.tenants import GIVING_UP, Tenants
from mqtt_nats.observability.history import History
from mqtt_nats.transport.connection import Connection, Handler
from mqtt_nats.transport.listener import Listener
from mqtt_nats.transport.listener_settings import Bound
from mqtt_nats.transport.rate_limited import PacedConnection, paced

if TYPE_CHECKING:
    from mqtt_nats.client.account import Account
    from mqtt_nats.gateway.account import Tenant

log = logging.getLogger("mqtt_nats.gateway")

START_RETRY_S: Final = 5.0
"""Seconds between two attempts to start after a pause."""

DRAIN_STEP: Final = 0.01
"""Minimum seconds between clients that are disconnected one after the other; shorter waits are left out."""


async def serve(
    settings: Settings,
    *,
    on_ready: Callable[[list[Bound]], None],
    stop: anyio.Event,
    hangup: ReloadSignal | None = None,
) -> None:
    """Run a gateway until ``stop`` is set. During a pause of all gateways it serves nobody, and then begins anew.

    Args:
        on_ready: called with the addresses on which the gateway accepts, also when it begins anew.
        hangup: its action becomes :meth:`Gateway.reload`.

    Raises:
        StartupError: a file cannot be read, NATS cannot be used, or an address is not available.
    """
    paused = False
    while not stop.is_set():
        gateway = Gateway(settings)
        if hangup is not None:
            hangup.call(gateway.reload)
        try:
            await _serve(gateway, on_ready, stop)
        except StartupError as error:
            if not paused or gateway.served:
                raise
            log.error("the gateway cannot go on after the pause: %s", error)
            with anyio.move_on_after(START_RETRY_S):
                await stop.wait()
        paused = True
        gc.unfreeze()  # what is left of the former gateway


async def _serve(gateway: Gateway, on_ready: Callable[[list[Bound]], None], stop: anyio.Event) -> None:
    """Run a gateway until ``stop`` is set or all gateways pause."""
    async with administered(gateway, on_ready) as ready:
        if not await gateway.connect(stop):
            await gateway.disconnect()
            return
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
            *(partial(self._reload_listener, listener) for listener in self.listeners),
            self.access.reload,
        ]
        """Functions that :meth:`reload` calls. Each raises StartupError when it has to keep its former state."""
        self.audit_trail, self.history = AuditTrail(), History()
        self.served = False
        """Whether the gateway has accepted clients."""
        self._paused = asyncio.Event()
        self.tenants = Tenants(settings, self._paused.set, self.reload)
        self.own = self.tenants.own
        """The gateway's own account, which serves clients without a tenant."""
        self._entrances: dict[Listener, tuple[Account, Callable[[Connection], Handler | None]]] = {}
        """The account in which connections of a listener begin, and what accepts them."""

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

    def _reload_listener(self, listener: Listener) -> None:
        """Read the files of a listener again, and disconnect clients whose certificates are not trusted any more.

        Raises:
            StartupError: a file cannot be used.
        """
        accepts = listener.reload()
        if accepts is not None:
            for account in self.tenants.accounts.values():
                work = distrust(account, self.doors[listener], accepts)
                account.services.tasks.spawn(work, "certificates of clients")

    async def connect(self, stop: anyio.Event) -> bool:
        """Connect to NATS and prepare the streams of the gateway's own account.

        Returns False when ``stop`` was set in a pause.

        Raises:
            StartupError: one line with the problem.
        """
        try:
            if not await self.own.connect(stop):
                return False
        except StartupError:
            await self.disconnect()
            raise
        GATEWAY.set(self.name)
        return True

    async def disconnect(self) -> None:
        """Close the connections to NATS, and the authenticators' connections."""
        await self.access.close()
        await self.tenants.disconnect()

    # -- clients --------------------------------------------------------------------------------

    async def run(self, on_ready: Callable[[list[Bound]], None], stop: anyio.Event) -> None:
        """Serve clients until ``stop`` is set or all gateways pause."""
        async with asyncio.TaskGroup() as tasks:
            powers = Powers(self.doors, stop.set, self.audit_trail, self.history)
            accounts = self.tenants.accounts
            self.access.tell(partial(_change_rules, accounts.values()), partial(_revoke, accounts.values()))
            for listener in self.listeners:
                listener.heed(partial(self._banned, listener))
            background: list[asyncio.Task[None]] = []
            try:
                await self.tenants.begin(tasks, powers, lambda: self.access.rules, self._let_in, stop)
                background.append(tasks.create_task(self.access.keep_current(), name="authenticators"))
                background.append(
                    tasks.create_task(self.history.record_points(partial(progress, accounts[""])), name="history")
                )
                if not self._paused.is_set():
                    await self._open(on_ready)
                await self._end(stop)
            except BaseException:  # also when the embedded nats-server has ended for good
                await self._give_up(background)
                raise
            self._close_listeners()
            await self._shut()
            await self.tenants.end_background()
            for task in background:
                task.cancel()

    def _let_in(self, tenant: Tenant) -> None:
        """Have connections of its listeners begin in an account that is served now, and tell where they are."""
        account = self.tenants.accounts[tenant.name]
        for listener in self.listeners:
            if (listener.settings.tenant or "") == tenant.name:
                self._entrances[listener] = account, partial(self._accept, listener, account)
        self._tell_addresses(tenant.name, account)

    def _tell_addresses(self, name: str, account: Account) -> None:
        """Write down in an account on which addresses its clients may connect."""
        found = [one for one in self.listeners if one.bound and one.settings.tenant in (None, name)]
        if found:
            account.lease.info["listen"] = [str(bound) for one in found for bound in one.bound]

    def _entrance(self, listener: Listener) -> tuple[Account, Callable[[Connection], Handler | None]]:
        """Return the account in which connections of a listener begin, and what accepts them.

        Those for a tenant that is not served begin in the gateway's own account, where their CONNECT is refused.
        """
        found = self._entrances.get(listener)
        if found is None:
            account = self.tenants.accounts[""]
            return account, partial(self._accept, listener, account)
        return found

    def _banned(self, listener: Listener, host: str) -> bool:
        account, _ = self._entrance(listener)
        return account.banning.address(host)

    async def _open(self, on_ready: Callable[[list[Bound]], None]) -> None:
        """Begin to serve clients."""
        for name, account in self.tenants.accounts.items():
            if text := disagreement(self.settings, account.services.nats.link.max_payload):
                log.warning(f"tenant {name}: {text}" if name else text)  # whole: arguments are shortened
        addresses = await self._listen()
        self.served = True
        # Objects that live as long as the gateway are not collected again. Nearly all other objects are freed by
        # reference counts. So old objects are collected very rarely: all clients wait meanwhile, as they do for young
        # objects, which therefore are few.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 5, 1_000)
        on_ready(addresses)

    async def _end(self, stop: anyio.Event) -> None:
        """Wait until ``stop`` is set or all gateways pause."""
        ends = [asyncio.create_task(event.wait()) for event in (stop, self._paused)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for one in ends:
            one.cancel()
        if self._paused.is_set() and not stop.is_set():
            log.warning("all gateways pause: clients are disconnected until the streams have been replaced")

    async def _listen(self) -> list[Bound]:
        """Begin to accept on every listener; return the addresses."""
        settings, spawn = self.settings, self.tenants.accounts[""].services.tasks.spawn
        found: list[Bound] = []
        for listener in self.listeners:
            try:
                bound = await listener.open(
                    self._connection, spawn, backlog=settings.backlog, shared=settings.workers > 1
                )
            except OSError as error:
                self._close_listeners()
                raise StartupError(cannot_listen(listener.settings.listen, error)) from None
            found += bound
        for name, account in self.tenants.accounts.items():
            self._tell_addresses(name, account)
        return found

    def _close_listeners(self) -> None:
        for listener in self.listeners:
            listener.close()

    def _accept(self, listener: Listener, account: Account, connection: Connection) -> Handler | None:
        if account.registry.closing or (connection.on_end is None and not listener.enter(connection, connection.host)):
            return None
        client = Client(account, connection, self.doors[listener], account.tenant == (listener.settings.tenant or ""))
        account.registry.enter(client)
        return entered(client)

    def _connection(self, listener: Listener) -> Connection:
        account, accept = self._entrance(listener)
        kind = PacedConnection if paced(listener.general) else Connection
        return kind(listener.limits, account.services.path.round, listener.general, account.services.clock, accept)

    async def _give_up(self, background: list[asyncio.Task[None]]) -> None:
        """Clean up after an error: clients are told; a lease left behind would look like a gateway that has died."""
        with anyio.move_on_after(GIVING_UP, shield=True):
            self._close_listeners()
            await self._shut()
        self.tenants.cancel()
        for task in background:
            task.cancel()

    async def _shut(self) -> None:
        """Close every connection, then wait until all stores and jobs are complete."""
        self.tenants.settle()
        accounts = list(self.tenants.accounts.values())
        for account in accounts:
            account.registry.begin_closing()
        await self._let_go(accounts)
        await self.tenants.finish()

    async def _let_go(self, accounts: list[Account]) -> None:
        """End every connection, one after the other: other gateways get the clients so, and serve them sooner."""
        text = "all gateways pause" if self._paused.is_set() else "the gateway is shutting down"
        error = MqttError(text, ReasonCode.SERVER_SHUTTING_DOWN)
        if self.settings.server_reference is not None and not self._paused.is_set():
            error = UseAnotherServer(text, self.settings.server_reference)
        clients = [client for account in accounts for client in account.registry.connections]
        for client in [one for one in clients if one.unanswered]:
            refuse(client, error)
        begun, seconds = asyncio.get_running_loop().time(), self.settings.drain_seconds(len(clients))
        for number, client in enumerate(clients):
            due = begun + seconds * number / len(clients)
            if (wait := due - asyncio.get_running_loop().time()) > DRAIN_STEP:
                await asyncio.sleep(wait)
            client.end_connection(error)


def _change_rules(accounts: Iterable[Account], rules: Rules) -> None:
    for account in accounts:
        change_rules(account, rules)


def _revoke(accounts: Iterable[Account]) -> None:
    for account in accounts:
        revoke(account)
