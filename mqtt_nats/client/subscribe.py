# SPDX-License-Identifier: Apache-2.0
"""SUBSCRIBE and UNSUBSCRIBE.

SUBACK leaves when the subscription is live: the session record is written (durable sessions), the consumers are
created, and nats-server has confirmed the NATS subscriptions. Retained messages follow SUBACK.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Set
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.batch import in_turn
from mqtt_nats.backbone.retry import retry_until_answered
from mqtt_nats.base.logs import log_failure
from mqtt_nats.client.grant import grant, replays_of
from mqtt_nats.client.subscription_change import (
    Lowering,
    Raising,
    Wish,
    begin_lowering,
    finish_lowering,
    lowerings,
    part,
    raises,
)
from mqtt_nats.client.subscription_room import Room, known_room, room_for
from mqtt_nats.codec import (
    MqttError,
    PacketTooLarge,
    ReasonCode,
    Suback,
    Subscribe,
    TopicFilterInvalid,
    Unsuback,
    Unsubscribe,
    encode,
    put_varint,
    validate_topic_filter,
)
from mqtt_nats.delivery.draining import drain
from mqtt_nats.delivery.resume import keep_taken
from mqtt_nats.delivery.slow_clients import postponed
from mqtt_nats.hooks.points import CLIENT_SUBSCRIBE
from mqtt_nats.ingress.retained.replay import Replay, drop_gate, open_gate, prepare, room_for_replays, start_replays
from mqtt_nats.ingress.retained.waiting_copies import let_copies_pass
from mqtt_nats.lifecycle import connection_hooks
from mqtt_nats.pubsub.routing_table import Options
from mqtt_nats.pubsub.shared_filters import PREFIX as SHARED
from mqtt_nats.pubsub.shared_filters import parse_shared
from mqtt_nats.sessions.groups.subscribe import acknowledged as ask_again
from mqtt_nats.sessions.groups.subscribe import subscribe_shared, unsubscribe_shared
from mqtt_nats.sessions.guard import may_subscribe
from mqtt_nats.sessions.message_stream import Mark, mark
from mqtt_nats.sessions.record import claimed, save_record
from mqtt_nats.sessions.unrecorded import when_room
from mqtt_nats.transport.turns import in_steps
from mqtt_streams.api import ApiError
from mqtt_streams.sessions import Conflict, SharedSubscription, second_sid
from mqtt_streams.subjects import ReservedSubject, filter_to_subjects

if TYPE_CHECKING:
    from mqtt_nats.client.client import Client
    from mqtt_nats.pubsub.backlog import Gate

log = logging.getLogger("mqtt_nats.broker")

FAILURE: Final = 0x80

NOT_SERVED: Final = ("$exclusive/", "$queue/")
"""Beginnings of filters that other brokers serve, and whose messages would never come here."""

JOINS_AT_ONCE: Final = 32
"""Filters that a SUBSCRIBE packet adds to the routing table before the next packet is handled."""


class Subscribing:
    """A SUBSCRIBE packet that is being handled."""

    def __init__(
        self, client: Client, packet: Subscribe, room: Room, refused: Mapping[int, int], place: Mark | None = None
    ) -> None:
        """Check each filter; ``refused``: reason codes of filters that hooks refuse, by index in the packet."""
        if (most := client.connection.settings.max_qos) < 2:  # [MQTT-3.2.2-10] (5.0)
            filters = tuple(replace(one, qos=min(one.qos, most)) for one in packet.filters)
            packet = replace(packet, filters=filters)
        self.client = client
        self.packet = packet
        self.guard = client.guarded
        self.present = {found.text for found in client.filters}
        self.wanted: dict[str, Wish] = {}
        self.shares: dict[str, SharedSubscription] = {}
        self.codes: list[int] = []
        """Reason codes by index in the packet; 0: the filter is, or was, in `wanted` or `shares`."""
        self.gates: dict[str, Gate] = {}
        self.lowering: list[Lowering] = []
        self.lost: set[str] = set()
        """Filters that were denied after the first check, by NATS or by changed rules."""
        self.place = place
        """Mark in the stream, after which messages are for these subscriptions; None = not set yet."""
        self._judge(room, refused)
        self.fresh = [text for text in self.shares if text not in (client.shares or ())]
        self.replays = replays_of(client, self.wanted)
        for replay in self.replays:
            if replay.filter not in self.present:
                replay.copies.begin_anew(0)

    def _judge(self, room: Room, refused: Mapping[int, int]) -> None:
        client = self.client
        given = (self.packet.properties or {}).get("subscription_identifier")
        identifier = given[0] if given else None
        for place, entry in enumerate(self.packet.filters):
            subjects, code = _subjects(client, entry.topic_filter)
            if place in refused:
                subjects, code = None, refused[place]
            if subjects is not None and not may_subscribe(client, entry.topic_filter, entry.qos):
                subjects, code = None, ReasonCode.NOT_AUTHORIZED
            if subjects is None or not room.reserve(entry, subjects):
                code = code or ReasonCode.QUOTA_EXCEEDED
            elif entry.topic_filter.startswith(SHARED):
                share = SharedSubscription(entry.qos, entry.retain_as_published, identifier, 0)
                self.shares[entry.topic_filter] = share
            else:
                # The last of several equal filters in one packet counts [MQTT-3.8.4-3] (3.1.1, 5.0).
                options = Options(entry.no_local, entry.retain_as_published, identifier)
                handling = entry.retain_handling
                replay = handling == 0 or (handling == 1 and entry.topic_filter not in self.present)
                self.wanted[entry.topic_filter] = Wish(entry.qos, subjects, options, handling, replay)
            self.codes.append(code)
        room.tell()

    def join_at_once(self) -> None:
        """Set the mark and join with the first filters; further filters and the consumers follow in a job."""
        if self.client.durable:
            self.place = mark(self.client.services.nats)
        for topic_filter in islice(self.wanted, JOINS_AT_ONCE):
            self._join(topic_filter)

    async def _join_all(self, *, higher: bool = False) -> None:
        """Add the remaining filters to the routing table in steps, or only ``higher`` ones (QoS 1 and 2)."""
        left = [text for text, wish in self.wanted.items() if text not in self.gates and (wish.qos or not higher)]
        await self.client.path.round.turns.run(in_steps(left, self._join))

    def _join(self, topic_filter: str) -> None:
        """Add a filter to the routing table, if there is room: core NATS brings what readers do not bring."""
        client, wish = self.client, self.wanted[topic_filter]
        most = client.services.settings.max_subscriptions_per_gateway
        if topic_filter in self.present or most is None or client.path.table.subscriptions < most:
            found = client.join(topic_filter, wish.qos, wish.options)
            self.gates[topic_filter] = open_gate(client, found)
            if wish.qos and not client.durable and topic_filter not in self.present:
                found.begin_joining(client)

    async def run(self) -> None:
        """Create the subscriptions; returns when they are live on all gateways.

        Raises:
            Conflict: the session belongs to another connection.
            ApiError: JetStream refuses them.
        """
        client, wanted, replays = self.client, self.wanted, self.replays
        if replays:
            await room_for_replays(client)
        if self.shares:
            await subscribe_shared(client, self.shares)
        if client.durable_side is not None and wanted:
            await self._grant()
        self.lowering = lowerings(client, wanted)
        await begin_lowering(client, self.lowering)
        await self._join_all()
        await _abandon(client, wanted, replays, client.refuse_surplus(wanted.keys() - self.gates))
        await retry_until_answered(client, partial(client.services.nodes.fence_wild, client.filters))
        await self._await_older()
        # The client gets messages that are published from now on; retained ones of before have to be stored to be read.
        await client.ingress.retained.stored_so_far()
        # Read before SUBACK leaves: newer messages then come after these. The requests follow the subscriptions on the
        # same connection, so their replies confirm the subscriptions at this nats-server; the other servers of a
        # cluster confirm them by an echo only.
        await retry_until_answered(client, partial(_first_pages, replays))
        await self._await_copies()
        if not self.lowering:
            client.in_force()
        if not replays or client.services.nodes.others:
            await retry_until_answered(client, partial(client.services.nodes.fence_filters, client.filters))
        await client.account.beginnings.settle(client, [gate.found for gate in self.gates.values()])
        denied = {topic_filter for topic_filter, gate in self.gates.items() if gate.found.denied}
        self.lost |= denied
        await _abandon(client, wanted, replays, denied)
        for one in self.lowering:
            if one.filter in denied:
                one.let_go()
        await finish_lowering(client, [one for one in self.lowering if one.filter not in denied])
        await prepare(client, replays)
        while client.guarded is not self.guard:
            self.guard = client.guarded
            self.lost |= await _hold_again(client, wanted, self.shares, replays)

    async def _await_older(self) -> None:
        """Wait until what was on its way to this gateway has come; on the connection for wildcards it has."""
        client, nats = self.client, self.client.services.nats
        new = [gate.found for gate in self.gates.values() if client in (gate.found.joining or ())]
        if any(found.link is nats.link for found in new):
            await retry_until_answered(client, nats.link.fence)
        for found in new:
            found.end_joining(client)

    async def _await_copies(self) -> None:
        """Wait for the copies of retained messages that change just now: they come as new messages, too.

        Where a reader brings the copies, the retained messages are read once more, behind a mark in the stream: the
        window of the session may be full of messages from before the mark, which are passed over.

        Raises:
            ApiError: JetStream refuses a request.
        """
        client, nats = self.client, self.client.services.nats
        stored = [one for one in self.replays if one.stored and one.copies.new and one.recent]
        if stored:
            position = await retry_until_answered(client, partial(mark(nats).position, nats.inbox))
            for replay in stored:
                replay.copies.begin_anew(position)
            await retry_until_answered(client, partial(_first_pages, stored))
        recent = [one for one in self.replays if one.recent]
        if recent:
            last = await retry_until_answered(client, partial(let_copies_pass, client))
            for replay in recent:
                replay.wait_at(self.gates[replay.filter])
            await in_turn([partial(replay.await_copies, last) for replay in recent])

    async def _grant(self) -> None:
        """Store the position and the record of a durable session with the subscriptions."""
        client, keys = self.client, {replay.key: replay for replay in self.replays}
        if self.gates or not raises(client, self.wanted):
            await grant(client, self.wanted, keys, self.place or mark(client.services.nats))
            return
        raising = Raising(client, self.wanted)
        await raising.drain()
        raising.change()
        await self._join_all(higher=True)
        await raising.read_second_mark()
        await grant(client, self.wanted, keys, raising.place, raising.has_come)

    async def undo(self) -> bool:
        """Undo the subscriptions, which JetStream refuses; False when the session belongs to another connection."""
        client, gates = self.client, self.gates
        if not await _undo(client, self.wanted.keys() - self.present, self.fresh):
            return False
        _drop(self.replays, set(self.wanted))
        for one in self.lowering:
            one.give_up()
        # The subscriptions that existed before go on and get the messages that came meanwhile.
        start_replays(client, [], {text: gates[text] for text in self.present & gates.keys()})
        self.wanted.clear()
        self.shares.clear()
        return True

    def answer(self) -> None:
        """Send SUBACK, then the retained messages."""
        client, packet, codes = self.client, self.packet, self.codes
        for index, entry in enumerate(packet.filters):
            if not codes[index] and entry.topic_filter in self.lost:
                codes[index] = ReasonCode.NOT_AUTHORIZED
            elif not codes[index]:
                # [MQTT-3.8.4-5] [MQTT-3.9.3-1] (3.1.1), [MQTT-3.8.4-6] [MQTT-3.8.4-7] [MQTT-3.9.3-1] (5.0)
                granted = entry.topic_filter in self.wanted or entry.topic_filter in self.shares
                codes[index] = entry.qos if granted else ReasonCode.QUOTA_EXCEEDED  # JetStream has refused it
            codes[index] = codes[index] if client.version == 5 else min(codes[index], FAILURE)
        # [MQTT-2.3.1-7] [MQTT-3.8.4-2] (3.1.1), [MQTT-2.2.1-6] [MQTT-3.8.4-2] (5.0)
        # No reason string, no user properties [MQTT-3.9.2-1] [MQTT-3.9.2-2] (5.0)
        if packet.packet_id:
            told = [one.qos for one in packet.filters] if client.terms.old else codes
            client.write_buffer.write(encode(Suback(packet.packet_id, tuple(told)), client.version))
        connection_hooks.subscribed(client, zip((entry.topic_filter for entry in packet.filters), codes, strict=True))
        start_replays(client, self.replays, {text: self.gates[text] for text in self.wanted})
        if self.shares:
            ask_again(client)


def begin_subscribing(client: Client, packet: Subscribe) -> Subscribing | Mark | None:
    """Let a SUBSCRIBE take effect at this gateway before the next packet; None: only a job can do that.

    Returns a mark where only the place in the stream can be kept: the use of a quota has to be read first. Returns
    None where hooks or JetStream have to be asked first, where a filter is a shared one or is just being subscribed,
    and where a durable session has one of the filters already.

    Raises:
        PacketTooLarge: SUBACK exceeds the client's Maximum Packet Size.
    """
    services, side = client.services, client.durable_side
    asking = services.hooks.in_use and services.hooks.deciding(CLIENT_SUBSCRIBE) is not None
    if asking or (side is not None and side.stalled) or not services.nats.online.is_set():
        return None
    asked_for = {entry.topic_filter for entry in packet.filters}
    if any(text.startswith(SHARED) for text in asked_for) or _is_open(client, asked_for):
        return None
    if client.durable and any(found.text in asked_for for found in client.filters):
        return None
    _check_room(client, len(packet.filters))
    room = known_room(client, packet)
    if room is None:
        return mark(services.nats)
    begun = Subscribing(client, packet, room, {})
    if not raises(client, begun.wanted):
        begun.join_at_once()
    return begun


def _is_open(client: Client, filters: Set[str]) -> bool:
    """Whether one of these filters has a gate: its subscription, or a replay for it, is not complete."""
    return any(found.text in filters for found in client.gates or ())


async def subscribe(client: Client, packet: Subscribe, begun: Subscribing | Mark | None = None) -> None:
    """Handle a SUBSCRIBE packet and send one SUBACK; a SUBSCRIBE of a plugin has packet identifier 0 and no SUBACK.

    [MQTT-3.8.4-1] [MQTT-3.8.4-4] (3.1.1), [MQTT-3.8.4-1] [MQTT-3.8.4-5] (5.0)
    """
    if postponed(client, partial(client.obey, partial(subscribe, client, packet, begun))):
        client.order.put_off()
        return
    if not isinstance(begun, Subscribing):
        _check_room(client, len(packet.filters))
        place = begun
        packet, refused_by_hooks = await connection_hooks.ask_hooks_to_subscribe(client, packet)
        begun = Subscribing(client, packet, await room_for(client, packet), refused_by_hooks, place)
    try:
        await begun.run()
    except Conflict:
        client.taken_over()
        return
    except ApiError as error:
        names = ", ".join(map(repr, begun.wanted))
        log_failure(log, logging.WARNING, "subscribe", "%s: subscribing to %s failed: %s", client, names, error)
        client.services.counters.refuse_filters("jetstream", len(begun.wanted) + len(begun.shares))
        if not await begun.undo():
            return
    begun.answer()


def _check_room(client: Client, count: int) -> None:
    """Check that the client takes SUBACK or UNSUBACK, which cannot be left out [MQTT-3.1.2-24] (5.0).

    Raises:
        PacketTooLarge: an answer with ``count`` reason codes exceeds the client's Maximum Packet Size.
    """
    if client.version == 5 and 4 + len(put_varint(3 + count)) + count > client.terms.maximum_packet_size:
        raise PacketTooLarge(f"an answer with {count} reason codes is too large for the client")


async def _abandon(client: Client, wanted: dict[str, Wish], replays: list[Replay], refused: set[str]) -> None:
    """Remove filters that NATS has refused from ``wanted`` and ``replays``, and end their subscriptions.

    Raises:
        Conflict: the session belongs to another connection.
        ApiError: they have not ended, and both have them still.
    """
    if refused:
        await _end(client, refused)
        for topic_filter in refused:
            del wanted[topic_filter]
        _drop(replays, refused)


async def _hold_again(
    client: Client, wanted: dict[str, Wish], shares: dict[str, SharedSubscription], replays: list[Replay]
) -> set[str]:
    """End the subscriptions that the rules, which have changed meanwhile, no longer permit.

    Returns:
        The filters that are removed from ``wanted`` and ``shares``.

    Raises:
        Conflict: the session belongs to another connection.
    """
    denied = {text for text, wish in wanted.items() if not may_subscribe(client, text, wish.qos)}
    refused = {text for text, one in shares.items() if not may_subscribe(client, text, one.qos)}
    for text in refused:
        del shares[text]
    await unsubscribe_shared(client, [text for text in refused if text in (client.shares or ())])
    await _abandon(client, wanted, replays, denied)
    return denied | refused


def _drop(replays: list[Replay], filters: Set[str]) -> None:
    """Remove the replays of some filters from ``replays``: these replays do not begin."""
    for replay in replays:
        if replay.filter in filters:
            replay.finish()
    replays[:] = [replay for replay in replays if replay.filter not in filters]


async def _first_pages(replays: list[Replay]) -> None:
    """Read the first page of each subject's retained messages, of a few subjects at once: turns take a bounded time."""
    for start in range(0, len(replays), JOINS_AT_ONCE):
        some = [replay.first_page() for replay in replays[start : start + JOINS_AT_ONCE]]
        await (asyncio.gather(*some) if len(some) > 1 else some[0])


