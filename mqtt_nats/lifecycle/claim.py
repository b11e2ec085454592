# SPDX-License-Identifier: Apache-2.0
"""Claims of sessions: the session that a client may claim, its claim, and claims whose store has an unknown outcome.

A session has one owner in the whole cluster: the connection that wrote the session's record last. The stream
sequence of that write is the epoch. The write is conditional on the record that was read. Its acknowledgement also
reaches the former owner, in a gateway or in nats-server's own listener, and tells it that the session has moved.

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

from mqtt_nats.backbone.pending_stores import FULL, lacks_room
from mqtt_nats.backbone.retry import RETRY_PAUSE_S
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.base.networks import household
from mqtt_nats.codec import InvalidClientId, MqttError, NotAuthorized, QuotaExceeded, ReasonCode
from mqtt_nats.hooks.points import SESSION_CREATED, SESSION_DISCARDED, SESSION_RESUMED, SESSION_TERMINATED
from mqtt_nats.hooks.session_notices import session
from mqtt_nats.lifecycle.deadline import set_deadline
from mqtt_nats.lifecycle.expiry import is_ended
from mqtt_nats.lifecycle.will import keep_will, reset_will_timers, settle_wills
from mqtt_nats.sessions.guard import may_read_all
from mqtt_nats.sessions.quotas import holder
from mqtt_nats.sessions.record import claimed, discard_session, is_empty, leftovers, save_record, unfinished
from mqtt_nats.sessions.unrecorded import begin_unrecorded
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout, call
from mqtt_streams.consumers import consumer_info, consumer_names
from mqtt_streams.hashing import held_token, name_hash, second_key
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.positions import STREAM as POSITIONS
from mqtt_streams.positions import decode
from mqtt_streams.quotas import quota_of
from mqtt_streams.sessions import (
    FIRST,
    V5,
    Conflict,
    Draining,
    ForeignRecord,
    NewerRecord,
    NoRecord,
    PoisonedRecord,
    SessionRecord,
)
from mqtt_streams.sessions import STREAM as SESSIONS
from mqtt_streams.subjects import wire_topic
from mqtt_streams.timers import EXPIRY

if TYPE_CHECKING:
    from mqtt_nats.backbone.retry import TimedPermit
    from mqtt_nats.codec import Connect
    from mqtt_nats.delivery.receiver import Receiver
    from mqtt_nats.lifecycle.lease import Lease
    from mqtt_nats.lifecycle.will import Wills
    from mqtt_nats.sessions.session import Session
    from mqtt_nats.sessions.takeover import Claims, RecordReads

log = logging.getLogger("mqtt_nats.broker")

# Attempts to claim a session. Of n concurrent claims of one session the last needs n attempts.
CLAIM_ROUNDS: Final = 20

RECORDS_ANSWER_MOST_S: Final = 5.0
"""Seconds for which CONNECT waits until JetStream answers, when other reads of records are not answered."""

RECORD_STORED_MOST_S: Final = 10.0
"""Seconds in which a record that was sent to its stream is stored, if ever: a leader may have to be elected first."""

NOBODY: Final = ""
"""User of the sessions of anonymous clients."""

NO_FORMER: Final = V5()
"""Part of the former session's record where there is no former session; it is only read."""


class Claim(NamedTuple):
    """Key for a client's record, and the record that the claim replaces; ``expected``: sequence, 0 = nothing there."""

    key: str
    record: SessionRecord | None
    expected: int


def user_of(client: Session) -> str:
    """Return the user to whom the session of a client belongs; `NOBODY` for an anonymous client."""
    return NOBODY if client.user is None else client.user


# -- the claim ----------------------------------------------------------------------------------------


