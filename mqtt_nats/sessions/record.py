# SPDX-License-Identifier: Apache-2.0
"""The session record: writing the record, and removing the consumers and messages of a session that ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mqtt_nats.backbone.batch import in_turn
from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.pubsub.shared_filters import groups_of
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import delete_consumer, delete_for_good
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.hashing import held_token
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.positions import STREAM as POSITIONS
from mqtt_streams.positions import position_subject
from mqtt_streams.pubrel import CONSUMER_PREFIX, pubrel_subject
from mqtt_streams.pubrel import PREFIX as PUBREL_PREFIX
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.qos2 import PREFIX as HELD_PREFIX
from mqtt_streams.qos2 import STREAM as HELD
from mqtt_streams.qos2 import held_subjects
from mqtt_streams.sessions import (
    V5,
    Conflict,
    Draining,
    ForeignRecord,
    NewerRecord,
    PoisonedRecord,
    SessionRecord,
    claim_subject,
)
from mqtt_streams.shared import ASSIGNED, MEMBERS, assigned_subjects, members_subject
from mqtt_streams.shared import STREAM as SHARED
from mqtt_streams.stored import direct_get_last, get_last, purge, remove, scan, subjects_of
from mqtt_streams.timers import EXPIRY

if TYPE_CHECKING:
    from mqtt_nats.sessions.services import Services
    from mqtt_nats.sessions.session import Session

Place = tuple[str, str]
"""A stream, and the subject or filter subject of one session's messages in it."""

Ends = dict[Place, int]
"""Sequence of the last message in each place; 0 = no message."""


class Exchanges(NamedTuple):
    """Which sessions have QoS 2 messages under way: held publishes, owed PUBRELs, assignments; as the leaders say."""

    subjects: frozenset[str]
    """Subjects of these messages, and the filter subjects that have `*` in place of the last token."""
    pubrel_consumers: bool
    """Whether any session has a consumer of PUBRELs."""


log = logging.getLogger("mqtt_nats.broker")


def claimed(record: SessionRecord | None) -> tuple[SessionRecord, V5]:
    """Return the record of a session that this connection has claimed, and the part that only gateways read."""
    assert record is not None
    assert record.v5 is not None
    return record, record.v5


async def save_record(client: Session, expected: int) -> int:
    """Write the session record [MQTT-4.1.0-1] (3.1.1), [MQTT-3.1.2-23] (5.0); return its sequence, the epoch.

    A write whose outcome is unknown is read back: the record's nonce tells whether this connection wrote it. The
    owner's write is made again when it is refused while the record is still the one that it replaces: the leader of
    the stream refuses a write while another one of the record is on its way, perhaps an earlier attempt. A leader that
    has lost its followers does so for seconds.

    Args:
        expected: sequence of the record that this write replaces; 0 = none.

    Raises:
        Conflict: another connection wrote the record.
        RequestTimeout, NoResponders: JetStream does not answer, and the session is not this connection's yet.
    """
    services = client.services
    expected = 0 if client in services.unrecorded else expected
    record, v5 = claimed(client.record)
    nonce = services.identity.new_nuid()
    record.sign(services.identity.id, nonce)
    if client.durable:  # to be stored before the first QoS 2 publish is held, which may come at any time
        v5.hold_qos2()
    if client.epoch:
        v5.begin_at(client.epoch)
    reply = claim_subject(client.hash, services.identity.id, nonce)
    sequence = 0
    try:
        sequence = await services.streams.sessions.save(record, expected=expected, reply=reply)
    except (RequestTimeout, NoResponders):
        pass
    except Conflict:
        if not _owns(client, expected):  # whoever claims a session looks at it anew
            raise
    if not sequence:
        sequence = await retry_until_answered(client, partial(_save_again, client, record, expected, nonce, reply))
    services.unrecorded.pop(client, None)
    client.claim(sequence)
    services.quotas.store_note(record)
    return sequence


async def name_position(client: Session) -> None:
    """Name a position in the session record, if it has none.

    Raises:
        ApiError: the record cannot be stored.
        Conflict: another connection has claimed the session.
    """
    if not claimed(client.record)[1].pos:
        await store_position_name(client)


