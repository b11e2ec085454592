# SPDX-License-Identifier: Apache-2.0
"""SUBSCRIBE and UNSUBSCRIBE.

SUBACK leaves when the subscription is live: the session record written (durable sessions), the consumers
created, the NATS subscriptions confirmed by the server. Retained messages follow it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from mqtt_nats.access.acl import EVERYTHING
from mqtt_nats.access.authenticator import ADMINISTRATOR
from mqtt_nats.backbone.retry import patiently
from mqtt_nats.base.logs import log_failure, shorten
from mqtt_nats.client.grant import Lowering, Wish, finish_lowering, grant, is_lowered
from mqtt_nats.client.overlap_handover import part
from mqtt_nats.codec import (
    MqttError,
    PacketTooLarge,
    ReasonCode,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    encode,
    put_varint,
    validate_topic_filter,
)
from mqtt_nats.delivery.draining import drain
from mqtt_nats.delivery.resume import descend, keep_taken
from mqtt_nats.delivery.slow_clients import postponed
from mqtt_nats.hooks.calls import asked, asked_to_end, subscribed, unsubscribed
from mqtt_nats.ingress.retained_replay import Replay, drop_gate, open_gate, prepare, start_replays
from mqtt_nats.lifecycle.quotas import holder
from mqtt_nats.pubsub.interest_propagation import fence, fence_wild
from mqtt_nats.pubsub.routing_table import Options
from mqtt_nats.pubsub.shared_filters import PREFIX as SHARED
from mqtt_nats.pubsub.shared_filters import parse_shared
from mqtt_nats.sessions.record import save_record
from mqtt_nats.sessions.shared_subscribe import acknowledged as ask_again
from mqtt_nats.sessions.shared_subscribe import subscribe_shared, unsubscribe_shared
from mqtt_streams.api import ApiError
from mqtt_streams.record_size import subscription_bytes
from mqtt_streams.sessions import Conflict, SharedSubscription, second_sid
from mqtt_streams.subjects import ReservedSubject, filter_to_subjects

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.pubsub.backlog import Gate

log = logging.getLogger("mqtt_nats.broker")
audit = logging.getLogger("mqtt_nats.audit")

FAILURE: Final = 0x80

JOINS_AT_ONCE: Final = 32
"""Filters with which the client is put into the subscription table in one turn of the event loop."""

LEVELS_EACH: Final = 8
"""Levels of a session's filters, on the average: each takes memory of the gateway."""

# Bytes of max_payload that are left for the rest of the session record: headers, later changes.
RECORD_SPARE: Final = 2048


