# SPDX-License-Identifier: Apache-2.0
"""Tenants of a gateway: each is served, or refused alone and tried again. See docs/internals/gateway.md#tenants."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import anyio

from mqtt_nats.base.errors import StartupError, describe
from mqtt_nats.control.server import Powers
from mqtt_nats.gateway.account import SameAccount, Tenant
from mqtt_nats.gateway.broker import Place
from mqtt_nats.messages.identity import Identity

if TYPE_CHECKING:
    from mqtt_nats.access.acl import Rules
    from mqtt_nats.client.account import Account
    from mqtt_nats.config.settings import Settings

log = logging.getLogger("mqtt_nats.gateway")

GIVING_UP: Final = 3.0
"""Maximum seconds for an account that cannot be served to give up its lease and close its connections."""

TENANTS_WAIT_MOST_S: Final = 40.0
"""Maximum seconds in which the gateway waits for its tenants before it listens: longer than an election."""

TENANT_RETRY_FIRST_S: Final = 5.0
"""Seconds until the second attempt to serve a tenant. Each further wait is twice as long as the one before."""

TENANT_RETRY_MOST_S: Final = 60.0
"""Maximum seconds between two attempts."""

NOT_YET: Final = "it is being connected"


class Tenants:
    """The accounts of a gateway by tenant; its own has the empty name.

    Args:
        settings: settings of the gateway.
        begin_pause: called when all gateways of an account are to pause.
        reload: reads files again, for requests in the gateway's own account.
    """

    def __init__(self, settings: Settings, begin_pause: Callable[[], None], reload: Callable[[], list[str]]) -> None:
        self._settings, self._begin_pause, self._reload = settings, begin_pause, reload
        self.own = Tenant("", settings, begin_pause)
        self.served: dict[str, Tenant] = {}
        """Tenants that are served, and the gateway's own account first."""
        self.accounts: dict[str, Account] = {}
        """Their services."""
        self.refused: dict[str, str] = dict.fromkeys(settings.tenants, NOT_YET)
        """Why the other tenants are not served."""
        self._opening = asyncio.Lock()
        self._attempts: list[asyncio.Task[None]] = []
        self._background: list[asyncio.Task[None]] = []

    async def begin(
        self,
        tasks: asyncio.TaskGroup,
        powers: Powers,
        rules: Callable[[], Rules | None],
        on_served: Callable[[Tenant], None],
        stop: anyio.Event,
    ) -> None:
        """Serve the gateway's own account, which is connected, then wait for the first attempts to serve the tenants.

        Args:
            on_served: called when an account is served, also later.

        Raises:
            StartupError: the gateway's own account cannot be served, or two tenants have the same account.
        """

        async def serve(tenant: Tenant) -> None:
            async with self._opening:
                await self._open(tenant, tasks, powers, rules())
                on_served(tenant)

        try:
            await serve(self.own)
        except BaseException:
            await _drop(self.own)
            raise
        firsts: list[asyncio.Future[None]] = []
        for name in self._settings.tenants:
            first = asyncio.get_running_loop().create_future()
            firsts.append(first)
            self._attempts.append(tasks.create_task(self._keep(name, serve, first, stop), name=f"tenant {name}"))
        await _first(firsts, stop)

    async def _open(self, tenant: Tenant, tasks: asyncio.TaskGroup, powers: Powers, rules: Rules | None) -> None:
        """Begin to serve a connected account.

        Raises:
            StartupError: it cannot be served.
        """
        name = tenant.name
        identity = Identity(tenant.identity, name, tenant.domain)
        place = Place(identity, self.accounts, {} if name else self.refused, rules)
        broker = tenant.open(tasks, self._reload, powers, place)
        await tenant.begin()
        if self.served:
            await tenant.look_for(self.served.values())
        self.refused.pop(name, None)
        self.served[name], self.accounts[name] = tenant, broker.account
        self._background += tenant.start_serving(tasks)

    async def _keep(
        self,
        name: str,
        serve: Callable[[Tenant], Awaitable[None]],
        first: asyncio.Future[None],
        stop: anyio.Event,
    ) -> None:
        """Attempt to serve a tenant again and again, at most once in `TENANT_RETRY_FIRST_S`, until it is served."""
        wait = TENANT_RETRY_FIRST_S
        while True:
            failure = await self._attempt(name, serve, stop)
            if failure is not None:
                self._refuse(name, str(failure))
            if not first.done():
                if isinstance(failure, SameAccount):
                    first.set_exception(failure)
                    return
                first.set_result(None)
            elif failure is None:
                log.warning("tenant %s is served now", name)
            if failure is None:
                return
            await asyncio.sleep(wait)
            wait = min(2 * wait, TENANT_RETRY_MOST_S)

    async def _attempt(
        self, name: str, serve: Callable[[Tenant], Awaitable[None]], stop: anyio.Event
    ) -> StartupError | None:
        """Attempt to serve a tenant; return why it cannot be served. None: it is served, or the gateway ends."""
        tenant = Tenant(name, self._settings.of(name), self._begin_pause)
        try:
            if await tenant.connect(stop):
                await serve(tenant)
            return None
        except StartupError as error:
            return error
        except Exception as error:
            log.exception("tenant %s: the attempt to serve it has failed", name)
            return StartupError(describe(error))
        finally:
            if self.served.get(name) is not tenant:
                await _drop(tenant)

    def _refuse(self, name: str, why: str) -> None:
        why = why.removeprefix(f"tenant {name}: ")
        if self.refused.get(name) != why:
            log.error("tenant %s is not served, its clients are refused: %s", name, why)
        self.refused[name] = why

    def settle(self) -> None:
        """Begin to serve no more tenants."""
        for task in self._attempts:
            task.cancel()

    async def finish(self) -> None:
        """Wait until all stores and jobs are complete, and attempts have ended."""
        await asyncio.gather(*(tenant.finish() for tenant in self.served.values()))
        if self._attempts:
            await asyncio.wait(self._attempts)

    async def end_background(self) -> None:
        """Unload the plugins, and end the background tasks."""
        for tenant in self.served.values():
            if tenant.broker is not None:
                await tenant.broker.plugins.unload_all()
        self.cancel()

    def cancel(self) -> None:
        """End the background tasks."""
        for task in reversed(self._background):
            task.cancel()

    async def disconnect(self) -> None:
        """Close the connections to NATS."""
        for tenant in {self.own.name: self.own, **self.served}.values():
            await tenant.disconnect()


async def _first(attempts: list[asyncio.Future[None]], stop: anyio.Event) -> None:
    """Wait until all first attempts have ended, for `TENANTS_WAIT_MOST_S`, or until ``stop`` is set.

    Raises:
        SameAccount: two tenants have the same account.
    """
    ended = asyncio.ensure_future(stop.wait())
    with anyio.move_on_after(TENANTS_WAIT_MOST_S):
        for one in attempts:
            await asyncio.wait({one, ended}, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    for one in attempts:
        if one.done():
            one.result()
        else:
            one.cancel()


async def _drop(tenant: Tenant) -> None:
    """Clean up after a failed attempt: a lease left behind would look like a gateway that has died."""
    with anyio.move_on_after(GIVING_UP, shield=True):
        if tenant.broker is not None:
            tenant.broker.account.registry.begin_closing()
            await tenant.finish()
            await tenant.broker.plugins.unload_all()
        await tenant.disconnect()