def _subjects(client: Client, topic_filter: str) -> tuple[tuple[str, ...] | None, int]:
    """Return the NATS subjects of a filter, or None and the reason code of its refusal."""
    try:
        if topic_filter.startswith(SHARED):
            topic_filter = parse_shared(topic_filter, client.services.settings.max_topic_levels)[1]
        if topic_filter.startswith(NOT_SERVED):
            raise TopicFilterInvalid("exclusive subscriptions and queues of EMQX are not served")
        settings = client.services.settings
        validate_topic_filter(topic_filter, settings.max_topic_levels, settings.max_topic_length)
        return filter_to_subjects(topic_filter), 0
    except (MqttError, ValueError) as error:
        log_failure(log, logging.INFO, "subscribe", "%s may not subscribe %r: %s", client, topic_filter, error)
        if isinstance(error, ReservedSubject):
            return None, ReasonCode.NOT_AUTHORIZED
        return None, ReasonCode.TOPIC_FILTER_INVALID


async def unsubscribe(client: Client, packet: Unsubscribe) -> None:
    """Handle an UNSUBSCRIBE packet; UNSUBACK is sent in any case [MQTT-3.10.4-5] [MQTT-3.10.4-6] (3.1.1, 5.0).

    Subscriptions end [MQTT-3.10.4-1] (3.1.1, 5.0), messages in flight are completed [MQTT-3.10.4-3] (3.1.1, 5.0).
    """
    if postponed(client, partial(client.obey, partial(unsubscribe, client, packet))):
        client.order.put_off()
        return
    _check_room(client, len(packet.filters))
    packet = await connection_hooks.ask_hooks_to_unsubscribe(client, packet)
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
    client.write_buffer.write(encode(answer, client.version))
    ended = (one for one, code in zip(packet.filters, codes, strict=True) if code == ReasonCode.SUCCESS)
    connection_hooks.unsubscribed(client, ended)