async def subscribe(client: Client, packet: Subscribe) -> None:
    """Answer a SUBSCRIBE packet, with one SUBACK; nobody has sent, or is answered, one without packet identifier.

    [MQTT-3.8.4-1] [MQTT-3.8.4-4] (3.1.1), [MQTT-3.8.4-1] [MQTT-3.8.4-5] (5.0)
    """
    if postponed(client, partial(subscribe, client, packet)):
        return
    _check_room(client, len(packet.filters))
    packet, refused_by_hooks = await asked(client, packet)
    if (most := client.connection.settings.max_qos) < 2:  # [MQTT-3.2.2-10] (5.0)
        packet = replace(packet, filters=tuple(replace(one, qos=min(one.qos, most)) for one in packet.filters))
    wanted: dict[str, Wish] = {}
    room = await _room(client, packet)
    given = (packet.properties or {}).get("subscription_identifier")
    identifier = given[0] if given else None
    codes: list[int] = []
    present = {found.text for found in client.filters}
    shares: dict[str, SharedSubscription] = {}
    guard = client.guarded
    for place, entry in enumerate(packet.filters):
        subjects, code = _subjects(client, entry.topic_filter)
        if place in refused_by_hooks:
            subjects, code = None, refused_by_hooks[place]
        if subjects is not None and not may_subscribe(client, entry.topic_filter, entry.qos):
            subjects, code = None, ReasonCode.NOT_AUTHORIZED
        if subjects is None or not room.take(entry, subjects):
            code = code or ReasonCode.QUOTA_EXCEEDED
        elif entry.topic_filter.startswith(SHARED):
            shares[entry.topic_filter] = SharedSubscription(entry.qos, entry.retain_as_published, identifier, 0)
        else:
            # The last of several equal filters in one packet counts [MQTT-3.8.4-3] (3.1.1, 5.0).
            options = Options(entry.no_local, entry.retain_as_published, identifier)
            handling = entry.retain_handling
            replay = handling == 0 or (handling == 1 and entry.topic_filter not in present)
            wanted[entry.topic_filter] = Wish(entry.qos, subjects, options, handling, replay)
        codes.append(code)
    fresh = [text for text in shares if text not in (client.shares or ())]
    gates: dict[str, Gate] = {}
    replays = _replays(client, wanted)
    lost: set[str] = set()
    begun = False
    lowering: list[Lowering] = []
    try:
        if shares:
            await subscribe_shared(client, shares)
        if client.durable_side is not None and wanted:
            refused = await grant(client, wanted, {replay.key: replay for replay in replays})
            begun = True
            await _abandon(client, wanted, replays, refused)
        await _join(client, wanted, gates, lowering)
        await patiently(client, partial(fence_wild, client))
        # Who has joined now gets what is published from now on; what was published before has to be there to be read.
        await client.broker.retained_so_far()
        # Read before SUBACK leaves: a newer message can then only come after these. The requests follow the
        # subscriptions on the same connection, so their replies also tell that the server has those; of the other
        # servers of a cluster only an echo tells.
        await patiently(client, partial(_first_pages, replays))
        if not replays or client.broker.nodes.others:
            await patiently(client, partial(fence, client))
        denied = {topic_filter for topic_filter, gate in gates.items() if gate.found.denied}
        lost |= denied
        await _abandon(client, wanted, replays, denied)
        await finish_lowering(client, [one for one in lowering if one.filter not in denied])
        await prepare(client, replays)
        while client.guarded is not guard:
            guard = client.guarded
            lost |= await _hold_again(client, wanted, shares, replays)
    except Conflict:
        client.taken_over()
        return
    except ApiError as error:
        _failed(client, wanted, error)
        if not await _undo(client, wanted.keys() - present, fresh, begun):
            return
        _drop(replays, set(wanted))
        for one in lowering:
            one.give_up()
        # What came meanwhile is for the subscriptions that there were before: they go on.
        start_replays(client, [], {topic_filter: gates[topic_filter] for topic_filter in present & gates.keys()})
        wanted.clear()
        shares.clear()
    for index, entry in enumerate(packet.filters):
        if not codes[index] and entry.topic_filter in lost:
            codes[index] = ReasonCode.NOT_AUTHORIZED
        elif not codes[index]:
            # [MQTT-3.8.4-5] [MQTT-3.9.3-1] (3.1.1), [MQTT-3.8.4-6] [MQTT-3.8.4-7] [MQTT-3.9.3-1] (5.0)
            granted = entry.topic_filter in wanted or entry.topic_filter in shares
            codes[index] = entry.qos if granted else ReasonCode.QUOTA_EXCEEDED  # JetStream has refused it
        codes[index] = codes[index] if client.version == 5 else min(codes[index], FAILURE)
    # [MQTT-2.3.1-7] [MQTT-3.8.4-2] (3.1.1), [MQTT-2.2.1-6] [MQTT-3.8.4-2] (5.0)
    # No reason string, no user properties [MQTT-3.9.2-1] [MQTT-3.9.2-2] (5.0)
    if packet.packet_id:
        told = [one.qos for one in packet.filters] if client.terms.old else codes
        client.outlet.write(encode(Suback(packet.packet_id, tuple(told)), client.version))
    subscribed(client, zip((entry.topic_filter for entry in packet.filters), codes, strict=True))
    start_replays(client, replays, {topic_filter: gates[topic_filter] for topic_filter in wanted})
    if shares:
        ask_again(client)
    if client.durable_side is not None and client.broker.live is not None:
        client.broker.live.soon(client)


