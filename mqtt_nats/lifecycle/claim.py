# SPDX-License-Identifier: Apache-2.0
"""Claims of sessions: the session that a client may claim, and claims whose store has an unknown outcome.

A client claims the session of its user, at the key of its client id or at its second key: see
docs/internals/lifecycle.md#keys-of-sessions and #users-of-sessions.

A claim that was stored although its client was refused makes the deadline of the session and the timers of delayed
wills void, as they name the record before the claim. Other gateways do not set new ones, since the record names a
gateway that runs: this gateway does. See docs/internals/sessions.md#unknown-outcomes.
"""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from mqtt_nats.backbone.retry import PAUSE
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.codec import InvalidClientId, MqttError, NotAuthorized, ReasonCode
from mqtt_nats.lifecycle.deadline import set_deadline
from mqtt_nats.lifecycle.expiry import end_session, is_ended
from mqtt_nats.lifecycle.will import delay_will, settle_wills
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import consumer_names
from mqtt_streams.hashing import held_token, name_hash, second_key
from mqtt_streams.messages import PREFIX as MESSAGE_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.sessions import V5, Draining, ForeignRecord, NewerRecord, PoisonedRecord, SessionRecord
from mqtt_streams.subjects import subject_to_filter, wire_topic
from mqtt_streams.timers import EXPIRY

if TYPE_CHECKING:
    from mqtt_nats.codec import Connect
    from mqtt_nats.lifecycle.will import Wills
    from mqtt_nats.sessions.session import Session
    from mqtt_nats.sessions.takeover import Claims

log = logging.getLogger("mqtt_nats.broker")

SETTLING: Final = 10.0
"""Seconds in which a record that was sent to its stream is stored, if ever: a leader may have to be elected first."""


NOBODY: Final = ""
"""User of the sessions of anonymous clients."""


class Claim(NamedTuple):
    """Key for a client's record, and the record that the claim replaces; ``expected``: its sequence, 0 = no record."""

    key: str
    record: SessionRecord | None
    expected: int


def user_of(client: Session) -> str:
    """Return the user to whom the session of a client belongs; `NOBODY` for an anonymous client."""
    return NOBODY if client.user is None else client.user


async def find_session(client: Session, claims: Claims, connect: Connect) -> Claim:
    """Find the session of a client, or the key for its new session.

    Raises:
        NotAuthorized: the session belongs to another user.
        MqttError: this gateway cannot read the session record.
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    first, second = name_hash(client.client_id), second_key(client.client_id, user_of(client))
    other_user = False
    found: Claim | None = None
    try:
        found = await _load(client, connect, first)
        other_user = found.record is not None and not await _may_claim(client, found.record, found.expected)
        if found.record is not None and not other_user:
            return found
    except ForeignRecord:
        log.info("%s: its session has its second key, since another client id has the same hash", client)
    if found is not None and not other_user and not await claims.look_for_second_keys():
        return found
    try:
        beside = await _load(client, connect, second)
    except ForeignRecord:  # another client id at the second key: no gateway writes such a record
        raise InvalidClientId("no session can be kept for this client id") from None
    if beside.record is not None:
        return beside
    if found is not None and not other_user:
        return found
    if other_user and client.services.settings.session_of_other_user == "refuse":
        raise NotAuthorized("the session of this client id belongs to another user")
    return beside


async def forget_second(client: Session, claims: Claims, wills: Wills) -> None:
    """End the client's session at its second key: a session that ends with its connection has begun at the first key.

    [MQTT-3.1.2-4] (3.1.1, 5.0)
    """
    services = client.services
    try:
        if await claims.look_for_second_keys():
            found = await services.streams.sessions.load(
                second_key(client.client_id, user_of(client)), client.client_id
            )
            if found is not None:
                await end_session(wills, *found)
    except (PoisonedRecord, ApiError, NoResponders, RequestTimeout) as error:
        log.debug("%s: the record at its second key cannot be read: %s", client, error)


async def _load(client: Session, connect: Connect, key: str) -> Claim:
    try:
        found = await client.services.streams.sessions.load(key, client.client_id)
    except NewerRecord as error:  # also for a clean start: only a newer gateway knows what the session has to remove
        log.warning("%s: only a newer gateway can serve its session: %s", client, error)
        raise MqttError(str(error), ReasonCode.SERVER_UNAVAILABLE) from None
    except ForeignRecord:
        raise
    except PoisonedRecord as error:
        if connect.clean_start:
            log.warning("%s: its clean start replaces a record that cannot be read: %s", client, error)
            names = await consumer_names(client.services.nats.inbox, MESSAGES, f"{key}_")
            consumers = [Draining(name, ">", 0, 0) for name in names]
            return Claim(key, SessionRecord(client.client_id, v5=V5(q2=True, draining=consumers), key=key), error.seq)
        log.error(
            "%s: its session record (sequence %d of $MQTT_sess) cannot be read: %s; "
            "connect once with a clean session to discard it",
            client,
            error.seq,
            error,
        )
        raise MqttError(str(error), ReasonCode.SERVER_UNAVAILABLE) from None
    return Claim(key, None, 0) if found is None else Claim(key, *found)


async def _may_claim(client: Session, record: SessionRecord, sequence: int) -> bool:
    """Whether a session belongs to the client's user, or to no user and the client may subscribe and publish it all."""
    user = record.v5.user if record.v5 is not None else None
    if user is not None:
        return user == user_of(client) or is_ended(record) or await has_expired(client, record, sequence)
    return _may_read(client, record) and await _may_release(client, record)


