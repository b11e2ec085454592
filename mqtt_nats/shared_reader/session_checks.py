# SPDX-License-Identifier: Apache-2.0
"""Periodic checks of the sessions that the shared reader serves."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from mqtt_nats.delivery.dormant_consumers import first_incomplete, follow_position, renew_dormant
from mqtt_nats.shared_reader.sessions import DORMANT_RENEWAL_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Set

    from mqtt_nats.delivery.durable import DurableDelivery
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.shared_reader.reader_session import ReaderSession
    from mqtt_nats.shared_reader.sessions import SharedReaderSessions

log = logging.getLogger("mqtt_nats.broker")

EVERY: Final = 0.5
"""Seconds between two checks."""

CROWD_MOST: Final = 100_000
"""Maximum number of waiting messages in all live sessions; beyond it sessions with the average or more fall behind."""

RENEWED_MOST: Final = 16
"""Maximum number of sessions whose dormant consumers are renewed in one check."""

FOLLOWED_MOST: Final = 64
"""Maximum number of sessions whose dormant consumers are set to their positions in one check."""


async def keep_up(live: SharedReaderSessions, waiting: Set[DurableDelivery]) -> None:
    """Check the sessions every half second while the gateway runs; ``waiting``: `DeliveryServices.waiting`."""
    while True:
        await asyncio.sleep(EVERY)
        try:
            look(live, waiting)
        except Exception:
            log.exception("the check of the sessions of the shared reader failed")


def look(live: SharedReaderSessions, waiting: Set[DurableDelivery]) -> None:
    """Bound the messages that wait, and renew dormant consumers."""
    # Only sessions that readers serve: messages of others wait until their clients take them.
    _stop_crowded(live, [side for side in waiting if side.live and side.machine.crowd])
    _renew(live, asyncio.get_running_loop().time())
    if live.listener:
        _follow(live)


@contextmanager
def _checking(client: Receiver) -> Iterator[None]:
    """Log the failure of a session's check: the checks of the other sessions follow."""
    try:
        yield
    except Exception:
        log.exception("%s: the check of its delivery failed", client)


def _stop_crowded(live: SharedReaderSessions, crowded: list[DurableDelivery]) -> None:
    """Give no more messages to sessions for which most wait, if too many wait in all."""
    crowd = sum(side.machine.crowd for side in crowded)
    for side in crowded:
        with _checking(side.client):
            machine = side.machine
            member = live.members.get(side.client)
            if crowd <= CROWD_MOST or machine.crowd * len(live.members) < crowd or side in live.catching:
                continue
            if member is not None and member.side is side:
                crowd -= machine.crowd
                live.fall_behind(member)


def _renew(live: SharedReaderSessions, now: float) -> None:
    """Renew the dormant consumers of the sessions for which it is time."""
    renewed = 0
    for client in live.renewals.due(now):
        with _checking(client):
            side = client.durable_side
            if side is None:
                continue
            live.renewals.put(client, now + DORMANT_RENEWAL_S)
            if not side.live or renewed >= RENEWED_MOST or client.busy:
                live.renewals.put(client, now)
                continue
            renewed += 1
            client.do(renew_dormant(client, side))


def _follow(live: SharedReaderSessions) -> None:
    """Set the dormant consumers of sessions whose positions have moved; those that had their turn come last."""
    followed = 0
    for client, member in list(live.members.items()):
        with _checking(client):
            if followed == FOLLOWED_MOST:
                return
            first = _following(member)
            if first and member.show(first):
                followed += 1
                live.members[client] = live.members.pop(client)
                client.do(follow_position(client, member.side, first))


def _following(member: ReaderSession) -> int:
    """Return the sequence to which a session's dormant consumers are to be set; 0: they stay as they are."""
    position_writer, side, client = member.side.position_writer, member.side, member.client
    if position_writer is None or not side.live or client.busy or not client.delivery.resets:
        return 0
    if all(one.removed for one in side.bindings.values()):
        return 0
    ledger = position_writer.ledger
    # The listener finds no record of a PUBREL that is owed meanwhile: the message has to come again.
    return min([first_incomplete(ledger), *ledger.released.values()])
