# SPDX-License-Identifier: Apache-2.0
"""Messages of a durable session whose packet identifiers do not follow from a sequence of ``$MQTT_msgs``.

The identifier of a retained message follows from its sequence in the stream of retained messages; a message of a
shared subscription has any free identifier. Both kinds wait in one queue, in the order in which they came.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Set
from typing import Any, Final

from mqtt_nats.codec import ProtocolError
from mqtt_nats.protocol.inflight import Delivery, Release, SubscriptionState
from mqtt_nats.protocol.ports import NOWHERE, Ports

RETAINED_BASE: Final = 49152
RETAINED_SPACE: Final = 16384


def retained_id(sequence: int) -> int:
    """Return the packet identifier under which a retained message is replayed."""
    return RETAINED_BASE + sequence % RETAINED_SPACE


class UnsequencedQueue:
    """The part of a durable session's sender for retained messages and shared subscriptions; abstract."""

    def __init__(self) -> None:
        self.ports: Ports = NOWHERE
        self.inflight: dict[int, Delivery] = {}
        self.releases: dict[int, Release] = {}
        self.open = False
        """Whether messages may be sent; False until all pending messages have come again, and while stalled."""
        self.others: deque[Delivery] = deque()
        """Retained and shared messages that wait for a place in the window."""
        self.reserved: set[int] = set()
        """Packet identifiers of shared subscriptions' messages that are not sent yet."""
        self._asked: set[int] = set()
        """Packet identifiers that the client has to give up before a QoS 2 message may use them; PUBREL is sent."""
        self.cursors: dict[SubscriptionState, int] = {}
        """Retained sequence from which the next connection would go on, by subscription with an unfinished replay."""
        self._last_allocated = 0
        self._recorded: dict[int, int] = {}
        """Sequences of the PUBRELs that were owed at the resume, by identifier, if `allocate_packet_id` made it."""

    @abstractmethod
    def pump(self) -> None:
        """Send the messages that may be sent now."""

    @abstractmethod
    def replayed(self, source: SubscriptionState, cursor: int | None) -> None:
        """Note the retained sequence from which the next connection would go on; None = the replay is complete."""

    def replay(self, source: SubscriptionState, sequence: int, qos: int, body: Any, dup: bool) -> None:
        """Send a retained message at QoS 1 or 2, once there is a place in the window."""
        identifier = retained_id(sequence)
        release = self.releases.get(identifier)
        if release is not None and release.sequence == sequence and dup and release.source in (None, source):
            release.replay_for(source)  # a copy for another subscription would be another message
            return  # the client has the message: its PUBREL is owed, or was until now
        self.others.append(Delivery(source, -sequence, identifier, qos, body, b"", dup))
        self.ports.report_waiting()
        self.pump()

    def allocate_packet_id(self, sequence: int, others: Set[int] = frozenset()) -> int:
        """Allocate an identifier for a group's copy of the message of a sequence; it is reserved until :meth:`share`.

        A PUBREL owed for another copy of the message has another identifier: their records could not be told apart.

        Args:
            others: identifiers that must not be allocated either.
        """
        for _ in range(RETAINED_SPACE):
            self._last_allocated = (self._last_allocated + 1) % RETAINED_SPACE
            identifier = RETAINED_BASE + self._last_allocated
            taken = identifier in self.inflight or identifier in self.releases or identifier in self._asked
            free = not (taken or identifier in self.reserved or identifier in others)
            if free and self._recorded.get(identifier) != sequence:
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
        """Send a message of a shared subscription, by an identifier of :meth:`allocate_packet_id` or its former one."""
        self.reserved.add(identifier)
        self.others.append(Delivery(source, -sequence, identifier, qos, body, reply, dup))
        self.ports.report_waiting()
        if self.open:
            self.pump()

    def shared(self, source: SubscriptionState) -> list[bytes]:
        """Return the acknowledgement subjects of a shared subscription's unacknowledged messages at QoS 1."""
        known = [*self.inflight.values(), *self.others]
        return [one.reply for one in known if one.source is source and one.qos == 1 and one.reply]

    def unacknowledged(self, source: SubscriptionState) -> list[tuple[int, int]]:
        """Return packet identifier and stream sequence of a shared subscription's unacknowledged messages at QoS 1."""
        known = [*self.inflight.values(), *self.others]
        return [(one.id, -one.sequence) for one in known if one.source is source and one.qos == 1]

    def unshare(self, source: SubscriptionState, *, all_: bool) -> list[bytes]:
        """End a shared subscription: give up its QoS 1 messages that other members may have.

        Args:
            all_: whether the connection has ended, so that messages in flight are given up, too.

        Returns:
            The acknowledgement subjects of unsent messages, with ``all_`` also of unacknowledged ones.
        """
        waiting = [one for one in self.others if one.source is source and one.qos == 1]
        self.others = deque(one for one in self.others if one.source is not source or one.qos != 1)
        self.reserved.difference_update(one.id for one in waiting)
        if all_:
            waiting += [one for one in self.inflight.values() if one.source is source and one.qos == 1]
        return [one.reply for one in waiting if one.reply]

    def oldest_replayed(self, source: SubscriptionState) -> int | None:
        """Return the lowest retained sequence of a source that waits or is not acknowledged; None = there is none."""
        sequences = [-one.sequence for one in self.inflight.values() if one.sequence < 0 and one.source is source]
        sequences += [-one.sequence for one in self.others if one.source is source]
        return min(sequences, default=None)
