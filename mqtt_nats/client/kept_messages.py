# SPDX-License-Identifier: Apache-2.0
"""How long clients have kept messages without acknowledging them.

The data path notes no times: a look every few seconds sees whether the oldest message of a client is still the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client

log = logging.getLogger("mqtt_nats.broker")

KEPT_CHECK_S: Final = 5.0
"""Seconds between two looks: so much later at most than it was sent a message counts as kept."""

CLIENTS_PER_TURN: Final = 1000
"""Number of clients after which a look gives way to other tasks."""

Oldest = tuple[object, object]
"""The oldest message that a client has not acknowledged, and the oldest PUBREL without an answer; None = none."""


def oldest(client: Client) -> Oldest:
    """Return what a client has longest without an answer; a packet identifier where nothing else is known."""
    if client.durable_side is not None:
        machine = client.durable_side.machine
        return next(iter(machine.inflight.values()), None), next(iter(machine.releases.values()), None)
    if client.regular_side is not None:
        return next(iter(client.regular_side.inflight), None), None
    return None, None


class KeptMessages:
    """The oldest unacknowledged messages of the clients of one account, and since when they are known."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._known: dict[Client, tuple[Oldest, tuple[float, float]]] = {}

    async def watch_clients(self, clients: Collection[Client]) -> None:
        """Look every `KEPT_CHECK_S` for as long as the gateway runs."""
        while True:
            await asyncio.sleep(KEPT_CHECK_S)
            try:
                await self.look_at_clients(clients)
            except Exception:
                log.exception("the search for messages that clients keep failed")

    async def look_at_clients(self, clients: Collection[Client]) -> None:
        """Look once at all clients."""
        now = self._now()
        found: dict[Client, tuple[Oldest, tuple[float, float]]] = {}
        for number, client in enumerate(list(clients), 1):
            side = client.durable_side
            if side is not None and side.machine.identifiers.allocated and side.machine.open:
                side.machine.forget_absent()
            message, release = oldest(client)
            if message is not None or release is not None:
                (was, owed), (since, owed_since) = self._known.get(client, ((None, None), (now, now)))
                times = since if message == was else now, owed_since if release == owed else now
                found[client] = (message, release), times
            if not number % CLIENTS_PER_TURN:
                await asyncio.sleep(0)
        self._known = found

    def age(self, client: Client) -> float | None:
        """Return for how many seconds a client has kept its oldest message; None: none, or less than `KEPT_CHECK_S`."""
        known = self._known.get(client)
        if known is None:
            return None
        pairs = zip(oldest(client), *known, strict=True)
        since = [at for one, was, at in pairs if one is not None and one == was]
        return self._now() - min(since) if since else None
