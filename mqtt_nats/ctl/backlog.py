# SPDX-License-Identifier: Apache-2.0
"""Number of messages that wait for a session: in its consumers, in the gateway of its client, and behind its position.

A consumer that a position replaces is dormant, and nats-server's numbers of it have no meaning; see
docs/internals/delivery.md#positions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.ctl.records import RECORD_REQUESTS_MOST, Found, consumers, pages
from mqtt_nats.protocol.overlap import subject_matches
from mqtt_streams import positions, stored
from mqtt_streams.api import ApiError, NoResponders, call
from mqtt_streams.consumers import ConsumerRef, consumer_info
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.positions import Position, position_subject


class State(NamedTuple):
    """State of a consumer according to nats-server."""

    queued: int
    """Messages not delivered yet."""
    inflight: int
    """Messages delivered and not acknowledged."""
    delivered: int
    """Stream sequence of the last delivered message, or to which the consumer was set."""


class Load(NamedTuple):
    """Numbers of messages in a gateway's memory for a client."""

    inflight: int
    queued: int
    taken: int | None
    """Stream sequence that the catch-up of the session has reached; None: the session does not catch up."""

    @classmethod
    def told(cls, item: Mapping[str, Any]) -> Load | None:
        """Return the numbers in a gateway's answer about a connected client; None: they were not requested."""
        return cls(item["inflight"], item["queued"], item["taken"]) if "taken" in item else None


class Waits(NamedTuple):
    """Numbers of messages for a session, or for one of its subscriptions."""

    queued: int
    inflight: int


async def queues(inbox: RequestInbox, names: Collection[str] | None = None) -> dict[str, State]:
    """Return the states of consumers by name: all consumers of messages, or ``names``."""
    if names is None:
        return {
            one["name"]: State(
                int(one.get("num_pending", 0)),
                int(one.get("num_ack_pending", 0)),
                int((one.get("delivered") or {}).get("stream_seq", 0)),
            )
            async for one in consumers(inbox, MESSAGES)
        }
    found, wanted = {}, list(names)
    for start in range(0, len(wanted), RECORD_REQUESTS_MOST):
        some = wanted[start : start + RECORD_REQUESTS_MOST]
        infos = await asyncio.gather(*(consumer_info(inbox, MESSAGES, name) for name in some))
        for name, info in zip(some, infos, strict=True):
            if info is not None:
                found[name] = State(info.num_pending, info.num_ack_pending, info.delivered_seq)
    return found


async def _positions(inbox: RequestInbox, key: str) -> dict[str, Position]:
    """Return the positions by session key, of the session with this key or of all (``*``)."""
    found = {}
    try:
        async for message in pages(inbox, positions.STREAM, position_subject(key)):
            position = positions.decode(message.payload)
            if position is not None:
                found[message.subject.rpartition(".")[2]] = position
    except NoResponders:
        pass  # no gateway has stored a position yet
    return found


class Waiting:
    """Snapshot of the states and positions from which the waiting messages of sessions are computed."""

    def __init__(
        self, inbox: RequestInbox, states: Mapping[str, State], found: Mapping[str, Position], first: int
    ) -> None:
        self.states = states
        self._inbox = inbox
        self._positions = found
        self._first = first
        """Stream sequence of the oldest stored message."""

    @classmethod
    async def read_queues(cls, inbox: RequestInbox, some: Sequence[Found] | None = None) -> Waiting:
        """Read the states of all sessions, or of some. Raises ApiError, NoResponders, RequestTimeout."""
        if some is None:
            states, found = await queues(inbox), await _positions(inbox, "*")
        else:
            own = [each.durable_name for one in some if one.record is not None for each in one.record.cons.values()]
            states, found = await queues(inbox, own), {}
            for start in range(0, len(some), RECORD_REQUESTS_MOST):
                for each in await asyncio.gather(
                    *(_positions(inbox, one.hash) for one in some[start:][:RECORD_REQUESTS_MOST])
                ):
                    found |= each
        first = 0
        try:
            first = int((await call(inbox, f"STREAM.INFO.{MESSAGES}"))["state"]["first_seq"])
        except ApiError as error:
            if error.err_code != STREAM_NOT_FOUND:
                raise
        return cls(inbox, states, found, first)

    def _position(self, one: Found) -> Position | None:
        """Return the valid position of a session, None without one."""
        position = self._positions.get(one.hash)
        v5 = one.record.v5 if one.record is not None else None
        return position if position is not None and v5 is not None and position.id == v5.pos else None

    def _pending(self, position: Position | None) -> list[int]:
        return [] if position is None else [one for one in position.pending if one >= self._first]

    def speaks_for(self, one: Found, consumer: ConsumerRef) -> bool:
        """Whether a consumer is dormant because the session's position replaces it."""
        position = self._position(one)
        return position is not None and consumer.durable_name in position.live

    async def of(self, one: Found, load: Load | None) -> Waits:
        """Return the numbers for a whole session; ``load``: from the gateway of its client, None: not connected."""
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
        if load is not None:  # the gateway counts all messages in flight to the client, from any source
            return Waits(queued + load.queued, load.inflight)
        return Waits(queued + len(self._pending(position)), inflight)

    async def of_subscription(self, one: Found, some: Collection[ConsumerRef]) -> Waits:
        """Return the numbers for one subscription with these consumers, if its client is away or they deliver to it."""
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
        """Return the subjects of the session's pending messages."""
        sequences = self._pending(self._position(one))
        found: list[str] = []
        for start in range(0, len(sequences), RECORD_REQUESTS_MOST):
            some = sequences[start : start + RECORD_REQUESTS_MOST]
            messages = await asyncio.gather(*(stored.get_sequence(self._inbox, MESSAGES, each) for each in some))
            found += [message.subject for message in messages if message is not None]
        return found

    async def _after(self, consumer: ConsumerRef, sequence: int) -> int:
        """Return the number of messages of a consumer after a stream sequence."""
        state = self.states.get(consumer.durable_name)
        if (
            state is None
            or state.inflight
            or state.delivered > sequence
            or (state.queued and state.delivered < sequence)
        ):
            return await stored.count_from(self._inbox, MESSAGES, consumer.filter_subject, sequence + 1)
        return state.queued