async def announce_claim(client: Receiver, connect: Connect, claims: Claims, lease: Lease) -> None:
    """Prepare for the claim of a session: wait for the lease, and for packets of the client's earlier connections.

    A session that needs no record does not wait for a lease that JetStream has no room for.

    Raises:
        RequestTimeout: the lease is not renewed, records cannot be read, or the client has gone meanwhile.
    """
    earlier = claims.listen(client)
    if not (lease.lasts() or (lease.full and _needs_no_record(client, connect))):
        await lease.confirmed(client)
    if client.services.records.silent:  # a claim whose outcome is unknown would leave work for later
        await _readable(client.services.records)
    if earlier:
        await claims.turn(client)


async def _readable(reads: RecordReads) -> None:
    """Wait until session records can be read.

    Raises:
        RequestTimeout: that takes too long.
    """
    try:
        async with asyncio.timeout(RECORDS_ANSWER_MOST_S):
            await reads.answered()
    except TimeoutError:
        raise RequestTimeout(f"JetStream does not answer: {reads.obstacle}") from None


async def claim_session(client: Receiver, connect: Connect, wills: Wills, lease: Lease, place: TimedPermit) -> bool:
    """Claim the announced session for a CONNECT, and store its will; return whether an earlier session goes on.

    Args:
        place: of the claim; it leaves the place where it has to wait long for the notes of a quota.

    Raises:
        MqttError: the client may not have the session, or another connection has it.
        ApiError, NoResponders, RequestTimeout, TimeoutError: JetStream refuses a request or does not answer.
    """
    if not lease.lasts():  # it has ended since the announcement
        if lease.full and _needs_no_record(client, connect):
            return await _claim_without_record(client, connect, wills)
        await lease.confirmed(client)
    present = await _claim(client, connect, wills, place)
    if connect.will is not None:
        await keep_will(client, connect.will)
    return present


async def _claim(client: Receiver, connect: Connect, wills: Wills, place: TimedPermit) -> bool:
    """Claim the session for this connection; returns whether an earlier session goes on.

    [MQTT-3.1.4-3] (3.1.1), [MQTT-3.1.4-4] (5.0)
    """
    claims, quotas = wills.claims, client.services.quotas
    key, known, expected = Claim(client.hash, None, 0)
    # Who asks for no session and leaves none need not look where to begin, unless one may be at its second key.
    if client.expiry != 0 or not connect.clean_start or await claims.look_for_second_keys():
        key, known, expected = await find_session(client, wills, connect)
    for _ in range(CLAIM_ROUNDS):
        had = known.v5 if known is not None and known.v5 is not None else NO_FORMER
        if key != client.hash:
            _move(client, key, claims)
        former_wills, quota = had.wills, had.quota
        written = known.time_ns if known is not None else 0
        expired = known is not None and await _is_over(client, known, expected, connect.clean_start)
        present = _prepare(client, connect, known, expected, expired=expired)
        await _count(client, known, quota, place, present=present)
        try:
            claims.check(client, known)
        except MqttError:
            quotas.give_back(client)
            raise
        full = False
        try:
            await save_record(client, expected)
        except Conflict:
            quotas.give_back(client)
            key, known, expected = await find_session(client, wills, connect)
            continue
        except BaseException as error:  # any failure: the record may be stored all the same
            full = isinstance(error, ApiError) and lacks_room(error) and _needs_no_record(client, connect)
            if not full:
                _leave_claimed_later(client, wills, expected, continued=present)
                raise
        if full:
            return await _claim_without_record(client, connect, wills)
        try:
            await _succeed(client, claims, known, expected, written if present else 0, continued=present)
            if former_wills:
                await settle_wills(wills, client.hash, former_wills, client.epoch, continued=present)
        except BaseException:  # any failure: nothing else sets the session's deadline and deals with its earlier wills
            client.give_up()
            _leave_claimed_later(client, wills, expected, continued=present)
            raise
        _, v5 = claimed(client.record)
        v5.name_wills([client.services.identity.id] if connect.will is not None else [])
        return present
    raise MqttError("too many connections claim this session at once", ReasonCode.SERVER_BUSY)


def _needs_no_record(client: Session, connect: Connect) -> bool:
    """Whether a new session ends with its connection, and leaves nothing that another gateway would have to do."""
    return client.expiry == 0 and connect.clean_start and connect.will is None