async def store_position_name(client: Session) -> None:
    """Store the session record with a name for the position; a name that the record has stays.

    Raises:
        ApiError: the record cannot be stored.
        Conflict: another connection has claimed the session.
    """
    v5 = claimed(client.record)[1]
    known = v5.pos
    v5.name_position(known or client.services.identity.new_nuid())
    try:
        await save_record(client, client.epoch)
    except BaseException:
        v5.name_position(known)
        raise


def _owns(client: Session, expected: int) -> bool:
    """Whether the record with sequence ``expected`` is one that this connection has written."""
    return 0 < expected == client.epoch


async def _save_again(client: Session, record: SessionRecord, expected: int, nonce: str, reply: str) -> int:
    """Write a record again unless an earlier write, whose outcome is unknown, has stored it.

    Raises:
        Conflict: another connection wrote the record.
        RequestTimeout: not answered; or a write of the owner's record is on its way, and nobody knows whose.
    """
    known, _ = await _stored(client, nonce)
    if known is not None:
        return known
    conflict: Conflict | None = None
    try:
        return await client.services.streams.sessions.save(record, expected=expected, reply=reply)
    except Conflict as error:
        conflict = error
    known, present = await _stored(client, nonce)  # the first write may have been stored late
    if known is not None:
        return known
    if present == expected and _owns(client, expected):
        raise RequestTimeout("another write of the session record is on its way") from conflict
    raise conflict


async def _stored(client: Session, nonce: str) -> tuple[int | None, int]:
    """Return the record's sequence if the write with this nonce stored it, else None; and its sequence (0 = none)."""
    try:
        found = await client.services.streams.sessions.load(client.hash, client.client_id)
    except PoisonedRecord as error:  # somebody else has written it
        return None, error.seq
    if found is None:
        return None, 0
    record, sequence = found
    mine = record.v5 is not None and record.v5.nonce == nonce
    return (sequence if mine else None), sequence


def leftovers(known: SessionRecord) -> list[Draining]:
    """Return the consumers of a session that is not continued.

    The record that takes the session's place names them until they are removed: where the removal is interrupted, the
    next owner of the record goes on with it.
    """
    found = {
        one.durable_name: Draining(one.durable_name, one.filter_subject or ">", 0, 0) for one in known.cons.values()
    }
    if known.v5 is not None:
        found |= {one.name: Draining(one.name, one.filter_subject, 0, 0) for one in known.v5.draining}
    if not known.clean:
        name = CONSUMER_PREFIX + known.key
        found[name] = Draining(name, pubrel_subject(known.key), 0, 0)
    return list(found.values())


def unfinished(record: SessionRecord) -> bool:
    """Whether the session has replaced another session that was not removed yet when this record was written."""
    pubrels = CONSUMER_PREFIX + record.key
    return record.v5 is not None and any(entry.name == pubrels for entry in record.v5.draining)


async def discard_session(services: Services, known: SessionRecord, epoch: int, until: int = 0) -> None:
    """Remove consumers and messages, not the record, of a session that is not continued [MQTT-3.1.2-6] [MQTT-3.1.2-7].

    The removal may be delayed until the client has a new session. So the last sequences are read first, then the
    record: messages with higher sequences are left alone. See docs/internals/sessions.md#late-ends.

    Args:
        epoch: sequence of the record write that has ended the session.
        until: time (nanoseconds since 1970) of the claim of the next session: newer messages belong to that session
            and stay. 0 = no client has used the next session.
    """
    await _delete_consumers(services, known)
    places = _places(known)
    ends = await in_turn([partial(_end, services, stream, subject, until) for stream, subject in places])
    if not await _as_written(services, known, epoch):
        log.info("the session of %r was claimed before it was removed", known.client_id)
        return
    await _remove_up_to(services, known, dict(zip(places, ends, strict=True)))
    if _has_pubrels(known):
        if not until:
            await _delete_pubrel_consumer(services, known, epoch)
        await services.streams.timers.cancel(EXPIRY, known.key, epoch)


async def is_empty(services: Services, known: SessionRecord) -> bool:
    """Whether a session without a connection has no subscription, no message, and no QoS 2 exchange under way.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream refuses a request or does not answer.
    """
    v5 = known.v5
    if v5 is None or known.subs or known.cons or v5.shared or v5.draining or v5.ended:
        return False
    for stream, subject in _places(known):
        if (stream, subject) != (POSITIONS, position_subject(known.key)) and await _end(services, stream, subject, 0):
            return False
    return True


