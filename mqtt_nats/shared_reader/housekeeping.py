# SPDX-License-Identifier: Apache-2.0
"""What is looked at now and then for the sessions that the shared reader serves, or may serve."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.delivery.position_recovery import renew_dormant
from mqtt_nats.shared_reader.promotion import settled
from mqtt_nats.shared_reader.sessions import RENEWAL

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.shared_reader.sessions import SharedReaderSessions

log = logging.getLogger("mqtt_nats.broker")

EVERY: Final = 0.5
"""Seconds between two looks."""

REFUSED: Final = 10.0
"""Seconds for which JetStream has refused a reader after which sessions are left to their consumers."""

CROWD_MOST: Final = 100_000
"""Messages that wait in all live sessions; beyond it those in which most wait are behind."""

FALLING_MOST: Final = 64
"""Sessions that are left to their consumers at the same time, where that is not their own doing."""

RENEWED_MOST: Final = 16
"""Sessions whose dormant consumers are renewed in one look."""


async def keep_up(live: SharedReaderSessions) -> None:
    """Look every half second, for as long as the gateway runs."""
    while True:
        await asyncio.sleep(EVERY)
        try:
            look(live)
        except Exception:
            log.exception("looking for sessions that keep up")


def look(live: SharedReaderSessions) -> None:
    """Find sessions that may become live, and those that cannot stay it."""
    now = asyncio.get_running_loop().time()
    reader = live.reader
    refused = not live.allowed or (reader.refused and now - reader.refused > REFUSED)
    sides = [member.side for member in live.members.values()]
    # What waits in those that have fallen behind already is there until their clients have had it.
    crowd = sum(side.machine.crowd for side in sides if side.keeper is not None and side.keeper.taking)
    renewed = 0
    for client in list(live.broker.clients.values()):
        side = client.durable_side
        if side is None:
            continue
        if side.keeper is not None and side.keeper.taking:
            machine = side.machine
            if refused or (crowd > CROWD_MOST and machine.crowd * len(live.members) >= crowd):
                if len(live.falling) < FALLING_MOST:
                    crowd -= machine.crowd
                    live.give_back(client, side)
                continue
            if (reached := live.reached(side)) > machine.reached:
                machine.reached = reached
                if machine.crowd:
                    machine.pump()
            renewed += _renew(live, client, side, now, renewed)
        live.begin(client, side, now)


def _renew(live: SharedReaderSessions, client: Client, side: DurableDelivery, now: float, renewed: int) -> int:
    """Renew a session's dormant consumers where it is time; how many sessions that was."""
    member = live.members.get(client)
    if member is None or now < member.renewal or renewed >= RENEWED_MOST or not settled(client):
        return 0
    member.renewal = now + RENEWAL
    client.do(renew_dormant(client, side))
    return 1