async def _join(client: Client, wanted: dict[str, Wish], gates: dict[str, Gate], lowering: list[Lowering]) -> None:
    """Put the client into the subscription table; many filters take more than a turn of the event loop."""
    for number, (topic_filter, wish) in enumerate(wanted.items(), 1):
        if is_lowered(client, wish):
            lowering.append(Lowering(client, topic_filter, wish))
        gates[topic_filter] = open_gate(client, client.join(topic_filter, wish.qos, wish.options))
        if number % JOINS_AT_ONCE == 0:
            await asyncio.sleep(0)


def _check_room(client: Client, count: int) -> None:
    """SUBACK and UNSUBACK cannot be left out where they are too large for the client [MQTT-3.1.2-24] (5.0).

    Raises:
        PacketTooLarge: it does not take one of ``count`` reason codes.
    """
    if client.version == 5 and 4 + len(put_varint(3 + count)) + count > client.terms.maximum_packet_size:
        raise PacketTooLarge(f"an answer with {count} reason codes is too large for the client")


async def _abandon(client: Client, wanted: dict[str, Wish], replays: list[Replay], refused: set[str]) -> None:
    """Take out of ``wanted`` and ``replays`` what NATS has refused, and leave nothing of it behind.

    Raises:
        Conflict: the session belongs to somebody else.
    """
    if refused:
        for topic_filter in refused:
            del wanted[topic_filter]
        await _end(client, refused)
        _drop(replays, refused)


def plain_filter(topic_filter: str) -> str:
    """A filter, of a shared subscription without what it begins with."""
    return topic_filter.split("/", 2)[2] if topic_filter.startswith(SHARED) else topic_filter


def may_subscribe(client: Client, topic_filter: str, qos: int) -> bool:
    """Whether a client may have a subscription, shared ones included, also where there are no rules."""
    if client.guarded is not None:
        return client.guarded.may_subscribe(topic_filter, qos)
    if client.granted is ADMINISTRATOR or EVERYTHING.may_subscribe(plain_filter(topic_filter), qos):
        return True
    text = "denied: subscription of %r, which needs a rule; %s"
    log_failure(audit, logging.WARNING, "denied", text, shorten(topic_filter), client)
    return False


async def _hold_again(
    client: Client, wanted: dict[str, Wish], shares: dict[str, SharedSubscription], replays: list[Replay]
) -> set[str]:
    """The rules have changed meanwhile: give up what they do not permit any more.

    Returns:
        The filters that are taken out of ``wanted`` and ``shares``.

    Raises:
        Conflict: the session belongs to somebody else.
    """
    denied = {text for text, wish in wanted.items() if not may_subscribe(client, text, wish.qos)}
    refused = {text for text, one in shares.items() if not may_subscribe(client, text, one.qos)}
    for text in refused:
        del shares[text]
    await unsubscribe_shared(client, [text for text in refused if text in (client.shares or ())])
    await _abandon(client, wanted, replays, denied)
    return denied | refused


def _drop(replays: list[Replay], filters: Set[str]) -> None:
    """Take out of ``replays`` those of some filters, which do not begin."""
    for replay in replays:
        if replay.filter in filters:
            replay.finish()
    replays[:] = [replay for replay in replays if replay.filter not in filters]


def _replays(client: Client, wanted: dict[str, Wish]) -> list[Replay]:
    """One for each subject of which retained messages are wanted."""
    return [
        Replay(client, topic_filter, subject if index == 0 else second_sid(subject), subject, wish.qos)
        for topic_filter, wish in wanted.items()
        if wish.replay
        for index, subject in enumerate(wish.subjects)
    ]


async def _first_pages(replays: list[Replay]) -> None:
    """Read the beginning of what is retained for each subject."""
    if len(replays) == 1:
        await replays[0].first_page()
    else:
        await asyncio.gather(*(replay.first_page() for replay in replays))


