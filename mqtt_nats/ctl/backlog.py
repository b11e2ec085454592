# SPDX-License-Identifier: Apache-2.0
"""What waits for a session: in its consumers, in the gateway that has its client, and behind its stored position.

A consumer for which a position speaks lies dormant, and what nats-server says of it does not count; see
docs/internals/rules.md#positions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.ctl.records import STREAM_NOT_FOUND, Found, consumers, pages
from mqtt_nats.protocol.overlap import subject_matches
from mqtt_streams import positions, stored
from mqtt_streams.api import ApiError, NoResponders, call
from mqtt_streams.consumers import ConsumerRef, consumer_info
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.positions import Position, position_subject

AT_ONCE: Final = 32
"""Requests at the same time."""


class State(NamedTuple):
    """A consumer, as nats-server describes it."""

    queued: int
    inflight: int
    """Delivered, and not acknowledged."""
    delivered: int
    """Sequence up to which it has delivered, or was set."""


class Load(NamedTuple):
    """What a gateway has in memory for a client."""

    inflight: int
    queued: int
    taken: int | None
    """Up to here it has been given what it has missed, where it is not yet given all of that."""

    @classmethod
    def told(cls, item: Mapping[str, Any]) -> Load | None:
        """In what a gateway says of a client that is connected; an older one does not say it."""
        return cls(item["inflight"], item["queued"], item["taken"]) if "taken" in item else None


class Waits(NamedTuple):
    """Messages for a session, or for one of its subscriptions."""

    queued: int
    inflight: int


async def queues(inbox: RequestInbox, names: Collection[str] | None = None) -> dict[str, State]:
    """The consumers of sessions by name, all of them or some."""
    if names is None:
        return {
            one["name"]: State(
                int(one.get("num_pending", 0)),
                int(one.get("num_ack_pending", 0)),
                int((one.get("delivered") or {}).get("stream_seq", 0)),
            )
            async for one in consumers(inbox, MESSAGES)
        }
    found = {}
    for name in names:
        info = await consumer_info(inbox, MESSAGES, name)
        if info is not None:
            found[name] = State(info.num_pending, info.num_ack_pending, info.delivered_seq)
    return found


class Waiting:
    """What waits for sessions, as it was when this was made."""

    def __init__(
        self, inbox: RequestInbox, states: Mapping[str, State], found: Mapping[str, Position], first: int
    ) -> None:
        self.states = states
        self._inbox = inbox
        self._positions = found
        self._first = first
        """Sequence of the oldest message that is stored."""

    @classmethod
    async def look(cls, inbox: RequestInbox, one: Found | None = None) -> Waiting:
        """At everything, or at what belongs to one session. Raises ApiError, NoResponders, RequestTimeout."""
        record = one.record if one is not None else None
        own = [] if record is None else [each.durable_name for each in record.cons.values()]
        states = await queues(inbox, own if one is not None else None)
        found = {}
        subject = position_subject("*" if one is None else one.hash)
        try:
            async for message in pages(inbox, positions.STREAM, subject):
                position = positions.decode(message.payload)
                if position is not None:
                    found[message.subject.rpartition(".")[2]] = position
        except NoResponders:
            pass  # the stream is there only where a shared reader is used
        first = 0
        try:
            first = int((await call(inbox, f"STREAM.INFO.{MESSAGES}"))["state"]["first_seq"])
        except ApiError as error:
            if error.err_code != STREAM_NOT_FOUND:
                raise
        return cls(inbox, states, found, first)

    def _position(self, one: Found) -> Position | None:
        """Where the session is, if that is not what its consumers say."""
        position = self._positions.get(one.hash)
        v5 = one.record.v5 if one.record is not None else None
        return position if position is not None and v5 is not None and position.id == v5.pos else None

    def _pending(self, position: Position | None) -> list[int]:
        return [] if position is None else [one for one in position.pending if one >= self._first]

    def speaks_for(self, one: Found, consumer: ConsumerRef) -> bool:
        """Whether a consumer lies dormant, as the session's position speaks for it."""
        position = self._position(one)
        return position is not None and consumer.durable_name in position.live

    async def of(self, one: Found, load: Load | None) -> Waits:
        """For a whole session; ``load``: what the gateway says that has its client, None: the client is away."""
        if one.record is None:
            return Waits(0, 0)
        position = self._position(one)
        queued = inflight = 0
        for consumer in one.record.cons.values():
            state = self.states.get(consumer.durable_name)
            if position is None or consumer.durable_name not in position.live:
                queued += state.queued if state is not None else 0
                inflight += state.inflight if state is not None else 0
            elif load is None:
                queued += await self._after(consumer, position.reached)
            elif load.taken is not None:
                queued += await self._after(consumer, load.taken)
        if load is not None:  # whatever brought it, what is on its way to the client is in the gateway
            return Waits(queued + load.queued, load.inflight)
        return Waits(queued + len(self._pending(position)), inflight)

    async def of_subscription(self, one: Found, some: Collection[ConsumerRef]) -> Waits:
        """For one subscription, with these consumers, of a session whose client is away or is fed by them."""
        position = self._position(one)
        live = [] if position is None else [each for each in some if each.durable_name in position.live]
        names = {each.durable_name for each in some if each not in live}
        states = [state for name, state in self.states.items() if name in names]
        queued = sum(state.queued for state in states)
        if position is not None and live:
            queued += sum([await self._after(each, position.reached) for each in live])
            patterns = [each.filter_subject for each in live]
            for subject in await self._subjects(one):
                queued += any(subject_matches(pattern, subject.split(".")) for pattern in patterns)
        return Waits(queued, sum(state.inflight for state in states))

    async def _subjects(self, one: Found) -> list[str]:
        """The subjects of what is pending."""
        sequences = self._pending(self._position(one))
        found: list[str] = []
        for start in range(0, len(sequences), AT_ONCE):
            some = sequences[start : start + AT_ONCE]
            messages = await asyncio.gather(*(stored.get_sequence(self._inbox, MESSAGES, each) for each in some))
            found += [message.subject for message in messages if message is not None]
        return found

    async def _after(self, consumer: ConsumerRef, sequence: int) -> int:
        """How many messages of a consumer there are after a sequence."""
        state = self.states.get(consumer.durable_name)
        if (
            state is None
            or state.inflight
            or state.delivered > sequence
            or (state.queued and state.delivered < sequence)
        ):
            return await stored.count_from(self._inbox, MESSAGES, consumer.filter_subject, sequence + 1)
        return state.queued