async def _claim_without_record(client: Receiver, connect: Connect, wills: Wills) -> bool:
    """Begin a clean session while JetStream has no room for its record; return False: no earlier session goes on.

    The epoch is the last sequence of the stream: each later record of the session is newer.

    Raises:
        QuotaExceeded: a former session would have to be replaced, which takes a record.
        MqttError: the client may not have the session, or another connection has it.
        ApiError, NoResponders, RequestTimeout: JetStream does not answer.
    """
    services = client.services
    services.quotas.give_back(client)
    key, known, sequence = await find_session(client, wills, connect)
    v5 = known.v5 if known is not None else None
    if key != client.hash or (
        known is not None and (v5 is None or v5.kind != "regular" or v5.wills or v5.groups or v5.draining)
    ):
        raise QuotaExceeded(f"{FULL}: the former session cannot be replaced")
    wills.claims.check(client, known)
    _prepare(client, connect, None, 0, expired=False)
    if known is not None:  # of an earlier connection
        await services.streams.sessions.delete(key, sequence)
    head = await call(services.nats.inbox, f"STREAM.INFO.{SESSIONS}")
    client.claim(max(int(head["state"]["last_seq"]), sequence, 1))
    begin_unrecorded(client)
    wills.claims.announce(client, services.identity.new_nuid())
    wills.claims.take_over(client)
    session(services.hooks, SESSION_CREATED, client.client_id, client.epoch)
    return False


async def _is_over(client: Receiver, known: SessionRecord, expected: int, clean_start: bool) -> bool:
    """Whether an earlier session has expired, or has lost its position and would be continued."""
    if await has_expired(client, known, expected):
        return True
    if clean_start or not await _has_lost_place(client, known):
        return False
    log.warning("%s: its position is gone from stream %s; a new session begins", client, POSITIONS)
    return True


def _move(client: Session, key: str, claims: Claims) -> None:
    """Change the key of the client's session to ``key``."""
    if not claims.leave(client):
        client.services.quotas.forget_session(client.hash)
    client.keep_at(key)
    claims.listen(client)


def _prepare(client: Receiver, connect: Connect, known: SessionRecord | None, expected: int, *, expired: bool) -> bool:
    """Set the record that claims the session; returns whether it continues the session ``known``.

    [MQTT-3.1.2-4] [MQTT-3.1.2-6] (3.1.1), [MQTT-3.1.2-4] [MQTT-3.1.2-5] [MQTT-3.1.2-6] (5.0). A durable session
    stays durable; it ends with its connection where its session expiry interval is now 0.

    Args:
        expected: sequence of the record that is ``known``; 0 = none.
    """
    left = leftovers(known) if known is not None else []
    had = known.v5 if known is not None and known.v5 is not None else NO_FORMER
    former = had.former
    # The record names the former owner's will until that is dealt with: the end of the session has to find the will.
    wills = list(had.wills)
    if connect.will is not None and client.services.identity.id not in wills:
        wills.append(client.services.identity.id)
    continued = known is not None and not (connect.clean_start or expired) and _may_continue(client, known)
    if not continued and client.expiry == 0:
        v5 = V5("regular", 0, draining=left, wills=wills, leaving=had.groups)
        client.begin_regular(_new_record(client, v5, clean=True))
        return False
    if continued:
        assert known is not None
        record, v5 = known, known.upgrade()
        v5.belong(user_of(client), _quota(client))
        v5.expire_after(client.expiry)
        v5.name_wills(wills)
        v5.begin_at(expected)
    else:
        v5 = V5("durable", client.expiry, draining=left, wills=wills, leaving=had.groups, first=FIRST)
        v5.count_in(client.services.stream.id)
        record = _new_record(client, v5)
    v5.name_position(v5.pos or client.services.identity.new_nuid())
    v5.follow(expected)
    client.begin_durable(record, former, continued=continued)
    return continued


