# SPDX-License-Identifier: Apache-2.0
"""Messages of a durable session whose packet identifiers do not follow from a sequence of ``$MQTT_msgs``.

Retained messages have identifiers that follow from a sequence of their own stream; messages of shared subscriptions
have any that is free. Both wait in one queue, in the order in which they came.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from mqtt_nats.codec import ProtocolError
from mqtt_nats.protocol.inflight import Delivery, Release, SubscriptionState

RETAINED_BASE: Final = 49152
RETAINED_SPACE: Final = 16384


def retained_id(sequence: int) -> int:
    """The packet identifier under which a retained message is replayed."""
    return RETAINED_BASE + sequence % RETAINED_SPACE


class UnsequencedQueue:
    """The part of a durable session's sender that deals with them."""

    def __init__(self) -> None:
        self.inflight: dict[int, Delivery] = {}
        self.releases: dict[int, Release] = {}
        self.open = False
        """False until everything in flight from an earlier connection has been collected."""
        self.others: deque[Delivery] = deque()
        """What waits for a place in the window."""
        self.reserved: set[int] = set()
        """Identifiers of messages of shared subscriptions that are not sent yet."""
        self._asked: set[int] = set()
        """Identifiers that the client is to give up first, where the next message is at QoS 2."""
        self.cursors: dict[SubscriptionState, int] = {}
        """Where the next connection would go on with retained messages, by subscription whose replay is unfinished."""
        self._last_free = 0
        self._recorded: dict[int, int] = {}
        """Sequences of the PUBRELs that were owed at the resume, by identifier, where :meth:`free_id` has such ones."""

    def pump(self) -> None:
        """Send what may be sent now."""
        raise NotImplementedError

    def replayed(self, source: SubscriptionState, cursor: int | None) -> None:
        """The next connection would go on with a subscription's retained messages here; None = they are complete."""
        raise NotImplementedError

    def replay(self, source: SubscriptionState, sequence: int, qos: int, body: Any, dup: bool) -> None:
        """Send a retained message at QoS 1 or 2, once there is a place in the window."""
        identifier = retained_id(sequence)
        release = self.releases.get(identifier)
        if release is not None and release.sequence == sequence and dup and release.source in (None, source):
            release.source = source  # what another subscription asks for is another copy
            return  # the client has it: its PUBREL is owed, or was until now
        self.others.append(Delivery(source, -sequence, identifier, qos, body, b"", dup))
        self.pump()

    def free_id(self, sequence: int) -> int:
        """An identifier for a group's copy of the message of a sequence; it is taken until :meth:`share`.

        It is not that of a PUBREL which was owed for another copy of the message: the two could not be told apart.
        """
        for _ in range(RETAINED_SPACE):
            self._last_free = (self._last_free + 1) % RETAINED_SPACE
            identifier = RETAINED_BASE + self._last_free
            taken = identifier in self.inflight or identifier in self.releases or identifier in self._asked
            if not taken and identifier not in self.reserved and self._recorded.get(identifier) != sequence:
                self.reserved.add(identifier)
                return identifier
        raise ProtocolError("no packet identifier is free")

    def share(
        self,
        source: SubscriptionState,
        sequence: int,
        identifier: int,
        qos: int,
        body: Any,
        reply: bytes,
        dup: bool = False,
    ) -> None:
        """Send a message of a shared subscription, under an identifier of :meth:`free_id`, or the one it had before."""
        self.reserved.add(identifier)
        self.others.append(Delivery(source, -sequence, identifier, qos, body, reply, dup))
        if self.open:
            self.pump()

    def shared(self, source: SubscriptionState) -> list[bytes]:
        """The acknowledgement subjects of a shared subscription's messages at QoS 1 that are not acknowledged."""
        known = [*self.inflight.values(), *self.others]
        return [one.reply for one in known if one.source is source and one.qos == 1 and one.reply]

    def unshare(self, source: SubscriptionState, *, all_: bool) -> list[bytes]:
        """A shared subscription, or with ``all_`` its connection, has ended: what of it others may have at QoS 1.

        Returns:
            The acknowledgement subjects of what was not sent, with ``all_`` also of what was not acknowledged.
        """
        waiting = [one for one in self.others if one.source is source and one.qos == 1]
        self.others = deque(one for one in self.others if one.source is not source or one.qos != 1)
        self.reserved.difference_update(one.id for one in waiting)
        if all_:
            waiting += [one for one in self.inflight.values() if one.source is source and one.qos == 1]
        return [one.reply for one in waiting if one.reply]

    @property
    def replaying(self) -> int:
        """Retained messages that wait for a place in the window."""
        return len(self.others)

    def oldest_replayed(self, source: SubscriptionState) -> int | None:
        """The lowest retained sequence of a source that waits or is not acknowledged; None when there is none."""
        sequences = [-one.sequence for one in self.inflight.values() if one.sequence < 0 and one.source is source]
        sequences += [-one.sequence for one in self.others if one.source is source]
        return min(sequences, default=None)