def _subjects(client: Client, topic_filter: str) -> tuple[tuple[str, ...] | None, int]:
    """The NATS subjects of a filter, or None and the reason why it may not be subscribed."""
    try:
        if topic_filter.startswith(SHARED):
            topic_filter = parse_shared(topic_filter, client.broker.settings.max_topic_levels)[1]
        settings = client.broker.settings
        validate_topic_filter(topic_filter, settings.max_topic_levels, settings.max_topic_length)
        return filter_to_subjects(topic_filter), 0
    except (MqttError, ValueError) as error:
        log_failure(log, logging.INFO, "subscribe", "%s may not subscribe %r: %s", client, topic_filter, error)
        if isinstance(error, ReservedSubject):
            return None, ReasonCode.NOT_AUTHORIZED
        return None, ReasonCode.TOPIC_FILTER_INVALID


async def _room(client: Client, packet: Subscribe) -> _Room:
    """What there is room for of a SUBSCRIBE packet."""
    record = client.record
    consumers = 0
    if client.durable_side is not None and record is not None and record.v5 is not None:
        having = {found.text for found, qos in client.filters.items() if qos}
        texts = {one.topic_filter for one in packet.filters if one.qos} - having
        consumers = sum(1 + text.endswith("/#") for text in texts if not text.startswith(SHARED))
        if consumers and record.v5.quota:
            who = holder(client.user, client.connection.host)
            work = partial(client.broker.quotas.reserve, record.key, record.v5.quota, who, consumers)
            consumers = await patiently(client, work)
    return _Room(client, consumers)


class _Room:
    """How many more subscriptions the session may have, and consumers for them."""

    def __init__(self, client: Client, consumers: int) -> None:
        self._consumers = consumers
        self._having = client.record.cons if client.durable_side is not None and client.record is not None else None
        self._present = {found.text for found in client.filters} | set(client.shares or ())
        self._count = client.connection.settings.max_subscriptions
        most = LEVELS_EACH * self._count + client.broker.settings.max_topic_levels
        self._levels = most - sum(map(_level_count, self._present))
        """What its filters may have in levels besides."""
        self._bytes: int | None = None
        """What the session record may grow by: it is stored in one message."""
        if client.durable_side is not None and client.record is not None:
            self._bytes = client.broker.store.max_payload - len(client.record.encode()) - RECORD_SPARE

    def take(self, entry: Subscription, subjects: tuple[str, ...]) -> bool:
        """Whether there is room for one more; it is then taken."""
        topic_filter = entry.topic_filter
        consumers = 0
        if self._having is not None and entry.qos and not topic_filter.startswith(SHARED):
            keys = (subjects[0], *map(second_sid, subjects[1:]))
            consumers = sum(key not in self._having for key in keys)
        if consumers > self._consumers:
            return False
        if topic_filter in self._present:
            self._consumers -= consumers
            return True
        levels = _level_count(topic_filter)
        if len(self._present) >= self._count or levels > self._levels:
            return False
        if self._bytes is not None:
            size = subscription_bytes(topic_filter, subjects)
            if size > self._bytes:
                return False
            self._bytes -= size
        self._levels -= levels
        self._present.add(topic_filter)
        self._consumers -= consumers
        return True


def _level_count(topic_filter: str) -> int:
    return topic_filter.count("/") + 1


async def unsubscribe(client: Client, packet: Unsubscribe) -> None:
    """Answer an UNSUBSCRIBE packet, in any case [MQTT-3.10.4-5] [MQTT-3.10.4-6] (3.1.1, 5.0).

    Subscriptions end [MQTT-3.10.4-1] (3.1.1, 5.0), messages in flight are completed [MQTT-3.10.4-3] (3.1.1, 5.0).
    """
    if postponed(client, partial(unsubscribe, client, packet)):
        return
    _check_room(client, len(packet.filters))
    packet = await asked_to_end(client, packet)
    present = {found.text for found in client.filters} | set(client.shares or ())
    shares = list(set(client.shares or ()).intersection(packet.filters))
    try:
        await unsubscribe_shared(client, shares)
        await part(client, present.intersection(packet.filters).difference(shares), _end)
    except Conflict:
        client.taken_over()
        return
    codes = tuple(_unsuback_code(client, topic_filter, present) for topic_filter in packet.filters)
    # [MQTT-2.3.1-7] [MQTT-3.10.4-4] (3.1.1), [MQTT-2.2.1-6] [MQTT-3.10.4-4] [MQTT-3.11.3-1] (5.0)
    # No reason string, no user properties [MQTT-3.11.2-1] [MQTT-3.11.2-2] (5.0)
    answer = Unsuback(packet.packet_id, codes if client.version == 5 else ())
    client.outlet.write(encode(answer, client.version))
    ended = (one for one, code in zip(packet.filters, codes, strict=True) if code == ReasonCode.SUCCESS)
    unsubscribed(client, ended)


