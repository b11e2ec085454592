# SPDX-License-Identifier: Apache-2.0
"""Desired state of all gateways: plugins to load or unload, and requests to read files again.

Wishes are in a KV bucket of JetStream. A gateway reads all wishes before it listens, receives new wishes at once, and
reads the wishes that it has missed after it was without NATS. See docs/internals/gateway.md#wishes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import orjson

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.plugins.manager import Plugins
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.fleet import PREFIX, FleetStore, Wish, read_wish
from mqtt_streams.gateway_subjects import RELOAD

if TYPE_CHECKING:
    from mqtt_nats.gateway.fleet_pause import FleetPause
    from mqtt_nats.sessions.services import Services

log = logging.getLogger("mqtt_nats.broker")

SUBJECTS: Final = f"{PREFIX}>".encode()

WISHES_READ_S: Final = 60.0
"""Seconds between two reads of all wishes; new wishes are received in between."""

WISHES_RETRY_S: Final = 2.0
"""Seconds until the next read after a read without an answer."""


class Fleet:
    """Desired state of all gateways, as applied by this gateway.

    Args:
        reload: reads files again; returns the problems, one line each.
        pause: is told of what the bucket says of a pause.
    """

    def __init__(
        self, services: Services, plugins: Plugins, reload: Callable[[], list[str]], pause: FleetPause
    ) -> None:
        self._services = services
        self._plugins = plugins
        self._reload = reload
        self._pause = pause
        self._store = FleetStore(services.nats.inbox)
        self._done: dict[tuple[str, str], str] = {}
        """Id of the last wish that was applied, by kind and name."""
        self._heard: list[Wish] = []
        self._problems: list[str] = []
        self._wake = asyncio.Event()
        services.nats.reconnect.subscribe(SUBJECTS, self._arrived)
        services.nats.reconnect.subscribe(RELOAD, self._asked)
        services.nats.reconnect.register(Phase.REQUESTS, self._wake.set)

    async def begin(self) -> None:
        """Load the plugins of the configuration and of the wishes, before any client may connect.

        Raises:
            StartupError: a plugin of the configuration cannot be loaded.
        """
        wishes: list[Wish] = []
        try:
            wishes = await self._store.all()
            await self._pause.look_for_pause(self._store)
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.warning("requests to all gateways cannot be read yet: %s", error)
        for wish in wishes:
            self._done[wish.kind, wish.name] = wish.identity
        await self._plugins.start({wish.name: wish.loaded for wish in wishes if wish.kind == "plugin"})

    async def follow_wishes(self) -> None:
        """Apply wishes for as long as the gateway runs."""
        wait = WISHES_READ_S
        while True:
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            wait = WISHES_READ_S
            heard, self._heard = self._heard, []
            try:
                wishes = await self._store.all()
                await self._pause.look_for_pause(self._store)
            except (ApiError, NoResponders, RequestTimeout) as error:
                log.debug("requests to all gateways: %s", error)
                wishes, wait = [], WISHES_RETRY_S
            # A received wish may be on its way into the stream still, so it counts in addition.
            latest = {(wish.kind, wish.name): wish for wish in (*wishes, *heard)}
            for wish in latest.values():
                await self._do(wish)

    def _arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        self._pause.heard(payload)
        wish = read_wish(payload)
        if wish is not None:
            self._heard.append(wish)
            self._wake.set()

    async def _do(self, wish: Wish) -> None:
        about = (wish.kind, wish.name)
        if self._done.get(about) == wish.identity:
            return
        if wish.kind == "reload":
            self._read_again(wish.identity)
            return
        self._done[about] = wish.identity
        await self._plugins.fulfil(wish.name, wish.loaded)

    def _read_again(self, identity: str) -> None:
        if self._done.get(("reload", "")) != identity:
            self._done["reload", ""] = identity
            self._problems = self._reload()

    def _asked(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        try:
            question = orjson.loads(payload)
            identity, gateway = question["id"], question["gateway"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return
        if not isinstance(identity, str) or gateway not in ("", self._services.identity.id):
            return
        self._read_again(identity)
        answer: dict[str, Any] = {"id": self._services.identity.id, "problems": self._problems}
        if reply:
            body = orjson.dumps(answer)
            self._services.nats.link.out.append(b"PUB %b %d\r\n%b\r\n" % (reply, len(body), body))
            self._services.nats.link.kick()
