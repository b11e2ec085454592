# SPDX-License-Identifier: Apache-2.0
"""Failover of a dead gateway: its wills are published, its sessions end at once or at their deadlines.

All of it may be done twice, and by two gateways: each step is conditional on the record that it has read, or finds
nothing the second time.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from mqtt_nats.ingress.retained.store import is_retained
from mqtt_nats.lifecycle.deadline import UNSET
from mqtt_nats.lifecycle.expiry import end_session
from mqtt_nats.lifecycle.will import publish_and_wait, set_will_timer, settle_wills
from mqtt_streams import stored
from mqtt_streams.api import ApiError
from mqtt_streams.error_codes import WRONG_LAST_SEQUENCE
from mqtt_streams.gateways import Entry
from mqtt_streams.headers import EPOCH, get_int
from mqtt_streams.pages import pages_of
from mqtt_streams.qos2 import releases_stored
from mqtt_streams.sessions import (
    PREFIX,
    STREAM,
    NewerRecord,
    PoisonedRecord,
    SessionRecord,
    decode,
)
from mqtt_streams.timers import EXPIRY, timer_subject
from mqtt_streams.timers import STREAM as TIMERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mqtt_nats.lifecycle.will import Wills
    from mqtt_nats.observability.presence import Presence
    from mqtt_nats.sessions.services import Services
    from mqtt_streams.stored import StoredMessage
    from mqtt_streams.wills import StoredWill

log = logging.getLogger("mqtt_nats.broker")


HANDLED_AT_ONCE: Final = 32
"""Sessions or wills that are handled at the same time."""

LOOK_BACK: Final = 10.0
"""Seconds before a gateway's last sign of life in which it may have published a will without its deletion."""


async def publish_wills(wills: Wills, dead: Entry) -> int:
    """Publish the wills of a dead gateway, or set their timers; returns the number of wills.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    owed = await wills.services.streams.wills.of_gateway(dead.identity)
    done = await _published_before(wills.services, dead, owed)
    for start in range(0, len(owed), HANDLED_AT_ONCE):
        await asyncio.gather(
            *(_will(wills, dead, will, will.epoch in done) for will in owed[start : start + HANDLED_AT_ONCE])
        )
    return len(owed)


async def fail_over(wills: Wills, presence: Presence, dead: Entry, published: int = 0) -> None:
    """Publish the wills of a dead gateway, and end its sessions or set their deadlines.

    Args:
        published: number of its wills that were published before.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    count = published + await publish_wills(wills, dead)
    sessions = 0
    inbox = wills.services.nats.inbox
    async with aclosing(pages_of(inbox, STREAM, PREFIX + ">", newest=True)) as pages:
        async for page in pages:
            owned = list(_owned(page, dead))
            for start in range(0, len(owned), HANDLED_AT_ONCE):
                await asyncio.gather(
                    *(_session(wills, presence, dead, *one) for one in owned[start : start + HANDLED_AT_ONCE])
                )
            sessions += len(owned)
    log.info("gateway %s: %d wills and %d sessions were taken over", dead.identity, count, sessions)


def _owned(page: list[StoredMessage], dead: Entry) -> Iterator[tuple[SessionRecord, int]]:
    """Yield the records of a dead gateway's sessions with their sequences."""
    for message in page:
        try:
            record = decode(message.payload, key=message.subject.rpartition(".")[2])
        except PoisonedRecord:
            continue
        if record.v5 is not None and record.v5.owner == dead.identity:
            yield record, message.seq


async def _published_before(services: Services, dead: Entry, wills: list[StoredWill]) -> set[int]:
    """Return the epochs of the wills that a dead gateway has published but not deleted.

    Other gateways have delivered these wills and may have forgotten their ids: see docs/internals/lifecycle.md#wills.
    """
    since = int((dead.alive - LOOK_BACK) * 1e9)
    names: dict[str, dict[str, StoredWill]] = {}
    for will in wills:
        route = services.path.table.route_to(will.subject.encode()) if will.qos else None
        if route is not None:
            names.setdefault(route.subject, {})[will.release.decode()] = will

    async def look(subject: str) -> set[int]:
        known = names[subject]
        found = [known[name] for name in await releases_stored(services.nats.inbox, subject, known.keys(), since)]
        # A will whose retained copy is missing is published again, with that copy.
        return {
            will.epoch
            for will in found
            if not will.retain or await is_retained(services.streams, subject, will.payload, since)
        }

    done: set[int] = set()
    subjects = list(names)
    for start in range(0, len(subjects), HANDLED_AT_ONCE):
        done.update(*await asyncio.gather(*(look(subject) for subject in subjects[start : start + HANDLED_AT_ONCE])))
    return done


async def _will(wills: Wills, dead: Entry, will: StoredWill, done: bool) -> None:
    """Publish a will at once or after its delay, which counts from the gateway's last sign of life.

    Args:
        done: the will has been published and is only deleted.
    """
    if done:
        await wills.services.streams.wills.delete(will)
        return
    try:
        found = await wills.services.streams.sessions.load(will.client_hash)
    except NewerRecord:
        return  # the session's new owner deals with the will
    except PoisonedRecord:
        found = None
    if found is not None and found[0].v5 is not None and found[0].v5.owner != dead.identity:
        if dead.identity not in found[0].v5.wills:  # the new owner has looked for wills before this one was stored
            await wills.services.streams.wills.delete(will)
        return  # else the session's new owner deals with the will
    record = found[0] if found is not None else None
    v5 = record.v5 if record is not None else None
    if found is None or v5 is None or not will.delay or v5.kind == "regular" or v5.expiry == 0:
        await publish_and_wait(wills, will)
        return
    delay = will.delay if v5.expiry is None else min(will.delay, v5.expiry)
    set_will_timer(wills.services, will, found[1], dead.alive + delay)


async def _session(wills: Wills, presence: Presence, dead: Entry, record: SessionRecord, sequence: int) -> None:
    """End a session that ends with its connection; set the deadline of any other session."""
    v5 = record.v5
    assert v5 is not None
    if v5.kind == "regular" or v5.expiry == 0:
        if await end_session(wills, record, sequence):
            presence.lost(dead.identity, record.client_id, sequence)
        return
    # Wills of earlier gateways that the dead gateway had not dealt with; its own wills are under its own id.
    others = [gateway for gateway in v5.wills if gateway != dead.identity]
    if others:
        await settle_wills(wills, record.key, others, sequence + 1, continued=True)
    if await _deadline(wills, record, sequence, None if v5.expiry is None else dead.alive + v5.expiry):
        presence.lost(dead.identity, record.client_id, sequence)


async def _deadline(wills: Wills, record: SessionRecord, sequence: int, at: float | None) -> bool:
    """Set the timer of a session; False when it has one, since its connection had ended before its gateway died."""
    client_hash = record.key
    payload = record.client_id.encode()
    try:
        await wills.services.streams.timers.schedule(EXPIRY, client_hash, at, sequence, payload, UNSET)
    except ApiError as error:
        if error.err_code not in WRONG_LAST_SEQUENCE:
            raise
        present = await stored.get_last(wills.services.nats.inbox, TIMERS, timer_subject(EXPIRY, client_hash))
        if present is None or (get_int(present.headers, EPOCH) or 0) >= sequence:
            return False
        await wills.services.streams.timers.cancel(EXPIRY, client_hash, sequence)
        await wills.services.streams.timers.schedule(EXPIRY, client_hash, at, sequence, payload, UNSET)
    return True
