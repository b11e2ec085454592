# SPDX-License-Identifier: Apache-2.0
"""Bans in the whole cluster, and clients that connect too often.

A ban is a key in a KV bucket of JetStream with a TTL; all gateways hear of its write at once. Writes that were missed
without a connection are read afterwards. Without NATS the known bans stay in force, and a new ban is in force here
until it can be stored. See docs/internals/lifecycle.md#bans.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.base.bans import PAIRS, Ban, Bans, ban, pair
from mqtt_nats.base.flapping import Flapping
from mqtt_nats.base.networks import household, parse_host
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.bans import PREFIX, BanStore, read_ban
from mqtt_streams.gateway_subjects import BANS

if TYPE_CHECKING:
    from mqtt_nats.sessions.services import Services
    from mqtt_nats.sessions.session import Session

log = logging.getLogger("mqtt_nats.audit")

SUBJECTS: Final = f"{PREFIX}>".encode()

BANS_READ_S: Final = 60.0
"""Seconds between two reads of all bans; the gateway receives writes between them."""

BANS_RETRY_S: Final = 2.0
"""Seconds until the next read without an answer, and until the second read after a reconnect."""


class Banning:
    """Bans that this gateway knows, and its counts of connections."""

    def __init__(self, services: Services) -> None:
        settings = services.settings
        self._services = services
        self._store = BanStore(services.nats.inbox)
        self.bans = Bans()
        self._unsaved: dict[tuple[str, str], Ban] = {}
        """Bans that this gateway has set and that are not stored yet."""
        self._heard: list[dict[str, Any]] = []
        """Writes that came since the last read of all bans: a write may arrive before it is stored."""
        self._renewed = True
        """The subscription is new, so the next read is soon: a ban published before it may not have been stored yet."""
        self._wake = asyncio.Event()
        window = settings.flapping_window
        by_id, by_address = settings.flapping_connects, settings.flapping_connects_per_address
        self._by_id = None if by_id is None else Flapping(by_id, window)
        self._by_address = None if by_address is None else Flapping(by_address, window)
        services.nats.reconnect.subscribe(BANS if settings.jetstream_domain else SUBJECTS, self._arrived)
        services.nats.reconnect.register(Phase.REQUESTS, self.read_missed)

    # -- questions ------------------------------------------------------------------------------

    def address(self, host: str) -> bool:
        """Whether an address is banned."""
        return bool(self.bans) and self.bans.find(natstime.now(), host=host) is not None

    @property
    def quiet(self) -> bool:
        """True when no bans exist and no connections are counted: `admit` has nothing to check."""
        return not self.bans and self._by_id is None and self._by_address is None

    async def admit(self, client: Session, client_id: str, *, known: bool) -> None:
        """Refuse a banned client, and delay a client that connects too often.

        Args:
            known: the client is authenticated, so it counts by client id and user; before, by its address only.

        Raises:
            MqttError: the client is banned.
        """
        host = client.connection.host
        now = natstime.now()
        user = client.granted.user if known else None
        # Where users may belong to other tenants, a ban of a client id applies only when the tenant is known.
        named = client_id if known or self._services.identity.tenant or not self._services.settings.tenants else ""
        self._refuse(self.bans.find(now, client=named, user=user, host=host, proved=known))
        delay: float | None = 0.0
        if known and self._by_id is not None:
            kind, value = pair(client_id, user, host)
            delay = self._by_id.connects(f"{kind} {value}", now)
            if delay is None:
                self._refuse(self._flaps(kind, value))
        elif not known and self._by_address is not None and parse_host(host) is not None:
            delay = self._by_address.connects(household(host), now)
            if delay is None:
                self._refuse(self._flaps("address", household(host) + ("/64" if ":" in household(host) else "")))
        if delay:
            await asyncio.sleep(delay)
            self._refuse(self.bans.find(natstime.now(), client=named, user=user, host=host, proved=known))

    def _refuse(self, found: Ban | None) -> None:
        if found is not None:
            raise MqttError(f"{found} is banned", ReasonCode.BANNED)

    def _flaps(self, kind: str, value: str) -> Ban:
        until = natstime.now() + self._services.settings.flapping_ban
        one = ban(kind, value, until, "it connects too often", self._services.identity.id)
        self._unsaved[one.kind, one.value] = one
        self._wake.set()
        self._set(one)
        return one

    # -- what is stored -------------------------------------------------------------------------

    def _set(self, one: Ban) -> None:
        """Put a ban into force, and end the connections that it concerns."""
        if not one.holds(natstime.now()):
            return
        known = self.bans.get(one.kind, one.value) == one
        self.bans.put(one)
        if known:
            return
        log.warning(
            "%s is banned by %s: %s", one, one.by or "an unknown administrator", one.reason or "no reason given"
        )
        error = MqttError("banned", ReasonCode.ADMINISTRATIVE_ACTION)
        for client in list(self._services.registry.connections):
            if client.alive and client.client_id and self._is_about(one, client):
                client.end_connection(error)

    def _is_about(self, one: Ban, client: Session) -> bool:
        if one.kind == "client":
            return client.client_id == one.value
        if one.kind == "user":
            return client.granted.user == one.value
        if one.kind in PAIRS:
            return pair(client.client_id, client.granted.user, client.connection.host) == (one.kind, one.value)
        alone = Bans()
        alone.put(one)
        return alone.find(0.0, host=client.connection.host) is not None

    def _arrived(self, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        found = read_ban(payload)
        if found is not None:
            self._heard.append(found)
            self._take(found)

    def _take(self, found: dict[str, Any]) -> None:
        try:
            one = ban(found["kind"], found["value"], found["until"], found["reason"], found["by"])
        except ValueError as error:
            log.error("a ban cannot be used: %s", error)
            return
        if found["lifted"]:
            self._unsaved.pop((one.kind, one.value), None)
            if self.bans.get(one.kind, one.value) is not None:
                log.warning("ban lifted: %s", one)
            self.bans.remove(one.kind, one.value)
        else:
            self._set(one)

    def read_missed(self) -> None:
        """Read the bans that were missed, after a reconnect."""
        self._heard.clear()
        self._renewed = True
        self._wake.set()

    async def begin(self) -> None:
        """Read the bans before clients may connect; without an answer :meth:`follow_bans` reads them later."""
        try:
            await self._read()
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.warning("bans cannot be read yet: %s", error)

    async def follow_bans(self) -> None:
        """Store new bans and read all bans again and again, for as long as the gateway runs."""
        while True:
            wait = BANS_RETRY_S if self._renewed else BANS_READ_S
            self._renewed = False
            try:
                await self._save()
                await self._read()
            except (ApiError, NoResponders, RequestTimeout) as error:
                log.debug("bans: %s", error)
                wait = BANS_RETRY_S
            self.bans.expire(natstime.now())
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _save(self) -> None:
        for key, one in list(self._unsaved.items()):
            if one.holds(natstime.now()):
                await self._store.add(*one, natstime.now())
            self._unsaved.pop(key, None)

    async def _read(self) -> None:
        there = {(one["kind"], one["value"]): one for one in await self._store.all()}
        heard, self._heard = self._heard, []
        for one in heard:
            there[one["kind"], one["value"]] = one
        for known in list(self.bans):
            if (known.kind, known.value) not in there and (known.kind, known.value) not in self._unsaved:
                self.bans.remove(known.kind, known.value)
        for one in there.values():
            self._take(one)