def _unsuback_code(client: Client, topic_filter: str, present: set[str]) -> int:
    if topic_filter in present:
        present.remove(topic_filter)  # named once more, it is none any more
        return ReasonCode.SUCCESS
    try:
        validate_topic_filter(topic_filter, client.broker.settings.max_topic_levels)
    except MqttError:
        return ReasonCode.TOPIC_FILTER_INVALID
    return ReasonCode.NO_SUBSCRIPTION_EXISTED


async def withdraw(client: Client, filters: Set[str]) -> None:
    """End subscriptions, shared ones among them, that the client may not have any more; they may have ended already."""
    shares = filters & set(client.shares or ())
    try:
        await unsubscribe_shared(client, list(shares))
        await _end(client, {text for text in filters if not text.startswith(SHARED)})
    except Conflict:
        client.taken_over()


async def _end(client: Client, filters: Set[str]) -> None:
    """End subscriptions [MQTT-3.10.4-2] (3.1.1, 5.0).

    Raises:
        Conflict: the session belongs to somebody else.
        ApiError: the session record cannot be stored.
    """
    if filters:
        await descend(client)
    gone = _forget(client, filters)
    side = client.durable_side
    if side is not None and filters:
        await keep_taken(client)
        await save_record(client, client.epoch)
        await patiently(client, partial(side.remove, gone))


def _failed(client: Client, filters: Iterable[str], error: ApiError) -> None:
    names = ", ".join(map(repr, filters))
    log_failure(log, logging.WARNING, "subscribe", "%s: subscribing to %s failed: %s", client, names, error)


async def _undo(client: Client, filters: Set[str], shares: list[str], begun: bool) -> bool:
    """End subscriptions that JetStream has not let begin; False when the session belongs to somebody else."""
    if filters and begun:  # else they never had consumers: those that are live have left nothing to them
        await descend(client)
    gone = _forget(client, filters)
    side = client.durable_side
    try:
        await unsubscribe_shared(client, [text for text in shares if text in (client.shares or ())])
        if side is not None and filters:
            await keep_taken(client)
            await save_record(client, client.epoch)
    except Conflict:
        client.taken_over()
        return False
    except ApiError as error:
        # Where there is no room for this one, there was none for the one that named them.
        log_failure(log, logging.WARNING, "store", "%s: its session record was not stored: %s", client, error)
    if side is not None and filters:
        await patiently(client, partial(side.remove, gone))
    return True


def _forget(client: Client, filters: Set[str]) -> list[str]:
    """Take subscriptions out of what this gateway knows; returns the consumers that can be deleted."""
    for topic_filter in filters:
        client.broker.table.unsubscribe(client, topic_filter)
        drop_gate(client, topic_filter)
    side = client.durable_side
    if side is None:
        return []
    record = client.record
    assert record is not None
    assert record.v5 is not None
    gone: list[str] = []
    for topic_filter in filters:
        subjects = filter_to_subjects(topic_filter)
        record.subs.pop(subjects[0], None)
        record.v5.options.pop(subjects[0], None)
        for index, subject in enumerate(subjects):
            key = subject if index == 0 else second_sid(subject)
            if key in record.cons:
                name = record.cons[key].durable_name
                if drain(side, key) is None:
                    gone.append(name)
    return gone