def _unsuback_code(client: Client, topic_filter: str, present: set[str]) -> int:
    if topic_filter in present:
        present.remove(topic_filter)  # the packet may name the filter again: no subscription exists then
        return ReasonCode.SUCCESS
    try:
        validate_topic_filter(topic_filter, client.services.settings.max_topic_levels)
    except MqttError:
        return ReasonCode.TOPIC_FILTER_INVALID
    return ReasonCode.NO_SUBSCRIPTION_EXISTED


async def withdraw(client: Client, filters: Set[str]) -> None:
    """End subscriptions, shared ones included, that the rules no longer permit; some may have ended already."""
    shares = filters & set(client.shares or ())
    try:
        await unsubscribe_shared(client, list(shares))
        await _end(client, {text for text in filters if not text.startswith(SHARED)})
    except Conflict:
        client.taken_over()


async def _end(client: Client, filters: Set[str]) -> None:
    """End subscriptions [MQTT-3.10.4-2] (3.1.1, 5.0).

    Raises:
        Conflict: the session belongs to another connection.
        ApiError: the session record cannot be stored.
    """
    gone = _forget(client, filters)
    side = client.durable_side
    if side is not None and filters:
        await when_room(client, partial(_keep_ends, client), client.in_force)
        await retry_until_answered(client, partial(side.remove, gone))


