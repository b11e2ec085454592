# SPDX-License-Identifier: Apache-2.0
"""The end of a session: in time, or since somebody asks for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from mqtt_nats.base import server_clock as natstime
from mqtt_nats.hooks.calls import session
from mqtt_nats.hooks.points import SESSION_TERMINATED
from mqtt_nats.lifecycle.deadline import UNSET
from mqtt_nats.lifecycle.will import settle_wills
from mqtt_nats.sessions.record import discard_session, leftovers
from mqtt_streams.api import ApiError
from mqtt_streams.sessions import (
    V5,
    V5_PLAIN,
    WRONG_LAST_SEQUENCE,
    Conflict,
    NewerRecord,
    PoisonedRecord,
    SessionRecord,
)

if TYPE_CHECKING:
    from mqtt_nats.gateway.broker import Broker
    from mqtt_streams.timers import FiredTimer

log = logging.getLogger("mqtt_nats.broker")

ENDED: Final = "expired-"
"""Before the epoch in the nonce of a record that ends a session."""

POSTPONED: Final = 15.0
"""Seconds after which a timer fires again that only a newer gateway can deal with."""


async def expire(broker: Broker, timer: FiredTimer) -> None:
    """A session's deadline has passed: end it, unless its record was written since the timer was set.

    Done again from the start when it was interrupted: the timer then comes back.
    """
    try:
        found = await broker.sessions.load(timer.key)
    except NewerRecord as error:  # a gateway that can read it may take the timer then
        log.debug("a session whose deadline has passed is left to a newer gateway: %s", error)
        await postpone(broker, timer)
        return
    except PoisonedRecord as error:  # not the record for which the timer was set
        log.warning("a session whose deadline has passed cannot be read: %s", error)
        return
    if found is None:
        return
    record, sequence = found
    if sequence == timer.epoch:
        log.info("the session of %r has expired", record.client_id)
        session(broker, SESSION_TERMINATED, record.client_id, sequence)
        await end_session(broker, record, sequence)
    elif record.v5 is not None and record.v5.nonce == _expired(timer.epoch):
        await _remove(broker, record, sequence)


async def postpone(broker: Broker, timer: FiredTimer) -> None:
    """Have a timer of a session fire again in a while, unless another one has been set."""
    try:
        at = natstime.now() + POSTPONED
        await broker.timers.schedule(timer.kind, timer.key, at, timer.epoch, timer.payload, UNSET)
    except ApiError as error:
        if error.err_code not in WRONG_LAST_SEQUENCE:
            raise


async def end_session(broker: Broker, record: SessionRecord, sequence: int) -> bool:
    """End a session whose record was written with ``sequence``; False when somebody has claimed it since.

    It is claimed like any session, so that a client that connects at this moment either keeps it or gets a new one.
    """
    record = ended_record(record, broker.identity, sequence)
    reply = f"$MQTT.JSA.{broker.identity}.SP.{record.key}.{broker.new_nuid()}"
    try:
        sequence = await broker.sessions.save(record, expected=sequence, reply=reply)
    except Conflict:
        return False
    await _remove(broker, record, sequence)
    return True


async def _remove(broker: Broker, record: SessionRecord, sequence: int) -> None:
    """Remove what a session has left; its end also ends the delay of its will."""
    assert record.v5 is not None
    await settle_wills(broker, record.key, record.v5.wills, sequence, continued=False)
    await discard_session(broker, record, sequence)
    if await broker.sessions.delete(sequence):
        await broker.quotas.forget(record)


def ended_record(record: SessionRecord, identity: str, epoch: int) -> SessionRecord:
    """What takes the place of an expired session's record until everything of the session is removed."""
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
        pos=record.v5.pos if record.v5 is not None else "",
        version=record.v5.version if record.v5 is not None else V5_PLAIN,
        user=record.v5.user if record.v5 is not None else None,
        quota=record.v5.quota if record.v5 is not None else "",
    )
    return SessionRecord(record.client_id, identity, clean=True, v5=v5, key=record.key)


def is_ended(record: SessionRecord) -> bool:
    """Whether a record stands for a session that has ended, and is being removed."""
    return record.v5 is not None and record.v5.nonce.startswith(ENDED)


def _expired(epoch: int) -> str:
    """The nonce of a record that ends the session of ``epoch``."""
    return f"{ENDED}{epoch}"
