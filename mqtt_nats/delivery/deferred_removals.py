# SPDX-License-Identifier: Apache-2.0
"""Deferred removal of the records of complete QoS 2 messages, until no redelivery can need the records any more.

A nats-server that is killed forgets its latest acknowledgements. A PUBREL record says that the client has the message;
an assignment says that a shared subscription's message goes to no other member. See
docs/internals/delivery.md#owed-pubrels and docs/internals/sessions.md#shared-subscriptions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from mqtt_nats.backbone.pending_stores import STALE, PendingStore
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.protocol.ack_tokens import ASSIGNED
from mqtt_nats.sessions.groups.ownership import CLOCK_INEXACT_S
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import ACK_WAIT_NS, ConsumerInfo, consumer_info, parse_ack
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.shared import IN_TIME_NS
from mqtt_streams.stored import get_sequence

if TYPE_CHECKING:
    from mqtt_nats.sessions.services import Services

REMOVAL_DELAY_S: Final = 0.3
"""Seconds from the end of an exchange to the removal of its record."""

AFTER_RELINK_S: Final = 5.0
"""Seconds after `NatsLinks.relinked` in which messages come again whose acknowledgement was forgotten."""

REDELIVERY_CLAIM_S: Final = IN_TIME_NS / 1e9 + 1.0
"""Seconds in which another member may claim a message that was delivered to it again."""

NO_SUBJECT_CLAIM_S: Final = ACK_WAIT_NS / 1e9 + REDELIVERY_CLAIM_S
"""Seconds as of `REDELIVERY_CLAIM_S`, where a record has no acknowledgement subject: AckWait has to pass first."""

GROUP_CONSUMER_CHECK_S: Final = 1.0
"""Seconds between two looks at a group's consumer that may have yet to deliver a message again."""


class _Removal(PendingStore):
    """The removal of an assignment, which waits while the group's consumer may deliver the message to another member.

    Without an answer the consumer is examined before the removal is sent again.
    """

    __slots__ = ("_kept", "_operation", "ack", "due", "record", "settled")

    def __init__(self, kept: DeferredRemovals, record: bytes, ack: bytes, operation: PendingStore) -> None:
        self._kept = kept
        self._operation = operation
        self.record = record
        self.ack = ack
        self.settled = 0.0
        """Loop time in seconds from which the consumer delivers the message to no member; 0 = it may."""
        self.due = 0.0
        """Seconds from `settled` to the removal."""

    def settle(self, now: float, due: float) -> None:
        """Note that no member gets the message from ``now`` on; the assignment stays for ``due`` seconds."""
        self.settled, self.due = now, due

    def stored(self, ack: bytes) -> None:
        """Report that the assignment is removed."""
        self._operation.stored(ack)

    def failed(self, error: ApiError) -> None:
        """Handle a removal that failed, or is stale: a killed nats-server may have forgotten the acknowledgement."""
        if error is STALE:
            self._kept.doubt(_Removal(self._kept, self.record, self.ack, self._operation))
        else:
            self._operation.failed(error)

    def stale(self) -> bool:
        """Return True: the removal is about to be sent again, so NATS or JetStream was away."""
        return True


class _Settled(PendingStore):
    """The repeated acknowledgement of a group's message: a gateway or nats-server may have lost the first one."""

    __slots__ = ("_due", "_removal")

    optional = True

    def __init__(self, removal: _Removal, due: float) -> None:
        self._removal = removal
        self._due = due

    def stored(self, ack: bytes) -> None:
        """Note that the consumer delivers the message to no member from now on."""
        self._removal.settle(asyncio.get_running_loop().time(), self._due)

    def failed(self, error: ApiError) -> None:
        """Treat the message as acknowledged: the consumer is gone, and the message with it."""
        self.stored(b"")


