# SPDX-License-Identifier: Apache-2.0
"""Packet identifiers that a client may know from messages that are gone: it gives them up before they are used again.

Why: docs/internals/protocol.md#suspect-identifiers.
"""

from __future__ import annotations

from mqtt_nats.protocol.inflight import Delivery


class SuspectIdentifiers:
    """The suspect identifiers of one client, the ones that it is asked to give up, and those that it has given up.

    Args:
        space: number of identifiers that follow from sequences.
    """

    __slots__ = ("_cleared", "_floor", "_space", "asked", "ranges")

    def __init__(self, space: int) -> None:
        self._space = space
        self.ranges: list[tuple[int, int]] = []
        """Ranges of stream sequences whose packet identifiers the client may know as received."""
        self._floor = -1
        """Stream sequence after which a stream that was replaced has other messages; -1 = it was not replaced."""
        self.asked: set[int] = set()
        """Packet identifiers that the client has to give up before a QoS 2 message may use them; PUBREL is sent."""
        self._cleared: set[int] = set()
        """Packet identifiers that the client has given up: they are not suspect any more."""

    def add(self, low: int, high: int) -> None:
        """Add the identifiers of the stream sequences ``low`` to ``high``."""
        self.ranges.append((low, high))

    def replaced(self, floor: int) -> None:
        """Note that the stream was replaced by one that has other messages after sequence ``floor``."""
        self._floor = floor
        self.ranges.append((1, 0))  # an empty range, which has every message checked

    def is_after_replacement(self, sequence: int) -> bool:
        """Return whether the present stream may have another message under a sequence of the former stream."""
        return -1 < self._floor < sequence

    def has(self, delivery: Delivery, allocated: bool) -> bool:
        """Whether the client has to give up the identifier of a message at QoS 2 first.

        Args:
            allocated: whether the identifier is one in place of the message's own.
        """
        identifier = delivery.id
        if identifier in self._cleared:
            return False
        if self.is_after_replacement(delivery.sequence) and not delivery.dup:
            return True
        # A message with DUP owns its identifier: the client may know the message by it, and must not give it up.
        if delivery.dup and allocated:
            return False
        latest = self.latest(delivery.sequence, identifier)
        latest -= self._space if delivery.dup else 0
        return any(
            low <= (latest if latest <= high else high - (high - latest) % self._space) for low, high in self.ranges
        )

    def latest(self, sequence: int, identifier: int) -> int:
        """Return the latest sequence, at most ``sequence``, whose own identifier is ``identifier``."""
        return sequence - (sequence + 1 - identifier) % self._space

    def ask(self, identifier: int) -> bool:
        """Note that the client is asked to give an identifier up; False: it was asked before."""
        if identifier in self.asked:
            return False
        self.asked.add(identifier)
        return True

    def answered(self, identifier: int) -> None:
        """Note a PUBCOMP: if the client was asked, it has given the identifier up."""
        if identifier in self.asked:
            self.asked.discard(identifier)
            self._cleared.add(identifier)

    def clear(self, identifier: int) -> None:
        """Note that the client has given an identifier up without having been asked."""
        self._cleared.add(identifier)