def _may_read(client: Session, record: SessionRecord) -> bool:
    """Whether the client may subscribe all filters of a session, ended ones with undelivered messages included."""
    guard = client.guarded
    if guard is None:
        return True
    wanted = [*record.subs.items()]
    if record.v5 is not None:
        wanted += [(one.filter_subject.removeprefix(MESSAGE_PREFIX), one.qos) for one in record.v5.draining if one.qos]
        if not all(guard.allows(text, one.qos) for text, one in record.v5.shared.items()):
            return False
    for subject, qos in wanted:
        try:
            topic_filter = subject_to_filter(subject)
        except ValueError:  # a subscription of nats-server's listener that a resume leaves out
            continue
        if not guard.allows(topic_filter, qos):
            return False
    return True


async def _may_release(client: Session, record: SessionRecord) -> bool:
    """Whether the client may publish all messages that are held for a session."""
    guard = client.guarded
    if guard is None:
        return True
    for held in await client.services.streams.held.held(held_token(record.client_id, record.key)):
        topic = wire_topic((held.mapped or held.subject).encode())
        if topic is None:
            continue
        encoded = topic.encode()
        if not guard.permits(len(encoded).to_bytes(2, "big") + encoded, 2, held.retain):
            return False
    return True


async def has_expired(client: Session, known: SessionRecord, sequence: int) -> bool:
    """Whether a session has expired: its timer has fired, although no gateway may have handled it yet."""
    expiry = known.v5.expiry if known.v5 is not None else None
    if expiry is None or natstime.now() - known.time_ns / 1e9 < expiry:
        return False
    return await client.services.streams.timers.fired(EXPIRY, known.key) == sequence


async def leave_claimed(client: Session, wills: Wills, expected: int, *, continued: bool) -> None:
    """Find out whether a claim was stored; if so, leave the session as one whose connection has just ended.

    Args:
        expected: sequence of the record that the claim was to replace; 0 = none.
        continued: the claim was to go on with an earlier session.
    """
    loop = asyncio.get_running_loop()
    until = inf
    pause = PAUSE
    while True:
        await client.services.nats.online.wait()
        try:
            if await _leave(client, wills, expected, continued) or loop.time() > until:
                return
            until = min(until, loop.time() + SETTLING)
        except PoisonedRecord:  # a record that this gateway has not written
            return
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("%s: it is not known yet whether it has claimed its session: %s", client, error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, SETTLING)


async def _leave(client: Session, wills: Wills, expected: int, continued: bool) -> bool:
    """Read the record once; False: neither the claim nor another record was stored so far."""
    services = client.services
    mine = client.record
    assert mine is not None
    assert mine.v5 is not None
    found = await services.streams.sessions.load(client.hash, client.client_id)
    if (0 if found is None else found[1]) == expected:
        return False
    if found is None or found[0].v5 is None or found[0].v5.nonce != mine.v5.nonce:
        return True
    record, epoch = found
    client.claim(epoch)
    log.info("%s: the client was refused after it had claimed its session: the session is released", client)
    if continued:
        await _delay_wills(client, wills, record)
    else:
        await settle_wills(wills, client.hash, found[0].v5.wills, client.epoch, continued=False)
    latest = await services.streams.sessions.load(client.hash, client.client_id)
    if latest is not None and latest[1] == epoch:  # else another connection has claimed the session meanwhile
        set_deadline(client, None if client.expiry is None else natstime.now() + client.expiry)
        services.nats.link.kick()
    return True


async def _delay_wills(client: Session, wills: Wills, record: SessionRecord) -> None:
    """Set the delays of a session's wills anew from now, as at the end of a connection; publish wills without one."""
    services = client.services
    assert record.v5 is not None
    for gateway in record.v5.wills:
        will = await services.streams.wills.load(gateway, client.hash)
        if will is None or will.epoch >= client.epoch:
            continue
        if will.delay and client.expiry != 0:
            delay = will.delay if client.expiry is None else min(will.delay, client.expiry)
            delay_will(services, will, client.epoch, natstime.now() + delay)
        else:
            await settle_wills(wills, client.hash, [gateway], client.epoch, continued=False)
