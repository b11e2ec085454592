# SPDX-License-Identifier: Apache-2.0
"""Records of QoS 2 messages that are complete, kept until nobody can need them.

A nats-server writes what its consumers have delivered, and what was acknowledged, about ten times a second. One that is
killed has forgotten the end of it, also acknowledgements that it has confirmed, and delivers those messages once more.
The record of a PUBREL says that the client has the message, the assignment of a shared subscription's message that no
other member gets it; so each stays a little longer than it is needed.

An assignment may have been made by another gateway, which was killed before the group's consumer was told, or before a
nats-server was killed that has forgotten it. Then it is acknowledged once more, when the consumer has delivered the
message for certain, and stays for as long as another member may have it on its way. See
docs/internals/rules.md#shared-subscriptions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending import STALE, PendingStore
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.protocol.ack_tokens import ASSIGNED
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import ACK_WAIT_NS, ConsumerInfo, consumer_info, parse_ack
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.shared import IN_TIME_NS
from mqtt_streams.stored import get_sequence

if TYPE_CHECKING:
    from mqtt_nats.gateway.broker import Broker

LINGER: Final = 0.3
"""Seconds from the end of an exchange to the end of its record."""

AFTERWARDS: Final = 5.0
"""Seconds from when the server that delivers may be another one: what it has forgotten comes again meanwhile."""

UNDER_WAY: Final = IN_TIME_NS / 1e9 + 1.0
"""Seconds in which another member to which a message was delivered again may claim it."""

UNKNOWN: Final = ACK_WAIT_NS / 1e9 + UNDER_WAY
"""As `UNDER_WAY`, where the consumer cannot be told: an older gateway has not written how."""

LOOK: Final = 1.0
"""Seconds between two looks at a group's consumer that has yet to deliver what it has forgotten."""

INEXACT: Final = 1.0
"""Seconds by which the time of nats-server may be another than is known here."""


class _Doubt:
    """A message that the group's consumer may deliver to another member, when its assignment is gone."""

    __slots__ = ("ack", "due", "operation", "record", "settled")

    def __init__(self, record: bytes, ack: bytes, operation: PendingStore) -> None:
        self.record = record
        self.ack = ack
        self.operation = operation
        self.settled = 0.0
        """Loop time at which JetStream has confirmed the acknowledgement; 0 = not yet."""
        self.due = UNDER_WAY
        """Seconds from then to the end of the assignment."""

    def stay(self, seconds: float) -> None:
        """How long the assignment stays once the acknowledgement is confirmed."""
        self.due = seconds

    def settle(self, now: float) -> None:
        """The consumer delivers the message to nobody from ``now`` on (loop time)."""
        self.settled = now


class _Settled(PendingStore):
    """The acknowledgement of a group's message that another gateway, or a nats-server before, may have lost."""

    __slots__ = ("doubt",)

    optional = True

    def __init__(self, doubt: _Doubt) -> None:
        self.doubt = doubt

    def stored(self, ack: bytes) -> None:
        """The consumer delivers it to nobody from now on."""
        self.doubt.settle(asyncio.get_running_loop().time())

    def failed(self, error: ApiError) -> None:
        """The consumer is gone, and the message with it."""
        self.stored(b"")


class _Removal(PendingStore):
    """The removal of an assignment; what is not answered is not sent again before the consumer was looked at."""

    __slots__ = ("_ack", "_kept", "_operation", "_record")

    def __init__(self, kept: DeferredRemovals, record: bytes, ack: bytes, operation: PendingStore) -> None:
        self._kept = kept
        self._record = record
        self._ack = ack
        self._operation = operation

    def stored(self, ack: bytes) -> None:
        """It is gone."""
        self._operation.stored(ack)

    def failed(self, error: ApiError) -> None:
        """There is none, or a nats-server may have been killed meanwhile, which has forgotten acknowledgements."""
        if error is STALE:
            self._kept.doubt(self._record, self._ack, self._operation)
        else:
            self._operation.failed(error)

    def stale(self) -> bool:
        """It is about to be sent again: NATS, or JetStream, was away."""
        return True