async def _keep_ends(client: Client) -> None:
    """Store what the session has taken, and its record without the ended subscriptions."""
    await keep_taken(client)
    await save_record(client, client.epoch)


async def _undo(client: Client, filters: Set[str], shares: list[str]) -> bool:
    """End subscriptions that JetStream has refused; False when the session belongs to another connection."""
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
        # Where JetStream has no room for this record, it had none for the record that named the subscriptions.
        log_failure(log, logging.WARNING, "store", "%s: its session record was not stored: %s", client, error)
    if side is not None and filters:
        await retry_until_answered(client, partial(side.remove, gone))
    return True


def _forget(client: Client, filters: Set[str]) -> list[str]:
    """Remove subscriptions from this gateway's state and the record; returns the consumers that can be deleted."""
    for topic_filter in filters:
        client.path.table.unsubscribe(client, topic_filter)
        drop_gate(client, topic_filter)
    side = client.durable_side
    if side is None:
        return []
    record, v5 = claimed(client.record)
    gone: list[str] = []
    for topic_filter in filters:
        subjects = filter_to_subjects(topic_filter)
        record.subs.pop(subjects[0], None)
        v5.options.pop(subjects[0], None)
        for index, subject in enumerate(subjects):
            key = subject if index == 0 else second_sid(subject)
            if key in record.cons:
                gone.append(drain(side, key))
    return gone