async def list_exchanges(services: Services) -> Exchanges | None:
    """Return which sessions have QoS 2 messages under way: three requests for any number of sessions that end.

    None: so many have some that nats-server does not name them all in one answer.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream refuses a request or does not answer.
    """
    patterns = ((HELD, HELD_PREFIX + ">"), (OUT, PUBREL_PREFIX + ">"), (SHARED, ASSIGNED + ">"))
    found = await asyncio.gather(*(subjects_of(services.nats.inbox, *one) for one in patterns))
    subjects: set[str] = set()
    for one in found:
        if one is None:
            return None
        subjects.update(one[0])
        subjects.update(name.rpartition(".")[0] + ".*" for name in one[0])
    _, owed, _ = found
    return Exchanges(frozenset(subjects), bool(owed is not None and owed[1]))


async def last_sequences(services: Services, known: SessionRecord, exchanges: Exchanges) -> Ends:
    """Return the last sequence of all that a session without a connection has stored, for `discard_expired`.

    They are read before the record is written that ends the session: up to them all messages are this session's.

    Args:
        exchanges: listed since the session's connection has ended.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream refuses a request or does not answer.
    """
    ends: Ends = {}
    for stream, subject in _places(known):
        if stream == POSITIONS:
            ends[stream, subject] = await _position(services, subject)
        elif subject in exchanges.subjects or subject.startswith(MEMBERS):
            ends[stream, subject] = await _end(services, stream, subject, 0)
    return ends


async def discard_expired(
    services: Services, known: SessionRecord, epoch: int, ends: Ends, exchanges: Exchanges
) -> None:
    """Remove consumers and messages of a session whose deadline has passed, with fewer requests; see `discard_session`.

    Args:
        epoch: sequence of the record write that has ended the session.
        ends: last sequences, read before that write.
        exchanges: as given to `last_sequences`.
    """
    await _delete_consumers(services, known)
    place = POSITIONS, position_subject(known.key)
    position = ends.pop(place, 0)
    # A replica that lags may have named a former position.
    if position and not await remove(services.nats.inbox, *place, position):
        await discard_session(services, known, epoch)
        return
    await _remove_up_to(services, known, ends)
    if exchanges.pubrel_consumers and _has_pubrels(known):
        await _delete_pubrel_consumer(services, known, epoch)


async def _delete_consumers(services: Services, known: SessionRecord) -> None:
    """Delete the consumers of messages; a consumer's name is never used again."""
    names = {entry.name for entry in leftovers(known)} - {CONSUMER_PREFIX + known.key}
    found = await asyncio.gather(*(delete_for_good(services.nats.inbox, MESSAGES, name) for name in names))
    services.stream.count_consumers(-sum(found))


async def _delete_pubrel_consumer(services: Services, known: SessionRecord, epoch: int) -> None:
    """Delete the consumer of PUBRELs unless the client has a new session: its consumer has the same name."""
    if await _as_written(services, known, epoch):
        await delete_consumer(services.nats.inbox, OUT, CONSUMER_PREFIX + known.key)


def _has_pubrels(known: SessionRecord) -> bool:
    """Whether a session may have a consumer of PUBRELs."""
    return any(entry.name == CONSUMER_PREFIX + known.key for entry in leftovers(known))


def _groups(known: SessionRecord) -> list[str]:
    """Return the hashes of the groups that a session's record names."""
    return groups_of(known.v5.groups if known.v5 is not None else ())


def _places(known: SessionRecord) -> list[Place]:
    """Return where a session may have messages of its own; its last sequences are read in this order."""
    groups = _groups(known)
    places = [(SHARED, members_subject(group, known.key)) for group in groups]
    if known.v5 is not None and known.v5.pos:
        places.append((POSITIONS, position_subject(known.key)))
    if known.clean or known.v5 is None or known.v5.q2:
        places.append((HELD, held_subjects(held_token(known.client_id, known.key))))
    if _has_pubrels(known):
        places.append((OUT, pubrel_subject(known.key)))
    if _has_pubrels(known) or groups:  # [MQTT-4.8.2-5] (5.0)
        places.append((SHARED, assigned_subjects(known.key)))
    return places


