# SPDX-License-Identifier: Apache-2.0
"""Packet identifiers that are allocated to messages whose own one is in use.

Theory of operation. A client may keep a message unacknowledged while so many others are delivered that the identifier
that follows from a sequence is still in use. The new message gets another one, so that neither it nor its followers
wait. This *allocation* is stored before the message is sent: the next connection sends the message again under the
identifier that the client knows [MQTT-4.4.0-1]. It ends when the message is complete, and the identifier is used again
once a position without it is stored. An identifier whose message was acknowledged late is used again once a position
is stored in which the message is not pending: a crash could bring it again, while a newer one has its identifier.

Why: docs/internals/protocol.md#packet-identifiers.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from mqtt_nats.protocol.inflight import Delivery, Release

ALLOCATED_MOST: Final = 1024
"""Maximum number of messages of a session that have an allocated identifier; further ones wait."""


class AllocatedIdentifiers:
    """The identifiers of one session that are allocated in place of those in use, or that are in use still.

    Args:
        inflight: messages in flight to the client, by packet identifier.
        releases: owed PUBRELs, by packet identifier.
        asked: packet identifiers that the client has to give up first.
    """

    __slots__ = ("_asked", "_inflight", "_releases", "_reported", "allocated", "stored", "unconfirmed", "used")

    def __init__(self, inflight: dict[int, Delivery], releases: dict[int, Release], asked: set[int]) -> None:
        self._inflight = inflight
        self._releases = releases
        self._asked = asked
        self.allocated: dict[int, int] = {}
        """Allocated packet identifier by stream sequence of the message; negative: a retained message."""
        self.used: dict[int, int] = {}
        """Sequence by packet identifier: of allocations that have not ended in the stored position, and of messages
        that are pending in it although they are complete. These identifiers are in use, whatever is in flight."""
        self.stored: set[int] = set()
        """Sequences whose allocation is stored: these messages may be sent."""
        self.unconfirmed: set[int] = set()
        """Packet identifiers of complete messages until a position is stored in which they are not pending."""
        self._reported = 0
        """Sequence of the message that was reported as waiting for an identifier; 0 = none."""

    def restore(self, identifiers: dict[int, int]) -> None:
        """Take the allocations that an earlier connection has stored: packet identifiers by stream sequence."""
        self.allocated.update(identifiers)
        self.used.update((identifier, sequence) for sequence, identifier in identifiers.items())
        self.stored.update(identifiers)

    def in_use(self, identifier: int) -> bool:
        """Whether an identifier cannot be given to a message now."""
        return identifier in self._inflight or identifier in self._releases or identifier in self.used

    def allocate(self, sequence: int, space: range, reserved: Set[int] = frozenset()) -> int:
        """Allocate a free identifier to a message; 0 = there is none, or too many are allocated.

        The search begins half of the identifiers away: those were not used lately, and are not needed soon.

        Args:
            sequence: stream sequence of the message; negative of a retained message.
            space: the identifiers that follow from sequences.
            reserved: identifiers that must not be allocated.
        """
        if len(self.allocated) >= ALLOCATED_MOST:
            return 0
        start = abs(sequence) + len(space) // 2
        for step in range(len(space)):
            identifier = space[(start + step) % len(space)]
            if not (self.in_use(identifier) or identifier in self._asked or identifier in reserved):
                self.allocated[sequence] = identifier
                self.used[identifier] = sequence
                return identifier
        return 0

    def report_once(self, sequence: int) -> bool:
        """Return whether a message that waits for an identifier has to be reported: it was not the last one."""
        new = self._reported != sequence
        self._reported = sequence
        return new

    def allocation_stored(self, identifier: int) -> bool:
        """Note that the allocation of an identifier is stored; whether its message may be sent."""
        sequence = self.used.get(identifier, 0)
        if self.allocated.get(sequence) != identifier:
            return False
        self.stored.add(sequence)
        return True

    def allocation_removed(self, identifier: int) -> bool:
        """Note that a position without an allocation is stored; whether the identifier is free since."""
        sequence = self.used.get(identifier, 0)
        if not sequence or self.allocated.get(sequence) == identifier:
            return False
        del self.used[identifier]
        return True

    def await_confirmation(self, identifier: int, sequence: int) -> None:
        """Keep the identifier of a complete message until it is known that no later connection gets the message."""
        self.used[identifier] = sequence
        self.unconfirmed.add(identifier)

    def confirm(self, identifier: int) -> bool:
        """Note that no later connection gets a message; whether it was one that has been waited for."""
        waited = identifier in self.unconfirmed
        self.unconfirmed.discard(identifier)
        return waited

    def end_use(self, identifier: int) -> int:
        """End the use of an identifier by a message that is complete, or that was given up before it was sent.

        Returns:
            The message's sequence if the identifier was allocated to it: it is free once a position without that is
            stored. 0 = it was not, and is free.
        """
        sequence = self.used.get(identifier, 0)
        if self.allocated.get(sequence) == identifier:
            del self.allocated[sequence]
            self.stored.discard(sequence)
            return sequence
        if sequence:
            del self.used[identifier]
        return 0
