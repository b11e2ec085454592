# SPDX-License-Identifier: Apache-2.0
"""The session record: writing it, and removing what it names."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from mqtt_nats.broker.groups import forget
from mqtt_nats.broker.patience import patiently
from mqtt_streams.api import NoResponders, RequestTimeout
from mqtt_streams.consumers import delete_consumer
from mqtt_streams.hashing import name_hash, subject_token
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import CONSUMER_PREFIX, pubrel_subject
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.sessions import Conflict, Draining, SessionRecord
from mqtt_streams.timers import EXPIRY

if TYPE_CHECKING:
    from mqtt_nats.broker.client import Client
    from mqtt_nats.broker.context import Broker


async def save_record(client: Client, expected: int) -> int:
    """Write the session record [MQTT-4.1.0-1] (3.1.1), [MQTT-3.1.2-23] (5.0); returns its sequence.

    A write whose outcome is unknown is read back: the record's nonce tells whether it is ours.

    Raises:
        Conflict: somebody else wrote it.
        RequestTimeout, NoResponders: JetStream does not answer, and the session is not this connection's yet.
    """
    broker = client.broker
    record = client.record
    assert record is not None
    assert record.v5 is not None
    record.origin = broker.identity
    record.v5.owner = broker.identity
    # Written before the first QoS 2 publish is held, and a durable client may send one at any time.
    record.v5.q2 = record.v5.q2 or client.durable
    record.v5.nonce = nonce = broker.new_nuid()
    reply = f"$MQTT.JSA.{broker.identity}.SP.{client.hash}.{nonce}"
    try:
        sequence = await broker.sessions.save(record, expected=expected, reply=reply)
    except (RequestTimeout, NoResponders):
        sequence = await patiently(client, partial(_save_again, client, record, expected, nonce, reply))
    client.epoch = sequence
    return sequence


async def _save_again(client: Client, record: SessionRecord, expected: int, nonce: str, reply: str) -> int:
    """Write a record of which nobody knows whether it was written."""
    known = await _written(client, nonce)
    if known is not None:
        return known
    try:
        return await client.broker.sessions.save(record, expected=expected, reply=reply)
    except Conflict as error:
        known = await _written(client, nonce)  # the first attempt may have come late
        if known is None:
            raise error
        return known


async def _written(client: Client, nonce: str) -> int | None:
    """The sequence of the stored record, if it is the one of this write."""
    found = await client.broker.sessions.load(client.hash, client.client_id)
    return found[1] if found is not None and found[0].v5 is not None and found[0].v5.nonce == nonce else None


def leftovers(known: SessionRecord) -> list[Draining]:
    """The consumers of a session that is not continued.

    Whoever ends it names them in the record that takes its place, until they are removed: should that be
    interrupted, the next owner of the record goes on.
    """
    found = {
        one.durable_name: Draining(one.durable_name, one.filter_subject or ">", 0, 0) for one in known.cons.values()
    }
    if known.v5 is not None:
        found |= {one.name: Draining(one.name, one.filter_subject, 0, 0) for one in known.v5.draining}
    if not known.clean:
        client_hash = name_hash(known.client_id)
        name = CONSUMER_PREFIX + client_hash
        found[name] = Draining(name, pubrel_subject(client_hash), 0, 0)
    return list(found.values())


async def discard_session(broker: Broker, known: SessionRecord, epoch: int) -> None:
    """Remove what a session that is not continued has left, other than its record [MQTT-3.1.2-6] [MQTT-3.1.2-7].

    Args:
        epoch: of the write that has ended it.
    """
    client_hash = name_hash(known.client_id)
    if known.v5 is not None and known.v5.shared:
        await forget(broker, client_hash, list(known.v5.shared))
    if known.v5 is not None and known.v5.pos:
        await broker.positions.purge(client_hash)
    names = {entry.name for entry in leftovers(known)}
    pubrels = CONSUMER_PREFIX + client_hash
    await asyncio.gather(*(delete_consumer(broker.inbox, MESSAGES, name) for name in names if name != pubrels))
    if known.clean or known.v5 is None or known.v5.q2:
        await broker.held.purge(subject_token(known.client_id))
    if pubrels in names:
        await broker.pubrels.purge(client_hash)
        await broker.groups.purge_assigned(client_hash)
        await delete_consumer(broker.inbox, OUT, pubrels)
        await broker.timers.cancel(EXPIRY, client_hash, epoch)