async def _remove_up_to(services: Services, known: SessionRecord, ends: Ends) -> None:
    """Remove the messages of a session up to the last sequence in each place, and tidy its groups."""
    if assigned := ends.get((SHARED, assigned_subjects(known.key))):
        await services.streams.groups.acknowledge(known.key, assigned)
    inbox = services.nats.inbox
    await in_turn([partial(purge, inbox, stream, subject, end) for (stream, subject), end in ends.items() if end])
    await in_turn([partial(services.streams.groups.tidy, group) for group in _groups(known)])


async def leave_groups(services: Services, key: str, client_id: str, texts: Iterable[str]) -> None:
    """Remove a session's registrations for shared subscriptions that its record does not name.

    Repeated and late calls do no harm: the last sequence is read before the record, so that the registration for a
    later subscription stays. See docs/internals/sessions.md#registrations.

    Args:
        key: of the session.
        client_id: of the session.
        texts: the shared subscriptions, ``$share/`` included.

    Raises:
        ApiError, NoResponders, RequestTimeout: JetStream does not do it.
    """
    left = {group: text for text in texts for group in groups_of([text])}
    if not left:
        return
    ends = await in_turn([partial(_end, services, SHARED, members_subject(group, key), 0) for group in left])
    named = await _shared_names(services, key, client_id)
    if named is not None:
        found = [(group, end) for (group, text), end in zip(left.items(), ends, strict=True) if text not in named]
        await in_turn([partial(_leave_group, services, group, key, end) for group, end in found])


async def _leave_group(services: Services, group: str, key: str, end: int) -> None:
    """Remove a session's registration in a group up to sequence ``end``, and the consumer without members."""
    if end:
        await purge(services.nats.inbox, SHARED, members_subject(group, key), end)
    await services.streams.groups.tidy(group)


async def take_back(
    services: Services, key: str, client_id: str, text: str, register: Callable[[], Awaitable[None]]
) -> None:
    """Leave a group after a registration whose answer nobody has awaited, unless the record names the subscription.

    The registration may be stored at any time, but before the one that ``register`` stores. Errors: `leave_groups`.
    """
    await register()
    await leave_groups(services, key, client_id, [text])


async def stored_part(client: Session) -> tuple[V5 | None, int]:
    """Return the stored session record's `v5` part and sequence; None and 0 = there is no readable record."""
    try:
        found = await client.services.streams.sessions.load(client.hash, client.client_id)
    except PoisonedRecord:
        return None, 0
    return (found[0].v5, found[1]) if found is not None else (None, 0)


async def _shared_names(services: Services, key: str, client_id: str) -> Collection[str] | None:
    """Return the shared subscriptions that the record at a key names; None: only others can read the record."""
    try:
        found = await services.streams.sessions.load(key, client_id)
    except (ForeignRecord, NewerRecord):
        return None
    except PoisonedRecord:
        return ()
    return found[0].v5.shared if found is not None and found[0].v5 is not None else ()


async def _end(services: Services, stream: str, subject: str, until: int) -> int:
    """Return the sequence of a subject's last message (stored by ``until``, if not 0); 0 = no message, or no stream."""
    try:
        found = await get_last(services.nats.inbox, stream, subject)
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return 0
        raise
    if found is None or not until or found.time_ns <= until:
        return 0 if found is None else found.seq
    return max([one.seq async for one in scan(services.nats.inbox, stream, subject) if one.time_ns <= until], default=0)


async def _position(services: Services, subject: str) -> int:
    """Return the sequence of a position, 0 = none; it may be replaced by now, as a replica that lags may answer."""
    try:
        found = await direct_get_last(services.nats.inbox, POSITIONS, subject)
    except (ApiError, NoResponders):
        found = None
    return await _end(services, POSITIONS, subject, 0) if found is None else found.seq


async def _as_written(services: Services, known: SessionRecord, epoch: int) -> bool:
    """Whether the record was not written since ``epoch``."""
    try:
        found = await services.streams.sessions.load(known.key, known.client_id)
    except (NewerRecord, PoisonedRecord):
        return False
    return found is not None and found[1] == epoch