def _may_continue(client: Session, known: SessionRecord) -> bool:
    """Whether a session outlives its connections and belongs to the client's user or to no known user."""
    v5 = known.v5
    own = v5 is None or (v5.kind == "durable" and v5.expiry != 0 and v5.user in (None, user_of(client)))
    return own and not known.clean


def _new_record(client: Session, v5: V5, *, clean: bool = False) -> SessionRecord:
    """Return the record of a new session of the client's user, under the session's key."""
    v5.begin(user_of(client), "" if clean else _quota(client))
    return SessionRecord(client.client_id, clean=clean, v5=v5, key=client.hash)


async def _succeed(
    client: Session, claims: Claims, known: SessionRecord | None, expected: int, until: int, *, continued: bool
) -> None:
    """End the former connection after the claim is stored, and settle the former session.

    Args:
        known: the record that the claim has replaced; ``expected`` is its sequence.
        until: as in `discard_session`.
        continued: the session goes on.

    Raises:
        MqttError: the session was claimed again.
        ApiError, NoResponders, RequestTimeout: JetStream refuses a request or does not answer.
    """
    claims.take_over(client)
    hooks = client.services.hooks
    if known is not None and not continued and (known.v5 is None or known.v5.kind == "durable"):
        session(hooks, SESSION_DISCARDED, client.client_id, expected)
    session(hooks, SESSION_RESUMED if continued else SESSION_CREATED, client.client_id, client.epoch)
    if known is not None and (not continued or unfinished(known)):
        await discard_session(client.services, known, client.epoch, until)
        await _count_no_more(client, known)
        await _forget_leftovers(client)
    elif continued and client.durable:
        # [MQTT-4.1.0-2] (3.1.1), [MQTT-4.1.0-1] (5.0)
        await client.services.streams.timers.cancel(EXPIRY, client.hash, client.epoch)


async def _forget_leftovers(client: Session) -> None:
    """Remove the former session's consumers and groups from the record: they are deleted, and left."""
    _, v5 = claimed(client.record)
    if v5.draining or v5.leaving:
        v5.forget_draining([one.name for one in v5.draining])
        v5.forget_leaving()
        try:
            await save_record(client, client.epoch)
        except Conflict:
            raise MqttError("another connection has claimed the session", ReasonCode.SESSION_TAKEN_OVER) from None


def _quota(client: Session) -> str:
    """Return the quota in which new sessions of a client count."""
    return quota_of(user_of(client), household(client.connection.host))


async def _count(
    client: Session, known: SessionRecord | None, quota: str, place: TimedPermit, *, present: bool
) -> None:
    """Count a session that is about to be claimed in its quota.

    Args:
        quota: the quota in which the session ``known`` has counted.

    Raises:
        QuotaExceeded: the user, or the address, has too many sessions.
    """
    quotas = client.services.quotas
    _, v5 = claimed(client.record)
    if known is not None and quota == v5.quota:
        quotas.note_claim(known)
    elif v5.quota and not present:
        who = holder(client.user, client.connection.host)
        await quotas.admit(client, client.hash, v5.quota, who, place.leave)


async def _count_no_more(client: Session, known: SessionRecord) -> None:
    """Remove the former session from its quota, unless the new session counts there in its place."""
    _, v5 = claimed(client.record)
    if known.v5 is not None and known.v5.quota != v5.quota:
        await client.services.quotas.forget(known)


# -- the session that a client may claim --------------------------------------------------------------


async def find_session(client: Session, wills: Wills, connect: Connect) -> Claim:
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
    if found is not None and not other_user and not await wills.claims.look_for_second_keys():
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
        if found is not None and await _yields(client, found):
            log.info("%s: the session of another user, who has left it empty, ends", client)
            return found
        raise NotAuthorized("the session of this client id belongs to another user")
    return beside