class DeferredRemovals:
    """The ends of one session's records, which are put off by `LINGER` seconds."""

    __slots__ = ("_broker", "_doubts", "_ended", "_loop", "_settling", "_waiting")

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[float, bytes, PendingStore]] = deque()
        self._doubts: list[_Doubt] = []
        self._settling = False
        self._ended = False

    def add(self, token: bytes, operation: PendingStore) -> None:
        """Let go of a record later; ``operation`` hears of the end of an assignment.

        After the end of the connection it is left to the next owner, who may have read it already.
        """
        if self._ended:
            return
        if not self._waiting:
            self._loop.call_later(LINGER, self._flush)
        self._waiting.append((self._loop.time() + LINGER, token, operation))

    def end(self) -> None:
        """The connection ends: let go of records now, or the next owner finds some that go away under its hands.

        Those of which NATS may yet forget what was acknowledged are left to the next owner: it sends PUBREL once more.
        Assignments go when their time is over: the next owner finds the PUBRELs owed that belong to them.
        """
        self._ended = True
        waiting, self._waiting = self._waiting, deque(one for one in self._waiting if one[1].startswith(ASSIGNED))
        if not self._forgetful:
            began = (natstime.now() - LINGER - INEXACT) * 1e9
            for _, token, _ in waiting:
                record = None if token.startswith(ASSIGNED) else parse_ack(token[1:])
                if record is not None and record.timestamp_ns < began:
                    self._remove(token)
        self._broker.link.kick()

    @property
    def _forgetful(self) -> bool:
        """Whether a server may send again what it has forgotten."""
        return not self._broker.link.online or self._loop.time() < self._broker.relinked + AFTERWARDS

    def _flush(self) -> None:
        now = self._loop.time()
        if self._forgetful:
            self._loop.call_later(LINGER, self._flush)
            return
        while self._waiting and self._waiting[0][0] <= now:
            self._let_go()
        self._broker.link.kick()
        if self._waiting:
            self._loop.call_at(self._waiting[0][0], self._flush)

    def _let_go(self) -> None:
        _, token, operation = self._waiting.popleft()
        if not token.startswith(ASSIGNED):
            self._remove(token)
            return
        record, _, rest = token[1:].partition(b" ")
        confirmed, _, ack = rest.partition(b" ")
        if not rest:
            self._broker.drop_assignment(record, operation)
        elif 0 < int(confirmed) > self._broker.relinked * 1e6:
            self._broker.drop_assignment(record, _Removal(self, record, ack, operation))
        else:
            self.doubt(record, ack, operation)

    def _remove(self, token: bytes) -> None:
        self._broker.link.out.append(b"PUB %b 0\r\n\r\n" % token[1:])

    # -- assignments of which the consumer may not have heard ---------------------------------------

    def doubt(self, record: bytes, ack: bytes, operation: PendingStore) -> None:
        """Let go of an assignment when the group has heard for certain that its message is complete."""
        self._doubts.append(_Doubt(record, ack, operation))
        if not self._settling:
            self._settling = True
            self._broker.spawn(self._settle(), "messages of groups")

    async def _settle(self) -> None:
        """Let go of the assignments in doubt as it becomes certain that the group delivers their messages no more."""
        try:
            while self._doubts:
                try:
                    await self._look()
                except (ApiError, NoResponders, RequestTimeout):
                    pass  # another look follows
                await asyncio.sleep(self._pause())
                self._release()
        finally:
            self._settling = False

    def _is_settled(self, one: _Doubt) -> bool:
        """Whether an acknowledgement was confirmed, and not before a nats-server may have been killed."""
        return one.settled > max(self._broker.relinked, 0.0)

    def _pause(self) -> float:
        if not all(map(self._is_settled, self._doubts)):
            return LOOK
        ends = [one.settled + one.due for one in self._doubts]
        return max(min(ends, default=0.0) - self._loop.time(), 0.0) + 0.01

    def _release(self) -> None:
        now = self._loop.time()
        if not self._broker.link.online:
            return
        over = [one for one in self._doubts if self._is_settled(one) and now >= one.settled + one.due]
        for one in over:
            self._doubts.remove(one)
            self._broker.drop_assignment(one.record, _Removal(self, one.record, one.ack, one.operation))
        self._broker.link.kick()

    async def _look(self) -> None:
        """Acknowledge what is not acknowledged for certain, where the consumer has delivered it.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not say how far it is.
        """
        infos: dict[str, ConsumerInfo | None] = {}
        for one in [one for one in self._doubts if not self._is_settled(one)]:
            await self._acknowledge(one, infos)
        self._broker.link.kick()

    async def _acknowledge(self, one: _Doubt, infos: dict[str, ConsumerInfo | None]) -> None:
        broker = self._broker
        ack = parse_ack(one.ack)
        if ack is None:
            one.stay(UNKNOWN)
            one.settle(self._loop.time())
            return
        if ack.consumer not in infos:
            infos[ack.consumer] = await consumer_info(broker.inbox, MESSAGES, ack.consumer)
        info = infos[ack.consumer]
        found = await get_sequence(broker.inbox, MESSAGES, ack.stream_seq)
        if info is None or found is None or found.time_ns != ack.timestamp_ns:
            one.stay(LINGER)  # nobody delivers it
            one.settle(self._loop.time())
        elif info.delivered_seq >= ack.stream_seq:
            began = (natstime.converted(broker.linked) + INEXACT) * 1e9
            first = not info.num_redelivered and ack.timestamp_ns > began  # it was delivered once only
            one.stay(LINGER if first else UNDER_WAY)
            broker.store.call(one.ack, b"", _Settled(one))
