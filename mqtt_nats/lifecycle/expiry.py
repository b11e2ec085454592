# SPDX-License-Identifier: Apache-2.0
"""End of a session: at its deadline, with its dead gateway, or at an administrator's request."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.base import server_clock as natstime
from mqtt_nats.hooks.points import SESSION_TERMINATED
from mqtt_nats.hooks.session_notices import session
from mqtt_nats.lifecycle.deadline import UNSET
from mqtt_nats.lifecycle.will import settle_wills
from mqtt_nats.sessions.record import discard_expired, discard_session, last_sequences, leftovers, unfinished
from mqtt_streams.api import ApiError
from mqtt_streams.error_codes import WRONG_LAST_SEQUENCE
from mqtt_streams.sessions import (
    V5,
    Conflict,
    NewerRecord,
    PoisonedRecord,
    SessionRecord,
    claim_subject,
)

if TYPE_CHECKING:
    from mqtt_nats.lifecycle.will import Wills
    from mqtt_nats.sessions.record import Exchanges
    from mqtt_nats.sessions.services import Services
    from mqtt_streams.timers import FiredTimer

log = logging.getLogger("mqtt_nats.broker")

ENDED: Final = "expired-"
"""Beginning of the nonce of a record that ends a session; the epoch follows."""

TIMER_POSTPONED_S: Final = 15.0
"""Seconds after which a timer that only a newer gateway can handle fires again."""


async def expire(wills: Wills, timer: FiredTimer, exchanges: Exchanges | None) -> None:
    """End a session whose deadline has passed, unless its record was written after the timer was set.

    After an interruption the timer is delivered again, and all is done again from the start.

    Args:
        exchanges: listed since the timer was taken; None = not known.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream refuses a request or does not answer.
    """
    sessions = wills.services.streams.sessions
    record = await sessions.written_at(timer.key, timer.epoch)
    if record is not None and await _end_expired(wills, record, timer.epoch, exchanges):
        return
    try:
        found = await sessions.load(timer.key)
    except NewerRecord as error:  # a gateway that can read the record may take the timer when it fires again
        log.debug("a session whose deadline has passed is left to a newer gateway: %s", error)
        await postpone(wills, timer)
        return
    except PoisonedRecord as error:  # another record than the one for which the timer was set
        log.warning("a session whose deadline has passed cannot be read: %s", error)
        return
    if found is None:
        return
    record, sequence = found
    if sequence == timer.epoch:
        await _end_expired(wills, record, sequence, exchanges)
    elif record.v5 is not None and record.v5.nonce == _expired(timer.epoch):
        await _remove(wills, record, sequence)
        if unfinished(record):  # it was durable; whoever has ended it may not have known that
            _tell(wills, record, timer.epoch)


async def _end_expired(wills: Wills, record: SessionRecord, epoch: int, exchanges: Exchanges | None) -> bool:
    """End a session whose deadline has passed; False when its record was replaced since it had sequence ``epoch``."""
    ends = None if exchanges is None else await last_sequences(wills.services, record, exchanges)
    ended = await _claim(wills, record, epoch)
    if ended is None:
        return False
    if record.v5 is None or record.v5.kind == "durable":  # hooks know the end of other sessions
        _tell(wills, record, epoch)
    if exchanges is None or ends is None:
        await _remove(wills, *ended)
        return True
    await _settle(wills, *ended)
    await discard_expired(wills.services, *ended, ends, exchanges)
    await _forget(wills.services, *ended)
    return True


def _tell(wills: Wills, record: SessionRecord, epoch: int) -> None:
    """Tell that a session has expired; after an interruption it may be told twice."""
    log.info("the session of %r has expired", record.client_id)
    session(wills.services.hooks, SESSION_TERMINATED, record.client_id, epoch)


async def postpone(wills: Wills, timer: FiredTimer) -> None:
    """Have a timer of a session fire again after `TIMER_POSTPONED_S`, unless another timer was set."""
    try:
        at = natstime.now() + TIMER_POSTPONED_S
        await wills.services.streams.timers.schedule(timer.kind, timer.key, at, timer.epoch, timer.payload, UNSET)
    except ApiError as error:
        if error.err_code not in WRONG_LAST_SEQUENCE:
            raise


async def end_session(wills: Wills, record: SessionRecord, sequence: int) -> bool:
    """End a session whose record has stream sequence ``sequence``; False when it has been claimed since.

    The session is claimed first, as by a client: a client that connects at this moment keeps it or gets a new one.
    """
    ended = await _claim(wills, record, sequence)
    if ended is None:
        return False
    await _remove(wills, *ended)
    return True


async def _claim(wills: Wills, record: SessionRecord, sequence: int) -> tuple[SessionRecord, int] | None:
    """Replace the record of a session that ends; return the new record and its sequence, None when it was claimed."""
    identity = wills.services.identity
    record = ended_record(record, identity.id, sequence)
    reply = claim_subject(record.key, identity.id, identity.new_nuid())
    try:
        with wills.claims.hearing(record.key):
            return record, await wills.services.streams.sessions.save(record, expected=sequence, reply=reply)
    except Conflict:
        return None


async def _remove(wills: Wills, record: SessionRecord, sequence: int) -> None:
    """Remove all that an ended session has stored."""
    await _settle(wills, record, sequence)
    await discard_session(wills.services, record, sequence)
    await _forget(wills.services, record, sequence)


async def _settle(wills: Wills, record: SessionRecord, sequence: int) -> None:
    """Publish the wills of an ended session: its end also ends their delay."""
    assert record.v5 is not None
    await settle_wills(wills, record.key, record.v5.wills, sequence, continued=False)


async def _forget(services: Services, record: SessionRecord, sequence: int) -> None:
    """Remove the record of an ended session, which goes last, and the session from its quota."""
    if await services.streams.sessions.delete(record.key, sequence):
        await services.quotas.forget(record)


def ended_record(record: SessionRecord, identity: str, epoch: int) -> SessionRecord:
    """Return the record that replaces an ended session's record until all of the session is removed."""
    wills = record.v5.wills if record.v5 is not None else []
    shared = record.v5.shared if record.v5 is not None else {}
    v5 = V5(
        kind="regular",
        expiry=0,
        nonce=_expired(epoch),
        q2=True,
        draining=leftovers(record),
        wills=wills,
        shared=shared,
        leaving=list(record.v5.leaving) if record.v5 is not None else [],
        pos=record.v5.pos if record.v5 is not None else "",
        user=record.v5.user if record.v5 is not None else None,
        quota=record.v5.quota if record.v5 is not None else "",
    )
    return SessionRecord(record.client_id, identity, clean=True, v5=v5, key=record.key)


def is_ended(record: SessionRecord) -> bool:
    """Whether a record belongs to a session that has ended and is being removed."""
    return record.v5 is not None and record.v5.nonce.startswith(ENDED)


def _expired(epoch: int) -> str:
    """Return the nonce of the record that ends the session of ``epoch``."""
    return f"{ENDED}{epoch}"