class DeferredRemovals:
    """Removals of one session's records, each deferred by `REMOVAL_DELAY_S`."""

    __slots__ = ("_doubts", "_ended", "_loop", "_nats", "_services", "_settling", "_waiting")

    def __init__(self, services: Services) -> None:
        self._services, self._nats = services, services.nats
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[float, bytes, PendingStore]] = deque()
        self._doubts: list[_Removal] = []
        """Removals whose acknowledgement the group's consumer may not have."""
        self._settling = False
        self._ended = False

    def add(self, token: bytes, operation: PendingStore) -> None:
        """Remove a record later; ``operation`` is called when an assignment is removed.

        After the end of the connection the record is left to the next owner, which may have read it already.
        """
        if self._ended:
            return
        if not self._waiting:
            self._loop.call_later(REMOVAL_DELAY_S, self._flush)
        self._waiting.append((self._loop.time() + REMOVAL_DELAY_S, token, operation))

    def connection_ended(self) -> None:
        """Note the end of the connection: records are removed when their time is over, as before.

        The next owner may have read some by then. It sends their PUBREL once more, and looks for them when they do not
        come. Records whose acknowledgement nats-server may have forgotten are left to the next owner.
        """
        self._ended = True
        if self._forgetful:
            self._leave_records()

    def _leave_records(self) -> None:
        """Leave the records to the next owner, except assignments: the next owner finds their PUBRELs owed."""
        self._waiting = deque(one for one in self._waiting if one[1].startswith(ASSIGNED))

    @property
    def _forgetful(self) -> bool:
        """Whether nats-server may still deliver messages again whose acknowledgements it has forgotten."""
        return not self._nats.link.online or self._loop.time() < self._nats.relinked + AFTER_RELINK_S

    def _flush(self) -> None:
        now = self._loop.time()
        if self._forgetful:
            if self._ended:
                self._leave_records()
            self._loop.call_later(REMOVAL_DELAY_S, self._flush)
            return
        while self._waiting and self._waiting[0][0] <= now:
            self._let_go()
        self._nats.link.kick()
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
            self._services.drop_assignment(record, operation)
            return
        removal = _Removal(self, record, ack, operation)
        if 0 < int(confirmed) > self._nats.relinked * 1e6:
            self._services.drop_assignment(record, removal)
        else:
            self.doubt(removal)

    def _remove(self, token: bytes) -> None:
        self._nats.link.out.append(b"PUB %b 0\r\n\r\n" % token[1:])

    # -- assignments whose acknowledgement the consumer may not have --------------------------------

    def doubt(self, removal: _Removal) -> None:
        """Remove an assignment once the group's consumer has the acknowledgement of its message for certain."""
        self._doubts.append(removal)
        if not self._settling:
            self._settling = True
            self._services.tasks.spawn(self._settle(), "messages of groups")

    async def _settle(self) -> None:
        """Remove assignments in doubt as it becomes certain that the group does not deliver their messages again."""
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

    def _is_settled(self, one: _Removal) -> bool:
        """Whether the acknowledgement was confirmed after `NatsLinks.relinked`: earlier ones may be forgotten."""
        return one.settled > max(self._nats.relinked, 0.0)

    def _pause(self) -> float:
        if not all(map(self._is_settled, self._doubts)):
            return GROUP_CONSUMER_CHECK_S
        ends = [one.settled + one.due for one in self._doubts]
        return max(min(ends, default=0.0) - self._loop.time(), 0.0) + 0.01

    def _release(self) -> None:
        now = self._loop.time()
        if not self._nats.link.online:
            return
        over = [one for one in self._doubts if self._is_settled(one) and now >= one.settled + one.due]
        for one in over:
            self._doubts.remove(one)
            self._services.drop_assignment(one.record, one)
        self._nats.link.kick()

    async def _look(self) -> None:
        """Acknowledge messages in doubt that the group's consumer has delivered.

        Raises:
            ApiError, NoResponders, RequestTimeout: JetStream does not say how far the consumer is.
        """
        infos: dict[str, ConsumerInfo | None] = {}
        for one in [one for one in self._doubts if not self._is_settled(one)]:
            await self._acknowledge(one, infos)
        self._nats.link.kick()

    async def _acknowledge(self, one: _Removal, infos: dict[str, ConsumerInfo | None]) -> None:
        nats = self._nats
        ack = parse_ack(one.ack)
        if ack is None:
            one.settle(self._loop.time(), NO_SUBJECT_CLAIM_S)
            return
        if ack.consumer not in infos:
            infos[ack.consumer] = await consumer_info(nats.inbox, MESSAGES, ack.consumer)
        info = infos[ack.consumer]
        found = await get_sequence(nats.inbox, MESSAGES, ack.stream_seq)
        if info is None or found is None or found.time_ns != ack.timestamp_ns:
            one.settle(
                self._loop.time(), REMOVAL_DELAY_S
            )  # the consumer, or the message, is gone: it is not delivered again
        elif info.delivered_seq >= ack.stream_seq:
            began = (natstime.converted(nats.linked) + CLOCK_INEXACT_S) * 1e9
            # Whether the message was delivered only once.
            first = ack.delivered == 1 and not info.num_redelivered and ack.timestamp_ns > began
            nats.store.call(one.ack, b"", _Settled(one, REMOVAL_DELAY_S if first else REDELIVERY_CLAIM_S))
