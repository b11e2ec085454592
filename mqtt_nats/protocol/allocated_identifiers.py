# SPDX-License-Identifier: Apache-2.0
"""Packet identifiers that are allocated to messages whose own one is in use.

Theory of operation. A client may keep a message unacknowledged while so many others are delivered that the identifier
that follows from a sequence is still in use. The new message gets another one, so that neither it nor its followers
wait. This *allocation* is stored before the message is sent: the next connection sends the message again under the
identifier that the client knows [MQTT-4.4.0-1]. It ends when the message is complete, and the identifier is used again
once a position without it is stored. An identifier whose message was acknowledged late is used again when JetStream
has confirmed the acknowledgement: a crash could bring the message again, while a newer one has its identifier.

Why: docs/internals/protocol.md#packet-identifiers.
"""

from __future__ import annotations

from typing import Final

from mqtt_nats.protocol.inflight import Delivery
from mqtt_nats.protocol.unsequenced import UnsequencedQueue

ALLOCATED_MOST: Final = 1024
"""Maximum number of messages of a session that have an allocated identifier; further ones wait."""


class AllocatedIdentifiers(UnsequencedQueue):
    """The part of a durable session's sender that allocates identifiers in place of those in use."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: dict[int, int] = {}
        """Allocated packet identifier by stream sequence of the message."""
        self.used: dict[int, int] = {}
        """Sequence by packet identifier: of allocations that have not ended in the stored position, and of messages
        whose acknowledgement JetStream has yet to confirm. These identifiers are in use, whatever is in flight."""
        self._stored: set[int] = set()
        """Sequences whose allocation is stored: these messages may be sent."""
        self._unconfirmed: dict[int, int] = {}
        """Number of acknowledgements that JetStream has yet to confirm, by packet identifier."""
        self._without = 0
        """Sequence of the message that was reported as waiting for an identifier; 0 = none."""

    def restore_identifiers(self, identifiers: dict[int, int]) -> None:
        """Take the allocations that an earlier connection has stored: packet identifiers by stream sequence."""
        self.allocated.update(identifiers)
        self.used.update((identifier, sequence) for sequence, identifier in identifiers.items())
        self._stored.update(identifiers)

    def _in_use(self, identifier: int) -> bool:
        return identifier in self.inflight or identifier in self.releases or identifier in self.used

    def _identified(self, delivery: Delivery, space: int) -> bool:
        """Whether a message may be sent as far as its identifier is concerned; allocate another one if that is in use.

        Args:
            space: number of identifiers that follow from sequences.
        """
        sequence = delivery.sequence
        if sequence in self.allocated:
            free = delivery.id not in self.inflight and delivery.id not in self.releases
            return free and sequence in self._stored
        if not self._in_use(delivery.id):
            return True
        identifier = self._free_identifier(sequence, space)
        if identifier:
            self.allocated[sequence] = identifier
            self.used[identifier] = sequence
            delivery.identify(identifier)
            self.ports.allocate(sequence, identifier)
            return sequence in self._stored
        if self._without != sequence:
            self._without = sequence
            self.ports.report_no_identifier()
        return False

    def _free_identifier(self, sequence: int, space: int) -> int:
        """Return a free identifier; 0 = there is none, or too many are allocated.

        The search begins half of the identifiers away: those were not used lately, and are not needed soon.
        """
        if len(self.allocated) >= ALLOCATED_MOST:
            return 0
        start = sequence + space // 2
        for step in range(space):
            identifier = (start + step) % space + 1
            if not self._in_use(identifier) and identifier not in self._asked:
                return identifier
        return 0

    def allocation_stored(self, identifier: int) -> None:
        """Send a message whose allocation is stored."""
        sequence = self.used.get(identifier, 0)
        if self.allocated.get(sequence) == identifier:
            self._stored.add(sequence)
            self.pump()

    def allocation_removed(self, identifier: int) -> None:
        """Free an identifier: a position without its allocation is stored."""
        sequence = self.used.get(identifier, 0)
        if sequence and self.allocated.get(sequence) != identifier:
            del self.used[identifier]
            self.pump()

    def _confirm(self, delivery: Delivery) -> None:
        """Acknowledge a complete message to JetStream; its identifier is free when that is confirmed."""
        replies = delivery.replies()
        self.used[delivery.id] = delivery.sequence
        self._unconfirmed[delivery.id] = len(replies)
        for reply in replies:
            self.ports.ack(reply, delivery.id)

    def _confirmed(self, identifier: int) -> None:
        """Note that JetStream has confirmed one acknowledgement of a message that is complete."""
        left = self._unconfirmed.get(identifier, 0) - 1
        if left > 0:
            self._unconfirmed[identifier] = left
        elif not left:
            del self._unconfirmed[identifier]
            self._end_use(identifier)
            self.pump()

    def _end_use(self, identifier: int) -> None:
        """End the use of an identifier by a message that is complete, or that was given up before it was sent."""
        sequence = self.used.get(identifier, 0)
        if self.allocated.get(sequence) == identifier:
            del self.allocated[sequence]
            self._stored.discard(sequence)
            self.ports.end_allocation(sequence, identifier)
        elif sequence:
            del self.used[identifier]

    def _drop(self, delivery: Delivery) -> None:
        """Acknowledge a message that waits and that the client does not get."""
        for reply in delivery.replies():
            self.ports.ack(reply)
        if delivery.sequence in self.allocated:
            self._end_use(delivery.id)