async def _yields(client: Session, found: Claim) -> bool:
    """Whether a session of another user has no connection and holds nothing, so that its end takes nothing away.

    Otherwise a user could keep others out by connecting once with each of their client ids. That the connection has
    ended shows in the timer of the session.
    """
    services, record = client.services, found.record
    if record is None or record.v5 is None:
        return False
    if await services.streams.timers.scheduled(EXPIRY, record.key) != found.expected:
        return False
    for gateway in record.v5.wills:
        if await services.streams.wills.load(gateway, record.key) is not None:
            return False
    return await is_empty(services, record)


async def _load(client: Session, connect: Connect, key: str) -> Claim:
    try:
        found = await client.services.streams.sessions.load(key, client.client_id)
    except NewerRecord as error:  # also for a clean start: only a newer gateway knows what the session has to remove
        log.warning("%s: only a newer gateway can serve its session: %s", client, error)
        raise MqttError(str(error), ReasonCode.SERVER_UNAVAILABLE) from None
    except ForeignRecord:
        raise
    except NoRecord as error:
        return Claim(key, None, error.seq)
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
    return may_read_all(client, record) and await _may_release(client, record)


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


async def _has_lost_place(client: Session, known: SessionRecord) -> bool:
    """Whether nothing says any more which messages a session has had: it has no consumers, and no position.

    The position is stored before the record names what it stands for. So somebody has removed it.
    """
    v5, services = known.v5, client.services
    if v5 is None or not v5.consumerless or not known.cons:
        return False
    found = await services.streams.positions.load(known.key)
    position = decode(found.data) if found.data else None
    if position is not None and position.id == v5.pos:
        return False
    for one in known.cons.values():
        if await consumer_info(services.nats.inbox, MESSAGES, one.durable_name) is not None:
            return False
    return True


# -- claims whose store has an unknown outcome --------------------------------------------------------


def _leave_claimed_later(client: Session, wills: Wills, expected: int, *, continued: bool) -> None:
    """Run :func:`leave_claimed` in the background."""
    work = leave_claimed(client, wills, expected, continued=continued)
    client.services.tasks.spawn(work, f"claim of {client.client_id}")


async def leave_claimed(client: Session, wills: Wills, expected: int, *, continued: bool) -> None:
    """Find out whether a claim was stored; if so, leave the session as one whose connection has just ended.

    Until then the session counts in its quota.

    Args:
        expected: sequence of the record that the claim was to replace; 0 = none.
        continued: the claim was to go on with an earlier session.
    """
    try:
        await _look(client, wills, expected, continued)
    finally:
        client.services.quotas.give_back(client)


async def _look(client: Session, wills: Wills, expected: int, continued: bool) -> None:
    """Read the record until the outcome of the claim is known, or the claim cannot be stored any more."""
    loop = asyncio.get_running_loop()
    until = inf
    pause = RETRY_PAUSE_S
    while True:
        await client.services.nats.online.wait()
        try:
            if await _leave(client, wills, expected, continued) or loop.time() > until:
                return
            until = min(until, loop.time() + RECORD_STORED_MOST_S)
        except PoisonedRecord:  # a record that this gateway has not written
            return
        except (ApiError, NoResponders, RequestTimeout) as error:
            log.debug("%s: it is not known yet whether it has claimed its session: %s", client, error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, RECORD_STORED_MOST_S)


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
    assert record.v5 is not None
    client.claim(epoch)
    services.quotas.settle(client, record)
    log.info("%s: the client was refused after it had claimed its session: the session is released", client)
    if continued:
        await reset_will_timers(wills, client, record.v5.wills)
    else:
        await settle_wills(wills, client.hash, record.v5.wills, client.epoch, continued=False)
    latest = await services.streams.sessions.load(client.hash, client.client_id)
    if latest is not None and latest[1] == epoch:  # else another connection has claimed the session meanwhile
        if record.v5.kind != "durable":  # the end of other sessions is told when their time is over
            session(services.hooks, SESSION_TERMINATED, client.client_id, epoch)
        set_deadline(client, None if client.expiry is None else natstime.now() + client.expiry)
        services.nats.link.kick()
    return True
