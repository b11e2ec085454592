# SPDX-License-Identifier: Apache-2.0
"""Periodic checks of the sessions that the shared reader serves, or may serve."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.delivery.position_recovery import renew_dormant
from mqtt_nats.shared_reader.promotion import RENEWAL, settled

if TYPE_CHECKING:
    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.shared_reader.sessions import SharedReaderSessions

log = logging.getLogger("mqtt_nats.broker")

EVERY: Final = 0.5
"""Seconds between two checks."""

REFUSED: Final = 10.0
"""Seconds of refusal by JetStream after which sessions go back to their own consumers."""

CROWD_MOST: Final = 100_000
"""Maximum number of waiting messages in all live sessions; beyond it sessions with the average or more fall behind."""

RETURNING_MOST: Final = 64
"""Maximum number of sessions that go back to their consumers at the same time for a reason outside the session."""

RENEWED_MOST: Final = 16
"""Maximum number of sessions whose dormant consumers are renewed in one check."""


async def keep_up(live: SharedReaderSessions) -> None:
    """Check the sessions every half second, for as long as the gateway runs."""
    while True:
        await asyncio.sleep(EVERY)
        try:
            look(live)
        except Exception:
            log.exception("the search for sessions that keep up failed")


def look(live: SharedReaderSessions) -> None:
    """Promote sessions that may become live, and demote live sessions that cannot stay live."""
    now = asyncio.get_running_loop().time()
    reader = live.reader
    refused = not live.allowed or (reader.refused and now - reader.refused > REFUSED)
    sides = [member.side for member in live.members.values()]
    # The sum leaves out sessions that have fallen behind: their messages wait until their clients take them.
    crowd = sum(side.machine.crowd for side in sides if side.live)
    renewed = 0
    for client in list(live.registry.clients.values()):
        side = client.durable_side
        if side is None:
            continue
        if side.live:
            machine = side.machine
            if refused or (crowd > CROWD_MOST and machine.crowd * len(live.members) >= crowd):
                if len(live.returning) < RETURNING_MOST:
                    crowd -= machine.crowd
                    live.give_back(client, side)
                continue
            if (reached := live.reached(side)) > machine.reached:
                machine.read_to(reached)
                if machine.crowd:
                    machine.pump()
            renewed += _renew(live, client, side, now, renewed)
        live.begin(client, side, now)


def _renew(live: SharedReaderSessions, client: Receiver, side: DurableDelivery, now: float, renewed: int) -> int:
    """Renew a session's dormant consumers if it is time; return the number of renewed sessions, 0 or 1."""
    member = live.members.get(client)
    if member is None or now < member.renewal or renewed >= RENEWED_MOST or not settled(client):
        return 0
    member.renew_at(now + RENEWAL)
    client.do(renew_dormant(client, side))
    return 1
